"""From pairs of samples to groups without chains: of one picture, or of mutual neighbours.

Every member of a group is paired with its centre, or equal to one that is: otherwise one wrong pair
would join two groups, and a series of frames would be one.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.intervals import Interval, wilson95
from sslpipe.evaluation.neighbours import nearest

Integers = NDArray[np.int64]


class Pairs(NamedTuple):
    """Pairs of rows that are verified to be one picture, each once, `first` < `second`; (P,)."""

    first: Integers
    second: Integers
    equal: NDArray[np.bool_]  # in all pixels
    score: NDArray[np.float32]  # 1 where they are equal

    def __len__(self) -> int:
        return len(self.first)


class Groups(NamedTuple):
    """Groups of two samples or more, by row, (N,)."""

    group: Integers  # numbered by their first rows; -1: in no group
    nearest: Integers  # the row of the group that is most like this one; -1: none
    score: NDArray[np.float32]  # of that pair; 0 without one

    def sizes(self) -> Integers:
        """Count the samples of every group, (G,)."""
        counts: Integers = np.bincount(self.group[self.group >= 0])
        return counts


class Precision(NamedTuple):
    """Pairs of samples in one group, both labelled, that share the label."""

    right: int
    pairs: int
    interval95: Interval  # Wilson's, of right / pairs
    chance: float  # the same share of pairs drawn from all labelled samples


def joined(parts: list[Pairs]) -> Pairs:
    """Join pairs; of one that occurs twice, the first."""
    first = np.concatenate([part.first for part in parts])
    second = np.concatenate([part.second for part in parts])
    equal = np.concatenate([part.equal for part in parts])
    score = np.concatenate([part.score for part in parts])
    _, kept = np.unique(np.stack([first, second]), axis=1, return_index=True)
    return Pairs(first[kept], second[kept], equal=equal[kept], score=score[kept])


def group(pairs: Pairs, rows: int) -> Groups:
    """Put samples into groups around centres.

    The row with the most verified pairs (of equals the lowest) is a centre; all free rows that are
    paired with it are its group; then the same of the rest. Rows of equal pixels stay together.

    Args:
        pairs: Verified, each once; of equal rows, the first with each other one at least.
        rows: How many samples there are.
    """
    # neighbours of each row, nearest first
    first = np.concatenate([pairs.first, pairs.second])
    second = np.concatenate([pairs.second, pairs.first])
    score = np.tile(pairs.score, 2)
    order = np.lexsort((second, ~np.tile(pairs.equal, 2), -score, first))
    first = first[order]
    second = second[order]
    score = score[order]
    starts = np.searchsorted(first, np.arange(rows + 1))
    degree = np.diff(starts)
    # stars: a row's count of free neighbours only falls; if it has, the row waits again
    label = np.full(rows, -1, np.int64)
    count = 0
    waiting = [(-size, row) for row, size in enumerate(degree.tolist()) if size]
    heapq.heapify(waiting)
    while waiting:
        size, row = heapq.heappop(waiting)
        if label[row] >= 0:
            continue
        around = second[starts[row] : starts[row + 1]]
        free = around[label[around] < 0]
        if len(free) < -size:
            if len(free):
                heapq.heappush(waiting, (-len(free), row))
            continue
        label[row] = label[free] = count
        count += 1
    # what is equal goes where the first of its kind went: that one alone was compared with others
    leader = np.arange(rows)
    np.minimum.at(leader, pairs.second[pairs.equal], pairs.first[pairs.equal])
    label = label[leader]
    # numbers by first rows, and each row's nearest in its group
    members = np.flatnonzero(label >= 0)
    _, first_of, place = np.unique(label[members], return_index=True, return_inverse=True)
    label[members] = np.argsort(np.argsort(first_of))[place]
    inside = (label[first] == label[second]) & (label[first] >= 0)
    rows_with, at = np.unique(first[inside], return_index=True)
    nearest = np.full(rows, -1)
    nearest[rows_with] = second[inside][at]
    scores = np.zeros(rows, np.float32)
    scores[rows_with] = score[inside][at]
    return Groups(label, nearest, scores)


def mutual_groups(rows: Embeddings, k: int = 1) -> Groups:
    """Group samples with their mutual neighbours: each is among the k nearest of the other.

    With k = 1 these are pairs. With more, the sample with the most mutual neighbours and these are
    a group, then the same of the rest: each member is a mutual neighbour of its group's centre, and
    no chain joins two groups.

    Args:
        rows: Features of one split.
        k: How many neighbours count.

    Raises:
        DataError: There are no k other samples.

    Source:
        Qin et al. 2011, "Hello neighbor": k-reciprocal nearest neighbours.
    """
    count = len(rows.ids)
    neighbours = nearest(rows.features, rows.features, k, hidden=(rows.ids, rows.ids))
    first = np.repeat(np.arange(count), k)
    second, score = (part.cpu().numpy().ravel() for part in neighbours)
    mutual = np.isin(first * count + second, second * count + first) & (first < second)
    first = first[mutual]
    second = second[mutual]
    score = score[mutual].astype(np.float32)
    return group(Pairs(first, second, np.zeros(len(first), bool), score), count)


def estimate_precision(group_of: Integers, labels: Integers) -> Precision | None:
    """Compare the labels within groups; None where no group has two labelled samples.

    Args:
        group_of: (N,), -1 without a group.
        labels: (N,), -1 without a label.
    """
    known = labels >= 0
    sizes = np.bincount(group_of[known & (group_of >= 0)])
    pairs = _pairs(sizes)
    if not pairs:
        return None
    both = np.stack([group_of, labels])[:, known & (group_of >= 0)]
    right = _pairs(np.unique(both, axis=1, return_counts=True)[1])
    chance = _pairs(np.unique(labels[known], return_counts=True)[1]) / _pairs(
        np.array([known.sum()])
    )
    return Precision(right, pairs, wilson95(right, pairs), chance)


def _pairs(sizes: Integers) -> int:
    """Count the pairs within sets of these sizes."""
    return int((sizes * (sizes - 1) // 2).sum())
