"""Which sample stands where: a pure function of integers, computed without reading anything.

An epoch lays the shards, in a permuted order, end to end as one line of samples, rotates the line
by a drawn offset, and cuts it to a whole number of global batches. The line is split into
`num_streams` equal segments; each segment is cut into windows (a contiguous run of one shard, at
most `window` samples); the windows of a segment are permuted, and so are the samples in each. A
global step takes `batch_size / num_streams` samples from every stream. Neither processes nor
workers appear anywhere here, so they cannot change the order.
"""

from collections.abc import Iterator
from functools import lru_cache, partial

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import DataError
from sslpipe.random import hash_integers, permutation

ORDER_VERSION = 1  # part of every digest: raise it whenever an order below changes

_SHARDS, _OFFSET, _WINDOWS, _SAMPLES, _HOLDOUT, _GROUPS, _CLASSES = range(7)  # names of draws

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
    """Count the samples of which another has the same label, so that a neighbour can be right."""
    counts = np.unique(labels[labels >= 0], return_counts=True)[1]
    return int(counts[counts > 1].sum())


def suggest_holdout(labels: Integers) -> tuple[HoldoutSettings, bool]:
    """Suggest settings that hold out about a tenth, at most 2,000, so that kNN can be scored.

    Such a slice has two classes or more, and most of its samples have a partner. Whole classes are
    held out where classes are too small for that. `labels` (N,) int64 are the whole split's, -1
    without.

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
    tenth = min(max(2, total // 10), 2000)
    # of each class its share
    shares = np.round(tenth * sizes / total)
    if (shares > 0).sum() > 1 and max(tenth, shares.sum()) <= 2 * shares[shares > 1].sum():
        return {"holdout": tenth, **whom}, True
    # whole classes
    chosen = choose_groups(class_groups(labels), labels, tenth / total, _HOLDOUT)
    if len(np.unique(labels[chosen])) > 1:
        return {"holdout": tenth, **whom, "holdout_by": "class"}, scores_knn
    # more than a tenth of few samples
    for count in range(tenth, total // 2 + 1) if scores_knn else ():
        shares = np.round(count * sizes / total)
        if (shares > 0).sum() > 1 and shares.max() > 1 and shares.sum() <= total / 2:
            return {"holdout": count, **whom}, True
    return {"holdout": tenth, **whom}, False


def repeated(groups: Integers, without: Integers) -> Integers:
    """List the samples that are not the first of their group, (N,) numbers; sorted ids.

    Those of `without`, sorted ids, count as not there.
    """
    there = np.ones(len(groups), bool)
    there[without] = False
    ids = np.flatnonzero(there)
    there[ids[np.unique(groups[ids], return_index=True)[1]]] = False
    return np.flatnonzero(there)


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


class Order:
    """The order of a whole run over one split.

    Args:
        starts: (shards + 1,) first id of each shard, as Split.starts.
        seed: Names every permutation.
        batch_size: Of a global step; a multiple of num_streams.
        num_streams: Segments that are read side by side.
        window: Samples, at most, that are shuffled together.
        without: Sorted ids that are never served.

    Raises:
        DataError: No global batch can be filled.
    """

    def __init__(
        self,
        starts: Integers,
        *,
        seed: int,
        batch_size: int,
        num_streams: int,
        window: int,
        without: Integers | None = None,
    ) -> None:
        self.seed = seed
        self.window = window
        self.batch_size = batch_size
        self.num_streams = num_streams
        self.starts = starts
        self.without = without = np.zeros(0, np.int64) if without is None else without
        cuts = np.searchsorted(without, starts)  # without[cuts[k]:cuts[k+1]] lie in shard k
        # row j of these: how many kept samples of the shard precede its j-th excluded one
        self._excluded = [
            without[a:b] - start - np.arange(b - a)
            for a, b, start in zip(cuts[:-1], cuts[1:], starts[:-1], strict=True)
        ]
        self.kept = np.diff(starts) - np.diff(cuts)  # (shards,) samples served, by shard
        self.samples = int(self.kept.sum())
        self.steps_per_epoch = self.samples // batch_size
        if not self.steps_per_epoch:
            if not self.samples:
                raise DataError("no sample is left to train on: hold out fewer, or keep more")
            raise DataError(
                f"data.batch_size = {batch_size} is more than the {self.samples} samples to train "
                "on; use a smaller one"
            )
        self.epoch = lru_cache(maxsize=2)(partial(EpochPlan, self))

    def rows(self, shard: int, kept: Integers) -> Integers:
        """Find the rows in the shard's file of its samples number `kept` among those served."""
        return kept + np.searchsorted(self._excluded[shard], kept, side="right")

    def ids(self, step: int, streams: range) -> tuple[int, Integers]:
        """Give the epoch, and the ids that the streams serve in a global step, stream-major."""
        epoch, within = divmod(step, self.steps_per_epoch)
        share = self.batch_size // self.num_streams
        plan = self.epoch(epoch)
        parts = [plan.stream(s).ids(within * share, (within + 1) * share) for s in streams]
        return epoch, np.concatenate(parts)


class EpochPlan:
    """One epoch's line of samples and its segments; epochs count from 0."""

    def __init__(self, order: Order, epoch: int) -> None:
        self.order = order
        self.epoch = epoch
        shards = permutation(len(order.kept), (order.seed, epoch, _SHARDS))
        offset = int(hash_integers((order.seed, epoch, _OFFSET))) % order.samples
        ends = np.cumsum(order.kept[shards])
        starts = ends - order.kept[shards]
        # The rotated line: the shard at `offset` gives its later part first, its earlier part last.
        first = int(np.searchsorted(ends, offset, side="right"))
        whole = np.stack([shards, np.zeros_like(shards), order.kept[shards]], axis=1)
        line = np.concatenate(
            [whole[first:], whole[: first + 1]]
        )  # (shards + 1, 3): shard, first and last + 1 kept sample
        line[0, 1] = line[-1, 2] = offset - starts[first]
        line = line[line[:, 1] < line[:, 2]]
        self.line = line
        self.line_ends = np.cumsum(line[:, 2] - line[:, 1])
        self.segment = order.steps_per_epoch * order.batch_size // order.num_streams
        self.stream = lru_cache(maxsize=None)(partial(StreamPlan, self))


class StreamPlan:
    """One segment's windows in the order they are read, and the samples inside each."""

    def __init__(self, plan: EpochPlan, number: int) -> None:
        order = plan.order
        self._order = order
        self._epoch = plan.epoch
        self.length = plan.segment
        begin = number * plan.segment
        end = (number + 1) * plan.segment
        first, last = np.searchsorted(plan.line_ends, [begin, end - 1], side="right")
        windows = []
        pieces = plan.line[first : last + 1]
        stops = plan.line_ends[first : last + 1]
        for (shard, low, high), stop in zip(pieces.tolist(), stops.tolist(), strict=True):
            start = stop - (high - low)  # where this piece begins on the line
            low = low + max(0, begin - start)
            high = high - max(0, stop - end)
            edges = np.arange(low, high, order.window)
            ends = np.minimum(edges + order.window, high)
            windows.append(np.stack([np.full_like(edges, shard), edges, ends], axis=1))
        unshuffled = np.concatenate(windows)  # (windows, 3): shard, first and last + 1 kept sample
        shuffle = permutation(len(unshuffled), (order.seed, plan.epoch, _WINDOWS, number))
        self.windows = unshuffled[shuffle]
        self.ends = np.cumsum(self.windows[:, 2] - self.windows[:, 1])  # (windows,) in the stream
        self.window_ids = lru_cache(maxsize=2)(self._window_ids)

    def _window_ids(self, window: int) -> Integers:
        shard, low, high = self.windows[window].tolist()
        order = self._order
        ids = order.starts[shard] + order.rows(shard, np.arange(low, high))
        keys = hash_integers((order.seed, self._epoch, _SAMPLES, ids))
        shuffled: Integers = ids[np.argsort(keys, kind="stable")]
        return shuffled

    def ids(self, begin: int, end: int) -> Integers:
        """Give the ids of the stream's samples begin to end - 1."""
        return np.concatenate([self.window_ids(k)[own] for k, own in self.pieces(begin, end)])

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, slice]]:
        """Cut the samples begin to end - 1 where windows change: its number, their places in it."""
        while begin < end:
            window = int(np.searchsorted(self.ends, begin, side="right"))
            stop = int(self.ends[window])
            start = stop - int(self.windows[window, 2] - self.windows[window, 1])
            yield window, slice(begin - start, min(end, stop) - start)
            begin = stop
