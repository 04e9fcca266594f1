"""Whose image a second view shows: a pure function of integers, like the order in `order.py`.

A partner of a sample is another sample of the split that is not held out, has the same value in all
of some columns, is near in a column of times or numbers, and differs in other columns. A sample
with a missing value in any of these has no partner, and is nobody's.

The textbook, for one sample; the candidates are those of the whole split (reach = "split"), or of
the sample's window in the epoch's plan, which is a pure function as well (reach = "window"):

    fitting = sorted(c for c in candidates if c is a partner of sample)
    partner = fitting[hash(seed, epoch, sample) % len(fitting)]     # without any: the sample itself

The draw below has this distribution without listing them. Samples that share a value stand side by
side in a column's groups; of the columns' runs the shortest is taken, and places in it are drawn by
(seed, epoch, sample, try) until who stands there fits. Only where few do are all of them listed.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.columns import Column, is_missing
from sslpipe.data.order import Order
from sslpipe.errors import DataError
from sslpipe.random import hash_integers

PARTNERS_VERSION = 1  # part of a digest with [pairs]: raise it whenever a draw below changes

_SHARE, _PARTNER, _LISTED = 0x5A01, 0x5A02, 0x5A03  # names of independent draws
_TRIES, _ROUNDS = 8, 8  # so many places are drawn before all that fit are listed
_LISTS_KEPT = 1024  # of those that fit, where they are few among many
_LEAST, _MOST = -(2**63) + 1, 2**63 - 1

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Values = NDArray[Any]


class Drawn(NamedTuple):
    """The partners of n samples, (n,) int64 ids; a sample's own where both views show it.

    `lonely` (n,) bool are those that should have a partner and have none.
    """

    ids: Integers
    lonely: Flags


class Near(NamedTuple):
    """A column of times or numbers, and how far apart in it partners may be, in its own unit."""

    column: Column
    within: float

    def bounds(self, ids: Integers) -> tuple[Values, Values]:
        """Return the least and the largest value that is near. (n,) -> (n,), (n,)."""
        values = self.column.values_of(ids)
        if self.column.kind == "float":
            return values - self.within, values + self.within
        reach = int(min(self.within, 2**62))  # no sum leaves 64 bits
        low = np.where(values < _LEAST + reach, _LEAST, values - reach)
        high = np.where(values > _MOST - reach, _MOST, values + reach)
        return low, high


class _Runs(NamedTuple):
    """Where the candidates of n samples are: `size` ids from `begin` on, of arrays[base]."""

    arrays: tuple[NDArray[np.integer[Any]], ...]
    base: Integers
    begin: Integers
    size: Integers

    def pick(self, rows: Integers, offsets: Integers) -> Integers:
        """Read candidates of some rows (n,) at offsets (n, k) in their runs: (n, k)."""
        picked = np.empty(offsets.shape, np.int64)
        for number, array in enumerate(self.arrays):
            here = self.base[rows] == number
            picked[here] = array[self.begin[rows[here], None] + offsets[here]]
        return picked


class Partners:
    """Draw the partners of an order's samples: none that the order never serves, by its seed.

    They have the same value in all columns of `same`, are `near` in another (needed without any),
    and differ in each of `different`. `share` of the samples have one drawn, anew in each epoch.
    With reach "split" it is among all samples, with "window" among those that the order shuffles
    together, which a stream holds in memory.

    Raises: DataError where a column's kind cannot serve.
    """

    def __init__(
        self,
        order: Order,
        share: float = 1.0,
        reach: str = "split",
        *,
        same: Sequence[Column],
        near: Near | None = None,
        different: Sequence[Column] = (),
    ) -> None:
        self.order, self.share, self.reach = order, share, reach
        self.same, self.near, self.different = tuple(same), near, tuple(different)
        self.bases = [column.groups for column in same]
        if near is not None and near.column.kind != "float":
            self.bases.append(near.column.groups)
        if reach == "split" and not self.bases:
            raise DataError(
                "pairs.time is a column of floats, which are in no groups: give pairs.positive "
                'as well, or pairs.reach = "window"'
            )
        self._listed = lru_cache(maxsize=_LISTS_KEPT)(
            lambda own, base, *span: self._list(own, self.bases[base].ids, *span)
        )
        self._window = lru_cache(maxsize=2 * order.num_streams + 2)(self._sort_window)

    def of_step(self, step: int, streams: range) -> Drawn:
        """Draw the partners of what the streams serve in a global step, stream-major."""
        epoch, ids = self.order.ids(step, streams)
        if self.reach == "window":
            return self._draw(
                epoch, ids, self._runs_in_windows(ids, self._windows_of(step, streams))
            )
        return self.in_split(epoch, ids)

    def of_samples(self, epoch: int, ids: Integers) -> Drawn:
        """Draw the partners of any samples, (n,), as `of_step` does wherever an epoch has them."""
        if self.reach == "split":
            return self.in_split(epoch, ids)
        parts = [slice(row, row + 1) for row in range(len(ids))]
        keys = zip(parts, self._find_windows(epoch, ids), strict=True)
        return self._draw(epoch, ids, self._runs_in_windows(ids, list(keys)))

    def in_split(self, epoch: int, ids: Integers) -> Drawn:
        """Draw the partners of any samples, (n,), among all of the split."""
        return self._draw(epoch, ids, self._runs_in_split(ids))

    def in_window(self, step: int, streams: range, partners: Integers) -> Flags:
        """Say which of a step's partners (B,) lie in the window of their sample: (B,)."""
        inside = np.zeros(len(partners), bool)
        for rows, key in self._windows_of(step, streams):
            inside[rows] = np.isin(partners[rows], self._window(*key).ids)
        return inside

    # the draw

    def _draw(self, epoch: int, ids: Integers, runs: _Runs) -> Drawn:
        seed, partners = self.order.seed, ids.copy()
        words = hash_integers(seed, epoch, ids, _SHARE)
        wanted = (words >> np.uint64(11)) * 2.0**-53 < self.share
        rows = np.flatnonzero(wanted & (runs.size > 1) & ~self._knows_nothing(ids))

        # places in the run, until who stands there fits
        for first in range(0, _TRIES * _ROUNDS, _TRIES):
            if not len(rows):
                break
            samples = ids[rows, None]
            words = hash_integers(
                seed, epoch, samples, _PARTNER, np.arange(first, first + _TRIES)
            )  # (n, tries)
            offsets = (words % runs.size[rows, None].astype(np.uint64)).astype(np.int64)
            drawn = runs.pick(rows, offsets)
            own = [values.repeat(_TRIES) for values in self._own(ids[rows])]
            fit = self._fit(own, drawn.ravel()).reshape(drawn.shape) & (drawn != samples)
            found, at = fit.any(1), fit.argmax(1)
            partners[rows[found]] = drawn[found, at[found]]
            rows = rows[~found]

        # few fit, or nobody: list them
        for row in rows.tolist():
            fitting = self._list_fitting(ids[row : row + 1], runs, row)
            if len(fitting):
                word = int(hash_integers(seed, epoch, ids[row], _LISTED))
                partners[row] = fitting[word % len(fitting)]
        return Drawn(partners, wanted & (partners == ids))

    def _list_fitting(self, sample: Integers, runs: _Runs, row: int) -> Integers:
        """List the partners of one sample, (1,) -> (n,)."""
        own = tuple(values.item() for values in self._own(sample))
        base, begin, size = (int(each[row]) for each in (runs.base, runs.begin, runs.size))
        if self.reach == "window" or self.near is not None:  # a list for each sample
            fitting = self._list(own, runs.arrays[base], begin, size)
        else:  # one for all samples that have the same values
            fitting = self._listed(own, base, begin, size)
        others: Integers = fitting[fitting != sample]
        return others

    def _list(
        self, own: tuple[float, ...], ids: NDArray[np.integer[Any]], begin: int, size: int
    ) -> Integers:
        candidates = ids[begin : begin + size].astype(np.int64)
        return candidates[self._fit(list(map(np.array, own)), candidates)]

    # who fits

    def _own(self, ids: Integers) -> list[Values]:
        """Look up all that decides who fits these samples; each (n,)."""
        values = [column.values_of(ids) for column in (*self.same, *self.different)]
        return [*values, *self.near.bounds(ids)] if self.near else values

    def _knows_nothing(self, ids: Integers) -> Flags:
        """Say which samples have a missing value. (n,) -> (n,)."""
        columns = [*self.same, *self.different, *([self.near.column] if self.near else [])]
        missing: Flags = np.any([column.missing(ids) for column in columns], axis=0)
        return missing

    def _fit(self, own: Sequence[Values], candidates: Integers) -> Flags:
        """Say which candidates (n,) fit samples with these values, each (n,) or ()."""
        left_out, own = self.order.without, list(own)
        first = np.searchsorted(left_out, candidates)
        fit: Flags = first == np.searchsorted(left_out, candidates, side="right")
        for column in self.same:  # the sample's is not missing
            fit &= column.values_of(candidates) == own.pop(0)
        for column in self.different:
            theirs = column.values_of(candidates)
            fit &= (theirs != own.pop(0)) & ~is_missing(column.kind, theirs)
        if self.near is not None:
            theirs, (low, high) = self.near.column.values_of(candidates), own
            fit &= (theirs >= low) & (theirs <= high)
            fit &= ~is_missing(self.near.column.kind, theirs)
        return fit

    # where candidates are

    def _runs_in_split(self, ids: Integers) -> _Runs:
        """Find the shortest run of candidates of each sample (n,) in the columns' groups."""
        spans = [column.groups.spans(column.groups.code_of(ids)) for column in self.same]
        if self.near is not None and self.near.column.kind != "float":
            groups = self.near.column.groups
            low, high = self.near.bounds(ids)
            first = np.searchsorted(groups.values, low, side="left")
            last = np.searchsorted(groups.values, high, side="right")
            begin, end = groups.begin_of(first), groups.begin_of(last)
            spans.append((begin, end - begin))
        sizes = np.stack([size for _, size in spans])  # (bases, n)
        base = sizes.argmin(0)
        columns = np.arange(len(ids))
        begin = np.stack([begin for begin, _ in spans])[base, columns]
        arrays = tuple(groups.ids for groups in self.bases)
        return _Runs(arrays, base, begin, sizes[base, columns])

    def _runs_in_windows(
        self, ids: Integers, windows: Sequence[tuple[slice, tuple[int, int, int] | None]]
    ) -> _Runs:
        """Find the candidates of samples (n,) in their windows, as `_windows_of` has these."""
        begin, size = np.zeros_like(ids), np.zeros_like(ids)
        members, first = [np.zeros(0, np.int64)], 0
        for rows, key in windows:
            if key is None:  # not in this epoch
                continue
            window = self._window(*key)
            at = np.searchsorted(window.ids, ids[rows])
            begin[rows], size[rows] = first + window.begin[at], window.size[at]
            members.append(window.members)
            first += len(window.members)
        return _Runs((np.concatenate(members),), np.zeros_like(ids), begin, size)

    def _find_windows(self, epoch: int, ids: Integers) -> list[tuple[int, int, int] | None]:
        """Find the window of each sample (n,): epoch, stream, number; None where it has none."""
        order, found = self.order, list[tuple[int, int, int] | None]()
        shards = np.searchsorted(order.starts, ids, side="right") - 1
        first = order.starts[shards]
        excluded = np.searchsorted(order.without, ids) - np.searchsorted(order.without, first)
        tables = [order.epoch(epoch).stream(k).windows for k in range(order.num_streams)]
        keys = [
            (epoch, stream, k) for stream, table in enumerate(tables) for k in range(len(table))
        ]
        shard_of, low, high = np.concatenate(tables).T
        for shard, kept in zip(shards, ids - first - excluded, strict=True):
            here = np.flatnonzero((shard_of == shard) & (low <= kept) & (kept < high))
            found.append(keys[here[0]] if len(here) else None)
        return found

    def _windows_of(self, step: int, streams: range) -> list[tuple[slice, tuple[int, int, int]]]:
        """Cut a step's rows where windows change: rows, and the window's epoch, stream, number."""
        order, parts = self.order, []
        epoch, within = divmod(step, order.steps_per_epoch)
        share, plan = order.batch_size // order.num_streams, order.epoch(epoch)
        for place, number in enumerate(streams):
            row, begin = place * share, within * share
            for window, own in plan.stream(number).pieces(begin, begin + share):
                rows = slice(row, row + own.stop - own.start)
                parts.append((rows, (epoch, number, window)))
                row = rows.stop
        return parts

    def _sort_window(self, epoch: int, stream: int, window: int) -> "_Window":
        """Sort a window's samples so that those that share all of `same` stand side by side."""
        ids = np.sort(self.order.epoch(epoch).stream(stream).window_ids(window))
        values = [column.values_of(ids) for column in self.same]
        by_value = np.lexsort([ids, *values])
        differs = np.zeros(len(ids), bool)
        for column in values:
            differs[1:] |= column[by_value][1:] != column[by_value][:-1]
        run = np.cumsum(differs)  # of each place in that order
        first = np.searchsorted(run, run, side="left")
        count = np.searchsorted(run, run, side="right") - first
        begin, size = np.empty_like(ids), np.empty_like(ids)
        begin[by_value], size[by_value] = first, count
        return _Window(ids, ids[by_value], begin, size)


class _Window(NamedTuple):
    """The samples of a window, ascending (w,), and where each one's candidates are in `members`."""

    ids: Integers
    members: Integers
    begin: Integers
    size: Integers
