"""Read a folder of images: CLASS/*.jpg, train/CLASS/*.jpg, images/train/CLASS/*.jpg, or one flat.

`walk` finds every file once and says why it is no image, `find_splits` which folders are splits,
`_classes` which are classes. What becomes no sample is counted in the report, by its kind.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from sslpipe.errors import DataError, counted, listed, shown
from sslpipe.sharding.build_report import Tally
from sslpipe.sharding.folder_doubts import below, folder_doubts, unread_files
from sslpipe.sharding.gather import match_names
from sslpipe.sharding.listed_files import from_rows
from sslpipe.sharding.sources import (
    SUFFIXES,
    Images,
    SourceOptions,
    chosen_splits,
    reported,
    root_folder,
)
from sslpipe.sharding.split_names import GENERIC, read_splits, split_of
from sslpipe.sharding.walk import Entry, links_to_same, walk

MOST_LEVELS = 4  # down to which folders may be splits: data/set/images/train
_TABLES = (".csv", ".tsv", ".jsonl", ".xlsx")  # --csv reads them, or says what does


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
        deep = {parts for parts in parents if len(parts) > level}
        names = {parts[level] for parts in deep}
        loose = parents - deep
        if names and (above is None or _are_splits_in_classes(names, loose)):
            where = root.joinpath(*min(parts[:level] for parts in deep))
            splits = read_splits(names, str(where), only)
            if splits and above is not None and loose:
                raise DataError(
                    f"{where} holds the splits {' and '.join(sorted(splits))}, and "
                    f"{root.joinpath(*min(loose))} holds images of none; move them, or give one of "
                    "the folders as --root"
                )
            if splits:
                return Splits(level, splits, above)
        if len(names) > 1:
            if above is not None:
                break
            above = level
    return Splits(-1, {}, None)


def _are_splits_in_classes(names: Iterable[str], loose: Collection[object]) -> bool:
    """Return whether names of folders in classes are splits: one may be named train by chance.

    They are where train and test are there, or all are splits and no class has `loose` images.
    """
    splits = {split_of(name) for name in names}
    return len(splits - {None}) > 1 or (not loose and None not in splits)


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


def _classes(root: Path, splits: Splits, files: Sequence[Path]) -> list[str | None]:
    """Return the class of each image of a split: the folder below the split's, or above it.

    Raises: DataError for loose images beside classes, and classes both above and below the splits.
    """
    parts = [file.relative_to(root).parts[:-1] for file in files]
    level = _class_level(parts, splits)
    below = [each[level] if len(each) > level else None for each in parts]
    if splits.above is not None:
        if len({*below}) > 1:
            some = root.joinpath(*next(p for p, n in zip(parts, below, strict=True) if n))
            raise DataError(
                f"{some}: there are folders above the splits and below them, and either may be the "
                "classes; give --root one of those above, or --no-labels"
            )
        return [each[splits.above] for each in parts]
    loose = [file.name for file, name in zip(files, below, strict=True) if name is None]
    if loose and any(below):
        raise DataError(
            f"{root.joinpath(*parts[0][: splits.level + 1])} holds class folders and loose images "
            f"({listed(loose, 1)}); move the images into a class, or give --no-labels to use all "
            "without labels"
        )
    return below


def _class_level(parts: Sequence[tuple[str, ...]], splits: Splits) -> int:
    """Return which part of the paths of a split names the class: that below the split's.

    A folder that all share and that says nothing is no class: val/images/*.jpg, train/train/CLASS.
    """
    level = splits.level + 1
    split = splits.of((*parts[0], "")) if splits.names else None
    while len({each[level : level + 1] for each in parts}) == 1 and len(parts[0]) > level:
        name = parts[0][level]
        repeats = split is not None and (split_of(name) == split or name == parts[0][splits.level])
        if not repeats and name.lower() not in GENERIC:
            break
        level += 1
    return level


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
    walked = walk(root, suffixes=options.suffixes, without=options.out)
    images = walked.images(options.suffixes)
    if not images:
        faults = _faults_of_absent(root, walked.entries, options)
        faults += [f"{root} holds no image; {each}" for each in unread_files(root, walked.entries)]
        raise DataError(faults[0]) if faults else _no_images(root, options.suffixes)
    paths = [entry.path for entry in images]
    only = options.named_split
    splits = find_splits(root, paths, only)
    chosen = [only or "train"]
    if splits.names:
        names = sorted({*splits.names.values()})
        chosen = chosen_splits(replace(options, split=only), names, root)
        if only is None:
            _check_filled(root, splits, paths, walked.folders)

    # each file that is asked for: an image to read, absent or skipped
    kept: dict[str, list[Path]] = {split: [] for split in chosen}
    missing: dict[str, list[str]] = {split: [] for split in chosen}  # absent, by name
    left_out = list[Entry]()
    doubled = links_to_same(images)
    for entry in walked.entries:
        split = splits.of(entry.path.relative_to(root).parts) if splits.names else chosen[0]
        if (split and split not in chosen) or (split == "" and only):
            continue
        if entry.reason:
            left_out.append(entry)
            if split and entry.is_absent:
                missing[split].append(below(root, entry.path))
        elif not split:
            left_out.append(entry._replace(reason="images beside the folders of the splits"))
        elif entry.path in doubled:
            left_out.append(entry._replace(reason="links to images that are read already"))
        else:
            kept[split].append(entry.path)

    # the samples, and what to say of the others
    rows = _rows(root, splits, kept, _faults_of_absent(root, left_out, options), options)
    skipped = Tally()
    for entry in left_out:
        skipped.add(entry.reason, below(root, entry.path), entry.kind)
    images_by_split = {
        split: replace(images, missing=missing[split])
        for split, images in from_rows(replace(options, split=None), root, rows).items()
    }
    doubts = [
        *unread_files(root, left_out),
        *folder_doubts(root, rows, splits.level, walked.folders),
    ]
    folders = {path.parent for paths in kept.values() for path in paths}
    in_names = options.is_label_in_names and column == SourceOptions.label_column
    if in_names and len(folders) > len(kept):
        doubts.append(
            f"classes are the group (?P<{column}>...) of --name-pattern, not folders; under "
            "another name it is a column alone"
        )
    tables = [entry.path for entry in left_out if entry.path.suffix.lower() in _TABLES]
    tables.sort(key=lambda path: "train" not in (split_of(path.stem), split_of(path.parent.name)))
    has_classes = any(images.classes for images in images_by_split.values())
    if tables and options.labels and not has_classes:
        doubts.append(
            f"no folders are classes, and {counted(len(tables), 'table')} may name them: "
            f"--source=csv --csv={str(tables[0])!r} reads columns"
        )
    return reported(images_by_split, skipped.groups(), doubts)


def _rows(
    root: Path,
    splits: Splits,
    files: Mapping[str, Sequence[Path]],
    faults: list[str],
    options: SourceOptions,
) -> dict[str, list[tuple[Path, str | None]]]:
    """Return each image with its class, by split.

    Raises: DataError for a split without an image; all else that is wrong is named at once.
    """
    rows = dict[str, list[tuple[Path, str | None]]]()
    for split, paths in files.items():
        if not paths:
            raise _no_images(root / split, options.suffixes)
        classes: list[str | None] = [None] * len(paths)
        try:
            if options.is_label_in_names:
                names = [below(root, path) for path in paths]
                classes = match_names(names, options.name_pattern)[options.label_column]
            elif options.labels:
                classes = _classes(root, splits, paths)
        except DataError as error:
            faults.append(str(error))
        rows[split] = list(zip(paths, classes, strict=True))
    if len(faults) > 1:
        listed = " ".join(f"({number}) {text}." for number, text in enumerate(faults, 1))
        raise DataError(f"{root} has {len(faults)} faults: {listed}")
    if faults:
        raise DataError(faults[0])
    return rows


def _faults_of_absent(root: Path, entries: Sequence[Entry], options: SourceOptions) -> list[str]:
    """Return what is wrong where images or folders are there by name and cannot be read."""
    absent = Tally()
    for entry in entries:
        if entry.is_absent and not options.skip_missing:
            absent.add(entry.reason, below(root, entry.path))
    kinds = absent.groups()
    if not kinds:
        return []
    reasons = "; ".join(f"{k.what}: {k.count:,}, such as {shown(k.example)}" for k in kinds)
    return [
        f"{root}: {reasons}; fetch them (git annex get, datalad get, git lfs pull, dvc pull), mend "
        "links and permissions, or give --skip-missing to build without them"
    ]
