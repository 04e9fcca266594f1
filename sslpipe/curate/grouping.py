"""From pairs of samples that are one picture to groups without chains.

Every member of a group is paired with its centre, or equal to one that is: otherwise one wrong pair
would join two groups, and a series of frames would be one.
"""

import heapq
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

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
