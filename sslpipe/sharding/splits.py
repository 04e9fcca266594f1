"""Cut the images of a source into splits, by share or by class."""

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from sslpipe.data.order import choose_groups
from sslpipe.errors import DataError, did_you_mean
from sslpipe.random import permutation
from sslpipe.sharding.columns import find_groups
from sslpipe.sharding.sources import Images
from sslpipe.sharding.writer import SplitImages


def relabel(images: Images, classes: tuple[str, ...]) -> Images:
    """Return the same images with labels that index `classes`, a list of class names."""
    places = np.array([classes.index(name) for name in images.classes] or [-1], np.int64)
    labels = np.where(images.labels < 0, -1, places[images.labels])
    return replace(images, labels=labels, classes=classes)


def cut_test(
    splits: dict[str, SplitImages], fraction: float, seed: int, by: str | None = None
) -> dict[str, SplitImages]:
    """Move a share of each class (rounded) from train to a new split, test.

    Where rounding leaves a split empty, as of four images per class, the remainders of classes are
    carried over to the next class, so that the share of all images is met. With `by`, a column, its
    groups stay whole, and the share is met as well as they allow.

    Raises:
        DataError: There are other splits, or one would be empty.
    """
    if list(splits) != ["train"]:
        raise DataError(
            f"--test-fraction cuts from a source with one split, train; here: {', '.join(splits)}"
        )
    train = splits["train"]
    images, is_test = train.images, np.zeros(len(train.images), bool)
    sizes = np.unique(images.labels, return_counts=True)[1].tolist()
    rounded: int = sum(round(fraction * size) for size in sizes)
    if by is not None:
        groups = find_groups(train.columns, by, "--split-by")
        is_test = choose_groups(groups, images.labels, fraction, seed)
    elif 0 < rounded < len(images):  # both splits have an image
        for label in np.unique(images.labels).tolist():
            members = np.nonzero(images.labels == label)[0]
            order = permutation(len(members), seed, label)
            is_test[members[order[: round(fraction * len(members))]]] = True
    else:
        is_test = choose_groups(np.arange(len(images)), images.labels, fraction, seed)
    if not is_test.any() or is_test.all():
        count = len(images)
        remedy = f"give a fraction from {1 / count:.2g} to {1 - 1 / count:.2g}"
        if by:
            remedy = f"groups of {by} stay whole: give another fraction, or another column"
        elif count < 2:
            remedy = "add images"
        raise DataError(
            f"--test-fraction {fraction} of {count} images leaves a split empty; {remedy}"
        )
    return {
        "train": train._replace(numbers=np.nonzero(~is_test)[0]),
        "test": train._replace(numbers=np.nonzero(is_test)[0]),
    }


def describe_cut(splits: Mapping[str, SplitImages], by: str | None = None) -> list[str]:
    """Say what share of the samples, classes and groups of `by` each split has; a line a split."""
    labels = next(iter(splits.values())).images.labels
    classes, lines = len(np.unique(labels[labels >= 0])), []
    for name, split in splits.items():
        own = labels[split.numbers]
        line = f"split {name}: {len(own):,} samples ({len(own) / len(labels):.1%})"
        if classes:
            line += f", {len(np.unique(own[own >= 0])):,} of {classes:,} classes"
        if by is not None:
            groups = split.columns[by].groups()[split.numbers]
            line += f", {len(np.unique(groups)):,} groups of {by}"
        lines.append(line)
    return lines


def cut_classes(
    splits: dict[str, SplitImages], unseen: list[str], classes: tuple[str, ...]
) -> dict[str, SplitImages]:
    """Move every image of the unseen classes from each split S to a split S_unseen.

    Raises:
        DataError: A name is none of `classes`, or a split would be empty.
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
        cut[f"{key}_unseen"] = split._replace(numbers=split.numbers[moved])
    return cut
