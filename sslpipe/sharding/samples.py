"""Samples of a source, and how they are cut into the splits that are written.

A `SampleReader` makes them of files that are no images yet; `build.write_shards` writes them.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sslpipe.data.holdout import CLASS
from sslpipe.data.subsets import choose_groups, class_groups
from sslpipe.errors import DataError, counted, did_you_mean, listed, shown
from sslpipe.random import permutation
from sslpipe.sharding.arrays import Arrays
from sslpipe.sharding.build_report import OVERLOOKED, UNSEEN, alike_names
from sslpipe.sharding.columns import Columns, find_groups, to_json
from sslpipe.sharding.sources import Images, SourceOptions

_SPLIT_NAME = re.compile(r"[^\W_][\w.+-]*")  # it begins the names of files
_NUMBERED = re.compile(r"(?P<series>.*\D)(?P<number>\d+)([.][^./]*)?")  # film7-0012.jpg
LEAST_OF_SERIES = 5  # images
SPARSEST_SERIES = 30  # numbers for an image, as of every 30th frame
LEAST_IN_CLASS = 5  # series; fewer are cameras or ways of naming
LEAST_IN_FLAT = 50  # series in one folder without classes, where fewer are classes or cameras
SEED = 0  # of every cut, and of the order in the shards


class Samples(NamedTuple):
    """Samples of all splits, with columns: a source's files, or what a reader makes of them."""

    images: Mapping[str, Images]
    columns: Mapping[str, Columns]
    label_column: str  # that has the classes, where one has
    origin: str = ""  # what reads them: a source's name
    arrays: Arrays | None = None  # what they are; None: 8-bit RGB
    dtype: str | None = None  # of images that are not 8-bit RGB
    window: tuple[float, float] | None = None  # low and high value to look at; None: measured
    notes: Sequence[str] = ()
    split_by: str | None = None  # the column that keeps samples of a file in one split


@runtime_checkable
class SampleReader(Protocol):
    """A source that decides what a sample of its files is, such as `sslpipe.SensorFiles`."""

    def read_samples(self, options: SourceOptions, out: Path, workers: int) -> Samples:
        """Find the samples.

        Args:
            options: Where the files are, and which columns are read.
            out: The folder that is written.
            workers: Threads.

        Raises:
            DataError: Files that do not fit, or none.
        """
        ...


@dataclass(frozen=True)
class Cut:
    """Which samples leave their split for one of their own. Raises: DataError."""

    test_fraction: float = 0.0  # share of each class to move from train to test, in [0, 0.9]
    split_by: str | None = None  # column whose groups stay whole then, or "class"
    unseen_classes: Sequence[str] = ()  # whose images go from each split S to S_unseen

    def __post_init__(self) -> None:
        if not 0 <= self.test_fraction <= 0.9:
            raise DataError(f"test_fraction = {self.test_fraction} is not in [0, 0.9]")
        if self.split_by and not self.test_fraction:
            raise DataError(
                f"--split-by={self.split_by!r} needs --test-fraction, the share that is cut"
            )

    def splits(self, source_splits: Iterable[str]) -> list[str]:
        """Return the names of the splits that those of a source become."""
        names = [*source_splits, "test"] if self.test_fraction else [*source_splits]
        return names + [f"{name}{UNSEEN}" for name in names if self.unseen_classes]


class SplitImages(NamedTuple):
    """A split to write: some of a source's images."""

    images: Images
    numbers: NDArray[np.int64]  # (n,), which of them
    columns: Columns  # of all of them
    described: Sequence[bytes]  # KEY.json of all of them, b"" for none


def cut_splits(
    samples: Samples, classes: tuple[str, ...], cut: Cut
) -> tuple[dict[str, SplitImages], list[str]]:
    """Cut test from train, and unseen classes from all; returns the splits and what to say.

    Labels become places in `classes`. Raises: DataError as `cut_test` and `_cut_classes`.
    """
    splits = dict[str, SplitImages]()
    notes = list[str]()
    for key, images in samples.images.items():
        places = np.array([classes.index(name) for name in images.classes] or [-1], np.int64)
        labels = np.where(images.labels < 0, -1, places[images.labels])
        columns = samples.columns[key]
        splits[key] = SplitImages(
            images=replace(images, labels=labels, classes=classes),
            numbers=np.arange(len(images)),
            columns=columns,
            described=to_json(columns, len(images)),
        )
    if cut.test_fraction:
        splits = cut_test(splits, cut.test_fraction, cut.split_by)
        notes = [] if cut.split_by is None else _describe_groups(splits, cut.split_by)
    if cut.unseen_classes:
        splits = _cut_classes(splits, cut.unseen_classes, classes)
    for key in splits:
        if not _SPLIT_NAME.fullmatch(key):
            raise DataError(
                f"split {key!r}: a name is letters, digits and . + - _, as in train; rename the "
                "tars, folders or cells that it is read from"
            )
    return splits, notes


def cut_test(
    splits: dict[str, SplitImages], fraction: float, by: str | None = None
) -> dict[str, SplitImages]:
    """Move a share of each class (rounded) from train to a new split, test.

    Where rounding leaves a split empty, as of four images per class, remainders are carried over to
    the next class. With `by`, a column, its groups stay whole, and the share is met as they allow;
    without it the images of a row, and the rows of a file.

    Raises: DataError where there are other splits, or one would be empty.
    """
    if list(splits) != ["train"]:
        raise DataError(
            f"--test-fraction cuts from a source with one split, train; here: {', '.join(splits)}"
            + "; leave it away, or cut train alone with --split=train" * ("train" in splits)
        )
    train = splits["train"]
    images = train.images
    groups = images.together if by is None else _groups_to_split(train, by)
    sizes = np.unique(images.labels, return_counts=True)[1].tolist()
    rounded: int = sum(round(fraction * size) for size in sizes)
    if groups is None and not 0 < rounded < len(images):  # one split would have no image
        groups = np.arange(len(images))
    if groups is not None:
        is_test = choose_groups(groups, images.labels, fraction, SEED)
    else:
        is_test = np.zeros(len(images), bool)
        for label in np.unique(images.labels).tolist():
            members = np.nonzero(images.labels == label)[0]
            order = permutation(len(members), (SEED, label))
            is_test[members[order[: round(fraction * len(members))]]] = True
    if not is_test.any() or is_test.all():
        count = len(images)
        remedy = f"give a fraction from {1 / count:.2g} to {1 - 1 / count:.2g}"
        if by:
            remedy = f"groups of {by} stay whole: give another fraction, or another column"
        elif images.together is not None:
            remedy = (
                "rows of a file stay in one split: list it once, or give splits by --split-column"
            )
        elif count < 2:
            remedy = "add images"
        raise DataError(
            f"--test-fraction={fraction} of {count} images leaves a split empty; {remedy}"
        )
    return {
        name: train._replace(numbers=np.nonzero(chosen)[0])
        for name, chosen in (("train", ~is_test), ("test", is_test))
    }


def _groups_to_split(split: SplitImages, by: str) -> NDArray[np.int64]:
    """Number images by the column `by`, or by their class; each without one is on its own. (n,)."""
    labels = split.images.labels
    if by != CLASS or by in split.columns.column_names:
        return find_groups(split.columns, by, "--split-by")
    if (labels < 0).all():
        raise DataError(f"--split-by={by!r}: no image has a class")
    return class_groups(labels)


def _describe_groups(splits: Mapping[str, SplitImages], by: str) -> list[str]:
    """Count the groups of `by` in each split, in a line; the report counts all else."""
    lines = []
    for name, split in splits.items():
        groups = _groups_to_split(split, by)[split.numbers]
        lines.append(f"split {name}: {counted(len(np.unique(groups)), 'group')} of {by}")
    columns = next(iter(splits.values())).columns
    if by in columns.column_names and pa.types.is_string(columns.column(by).type):
        values = columns.column(by).unique().drop_null().to_pylist()
        alike = [" and ".join(map(shown, spellings)) for spellings in alike_names(values)]
        if alike:
            lines.append(
                f"look at this: values of {by} that differ by {OVERLOOKED} are {by}s of their "
                f"own, and may be in both splits: {listed(alike, 3)}"
            )
    return lines


def series_doubts(images: Images) -> list[str]:
    """Doubt a random cut of images whose names are numbered in far more series than classes.

    So are frames of films, slices of scans and pictures of one object: cat/film7-0012.jpg.
    """
    numbers: dict[str, list[int]] = defaultdict(list)
    for name in images.names:
        if match := _NUMBERED.fullmatch(name):
            numbers[match["series"]].append(int(match["number"]))
    sizes = {
        series: len(frames)
        for series, frames in numbers.items()
        if len(frames) >= LEAST_OF_SERIES
        and max(frames) - min(frames) < SPARSEST_SERIES * len(frames)
    }
    classes = images.class_names()
    folders = {name.rpartition("/")[0] for name in images.names}
    least = LEAST_IN_CLASS * max(2, len(classes or folders))
    is_flat = not classes and len(folders) == 1
    if is_flat:
        least = LEAST_IN_FLAT
    if len(sizes) < least or 2 * sum(sizes.values()) < len(images):
        return []
    first = min(sizes)
    doubt = (
        f"names are numbered in {len(sizes):,} series, such as {shown(first)} with "
        f"{sizes[first]:,} images, and test was cut at random: "
    )
    # breeds have words of their own, films most often a number: Abyssinian_1, video01_000123
    words = {re.sub(r"[\W\d_]+", "", series.lower()) for series in sizes}
    if is_flat and 2 * len(words) > len(sizes):
        doubt += (
            r"where each is a class, --name-pattern='(?P<label>.+?)[-_. ]*\d+[.]\w+|.*' takes it as"
            " one; where each is a film, a scan or one object, images of test have neighbours in "
            "train; "
        )
    else:
        doubt += (
            "where each is no class but a film, a scan or one object, images of test have "
            "neighbours in train; "
        )
    whole = r"--name-pattern='(?P<series>.*\D)\d+[.]\w+|.*' --split-by=series leaves them whole"
    return [doubt + whole]


def _cut_classes(
    splits: Mapping[str, SplitImages], unseen: Sequence[str], classes: tuple[str, ...]
) -> dict[str, SplitImages]:
    """Move every image of the unseen classes from each split S to a split S_unseen.

    Raises: DataError where a name is not one of `classes`, or a split would be empty.
    """
    for name in unseen:
        if name not in classes:
            raise DataError(
                f"--unseen-classes names {name!r}, which is no class{did_you_mean(name, classes)}; "
                f"known: {', '.join(classes) or 'none'}"
            )
    labels = [classes.index(name) for name in unseen]
    cut = {}
    for key, split in splits.items():
        moved = np.isin(split.images.labels[split.numbers], labels)
        if moved.all() or not moved.any():
            raise DataError(f"--unseen-classes leaves {key} or {key}_unseen without an image")
        cut[key] = split._replace(numbers=split.numbers[~moved])
        cut[f"{key}{UNSEEN}"] = split._replace(numbers=split.numbers[moved])
    return cut
