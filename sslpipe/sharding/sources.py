"""Read encoded images with names and labels, for each split, from where they lie.

To add a source: write a SourceReader, and a line in SOURCES (`sslpipe/sharding/readers.py`).
"""

import re
import shlex
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
from sslpipe.errors import DataError, did_you_mean, listed, shown
from sslpipe.portable import open_regular
from sslpipe.sharding.build_report import Group
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
PLACE = "place of the row"  # column of a table, for rows of several images
MOST_NAMED = 20  # splits in a message


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
        labels = np.unique(self.labels[self.labels >= 0]).tolist()
        return {self.classes[label] for label in labels if label < len(self.classes)}


@dataclass(frozen=True)
class SourceOptions:
    """What the command line says about a source; each reader uses what it knows."""

    root: Path | None = None  # folder of the images or files
    split: str | None = None  # only this one; names it where the source has none
    name: str | None = None  # in torchvision
    csv: Path | None = None  # a row an image
    image_column: str = "path"  # of the CSV or parquet file, as label_column
    label_column: str = "label"  # of a folder or tars: the group of name_pattern
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

Files = TypeVar("Files")
SourceReader = Callable[[SourceOptions], dict[str, Images]]  # images by split; raises DataError


def reported(
    images: Mapping[str, Images], left_out: Sequence[Group], doubts: Sequence[str] = ()
) -> dict[str, Images]:
    """Add what was left out of a source, and what looks like a slip: the first split has it."""
    key, first = next(iter(images.items()))
    all_left_out = [*first.left_out, *left_out]
    all_doubts = [*first.doubts, *doubts]
    return {**images, key: replace(first, left_out=all_left_out, doubts=all_doubts)}


def numbered(things: Sequence[Hashable]) -> NDArray[np.int64]:
    """Number things, equal ones alike. (n,) -> (n,)."""
    numbers = {each: number for number, each in enumerate(dict.fromkeys(things))}
    return np.array([numbers[each] for each in things], np.int64)


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
    """Return which labels are one class, which are no text of UTF-8, and a -1 that is a class."""
    by_class: dict[str, set[str]] = {}
    has_minus_one = False
    for label in labels:
        has_minus_one |= label is not None and label.strip() == "-1"
        name = class_of(label)
        if name is not None and label is not None:
            by_class.setdefault(name, set()).add(label)
    merged = [name for name, spellings in by_class.items() if len(spellings) > 1]
    strange = [
        name for name, spellings in by_class.items() if any(readable(x) != x for x in spellings)
    ]
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
    if has_minus_one and by_class.keys() == {"1"}:  # as of CelebA's attributes
        doubts.append(
            "labels are -1 and 1, and -1 is no label; where it is a class, write 0 or a name"
        )
    return doubts


def chosen_splits(options: SourceOptions, splits: Iterable[str], where: object) -> list[str]:
    """Return the splits to read: the one of --split, or all. Raises: DataError."""
    known = list(splits)
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


def read_class_names(path: Path) -> tuple[str, ...]:
    """Read the lines of a text file that are not blank. Raises: DataError where it is no UTF-8."""
    try:
        text = read_file(path, pipe=True).decode("utf-8-sig")  # Windows begins with a mark
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not a text: {error}; save it in UTF-8") from error
    return distinct_names([line.strip() for line in text.splitlines() if line.strip()])


def distinct_names(names: Sequence[str]) -> tuple[str, ...]:
    """Tell numbered classes of one name apart by their numbers, as ImageNet's two of "crane"."""
    count = Counter(names)
    return tuple(
        f"{name} ({number})" if count[name] > 1 else name for number, name in enumerate(names)
    )


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
