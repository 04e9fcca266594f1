"""Which samples a fine-tuning trains on, which it holds out, and how their classes are numbered."""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.data.index import DatasetIndex, RelabelledSplit, Split, relabelled
from sslpipe.data.subsets import FEW_HELD_OUT, lowest_hashes
from sslpipe.errors import RecipeError, did_you_mean, naming
from sslpipe.metric_learning.recipe import FinetuneRecipe
from sslpipe.metric_learning.sampling import PKOrder
from sslpipe.random import permutation

Integers = NDArray[np.int64]

MOST_VALIDATED = 4000  # held-out samples that are scored: evenly spaced ones
MOST_BANK = 500  # trained ones that held-out images search, too
MOST_HELD_OUT = 500  # images that data.validation_classes = "auto" aims at
LEAST_HELD_OUT_CLASSES = 5
_VALIDATION = 0x7A  # names the draw of validation classes


def labelled_split(recipe: FinetuneRecipe, index: DatasetIndex) -> tuple[Split, Sequence[str]]:
    """Open the split that is trained on, and the names of its classes, by label.

    With sampler.column the labels number that column's values.

    Raises:
        DataError: There is no such column, or it is of floats.
    """
    split = index.split(recipe.data.split)
    with naming("sampler.column"):
        split = relabelled(split, recipe.sampler.column)
    return split, class_names(split)


def class_names(split: Split) -> Sequence[str]:
    """Return the names of the classes, by label, of a split as `labelled_split` gives it."""
    return split.names if isinstance(split, RelabelledSplit) else split.index.manifest.classes


class HeldOut(NamedTuple):
    """What a fine-tuning does not train on, to choose its weights by."""

    ids: Integers  # sorted
    whole_classes: bool  # else images of classes that are trained on


def held_out(recipe: FinetuneRecipe, split: Split, names: Sequence[str]) -> HeldOut:
    """Choose the samples that data.validation_classes holds out, those of no group included.

    "auto" aims at a tenth of the images; of few at FEW_HELD_OUT, if that is at most a quarter, of
    many at MOST_HELD_OUT. Whole classes, which say most of new ones, if these are at least
    LEAST_HELD_OUT_CLASSES and leave those of a batch. Fewer, two or more, where another split has
    new classes alone, so that the run is for such, or where groups are held out. Else, and where a
    batch needs all classes, of each class so many images, if it has more than images_per_class, and
    no groups are held out; where none has, two classes or more; where a batch needs these, nothing.

    Args:
        recipe: Of a fine-tuning.
        split: As `labelled_split` gives it, like names.
        names: Of the classes, by label.

    Raises:
        RecipeError: As in `validation_ids`.
    """
    chosen = recipe.data.validation_classes
    sampler = recipe.sampler
    if chosen != "auto":
        return HeldOut(validation_ids(split, chosen, names), whole_classes=True)
    labels, sizes = np.unique(split.labels[split.labels >= 0], return_counts=True)
    images = int(sizes.sum())
    classes = len(labels)
    spare_classes = int((sizes >= sampler.images_per_class).sum()) - sampler.classes_per_batch
    few = min(FEW_HELD_OUT, images // 4)
    share = min(max(images // 10, few), MOST_HELD_OUT) / max(1, images)
    wanted = round(share * classes)
    if LEAST_HELD_OUT_CLASSES <= wanted <= spare_classes:
        return HeldOut(validation_ids(split, wanted, names), whole_classes=True)
    by_groups = recipe.data.holdout_by is not None
    can_spare = classes > 3 and spare_classes >= 2
    if not by_groups and not (can_spare and new_classes_are_tested(split, sampler.column)):
        of_classes = []
        for label, size in zip(labels.tolist(), sizes.tolist(), strict=True):
            spare = size - sampler.images_per_class
            if spare > 0:
                count = min(max(1, int(share * size)), spare)
                of_classes.append(lowest_hashes(np.flatnonzero(split.labels == label), count))
        if len(of_classes) > 1:
            return HeldOut(np.sort(np.concatenate(of_classes)), whole_classes=False)
    if can_spare:
        wanted = max(wanted, 2, min(LEAST_HELD_OUT_CLASSES, classes // 4))
        return HeldOut(validation_ids(split, min(wanted, spare_classes), names), True)
    return HeldOut(np.zeros(0, np.int64), whole_classes=True)


@lru_cache(maxsize=1)  # the labels of all splits are read, and many batches may be tried
def new_classes_are_tested(split: Split, column: str | None) -> bool:
    """Return whether another split has labels, none of which this one has.

    Args:
        split: That is trained on.
        column: Whose values are the labels; None: the data set's own.

    Raises:
        DataError: The labels of another split cannot be read.
    """
    trained = _classes(split)
    for name in split.index.manifest.splits:
        if name != split.name:
            with naming(
                "data.validation_classes = 'auto' looks whether other splits have classes of their "
                "own, which data.validation_classes = 2 does not"
            ):
                others = _classes(relabelled(split.index.split(name), column))
            if others and others.isdisjoint(trained):
                return True
    return False


def _classes(split: Split) -> set[str | int]:
    labels = np.unique(split.labels[split.labels >= 0])
    if isinstance(split, RelabelledSplit):  # each split numbers its own values
        return {split.names[label] for label in labels}
    return set(labels.tolist())


def validation_ids(split: Split, classes: int | Sequence[str], names: Sequence[str]) -> Integers:
    """Return the sorted ids of every sample of the validation classes.

    Args:
        split: The split that is trained on.
        classes: Their names, or how many of those that have samples: the first of a fixed shuffle.
        names: Of the data set's classes, by label.

    Raises:
        RecipeError: A name that is not one of the classes, or no class is left to train on.
    """
    present = np.unique(split.labels[split.labels >= 0])
    if isinstance(classes, int):
        chosen = present[permutation(len(present), (_VALIDATION,))[:classes]]
        if classes >= len(present):
            raise RecipeError(
                f"data.validation_classes = {classes} leaves no class to train on; split "
                f"{split.name!r} has {len(present)}: set data.validation_classes=auto"
            )
    else:
        for name in classes:
            if name not in names:
                raise RecipeError(
                    f"data.validation_classes names {name!r}, which is no class of the data"
                    f"{did_you_mean(name, names)}; it has: {', '.join(names) or 'no names'}"
                )
        chosen = np.array([names.index(name) for name in classes], np.int64)
    return np.flatnonzero(np.isin(split.labels, chosen))


def untrained_ids(recipe: FinetuneRecipe, split: Split, names: Sequence[str]) -> Integers:
    """Return the sorted ids that are not trained on: those held out, and their groups.

    With data.holdout_by, a group that has a sample in a validation class is skipped whole. The
    arguments are as in `held_out`.
    """
    by = recipe.data.holdout_by
    ids = held_out(recipe, split, names).ids
    if by is None:
        return ids
    with naming("data.holdout_by"):
        groups = split.column(by).groups.whole_split()
    return np.flatnonzero(np.isin(groups, groups[ids]))


def watched_ids(ids: Integers) -> Integers:
    """Return the held-out samples that are scored: evenly spaced ones, MOST_VALIDATED at most."""
    return ids[:: -(-len(ids) // MOST_VALIDATED) or 1]


def bank_ids(order: PKOrder) -> Integers:
    """Return the trained samples that held-out images search: MOST_BANK at most, by a hash."""
    trained = np.flatnonzero(np.isin(order.labels, order.classes))
    return lowest_hashes(trained, MOST_BANK)


def trained_labels(order: PKOrder, split: Split) -> list[int]:
    """List the data set's own labels that are trained on; split: of `labelled_split`."""
    if not isinstance(split, RelabelledSplit):
        classes: list[int] = order.classes.tolist()
        return classes
    original = np.unique(split.original.labels[np.isin(order.labels, order.classes)])
    labels: list[int] = original[original >= 0].tolist()
    return labels


def class_numbers(labels: Tensor, classes: Tensor) -> Tensor:
    """Number labels of the data set, (n,) int64, by their place among sorted classes, else -1."""
    place = torch.searchsorted(classes, labels).clamp(max=len(classes) - 1)
    return torch.where(classes[place] == labels, place, -1)
