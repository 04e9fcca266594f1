"""Read the images of webdataset tars that others made, to write them anew: as PNG, smaller, cut."""

import os
from collections.abc import Sequence
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.index import IMAGE_SUFFIXES
from sslpipe.data.storage import read_range
from sslpipe.errors import DataError, did_you_mean
from sslpipe.files import Tree
from sslpipe.sharding.build_report import group_lines, merge_groups
from sslpipe.sharding.gather import json_of_samples, match_names
from sslpipe.sharding.index_tars import find_tars
from sslpipe.sharding.scan import Scan, scan_tar, unread
from sslpipe.sharding.sources import (
    SUFFIXES,
    Images,
    SourceOptions,
    chosen_splits,
    merged_classes,
    number_labels,
    numbered,
    open_file,
    readable,
    reported,
    root_folder,
    unnamed_split,
)
from sslpipe.sharding.split_names import missing_shards
from sslpipe.sharding.tables import unread_columns
from sslpipe.sharding.tar_doubts import classes_in_names

LABEL_COLUMN = "label"  # the default of --label-column, for which KEY.cls comes first
MOST_LABEL_BYTES = 1024
MOST_KEYS = 20  # of KEY.json, in a message
# those that shards hold come first where a sample has several
_SUFFIXES = (*IMAGE_SUFFIXES, *(each[1:] for each in SUFFIXES if each[1:] not in IMAGE_SUFFIXES))


class _Tar(NamedTuple):
    """The samples of a tar, and the class and KEY.json of each."""

    path: Path
    scan: Scan
    labels: list[str | None]
    trees: list[Tree]


def read_tars(options: SourceOptions) -> dict[str, Images]:
    """Read webdataset tars in a folder; a sample is what `scan_tar` takes for one.

    Its class is the text of KEY.NAME, else the key NAME of KEY.json, where NAME is --label-column;
    by default KEY.cls, else `label` of KEY.json. A group NAME of --name-pattern comes before both.
    Columns are keys of KEY.json.
    """
    root = root_folder(options)
    if options.out is not None and root.resolve() == options.out.resolve():
        raise DataError(f"{root} holds the tars that are read; write the data set elsewhere")
    groups = unnamed_split(find_tars(root, None), options)
    chosen = chosen_splits(options, groups, root)
    tars = {split: [_read_tar(path, options) for path in paths] for split, paths in groups.items()}
    every = list(chain(*tars.values()))
    _check_known(root, every, options)
    all_labels = {label for tar in every for label in tar.labels}
    images = {split: _images(tars[split], all_labels, options) for split in chosen}
    read = list(chain(*(tars[split] for split in chosen)))
    skipped = merge_groups(each for tar in read for each in tar.scan.left_out)
    unread_keys = unread_columns(_keys(read), {options.label_column, *options.fields})
    doubts = [
        *missing_shards(tar.path for tar in read),
        *merged_classes(all_labels),
        *group_lines(merge_groups(each for tar in read for each in tar.scan.unusual)),
        *unread(skipped, groups[chosen[0]][0]),
    ]
    if options.labels and not options.fields and all_labels == {None}:
        keys = _keys(every)
        has_texts = any(each.kind == ".txt" for tar in every for each in tar.scan.left_out)
        hints = ["there is KEY.txt"] if has_texts else []
        hints += [f"in their KEY.json is {', '.join(keys[:MOST_KEYS])}"] if keys else []
        if hints:
            doubts.append(
                f"no image has a label; {', and '.join(hints)}: name the classes with "
                "--label-column"
            )
        else:
            folders = {folder for tar in every for folder in tar.scan.folders}
            count = sum(len(tar.scan.samples) for tar in every)
            paths = [tar.path for tar in every]
            doubts += classes_in_names(paths, folders, count)
    return reported(images, [*skipped, *unread_keys], doubts)


def _read_tar(path: Path, options: SourceOptions) -> _Tar:
    """List the samples of a tar, and read what belongs to them. Raises: DataError."""
    column = options.label_column
    suffix = "cls" if column == LABEL_COLUMN else column.lower()
    scan = scan_tar(path, _SUFFIXES, label_suffix=suffix)
    labels: list[str | None] = [None] * len(scan.samples)
    is_needed = options.labels or options.fields
    trees = json_of_samples(path, scan.samples) if is_needed else [Tree()] * len(scan.samples)
    if options.is_label_in_names:
        names = [readable(sample.name) for sample in scan.samples]
        labels = match_names(names, options.name_pattern)[column]
    elif options.labels:
        labels = [_text_of(tree.get(column)) for tree in trees]
        with open_file(path) as file:
            for place, sample in enumerate(scan.samples):
                if sample.text is not None:
                    start, size = sample.text
                    raw = os.pread(file.fileno(), min(size, MOST_LABEL_BYTES), start)
                    labels[place] = raw.decode(errors="backslashreplace").strip()
    return _Tar(path=path, scan=scan, labels=labels, trees=trees)


def _text_of(value: object) -> str | None:
    """Return a class as JSON has it: a text, or a whole number. Raises: DataError for others."""
    if value is None or isinstance(value, str):
        return value
    if isinstance(value, int):
        return str(value)
    raise DataError(
        f"--label-column: {value!r} in a KEY.json is neither a text nor an integer; name another "
        "key, or give --no-labels"
    )


def _keys(tars: Sequence[_Tar]) -> list[str]:
    """Return the keys that any KEY.json has, sorted."""
    return sorted({key for tar in tars for tree in tar.trees for key in tree})


def _check_known(root: Path, tars: Sequence[_Tar], options: SourceOptions) -> None:
    """Raise DataError for a column, or a column of classes, that no sample has."""
    if not any(tar.scan.samples for tar in tars):
        raise DataError(f"{root}: its tars hold no image KEY.jpg, KEY.png, ..., KEY.tif")
    keys = _keys(tars)
    contents = f"in their KEY.json is: {', '.join(keys[:MOST_KEYS]) or 'nothing'}"
    column = options.label_column
    is_asked = options.labels and column != LABEL_COLUMN
    if is_asked and all(label is None for tar in tars for label in tar.labels):
        raise DataError(
            f"--label-column={column!r}: no sample has a member KEY.{column} or this key"
            f"{did_you_mean(column, keys)}; {contents}; or give --no-labels"
        )
    for name in options.fields:
        if name not in keys:
            raise DataError(
                f"--columns={name!r}: no sample has it{did_you_mean(name, keys)}; {contents}"
            )


def _images(tars: Sequence[_Tar], all_labels: set[str | None], options: SourceOptions) -> Images:
    places = [(tar.path, *sample.image) for tar in tars for sample in tar.scan.samples]
    labels, classes = number_labels([each for tar in tars for each in tar.labels], all_labels)

    def read(number: int) -> bytes:
        path, start, size = places[number]
        return read_range(str(path), start, start + size)

    return Images(
        names=[readable(sample.name) for tar in tars for sample in tar.scan.samples],
        labels=labels,
        sizes=np.array([size for _, _, size in places], np.int64),
        classes=classes,
        read=read,
        cells={
            name: [tree.get(name) for tar in tars for tree in tar.trees] for name in options.fields
        },
        origin="typed",
        together=_together(tars),
    )


def _together(tars: Sequence[_Tar]) -> NDArray[np.int64] | None:
    """Number the samples by what they share: KEY.json, KEY.cls or KEY.txt; None: each has its own.

    Images such as v1.0.jpg and v1.1.jpg share a KEY, but nothing in the tar says that they belong
    together.
    """
    shared = list[tuple[Path, object]]()
    for tar in tars:
        for sample in tar.scan.samples:
            has_more = sample.json or sample.text or sample.label >= 0
            folder, slash, name = sample.name.rpartition("/")
            key = f"{folder}{slash}{name.partition('.')[0]}"
            shared.append((tar.path, key if has_more else sample.image))
    return None if len({*shared}) == len(shared) else numbered(shared)
