"""Parts of a split, chosen by hashes: held-out slices, whole groups, the first of each group.

A choice is a function of ids, labels and counts alone: a split has the same parts in every run.
"""

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import DataError
from sslpipe.random import hash_integers

# names of draws; data/order.py has 0 to 3
_HOLDOUT = 4
_GROUPS = 5
_CLASSES = 6

FEW_HELD_OUT = 100  # of few images so many are held out: a tenth tells no gain from luck

Integers = NDArray[np.int64]
Booleans = NDArray[np.bool_]
HoldoutSettings = dict[str, int | str]  # keys of [data] without their section, and their values


def held_out(labels: Integers, count: int, groups: Integers | None = None) -> Integers:
    """Choose the ids of a fixed, class-stratified slice, sorted: the lowest hashes of each class.

    Args:
        labels: (N,) int64. Samples without a label (-1) are never taken, but with their group.
        count: Of the slice; each class gives its share, rounded. 0: no sample.
        groups: (N,) number of each sample's group, which is taken whole or not at all; then the
            slice has as nearly `count` labelled samples as that allows; see `choose_groups`.

    Raises:
        DataError: Nothing is left to train on, or with groups nothing is taken.
    """
    labelled = np.flatnonzero(labels >= 0)
    if not count or not len(labelled):
        return np.zeros(0, np.int64)
    if count >= len(labelled):
        raise DataError(
            f"data.holdout = {count} leaves nothing to train on; {len(labelled)} are labelled"
        )
    if groups is not None:
        whole = np.flatnonzero(choose_groups(groups, labels, count / len(labelled), _HOLDOUT))
        if len(whole) in (0, len(labels)):
            raise DataError(
                f"data.holdout = {count} with data.holdout_by: groups are too large to hold some "
                "out and train on others; use another count, or another column"
            )
        return whole
    taken = []
    for label in np.unique(labels[labelled]):
        members = np.flatnonzero(labels == label)
        share = round(count * len(members) / len(labelled))
        taken.append(lowest_hashes(members, share))
    return np.sort(np.concatenate(taken)).astype(np.int64)


def lowest_hashes(ids: Integers, count: int) -> Integers:
    """Choose at most `count` ids, always the same ones, sorted."""
    return np.sort(ids[np.argsort(hash_integers((_HOLDOUT, ids)), kind="stable")[:count]])


def class_groups(labels: Integers) -> Integers:
    """Number the groups that hold out whole classes: (N,) labels -> (N,), unlabelled ones alone."""
    return np.where(labels >= 0, labels, len(labels) + np.arange(len(labels)))


def with_a_partner(labels: Integers) -> int:
    """Count the samples of `has_a_partner`."""
    return int(has_a_partner(labels).sum())


def has_a_partner(labels: Integers) -> Booleans:
    """Return of which samples another has the same label, so that a neighbour can be right."""
    _, places, counts = np.unique(labels, return_inverse=True, return_counts=True)
    has_two: Booleans = (counts[places] > 1) & (labels >= 0)
    return has_two


def suggest_holdout(labels: Integers, few: int = 0) -> tuple[HoldoutSettings, bool]:
    """Suggest settings that hold out about a tenth, at most 2,000, so that kNN can be scored.

    Such a slice has two classes or more, and most of its samples have a partner. Whole classes are
    held out where classes are too small for that.

    Args:
        labels: (N,) int64, the whole split's, -1 without.
        few: So many, or a fifth, where a tenth is less.

    Returns:
        The settings, and whether kNN can be scored there: not with a single class, nor where each
        class has one sample. Scores without labels always can.
    """
    whom: HoldoutSettings = {}
    if not (labels >= 0).any():
        labels = np.zeros_like(labels)
        whom = {"holdout_from": "all"}
    sizes = np.unique(labels[labels >= 0], return_counts=True)[1]
    total = int(sizes.sum())
    scores_knn = len(sizes) > 1 and sizes.max() > 1
    if total < 4:
        return {"holdout": 0}, False
    wanted = min(max(2, total // 10, min(few, total // 5)), 2000)
    # of each class its share
    shares = np.round(wanted * sizes / total)
    if (shares > 0).sum() > 1 and max(wanted, shares.sum()) <= 2 * shares[shares > 1].sum():
        return {"holdout": wanted, **whom}, True
    # whole classes
    chosen = choose_groups(class_groups(labels), labels, wanted / total, _HOLDOUT)
    if len(np.unique(labels[chosen])) > 1:
        return {"holdout": wanted, **whom, "holdout_by": "class"}, scores_knn
    # more of few samples
    for count in range(wanted, total // 2 + 1) if scores_knn else ():
        shares = np.round(count * sizes / total)
        if (shares > 0).sum() > 1 and shares.max() > 1 and shares.sum() <= total / 2:
            return {"holdout": count, **whom}, True
    return {"holdout": wanted, **whom}, False


def repeated(groups: Integers, without: Integers) -> Integers:
    """List the samples that are not the first of their group, (N,) numbers; sorted ids.

    Those of `without`, sorted ids, count as not there.
    """
    is_candidate = np.ones(len(groups), bool)
    is_candidate[without] = False
    ids = np.flatnonzero(is_candidate)
    is_candidate[ids[np.unique(groups[ids], return_index=True)[1]]] = False
    return np.flatnonzero(is_candidate)


def choose_groups(groups: Integers, labels: Integers, fraction: float, word: int) -> Booleans:
    """Draw whole groups that hold a share of the samples and of each class; who is in them, (N,).

    Classes, and the groups of a class, come in an order drawn by hashes; a group is taken where
    that brings the number of samples taken so far nearer to the share (error diffusion). The whole
    is off by at most half of the largest group.

    Args:
        groups: (N,) number of each sample's group.
        labels: (N,) the class of a group is that of most of its samples. Samples without a label
            (-1) count where none has one; else they go with their group and do not count.
        fraction: The share, in [0, 1].
        word: Names the draw.
    """
    _, first, numbers = np.unique(groups, return_index=True, return_inverse=True)
    counted = labels >= 0 if (labels >= 0).any() else np.ones(len(labels), bool)
    sizes = np.bincount(numbers[counted], minlength=len(first))
    # the class of each group: pairs of group and class, the most frequent of a group first
    pairs, counts = np.unique(
        np.stack([numbers[counted], labels[counted]]), axis=1, return_counts=True
    )
    pairs = pairs[:, np.lexsort((pairs[1], -counts, pairs[0]))]
    named, begins = np.unique(pairs[0], return_index=True)
    classes = np.full(len(first), -1, np.int64)
    classes[named] = pairs[1, begins]
    # the draw
    ranked = np.lexsort(
        (hash_integers((word, _GROUPS, first)), hash_integers((word, _CLASSES, classes)))
    )
    chosen = np.zeros(len(first), bool)
    held = 0
    seen = 0
    for group, size in zip(ranked.tolist(), sizes[ranked].tolist(), strict=True):
        seen += size
        if 0 < size < 2 * (fraction * seen - held):
            chosen[group] = True
            held += size
    return chosen[numbers]
