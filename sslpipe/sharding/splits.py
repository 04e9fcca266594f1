"""Cut the images of a source into splits, by share or by class."""

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

    Args:
        splits: train, and nothing else.
        fraction: The share.
        seed: Of the draw.
        by: A column whose groups stay whole: then the share is met as well as they allow.

    Raises:
        DataError: There are other splits, or one would be empty.
    """
    if list(splits) != ["train"]:
        raise DataError(
            f"--test-fraction cuts from a source with one split, train; here: {', '.join(splits)}"
        )
    train = splits["train"]
    images, is_test = train.images, np.zeros(len(train.images), bool)
    if by is not None:
        groups = find_groups(train.columns, by, "--split-by")
        is_test = choose_groups(groups, images.labels, fraction, seed)
    else:
        for label in np.unique(images.labels).tolist():
            members = np.nonzero(images.labels == label)[0]
            order = permutation(len(members), seed, label)
            is_test[members[order[: round(fraction * len(members))]]] = True
    if not is_test.any() or is_test.all():
        whole = f", as groups of {by} stay whole" if by else ""
        raise DataError(
            f"--test-fraction {fraction} of {len(images)} images leaves a split empty{whole}"
        )
    return {
        "train": train._replace(numbers=np.nonzero(~is_test)[0]),
        "test": train._replace(numbers=np.nonzero(is_test)[0]),
    }


def cut_classes(
    splits: dict[str, SplitImages], unseen: list[str], classes: tuple[str, ...]
) -> dict[str, SplitImages]:
    """Move every image of the unseen classes from each split S to a split S_unseen.

    Args:
        splits: The splits to cut.
        unseen: Class names to hold out.
        classes: All class names, by label.

    Raises:
        DataError: A name is no class, or a split would be empty.
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
