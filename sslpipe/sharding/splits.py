"""Which images of a source go into which split: cut by share, or by class."""

import numpy as np

from sslpipe.errors import DataError, did_you_mean
from sslpipe.random import permutation
from sslpipe.sharding.sources import Images
from sslpipe.sharding.writer import Part


def relabelled(images: Images, classes: tuple[str, ...]) -> Images:
    """The same images with labels by their class's place in `classes`."""
    places = np.array([classes.index(name) for name in images.classes] or [-1], np.int64)
    labels = np.where(images.labels < 0, -1, places[images.labels])
    return Images(images.names, labels, images.sizes, classes, images.read)


def cut_test(parts: dict[str, Part], fraction: float, seed: int) -> dict[str, Part]:
    """Move a share of each class (rounded) from train to a new split, test."""
    if list(parts) != ["train"]:
        raise DataError(
            f"--test-fraction cuts from a source with one split, train; here: {', '.join(parts)}"
        )
    images = parts["train"].images
    is_test = np.zeros(len(images), bool)
    for label in np.unique(images.labels).tolist():
        members = np.nonzero(images.labels == label)[0]
        order = permutation(len(members), seed, label)
        is_test[members[order[: round(fraction * len(members))]]] = True
    if not is_test.any() or is_test.all():
        raise DataError(f"--test-fraction {fraction} of {len(images)} images leaves a split empty")
    return {
        "train": Part(images, np.nonzero(~is_test)[0], "train"),
        "test": Part(images, np.nonzero(is_test)[0], "train"),
    }


def cut_classes(
    parts: dict[str, Part], unseen: list[str], classes: tuple[str, ...]
) -> dict[str, Part]:
    """Move every image of the unseen classes from each split S to a split S_unseen."""
    for name in unseen:
        if name not in classes:
            raise DataError(
                f"--unseen-classes names {name!r}, which is no class{did_you_mean(name, classes)}; "
                f"known: {', '.join(classes) or 'none'}"
            )
    labels = [classes.index(name) for name in unseen]
    cut = {}
    for key, part in parts.items():
        moved = np.isin(part.images.labels[part.numbers], labels)
        if moved.all() or not moved.any():
            raise DataError(f"--unseen-classes leaves {key} or {key}_unseen without an image")
        cut[key] = Part(part.images, part.numbers[~moved], part.origin)
        cut[f"{key}_unseen"] = Part(part.images, part.numbers[moved], part.origin)
    return cut
