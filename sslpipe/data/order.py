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

# names of draws; data/subsets.py has 4 to 6
_SHARDS = 0
_OFFSET = 1
_WINDOWS = 2
_SAMPLES = 3

Integers = NDArray[np.int64]


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
        without = np.zeros(0, np.int64) if without is None else without
        self.without = without
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
        # number of an epoch -> its plan; where one ends, threads read ahead in the next
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
        # (shards + 1, 3): shard, first and last + 1 kept sample
        line = np.concatenate([whole[first:], whole[: first + 1]])
        cut = offset - starts[first]  # a kept sample of that shard
        line[0, 1] = cut
        line[-1, 2] = cut
        line = line[line[:, 1] < line[:, 2]]  # without empty parts
        self.line = line
        self.line_ends = np.cumsum(line[:, 2] - line[:, 1])
        self.segment = order.steps_per_epoch * order.batch_size // order.num_streams
        # number of a stream -> its plan
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
            first_kept = low + max(0, begin - start)  # of the shard, in this segment
            end_kept = high - max(0, stop - end)
            begins = np.arange(first_kept, end_kept, order.window)
            ends = np.minimum(begins + order.window, end_kept)
            windows.append(np.stack([np.full_like(begins, shard), begins, ends], axis=1))
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
        return np.concatenate([self.window_ids(k)[rows] for k, rows in self.pieces(begin, end)])

    def pieces(self, begin: int, end: int) -> Iterator[tuple[int, slice]]:
        """Cut the samples begin to end - 1 where windows change: its number, their places in it."""
        while begin < end:
            window = int(np.searchsorted(self.ends, begin, side="right"))
            stop = int(self.ends[window])
            start = stop - int(self.windows[window, 2] - self.windows[window, 1])
            yield window, slice(begin - start, min(end, stop) - start)
            begin = stop
