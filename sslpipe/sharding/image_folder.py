"""Read a folder of images: CLASS/*.jpg, train/CLASS/*.jpg, images/train/CLASS/*.jpg, or one flat.

`walk` finds every file once and says why it is no image, `find_splits` which folders are splits,
`_classes` which are classes. What becomes no sample is counted in the report, by its kind.
"""

import os
import re
from collections import Counter, defaultdict, deque
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

from sslpipe.data.decode import image_kind, other_kind
from sslpipe.errors import DataError, counted, listed, shown
from sslpipe.sharding.build_report import group_kinds
from sslpipe.sharding.gather import match_names
from sslpipe.sharding.sources import (
    HEIC_SUFFIXES,
    SENSOR_SUFFIXES,
    SUFFIXES,
    Images,
    SourceOptions,
    chosen_splits,
    from_rows,
    is_image,
    open_file,
    read_file,
    readable,
    reported,
    root_folder,
)
from sslpipe.sharding.split_names import GENERIC, read_splits, split_of

MOST_LEVELS = 4  # down to which folders may be splits: data/set/images/train
POINTER_BYTES = 1024  # at most, of what git-lfs and git-annex keep in place of a file
_POINTERS = (b"version https://git-lfs", b"/annex/objects/", b"version https://hawser")
# kinds of files that may hold images, and what makes images of them
_UNREAD = {
    "pip install pillow-heif, and build again with --overwrite": HEIC_SUFFIXES,
    "convert them to JPEG or PNG": (
        *(".avif", ".jxl", ".jp2", ".jpx", ".svg", ".psd", ".tga", ".ico"),
        *(".raw", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".eps", ".pdf"),
    ),
    "take frames, ffmpeg -i FILE -vf fps=1 FRAMES/FILE-%d.jpg, which docs/pairs.md pairs": (
        *(".mp4", ".mov", ".avi", ".mkv", ".webm", ".m4v", ".mpg", ".mpeg", ".wmv", ".3gp"),
    ),
    "`sslpipe shards build OUT --source parquet --root {root}` reads them": (".parquet", ".arrow"),
    "`sslpipe shards index {root}` reads them": (".tar",),
    "unpack them": (".zip", ".rar", ".7z", ".gz", ".tgz", ".bz2", ".xz", ".zst"),
    "`sslpipe sensors build` reads them": SENSOR_SUFFIXES,
}
# what `image_kind` and `other_kind` say of images -> the end of their names
_NAMED = {
    **{"jpg": ".jpg", "png": ".png", "webp": ".webp", "a GIF": ".gif", "a TIFF": ".tif"},
    **{"a DICOM": ".dcm", "an AVIF": ".avif", "a HEIC": ".heic", "a JPEG XL": ".jxl"},
}
_TABLES = (".csv", ".tsv", ".jsonl", ".xlsx")  # --csv reads them, or says what does
MOST_OPENED = 100  # files of a kind
_PARTS = {"fold", "part", "batch", "set", "subset", "chunk"}  # of a data set, with a number
# names of folders beside each other that are parts of a data set, not classes
_HARDLY_CLASSES = GENERIC | {
    *("mask", "masks", "label", "labels", "annotation", "annotations", "ground_truth", "gt"),
    *("thumbs", "thumbnails", "segmentations", "json", "xml"),
    *("jpegimages", "segmentationclass", "segmentationobject"),  # of Pascal VOC
}
# 2024, 2024-05, 2024-05-01 Rome, 20240501; 100APPLE of a camera; cam01, Camera 2
_OF_A_TIME = re.compile(
    r"(19|20)\d\d([-_. ]?(0[1-9]|1[0-2])([-_. ]?([0-2]\d|3[01])\b.*)?)?|\d{3}[A-Z_]{5}"
    r"|[Cc]am(era)?[-_. ]?\d+"
)
# folders and files that systems and programs make, in lower case
_SYSTEM = frozenset(
    (
        *("@eadir", "#recycle", "#snapshot", "@recycle", "@recently-snapshot", "@tmp"),
        *("$recycle.bin", "system volume information", "lost+found", "__macosx", "__pycache__"),
        *("thumbs.db", "ehthumbs.db", "desktop.ini", "icon\r"),
    )
)


class Entry(NamedTuple):
    """A file or folder below the root: an image, or why it is skipped."""

    path: Path
    reason: str = ""  # why it is skipped
    kind: str = ""  # of what is skipped, such as a suffix
    absent: str = ""  # why an image that should be there cannot be read
    is_link: bool = False


class Walked(NamedTuple):
    """What lies below a folder."""

    entries: list[Entry]
    folders: list[Path]  # all that were opened, but the root


def walk(
    root: Path, *, suffixes: tuple[str, ...] = SUFFIXES, without: Path | None = None
) -> Walked:
    """List the files below a folder, each real folder once: links may lead anywhere, also up.

    Args:
        root: The folder.
        suffixes: How names of images end.
        without: A folder that is skipped.
    """
    above = {_identity(parent.stat()) for parent in root.resolve().parents}
    excluded = _identity(without.stat()) if without is not None and without.is_dir() else None
    seen = set[tuple[int, int]]()
    entries = list[Entry]()
    folders = list[Path]()
    # folders to open, the linked ones last
    real = deque([root])
    links = deque[Path]()
    while real or links:
        is_link = not real
        folder = (links if is_link else real).popleft()
        try:
            identity = _identity(folder.stat())
            with os.scandir(folder) as found:
                children = sorted(found, key=lambda child: child.name)
        except OSError as error:
            entries.append(
                Entry(folder, absent=f"folders that cannot be opened ({error.strerror})")
            )
            continue
        if identity in seen or identity in above or (identity == excluded and folder != root):
            reason = "links to folders that are read already, or hold this one"
            entries.append(Entry(folder, reason if is_link else _OWN))
            continue
        seen.add(identity)
        names = {child.name for child in children}
        if folder != root:
            is_finished = "dataset.json" in names and any(n.endswith(".offsets.npy") for n in names)
            is_begun = ".build" in names and not any(is_image(Path(name)) for name in names)
            if is_finished or is_begun:
                entries.append(Entry(folder, _OWN))
                continue
            folders.append(folder)
        for child in children:
            path = folder / child.name
            if reason := _reason_of_name(child.name):
                entries.append(Entry(path, reason, child.name if reason == _OF_SYSTEM else ""))
            elif _is_folder(child):
                (links if child.is_symlink() else real).append(path)
            else:
                entries.append(_look_at(path, child, names, suffixes))
    entries.sort(key=lambda entry: entry.path)
    return Walked(entries, sorted(folders))


def _is_folder(child: "os.DirEntry[str]") -> bool:
    try:
        return child.is_dir()
    except OSError:  # links in a circle
        return False


def _identity(status: os.stat_result) -> tuple[int, int]:
    return status.st_dev, status.st_ino


_OWN = "folders of data sets that sslpipe writes"
_OTHERS = "files of other kinds"
_NOWHERE = "links that lead nowhere"
_OF_SYSTEM = "files and folders of a system or NAS"


def _reason_of_name(name: str) -> str:
    """Return why a file or folder of this name is skipped without a line; "" where it is not."""
    if name.lower() in _SYSTEM or name.startswith(("._", ".@", ".DS_Store", ".thumbnails")):
        return _OF_SYSTEM
    return "hidden files and folders" if name.startswith(".") else ""


def _look_at(
    path: Path, child: "os.DirEntry[str]", names: set[str], suffixes: tuple[str, ...]
) -> Entry:
    """Judge a file by its name, and where that is an image's by what lies there."""
    is_link = child.is_symlink()
    suffix = path.suffix.lower()
    stem = path.with_suffix("")
    if (
        suffix == ".dvc"
        and stem.name not in names
        and (not stem.suffix or is_image(stem, suffixes))
    ):
        return Entry(stem, absent="files and folders whose content DVC has not fetched")
    if not is_image(path, suffixes):
        if is_link and not path.exists():
            return Entry(path, _NOWHERE, suffix)
        suffix = ".nii.gz" if path.name.lower().endswith(".nii.gz") else suffix
        return Entry(path, _OTHERS, suffix or "no extension")
    try:
        status = child.stat()
    except OSError as error:
        what = "links without content" if is_link else f"files that fail ({error.strerror})"
        return Entry(path, absent=what, is_link=is_link)
    if not child.is_file():
        return Entry(path, "devices and pipes")
    if not os.access(path, os.R_OK):
        return Entry(path, absent="files without permission", is_link=is_link)
    if status.st_size <= POINTER_BYTES and read_file(path).startswith(_POINTERS):
        return Entry(path, absent="pointers of git-lfs or git-annex without content")
    return Entry(path, is_link=is_link)


# --- which folders are splits


class Splits(NamedTuple):
    """Which part of a path below the root names its split, and what the names there mean."""

    level: int  # -1: there are no splits
    names: dict[str, str]  # name of a folder -> split
    above: int | None  # the level over it that has several names, as in CLASS/train/*.jpg

    def of(self, parts: Sequence[str]) -> str | None:
        """Return the split of a path's parts; None beside the splits, "" in another folder."""
        return self.names.get(parts[self.level], "") if len(parts) > self.level + 1 else None


def find_splits(root: Path, files: Iterable[Path], only: str | None = None) -> Splits:
    """Find the level of folders that are splits: under one folder, or alike under each class.

    Args:
        root: The folder that was walked.
        files: The images below it.
        only: The one split that is asked for.

    Raises: DataError where splits and other folders are mixed, as `read_splits`.
    """
    parents = {file.relative_to(root).parts[:-1] for file in files}
    above: int | None = None
    for level in range(MOST_LEVELS):
        names = {parts[level] for parts in parents if len(parts) > level}
        split_names = {split_of(name) for name in names}
        without = [parts for parts in parents if len(parts) <= level]
        # inside of classes a folder may be named train by chance, but not all, nor train and test
        is_alike = not without and None not in split_names
        if names and (above is None or is_alike or len(split_names - {None}) > 1):
            where = root.joinpath(*min(parts[:level] for parts in parents if len(parts) > level))
            splits = read_splits(names, str(where), only)
            if splits and above is not None and without:
                raise DataError(
                    f"{where} holds the splits {' and '.join(sorted(splits))}, and "
                    f"{root.joinpath(*min(without))} holds images of none; move them, or give one "
                    "of the folders as --root"
                )
            if splits:
                return Splits(level, splits, above)
        if len(names) > 1:
            if above is not None:
                break
            above = level
    return Splits(-1, {}, None)


def _check_filled(
    root: Path, splits: Splits, files: Sequence[Path], folders: Sequence[Path]
) -> None:
    """Raise DataError where a folder beside those of the splits is named as one and is empty."""
    parents = {root.joinpath(*file.relative_to(root).parts[: splits.level]) for file in files}
    for folder in folders:
        is_beside = (
            folder.parent in parents and len(folder.relative_to(root).parts) == splits.level + 1
        )
        if is_beside and folder.name not in splits.names and split_of(folder.name) is not None:
            raise _no_images(folder, SUFFIXES)


# --- which folders are classes


def _classes(root: Path, splits: Splits, own: Sequence[Path]) -> list[str | None]:
    """Return the class of each image of a split: the folder below the split's, or above it.

    Raises: DataError for loose images beside classes, and classes both above and below the splits.
    """
    parts = [file.relative_to(root).parts[:-1] for file in own]
    # a folder that all share and that says nothing is no class: val/images/*.jpg, train/train/CLASS
    first = splits.level + 1
    split = splits.of((*parts[0], "")) if splits.names else None
    while len(shared := {each[first : first + 1] for each in parts}) == 1:
        (part,) = shared
        name = "".join(part)  # "": there is none
        repeats = split is not None and (split_of(name) == split or name == parts[0][splits.level])
        if not repeats and name.lower() not in GENERIC:
            break
        first += 1
    below = [each[first] if len(each) > first else None for each in parts]
    if splits.above is not None:
        if len({*below}) > 1:
            some = root.joinpath(*next(p for p, n in zip(parts, below, strict=True) if n))
            raise DataError(
                f"{some}: there are folders above the splits and below them, and either may be the "
                "classes; give --root one of those above, or --no-labels"
            )
        return [each[splits.above] for each in parts]
    if not any(below):
        return below
    base = root.joinpath(*parts[0][: splits.level + 1])
    loose = [file.name for file, own_class in zip(own, below, strict=True) if own_class is None]
    if loose:
        raise DataError(
            f"{base} holds class folders and loose images ({listed(loose, 1)}); "
            "move the images into a class, or give --no-labels to use all without labels"
        )
    return below


def _no_images(folder: Path, suffixes: tuple[str, ...]) -> DataError:
    more = ""
    if suffixes == SUFFIXES:
        more = "; DICOM, NIfTI, arrays and other TIFFs: `sslpipe sensors build`"
    return DataError(
        f"{folder} has no images ({' '.join(sorted(suffixes))}); for a "
        f"table, parquet or idx files see --source{more}"
    )


# --- the source


def read_folder(options: SourceOptions) -> dict[str, Images]:
    """Read the images below a folder; names of its folders are splits and classes."""
    root = root_folder(options)
    column = options.label_column
    if column != SourceOptions.label_column and column not in options.in_names:
        raise DataError(
            f"--label-column={column!r}: a folder has no columns; for classes in the names of "
            f"files give --name-pattern with a group (?P<{column}>...), for a table --source=csv"
        )
    entries, folders = walk(root, suffixes=options.suffixes, without=options.out)
    images = [
        entry for entry in entries if not entry.reason and is_image(entry.path, options.suffixes)
    ]
    if not images:
        _check_absent(root, entries, options)
        unread = _unread(root, entries)
        raise (
            DataError(f"{root} holds no image; {unread[0]}")
            if unread
            else _no_images(root, options.suffixes)
        )
    only = options.named_split
    splits = find_splits(root, [entry.path for entry in images], only)
    names = sorted({*splits.names.values()})
    chosen = (
        chosen_splits(replace(options, split=only), names, root) if names else [only or "train"]
    )
    if names and only is None:
        _check_filled(root, splits, [entry.path for entry in images], folders)

    # each file that is asked for: a sample of a split, or skipped
    placed = list[tuple[Entry, str | None]]()
    for entry in entries:
        split = splits.of(entry.path.relative_to(root).parts) if names else chosen[0]
        if split is None or split in chosen or not (split or only):
            placed.append((entry, split))
    faults = list[str]()
    with _kept_in(faults):
        _check_absent(root, [entry for entry, _ in placed], options)
    kept: dict[str, list[Path]] = {split: [] for split in chosen}
    missing: dict[str, list[str]] = {split: [] for split in chosen}
    left_out = list[Entry]()
    doubled = _doubled(images)
    for entry, split in placed:
        if entry.reason or entry.absent:
            left_out.append(entry)
            if split and entry.absent:
                missing[split].append(_below(root, entry.path))
        elif not split:
            left_out.append(entry._replace(reason="images beside the folders of the splits"))
        elif entry.path in doubled:
            left_out.append(entry._replace(reason="links to images that are read already"))
        else:
            kept[split].append(entry.path)

    # their classes
    rows = dict[str, list[tuple[Path, str | None]]]()
    for split, own in kept.items():
        if not own:
            raise _no_images(root / split, options.suffixes)
        classes: list[str | None] = [None] * len(own)
        with _kept_in(faults):
            if options.is_label_in_names:
                names = [_below(root, path) for path in own]
                classes = [*match_names(names, options.name_pattern)[options.label_column]]
            elif options.labels:
                classes = _classes(root, splits, own)
        rows[split] = list(zip(own, classes, strict=True))
    if len(faults) > 1:
        listed = " ".join(f"({number}) {text}." for number, text in enumerate(faults, 1))
        raise DataError(f"{root} has {len(faults)} faults: {listed}")
    if faults:
        raise DataError(faults[0])
    by_split = from_rows(replace(options, split=None), root, rows)
    by_split = {split: replace(own, missing=missing[split]) for split, own in by_split.items()}
    said = group_kinds((e.reason or e.absent, e.kind, _below(root, e.path)) for e in left_out)
    doubts = [*_unread(root, left_out), *_doubts(root, splits, rows, folders)]
    tables = [entry.path for entry in left_out if entry.path.suffix.lower() in _TABLES]
    if options.labels and tables and not any(own.classes for own in by_split.values()):
        doubts.append(
            "no folders are classes, and a table may name them: --source=csv "
            f"--csv={str(tables[0])!r} reads its columns"
        )
    return reported(by_split, said, doubts)


@contextmanager
def _kept_in(faults: list[str]) -> Iterator[None]:
    """Keep the DataError of a check, so that all that is wrong can be mended at once."""
    try:
        yield
    except DataError as error:
        faults.append(str(error))


def _below(root: Path, path: Path) -> str:
    return readable(str(path.relative_to(root)))


def _check_absent(root: Path, entries: Sequence[Entry], options: SourceOptions) -> None:
    """Raise DataError where images or folders are there by name and cannot be read."""
    absent = [entry for entry in entries if entry.absent]
    if absent and not options.skip_missing:
        kinds = group_kinds((e.absent, "", _below(root, e.path)) for e in absent)
        said = "; ".join(f"{k.what}: {k.count:,}, such as {shown(k.example)}" for k in kinds)
        raise DataError(
            f"{root}: {said}; fetch them (git annex get, datalad get, git lfs pull, dvc pull), "
            "mend links and permissions, or give --skip-missing to build without them"
        )


def _doubled(images: Sequence[Entry]) -> set[Path]:
    """Return the links to a file that is read under another name."""
    links = [entry.path for entry in images if entry.is_link and not entry.absent]
    if not links:
        return set()
    others = (entry.path for entry in images if not entry.is_link and not entry.absent)
    seen = {_identity(path.stat()) for path in others}
    doubled = set()
    for path in links:
        identity = _identity(path.stat())
        if identity in seen:
            doubled.add(path)
        seen.add(identity)
    return doubled


def _unread(root: Path, left_out: Sequence[Entry]) -> list[str]:
    """Name files that may hold images and are not read, and what to do with them."""
    doubts = []
    folders = [e.path for e in left_out if e.reason == _NOWHERE and not e.kind]
    if folders:
        doubts.append(
            f"links that lead nowhere and may be to folders: {len(folders):,}, such as "
            f"{shown(_below(root, folders[0]))}; mount what they lead to, and build again with "
            "--overwrite"
        )
    by_kind: dict[str, list[Path]] = defaultdict(list)
    for entry in left_out:
        if entry.reason == _OTHERS:
            by_kind[entry.kind].append(entry.path)
    for remedy, suffixes in _UNREAD.items():
        kinds = [f"{len(by_kind.pop(kind)):,} {kind}" for kind in suffixes if kind in by_kind]
        if kinds:
            doubts.append(
                f"files that may hold images and are not read: {', '.join(kinds)}; "
                f"{remedy.format(root=root)}"
            )
    # cat, cat.jpg?w=400: by their first bytes
    hidden = {
        kind: image
        for kind, paths in by_kind.items()
        if (image := next(filter(_end_of_name, paths[:MOST_OPENED]), None))
    }
    if hidden:
        count = sum(len(by_kind[kind]) for kind in hidden)
        images = list(hidden.values())
        ends = dict.fromkeys(map(_end_of_name, images))
        doubts.append(
            f"files of kinds that hold images by their first bytes: {count:,}, such as "
            f"{shown(_below(root, images[0]))}; rename them to end in {' or '.join(ends)}"
        )
    return doubts


def are_times(names: Collection[str]) -> bool:
    """Return whether all names are those of folders of years, months, days, or of a camera."""
    return bool(names) and all(_OF_A_TIME.fullmatch(name) for name in names)


def _end_of_name(path: Path) -> str:
    """Return how the name of an image should end; "" for another file."""
    try:
        with open_file(path) as file:
            start = file.read(132)
    except DataError:
        return ""
    return _NAMED.get(image_kind(start) or other_kind(start) or "", "")


def _doubts(
    root: Path,
    splits: Splits,
    rows: Mapping[str, Sequence[tuple[Path, str | None]]],
    folders: Sequence[Path],
) -> list[str]:
    """Return what of the folders looks like a slip."""
    doubts = []
    classes = {row[1] for own in rows.values() for row in own if row[1] is not None}
    places = sorted({row[0].parent for own in rows.values() for row in own})
    filled = {above for place in places for above in (place, *place.parents)}
    beside = {place.parent for place in filled if place.name in classes}
    empty = [each for each in folders if each.parent in beside and each not in filled]
    if empty:
        doubts.append(
            f"{counted(len(empty), 'folder')} beside the classes without an image, such as "
            f"{shown(_below(root, empty[0]))}"
        )
    if len(classes) == 1 and len(places) > len(rows):
        (name,) = classes
        doubts.append(
            f"all images are of one class, {shown(name)}; where the {len(places):,} folders in it "
            "are the classes, give it as --root"
        )
    hardly = sorted(name for name in classes if name.lower() in _HARDLY_CLASSES)
    if hardly:
        doubts.append(
            f"folders that are hardly classes became some, such as {shown(hardly[0])}; give the "
            "folder that holds the classes as --root"
        )
    shards = sorted(name for name in classes if (root / f"{name}_stats.json").is_file())
    if shards:
        doubts.append(
            f"folders of img2dataset, each a part of the images, became classes, such as "
            f"{shown(shards[0])}; --no-labels reads them without"
        )
    if are_times(classes):
        doubts.append(
            "folders of years, days, or of a camera, became classes, such as "
            f"{shown(min(classes))}; --no-labels reads them without, and a group (?P<label>...) of "
            "--name-pattern takes the class from the files' names"
        )
    below = [place.relative_to(root).parts for place in places]
    pairs = {pair for parts in below for pair in pairwise(parts)}
    owners = Counter(name for above, name in pairs if above in classes and not split_of(name))
    alike = [name for name, count in owners.items() if count == len(classes) > 1]
    # fold1, fold_2; person1 and person2 may well have front and side
    are_parts = {re.sub(r"[\W\d_]+", "", name.lower()) for name in classes} <= _PARTS
    if len(alike) > 1 and (are_parts or len(alike) > len(classes)):
        doubts.append(
            f"all {len(classes)} classes, such as {shown(min(classes))}, have folders of the same "
            f"{len(alike)} names, such as {shown(min(alike))}; where these are the classes, give "
            "the folder over them as --root"
        )
    inside = [
        place
        for place, parts in zip(places, below, strict=True)
        if any(split_of(name) for name in parts[splits.level + 1 :])
    ]
    if inside:
        doubts.append(
            f"{len(inside):,} folders are named as splits and lie inside of classes, such as "
            f"{shown(_below(root, inside[0]))}; give the folder of the splits as --root"
        )
    return doubts
