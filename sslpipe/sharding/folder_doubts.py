"""What of a folder of images looks like a slip, a sentence each."""

import os
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from itertools import pairwise
from pathlib import Path

from sslpipe.data.decode import image_kind, other_kind
from sslpipe.errors import DataError, counted, shown
from sslpipe.sharding.sources import HEIC_SUFFIXES, SENSOR_SUFFIXES, open_file, readable
from sslpipe.sharding.split_names import GENERIC, names_like_splits, split_of
from sslpipe.sharding.walk import NOWHERE, OTHERS, Entry

# kinds of files that may hold images, and what makes images of them
_UNREAD = {
    "pip install pillow-heif, and build again with --overwrite": HEIC_SUFFIXES,
    "convert them to JPEG or PNG": (
        *(".avif", ".jxl", ".jp2", ".jpx", ".svg", ".psd", ".tga", ".ico"),
        *(".raw", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2", ".eps", ".pdf"),
        *(".exr", ".hdr", ".czi", ".nd2", ".lif", ".mha", ".mhd", ".nrrd", ".mgz"),
        *(".h5", ".hdf5", ".mat"),
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
# cat_mask.png, cat-edited.jpg, cat-150x150.jpg, cat@2x.png: names that add this to another's
_OF_ANOTHER = re.compile(
    r"(([-_.] ?(masks?|seg|segmentation|gt|ground[-_ ]?truth|labels?|annotation|depth"
    r"|thumb|thumbnail|preview|edited|scaled|\d+x\d+)|[-_. ]copy)([-_ ]?\d+)?|@[23]x)\Z",
    re.IGNORECASE,
)
_LONGEST = 30  # letters of what is added
MOST_OPENED = 100  # files of a kind
_PARTS = {"fold", "part", "batch", "set", "subset", "chunk"}  # of a data set, with a number
# names of folders that hold what belongs to images elsewhere
_ASIDE = {
    *("mask", "masks", "label", "labels", "annotation", "annotations", "ground_truth", "gt"),
    *("thumbs", "thumbnails", "segmentations", "segmentationclass", "segmentationobject"),
}
# names of folders beside each other that are parts of a data set, not classes
_OF_KINDS = {"json", "xml", "jpegimages", "rgb", "depth", "thermal", "infrared"}
_HARDLY_CLASSES = GENERIC | _ASIDE | _OF_KINDS
# 2024, 2024-05, 2024-05-01 Rome, 20240501; of Google Takeout; 100APPLE of a camera; cam01, Camera 2
_OF_A_TIME = re.compile(
    r"(19|20)\d\d([-_. ]?(0[1-9]|1[0-2])([-_. ]?([0-2]\d|3[01])\b.*)?)?|Photos from (19|20)\d\d"
    r"|\d{3}[A-Z_]{5}|[Cc]am(era)?[-_. ]?\d+"
)


def folder_doubts(
    root: Path,
    rows: Mapping[str, Sequence[tuple[Path, str | None]]],
    split_level: int,
    opened: Sequence[Path],
) -> list[str]:
    """Return what of the folders looks like a slip.

    Args:
        root: The folder.
        rows: By split, its images with their classes.
        split_level: Which part of a path below the root names its split; -1: none.
        opened: All folders below the root.
    """
    images = [row for of_split in rows.values() for row in of_split]
    classes = {name for _, name in images if name is not None}
    places = sorted({path.parent for path, _ in images})
    doubts = []

    # folders beside the classes
    filled = {above for place in places for above in (place, *place.parents)}
    beside = {place.parent for place in filled if place.name in classes}
    empty = [each for each in opened if each.parent in beside and each not in filled]
    if empty:
        doubts.append(
            f"{counted(len(empty), 'folder')} beside the classes without an image, such as "
            f"{shown(below(root, empty[0]))}"
        )

    # names of classes
    if len(classes) == 1 and len(places) > len(rows):
        doubts.append(
            f"all images are of one class, {shown(min(classes))}; where the {len(places):,} "
            "folders in it are the classes, give it as --root"
        )
    hardly = [name for name in classes if name.lower() in _HARDLY_CLASSES]
    if hardly:
        doubts.append(
            f"folders that are hardly classes became some, such as {shown(min(hardly))}; give the "
            "folder that holds the classes as --root"
        )
    shards = [name for name in classes if (root / f"{name}_stats.json").is_file()]
    if shards:
        doubts.append(
            f"folders of img2dataset, each a part of the images, became classes, such as "
            f"{shown(min(shards))}; --no-labels reads them without"
        )
    if are_times(classes):
        doubts.append(
            "folders of years, days, or of a camera, became classes, such as "
            f"{shown(min(classes))}; --no-labels reads them without, and a group (?P<label>...) of "
            "--name-pattern takes the class from the files' names"
        )

    # levels of folders in the classes: fold1, fold_2; person1 and person2 may have front and side
    names = [place.relative_to(root).parts for place in places]
    telling = [[part for part in parts if part.lower() not in GENERIC] for parts in names]
    pairs = {pair for parts in telling for pair in pairwise(parts)}
    owners = Counter(name for above, name in pairs if above in classes and not split_of(name))
    alike = [name for name, count in owners.items() if count == len(classes) > 1]
    are_parts = {re.sub(r"[\W\d_]+", "", name.lower()) for name in classes} <= _PARTS
    if len(classes) > 1 and are_parts and not alike:
        doubts.append(
            f"folders that are parts of a data set became classes, such as {shown(min(classes))}; "
            "--no-labels reads them without, and --root one of them alone"
        )
    if len(alike) > 1 and (are_parts or len(alike) > len(classes)):
        doubts.append(
            f"all {len(classes)} classes, such as {shown(min(classes))}, have folders of the same "
            f"{len(alike)} names, such as {shown(min(alike))}; where these are the classes, give "
            "the folder over them as --root"
        )
    in_split = [_in_split(parts, split_level) for parts in names]
    called = {parts[0] for parts in in_split if parts and split_of(parts[0])} & classes
    if called := called - {*names_like_splits(called)}:  # which the report has, of any source
        doubts.append(
            f"folders named as splits became classes, such as {shown(min(called))}; where images "
            "in them are of no class, move them elsewhere"
        )
    inside = [
        parts
        for parts, below_split in zip(names, in_split, strict=True)
        if any(map(split_of, below_split[bool(classes) :]))
    ]
    if inside:
        doubts.append(
            f"{counted(len(inside), 'folder')} inside of classes named as splits, such as "
            f"{shown(readable('/'.join(inside[0])))}; give the folder of the splits as --root"
        )
    if not alike:
        doubts += _deeper(classes, in_split)
    return doubts + _of_others(root, [path for path, _ in images], split_level)


def _deeper(classes: Collection[str], places: Sequence[tuple[str, ...]]) -> list[str]:
    """Doubt classes whose images all lie in folders with names of their own: animal/cat.

    Args:
        classes: Their names.
        places: The folders of the images, from the split's on.
    """
    if any(len(parts) < 2 or parts[0] not in classes for parts in places):
        return []
    inner = {parts[:2] for parts in places}
    words = {re.sub(r"[\W\d_]+", "", name.lower()) for _, name in inner}
    are_names = len(words) == len(inner) > len(classes) > 1 and len(min(words, key=len)) > 2
    if not are_names:
        return []
    return [
        f"all images lie in {len(inner)} folders inside of {len(classes)} classes, such as "
        f"{shown(readable('/'.join(min(inner))))}; where these are the classes, give "
        "--name-pattern='(.*/)?(?P<label>[^/]+)/[^/]+'"
    ]


def _in_split(parts: tuple[str, ...], level: int) -> tuple[str, ...]:
    """Return the folders in a split's own, which may have its name again: test_set/test_set."""
    inner = parts[level + 1 :]
    while level >= 0 and inner and split_of(inner[0]) == split_of(parts[level]):
        inner = inner[1:]
    return inner


def _of_others(root: Path, images: Sequence[Path], split_level: int) -> list[str]:
    """Return doubts of images that are, by their names, masks or versions of other images."""
    folders: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for image in images:
        folder, name = os.path.split(image)
        folders[folder][os.path.splitext(name)[0]].append(name)
    versions: list[tuple[Path, str]] = []
    again: list[tuple[str, list[str]]] = []
    aside: list[Path] = []
    for folder, stems in folders.items():
        for stem, names in stems.items():
            match = _OF_ANOTHER.search(stem, max(0, len(stem) - _LONGEST))
            other = stem[: match.start()].rstrip("-_. ") if match else ""
            if other in stems:
                versions.append((Path(folder, names[0]), stems[other][0]))
            if len(names) > 1 and len({os.path.splitext(name)[1].lower() for name in names}) > 1:
                again.append((folder, sorted(names, key=str.lower)))
        inner = Path(folder).relative_to(root).parts[split_level + 2 :]
        if not _ASIDE.isdisjoint(map(str.lower, inner)):
            aside += [Path(folder, name) for names in stems.values() for name in names]
    doubts = []
    if versions:
        first, other = min(versions)
        doubts.append(
            f"images named as masks, edits or smaller copies of others beside them: "
            f"{len(versions):,}, such as {shown(below(root, first))} of {shown(other)}; where they "
            "are no images of their own, move them elsewhere"
        )
    if again:
        folder, names = min(again)
        count = sum(len(stems) for _, stems in again)
        doubts.append(
            f"images of one name in several formats: {count:,}, such as "
            f"{shown(below(root, Path(folder, names[0])))} and {shown(names[-1])}; where they are "
            "one picture, keep one of them"
        )
    if aside:
        doubts.append(
            f"images in folders of masks, labels or thumbnails: {len(aside):,}, such as "
            f"{shown(below(root, min(aside)))}; where they are no images of their own, move them "
            "elsewhere"
        )
    return doubts


def below(root: Path, path: Path) -> str:
    """Return a path from the root, as people read it."""
    return readable(str(path.relative_to(root)))


# --- files that are not read


def unread_files(root: Path, left_out: Sequence[Entry]) -> list[str]:
    """Name files that may hold images and are not read, and what to do with them."""
    doubts = []
    folders = [e.path for e in left_out if e.reason == NOWHERE and not e.kind]
    if folders:
        doubts.append(
            f"links that lead nowhere and may be to folders: {len(folders):,}, such as "
            f"{shown(below(root, folders[0]))}; mount what they lead to, and build again with "
            "--overwrite"
        )
    by_kind: dict[str, list[Path]] = defaultdict(list)
    for entry in left_out:
        if entry.reason == OTHERS:
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
            f"{shown(below(root, images[0]))}; rename them to end in {' or '.join(ends)}"
        )
    return doubts


def are_times(names: Collection[str]) -> bool:
    """Return whether all names are those of folders of years, months, days, or of a camera."""
    return bool(names) and all(_OF_A_TIME.fullmatch(name) for name in names)


def _end_of_name(path: Path) -> str:
    """Return how the name of an image should end; "" for another file."""
    if path.name.upper() == "DICOMDIR":  # a list of images
        return ""
    try:
        with open_file(path) as file:
            start = file.read(132)
    except DataError:
        return ""
    return _NAMED.get(image_kind(start) or other_kind(start) or "", "")
