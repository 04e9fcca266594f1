"""Read encoded images with names and labels, for each split, from where they lie.

To add a source: write a SourceReader, and a line in SOURCES (`sslpipe/sharding/readers.py`).
"""

import glob
import os
import re
import shlex
import stat
import unicodedata
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from io import BufferedReader
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.columns import Kind
from sslpipe.data.decode import MAX_BYTES, BadSample, read_encoded
from sslpipe.data.storage import local_path, read_bytes
from sslpipe.errors import DataError, did_you_mean, listed, shown
from sslpipe.portable import open_regular
from sslpipe.sharding.build_report import Group, Tally
from sslpipe.sharding.members import READS_AVIF, READS_HEIC
from sslpipe.sharding.split_names import split_of

HEIC_SUFFIXES = (".heic", ".heif")  # read where pillow-heif is installed
SUFFIXES = (
    *(".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif"),
    *(".ppm", ".pgm", ".bmp", ".tif", ".tiff"),
    *([".avif"] if READS_AVIF else []),
    *(HEIC_SUFFIXES if READS_HEIC else []),
)
# of other files, which `sslpipe sensors build` reads
SENSOR_SUFFIXES = (".npy", ".npz", ".dcm", ".dicom", ".nii", ".nii.gz", ".btf", ".tf8")
_SURROGATE = re.compile(r"[\ud800-\udfff]")  # how Python holds such bytes, or half of a character
URL_BYTES = 100_000  # taken for the size of an image that is not downloaded yet
PLACE = "place of the row"  # column of a table, for rows of several images
MOST_NAMED = 20  # splits in a message
MOST_LETTERS = 1000  # of a name in a message: a cell may hold an image in base64


class ColumnSpec(NamedTuple):
    """A column that is asked for: its name here and in the source; kind None: inferred."""

    name: str
    field: str
    kind: Kind | None


# typed: "12" is a text (JSON, parquet); table: it may be a number (CSV); name: so, and where one
# cell is a text, all are (folders, names of files)
Origin = Literal["typed", "table", "name"]


@dataclass(frozen=True)
class Images:
    """One split of a source, readable in any order and from several threads."""

    names: Sequence[str]  # where each image comes from, for messages and keys
    labels: NDArray[np.int64]  # (n,), an index into `classes`; -1 for none
    sizes: NDArray[np.int64]  # (n,), bytes of each encoded image, roughly
    classes: tuple[str, ...]
    read: Callable[[int], bytes]  # the i-th image as it is in the source; raises DataError
    missing: Sequence[str] = ()  # files that the source lists and does not have
    cells: Mapping[str, Any] = field(default_factory=dict)  # by column: of pyarrow, or a sequence
    origin: Origin = "name"  # what a text among `cells` may mean
    paths: Sequence[Path] = ()  # the file of each image, where they are files
    are_places: bool = False  # `names` are paths below the root, or URLs
    left_out: Sequence[Group] = ()  # what else was there, of all splits
    doubts: Sequence[str] = ()  # what looks like a slip, a sentence each, of all splits
    together: NDArray[np.int64] | None = None  # (n,), groups that a cut of test leaves whole
    contents: str = ""  # a hash of all images, where names and sizes do not tell them from others

    def __len__(self) -> int:
        return len(self.names)

    def class_names(self) -> set[str]:
        """Return the classes that have an image, by name; labels beyond the names have none."""
        there = np.unique(self.labels[self.labels >= 0]).tolist()
        return {self.classes[label] for label in there if label < len(self.classes)}


@dataclass(frozen=True)
class SourceOptions:
    """What the command line says about a source; each reader uses what it knows."""

    root: Path | None = None  # folder of the images or files
    split: str | None = None  # only this one; names it where the source has none
    name: str | None = None  # in torchvision
    csv: Path | None = None  # a row an image
    image_column: str = "path"  # of the CSV or parquet file, as label_column
    label_column: str = "label"  # of a folder: the group of name_pattern
    split_column: str | None = None  # of the CSV file; None: one split
    labels: bool = True
    download: bool = False  # torchvision may fetch the data set
    skip_missing: bool = False  # files that a list names and that are not there
    columns: tuple[ColumnSpec, ...] = ()  # what else is read of each image
    name_pattern: re.Pattern[str] | None = None  # of an image's whole name; named groups: columns
    suffixes: tuple[str, ...] = SUFFIXES  # how names of images in a folder end, in lower case
    out: Path | None = None  # the folder that is written, which may lie below the root

    @property
    def named_split(self) -> str | None:
        """The split that is asked for, by the name that splits of its meaning have."""
        return self.split and (split_of(self.split) or self.split)

    @property
    def in_names(self) -> list[str]:
        """Columns that are read from the names of images."""
        return list(self.name_pattern.groupindex) if self.name_pattern else []

    @property
    def is_label_in_names(self) -> bool:
        """Whether a group of --name-pattern is the class."""
        return self.labels and self.label_column in self.in_names

    @property
    def fields(self) -> list[str]:
        """Columns of the source's own table, by its names, that are to be read."""
        return [spec.field for spec in self.columns if spec.field not in self.in_names]


# what --root may be instead of a folder
_LIST = "for a list or table give --source=csv --csv={file!r}"
_OF_FILES = {
    **dict.fromkeys((".csv", ".tsv", ".txt", ".lst"), _LIST),
    **dict.fromkeys((".parquet", ".arrow"), "give --source=parquet --root={file!r}"),
    ".tar": "give the folder of webdataset tars to `sslpipe shards index`, or unpack it",
    ".zip": "unpack it with `python -m zipfile -e {quoted} {to}`, and give --root={folder!r}",
    **dict.fromkeys((".tgz", ".gz", ".7z", ".rar"), "unpack it, and give that folder"),
}
_UPPER = tuple(suffix.upper() for suffix in SUFFIXES)

Files = TypeVar("Files")
Place = Path | str  # of an image: a file, or a URL
Row = tuple[Place, str | None]  # an image and its class
SourceReader = Callable[[SourceOptions], dict[str, Images]]  # images by split; raises DataError


def from_rows(
    options: SourceOptions,
    root: Path,
    groups: Mapping[str, Sequence[Row]],
    tables: Mapping[str, Any] | None = None,
    *,
    where: str = "",
) -> dict[str, Images]:
    """Describe image files: the splits that are asked for, whose classes are those of all.

    Args:
        options: Choose the split; files that are not there are an error, or listed as missing.
        root: Names of the images are relative to it.
        groups: By split, its rows: image, and class ('' or None: none).
        tables: By split, what else a table says of its rows (pyarrow.Table); None: nothing.
        where: What has the splits, for messages; "": the root.

    Raises: DataError where there is no such split, it is empty, or a file is missing.
    """
    all_labels = {row[1] for rows in groups.values() for row in rows}
    images = {}
    for split in chosen_splits(options, groups, where or root):
        if not groups[split]:
            raise DataError(f"{root} has no image of split {split!r}")
        table = tables[split] if tables else None
        images[split] = _images_of(groups[split], table, all_labels, root, options)
    return listed_again(reported(images, missing_files(images), merged_classes(all_labels)))


def _images_of(
    rows: Sequence[Row],
    table: Any,
    all_labels: Iterable[str | None],
    root: Path,
    options: SourceOptions,
) -> Images:
    """Describe the rows of one split, with what a table says of them. Raises: DataError."""
    places = [listed_file(place) for place, _ in rows]
    sizes = np.array([_size(place) for place in places], np.int64)
    names = [_name(place, root) for place in places]
    missing = np.flatnonzero(sizes < 0).tolist()
    check_missing([str(places[k]) for k in missing], len(rows), options.skip_missing, root=root)
    there = np.flatnonzero(sizes >= 0).tolist()
    kept = [places[k] for k in there]
    labels, classes = number_labels([rows[k][1] for k in there], all_labels)
    cells = {}
    if table is not None:
        table = table.take(there)
        cells = {name: table.column(name) for name in table.column_names}
    files = [place for place in kept if isinstance(place, Path)]
    return Images(
        names=[names[k] for k in there],
        labels=labels,
        sizes=sizes[there],
        classes=classes,
        read=lambda number: read_place(kept[number]),
        missing=[names[k] for k in missing],
        cells=cells,
        origin="name" if table is None else "table",
        paths=files if len(files) == len(kept) else (),
        are_places=True,
        together=cells[PLACE].to_numpy() if PLACE in cells else None,
    )


def missing_files(images: Mapping[str, Images]) -> list[Group]:
    """Count the files that a list names and that are not there, for the report."""
    tally = Tally()
    for own in images.values():
        for name in own.missing:
            tally.add("files of the list that are not there", name)
    return tally.groups()


def reported(
    images: Mapping[str, Images], left_out: Sequence[Group], doubts: Sequence[str] = ()
) -> dict[str, Images]:
    """Add what was left out of a source, and what looks like a slip: the first split has it."""
    first, own = next(iter(images.items()))
    own = replace(own, left_out=[*own.left_out, *left_out], doubts=[*own.doubts, *doubts])
    return {**images, first: own}


def listed_again(images: dict[str, Images]) -> dict[str, Images]:
    """Keep the samples of a file that a list names several times together, and name such files.

    A cut of test leaves those of a split in one; what the list itself puts into several is said.
    """
    again = _twice(name for own in images.values() for name in own.names)
    if not again:
        return images
    rows = {
        (split, name, label)
        for split, own in images.items()
        for name, label in zip(own.names, own.labels.tolist(), strict=True)
        if name in again
    }
    found = {
        "several times, each time as a sample; drop the other rows": again,
        "with several classes": _twice(
            name for name, label in {row[1:] for row in rows} if label >= 0
        ),
        "in several splits, so that a test sees what was trained on": _twice(
            name for _, name in {row[:2] for row in rows}
        ),
    }
    kept = {}
    for split, own in images.items():
        files = numbered(own.names)
        together = files if own.together is None else connected(files, own.together)
        kept[split] = replace(own, together=together)
    doubts = [
        f"images that are listed {what}: {len(names):,}, such as {shown(min(names))}"
        for what, names in found.items()
        if names
    ]
    return reported(kept, [], doubts)


def _twice(names: Iterable[str]) -> set[str]:
    return {name for name, count in Counter(names).items() if count > 1}


def numbered(things: Sequence[Hashable]) -> NDArray[np.int64]:
    """Number things, equal ones alike. (n,) -> (n,)."""
    numbers = {each: number for number, each in enumerate(dict.fromkeys(things))}
    return np.array([numbers[each] for each in things], np.int64)


def connected(one: NDArray[np.int64], other: NDArray[np.int64]) -> NDArray[np.int64]:
    """Number what hangs together where things are alike by either number. (n,), (n,) -> (n,)."""
    from scipy.sparse import coo_array  # here: the import takes 0.15 s
    from scipy.sparse.csgraph import connected_components

    size = 1 + int(max(one.max(), other.max()))
    edges = (np.ones(len(one), bool), (one, size + other))
    graph = coo_array(edges, shape=(2 * size, 2 * size))
    groups: NDArray[np.int64] = connected_components(graph, directed=False)[1][one]
    return groups


def place_of(root: Path, text: str) -> Place:
    """Return the file or URL that a list names. Raises: DataError for a scheme that is not read."""
    path = local_path(text)
    return text if path is None else root / path


def read_place(place: Place) -> bytes:
    """Read an image's file, or download it. Raises: DataError; BadSample, of a URL or its size."""
    if isinstance(place, Path):
        with open_file(place) as file:
            return read_encoded(file)
    try:
        return read_bytes(place, MAX_BYTES)
    except DataError as error:  # one of a million, which --skip-bad passes by
        reason = str(error).removeprefix(f"cannot read {place}: ").replace(place, "no such file")
        raise BadSample(f"cannot be downloaded: {reason}") from error


def _name(place: Place, root: Path) -> str:
    if isinstance(place, Path):
        place = os.path.relpath(place, root)
    return readable(place)


def listed_file(path: Place) -> Place:
    """Return the file that a list means: as written, or nearly so.

    Lists have Windows' separators, and other Unicode forms of accents than a Mac's files. Tables of
    Kaggle name ids, and one image file of that name is there.

    Raises:
        DataError: Several image files have the name.
    """
    if isinstance(path, str) or os.path.exists(path):  # False, too, where a name is too long
        return path
    tries = [path, Path(str(path).replace("\\", "/"))]
    for form in ("NFC", "NFD"):
        tries += [
            path.with_name(unicodedata.normalize(form, path.name)),
            Path(unicodedata.normalize(form, str(path))),
        ]
    for each in tries:
        if os.path.isfile(each):
            return each
        if not is_image(each):
            tried = [each.with_name(each.name + suffix) for suffix in (*SUFFIXES, *_UPPER)]
            there = [file for file in tried if os.path.isfile(file)]
            if len(there) > 1:
                raise DataError(
                    f"{each} is {there[0].name} or {there[1].name}: write the suffix into the "
                    "list, or move the other one elsewhere"
                )
            if there:
                return there[0]
    return path


def _size(path: Place) -> int:
    """Return the bytes of a file, -1 where there is none. Raises: DataError for another thing."""
    if isinstance(path, str):
        return URL_BYTES
    try:
        status = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return -1
    except (OSError, ValueError) as error:  # ValueError: a NUL byte in the name
        reason = getattr(error, "strerror", None) or error
        name = str(path)[:MOST_LETTERS]
        raise DataError(f"cannot read {name!r}: {reason}; name a file or URL") from error
    if not stat.S_ISREG(status.st_mode):
        raise DataError(f"cannot read {path}: it is not a file")
    return status.st_size


def number_labels(
    labels: Sequence[str | None], all_labels: Iterable[str | None]
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Number labels that are texts, see `class_of`: (n,) int64, -1 for none, and the classes.

    The classes are the labels of all splits, sorted; integers by value.
    """
    class_names = {label: class_of(label) for label in {*labels, *all_labels}}
    names = {name for name in class_names.values() if name is not None}
    by_value = all(name.isdecimal() for name in names)
    classes = tuple(sorted(names, key=int) if by_value else sorted(names))
    number: dict[str | None, int] = {name: k for k, name in enumerate(classes)}
    number[None] = -1
    return np.array([number[class_names[label]] for label in labels], np.int64), classes


def class_of(label: str | None) -> str | None:
    """Return the class that a text names: one form of accents, no blanks around it.

    None, an empty text and -1 are no label, in every source.
    """
    name = unicodedata.normalize("NFC", readable(label or "")).strip()
    return None if name in ("", "-1") else name


def readable(name: str) -> str:
    r"""Return a name as text that UTF-8 can hold; bytes of another encoding become \xe9."""
    return _SURROGATE.sub(lambda match: rf"\x{ord(match[0]) & 0xFF:02x}", name)


def merged_classes(labels: Iterable[str | None]) -> list[str]:
    """Return which labels are one class, and which are no text of UTF-8."""
    by_class: dict[str, set[str]] = {}
    for label in labels:
        name = class_of(label)
        if name is not None and label is not None:
            by_class.setdefault(name, set()).add(label)
    merged = [name for name, own in by_class.items() if len(own) > 1]
    strange = [name for name, own in by_class.items() if any(readable(x) != x for x in own)]
    doubts = []
    if merged:
        doubts.append(
            "classes that are written in several ways (blanks around them, forms of accents) and "
            f"became one each: {len(merged):,}, such as {shown(min(merged))}"
        )
    if strange:
        doubts.append(
            f"names of classes that are not UTF-8: {len(strange):,}, such as "
            f"{shown(min(strange))}; convmv -f latin1 -t utf8 renames them"
        )
    return doubts


def check_missing(
    missing: Sequence[str],
    total: int,
    skip_missing: bool,
    *,
    root: Path | None = None,
    beside: Path | None = None,
) -> None:
    """Raise DataError where files of a list are missing, unless they are skipped and some stay.

    `root` is where a file of the first name is looked for, to say where it lies. `beside` is what
    paths of a table are relative to, where no option says another folder.
    """
    some_stay = len(missing) < total
    if not missing or (skip_missing and some_stay):
        return
    hint = ", or give --skip-missing to build without them" if some_stay else ""
    if not some_stay and root is not None:
        first = Path(missing[0].replace("\\", "/"))  # of Windows
        packed = [f"; {file} is there: unpack it" for file in sorted(root.glob("*.zip"))]
        hint = _where_instead(first, root) or _other_case(first) or "".join(packed[:1])
    remedy = "mend the list or --root"
    if beside is not None:
        remedy = f"paths are relative to {beside}: move the table to where they begin, or mend it"
    raise DataError(
        f"cannot read {missing[0][:MOST_LETTERS]}: No such file or directory; {len(missing):,} of "
        f"{total:,} listed files are missing: {remedy}{hint}"
    )


def _other_case(path: Path) -> str:
    """Return that a file of this name but for its case is there; "" for none."""
    beside = path.parent.iterdir() if path.parent.is_dir() else ()
    found = next((file for file in beside if file.name.casefold() == path.name.casefold()), None)
    return "" if found is None else f"; {found.name} is there: case counts, write it so"


def _where_instead(path: Path, root: Path) -> str:
    """Return where a file that is missing lies, up to 3 folders below a root; "" for nowhere."""
    below = path.relative_to(root) if path.is_relative_to(root) else path
    parts = re.split(r"[\\/]", str(below))
    patterns = [f"{above}{glob.escape(parts[-1])}*" for above in ("", "*/", "*/*/", "*/*/*/")]
    files = (file for pattern in patterns for file in root.glob(pattern))
    elsewhere = next((file for file in files if parts[-1] in (file.name, file.stem)), None)
    if elsewhere is None:
        return ""
    if len(parts) <= len(elsewhere.parts):
        base = elsewhere.parents[len(parts) - 1]
        if listed_file(base.joinpath(*parts)) == elsewhere:
            return f"; {elsewhere} is there: give --root={str(base)!r}"
    return f"; {elsewhere} is there: write the paths of the list relative to --root"


def chosen_splits(options: SourceOptions, there: Iterable[str], where: object) -> list[str]:
    """Return the splits to read: the one of --split, or all. Raises: DataError."""
    known = list(there)
    wanted = options.split
    if wanted is not None and wanted not in known:
        wanted = options.named_split
    if options.split is not None and wanted not in known:
        near = did_you_mean(options.split, known[:MOST_NAMED])
        raise DataError(
            f"{where} has no split {options.split!r}{near}; it has: {listed(known, MOST_NAMED)}"
        )
    return known if wanted is None else [wanted]


def unnamed_split(groups: dict[str, Files], options: SourceOptions) -> dict[str, Files]:
    """Name the only split of files whose names say nothing of splits as --split does, or train."""
    if len(groups) != 1 or split_of(next(iter(groups))):
        return groups
    return {options.split or "train": next(iter(groups.values()))}


def root_folder(options: SourceOptions, must_exist: bool = True) -> Path:
    """Return --root. Raises DataError where it is not given, or no folder."""
    if options.root is None:
        raise DataError("this source needs --root DIR")
    if must_exist and not options.root.is_dir():
        suffix = options.root.suffix.lower()
        folder = options.root.with_suffix("")
        remedy = _OF_FILES.get(suffix, "") if options.root.is_file() else ""
        raise DataError(
            f"--root={str(options.root)!r} is not a folder; "
            + remedy.format(
                file=str(options.root),
                quoted=shlex.quote(str(options.root)),
                folder=str(folder),
                to=shlex.quote(str(folder)),
            )
            + "give the one that holds the images; for a table, parquet or idx files see --source"
            * (not remedy)
        )
    return options.root


def class_names(path: Path) -> tuple[str, ...]:
    """Read the lines of a text file that are not blank. Raises: DataError where it is no UTF-8."""
    try:
        text = read_file(path, pipe=True).decode("utf-8-sig")  # Windows begins with a mark
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text: {error}; save it in UTF-8") from error
    return tuple(line.strip() for line in text.splitlines() if line.strip())


@contextmanager
def open_file(path: str | Path, *, pipe: bool = False) -> Iterator[BufferedReader]:
    """Open a regular file; `pipe` as in `open_regular`.

    Raises: DataError with the path, also where it cannot be read afterwards.
    """
    try:
        with open_regular(path, pipe=pipe) as file:
            yield file
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def read_file(path: str | Path, *, pipe: bool = False) -> bytes:
    """Read a whole file; see `open_file`."""
    with open_file(path, pipe=pipe) as file:
        return file.read()


def is_image(path: Path, suffixes: tuple[str, ...] = SUFFIXES) -> bool:
    """Return whether a file is named as an image: its name ends in one of these."""
    return path.name.lower().endswith(suffixes)
