"""Files that a list or a folder names, or URLs -> images of a source; and what is not there."""

import glob
import os
import re
import stat
import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.decode import MAX_BYTES, BadSample, read_encoded
from sslpipe.data.storage import local_path, read_bytes
from sslpipe.errors import DataError, shown
from sslpipe.sharding.build_report import Group, Tally
from sslpipe.sharding.sources import (
    PLACE,
    SUFFIXES,
    Images,
    SourceOptions,
    chosen_splits,
    is_image,
    merged_classes,
    number_labels,
    numbered,
    open_file,
    readable,
    reported,
)

URL_BYTES = 100_000  # taken for the size of an image that is not downloaded yet
MOST_LETTERS = 1000  # of a name in a message: a cell may hold an image in base64
_UPPER = tuple(suffix.upper() for suffix in SUFFIXES)

Place = Path | str  # of an image: a file, or a URL
Row = tuple[Place, str | None]  # an image and its class


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
    present = np.flatnonzero(sizes >= 0).tolist()
    kept = [places[k] for k in present]
    labels, classes = number_labels([rows[k][1] for k in present], all_labels)
    cells = {}
    if table is not None:
        table = table.take(present)
        cells = {name: table.column(name) for name in table.column_names}
    files = [place for place in kept if isinstance(place, Path)]
    return Images(
        names=[names[k] for k in present],
        labels=labels,
        sizes=sizes[present],
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
    for split in images.values():
        for name in split.missing:
            tally.add("files of the list that are not there", name)
    return tally.groups()


def listed_again(images: dict[str, Images]) -> dict[str, Images]:
    """Have a cut of test keep the samples of a file that a list names several times in one split.

    Such files are reported; those of two classes or splits are by `copies_across`, too.
    """
    counts = Counter(name for split in images.values() for name in split.names)
    again = [name for name, count in counts.items() if count > 1]
    if not again:
        return images
    kept = {}
    for key, split in images.items():
        files = numbered(split.names)
        together = files if split.together is None else connected(files, split.together)
        kept[key] = replace(split, together=together)
    doubt = (
        "images that are listed several times, each time as a sample; drop the other rows: "
        f"{len(again):,}, such as {shown(min(again))}"
    )
    return reported(kept, [], [doubt])


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

    Lists have Windows' separators, blanks around names, and other Unicode forms of accents than a
    Mac's files. Tables of Kaggle name ids, and one image file of that name is there.

    Raises:
        DataError: Several image files have the name.
    """
    if isinstance(path, str) or os.path.exists(path):  # False, too, where a name is too long
        return path
    tries = [path, Path(str(path).replace("\\", "/")), Path(*map(str.strip, path.parts))]
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
            existing = [file for file in tried if os.path.isfile(file)]
            if len(existing) > 1:
                raise DataError(
                    f"{each} is {existing[0].name} or {existing[1].name}: write the suffix into "
                    "the list, or move the other one elsewhere"
                )
            if existing:
                return existing[0]
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
    first = Path(missing[0].replace("\\", "/"))  # of Windows
    if some_stay and root is not None:
        hint = _other_case(first) + hint
    elif root is not None:
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
    name = path.name.casefold()
    other_case = next((file for file in beside if file.name.casefold() == name), None)
    return "" if other_case is None else f"; {other_case.name} is there: case counts, write it so"


def _where_instead(path: Path, root: Path) -> str:
    """Return where a file that is missing lies, up to 3 folders below a root; "" for nowhere."""
    below = path.relative_to(root) if path.is_relative_to(root) else path
    parts = re.split(r"[\\/]", str(below))
    patterns = [f"{above}{glob.escape(parts[-1])}*" for above in ("", "*/", "*/*/", "*/*/*/")]
    files = [file for pattern in patterns for file in root.glob(pattern)]
    of_name = [file for file in files if parts[-1] in (file.name, file.stem)]
    if not of_name:
        return ""

    def same_folders(file: Path) -> int:
        pairs = zip(reversed(file.parts[:-1]), reversed(parts[:-1]), strict=False)
        return len([*takewhile(lambda pair: pair[0] == pair[1], pairs)])

    elsewhere = max(of_name, key=same_folders)  # of equal ones that of the fewest folders
    if len(parts) <= len(elsewhere.parts):
        base = elsewhere.parents[len(parts) - 1]
        if listed_file(base.joinpath(*parts)) == elsewhere:
            return f"; {elsewhere} is there: give --root={str(base)!r}"
    return f"; {elsewhere} is there: write the paths of the list relative to --root"
