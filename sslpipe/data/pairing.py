"""[pairs] on one split: whom second views show, and who is never whose negative.

Partners are a pure function of integers, like the order in `order.py`.
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

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sslpipe.data.columns import Column, is_missing
from sslpipe.data.index import Split, relabelled
from sslpipe.data.order import ORDER_VERSION, Order
from sslpipe.data.pipeline import Batch, PairRows
from sslpipe.errors import DataError, naming
from sslpipe.random import hash_integers
from sslpipe.recipe.pretrain import Pairs

PARTNERS_VERSION = 1  # part of a digest with [pairs]: raise it whenever a draw below changes

_SHARE, _PARTNER, _LISTED = 0x5A01, 0x5A02, 0x5A03  # names of independent draws
_TRIES, _ROUNDS = 8, 8  # so many places are drawn before all that fit are listed
_LISTS_KEPT = 1024  # of those that fit, where they are few among many
_LEAST, _MOST = -(2**63) + 1, 2**63 - 1
_SAMPLES_LOOKED_AT = 2048  # for warnings
_MOST_MASKED = 0.6  # of a batch's pairs; a column of two values masks half of them
_STEPS_KEPT = 64  # drawn partners: of the batches that are being read and collated

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Values = NDArray[Any]


# whom a second view shows


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
    and differ in each of `different`. `share` of the samples have one drawn, anew in each epoch,
    within `reach`.

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
        self._windows = lru_cache(maxsize=4)(self._tabulate)

    def of_step(self, step: int, streams: range) -> Drawn:
        """Draw the partners of what the streams serve in a global step, stream-major."""
        return self.of_samples(*self.order.ids(step, streams), streams)

    def of_samples(
        self, epoch: int, ids: Integers, streams: range | None = None, reach: str | None = None
    ) -> Drawn:
        """Draw the partners of samples (n,).

        Args:
            epoch: In which they are served.
            ids: Any samples.
            streams: Those that serve them; None: any.
            reach: "split" or "window"; None: as the constructor's.
        """
        if (reach or self.reach) == "split":
            return self._draw(epoch, ids, self._runs_in_split(ids))
        streams = range(self.order.num_streams) if streams is None else streams
        return self._draw(epoch, ids, self._runs_in_windows(epoch, ids, streams))

    def in_window(self, step: int, streams: range, partners: Integers) -> Flags:
        """Say which of a step's partners (B,) lie in the window of their sample: (B,)."""
        epoch, ids = self.order.ids(step, streams)
        own, theirs = (self._find_windows(epoch, each, streams) for each in (ids, partners))
        inside: Flags = (theirs >= 0) & (theirs == own)
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

    def _runs_in_windows(self, epoch: int, ids: Integers, streams: range) -> _Runs:
        """Find the candidates of samples (n,) in their windows; none outside of these streams."""
        begin, size = np.zeros_like(ids), np.zeros_like(ids)
        members, first = [np.zeros(0, np.int64)], 0
        places, names = self._find_windows(epoch, ids, streams), self._windows(epoch, streams)[2]
        by_place = np.argsort(places, kind="stable")  # samples of a window side by side
        each, starts = np.unique(places[by_place], return_index=True)
        for place, rows in zip(each.tolist(), np.split(by_place, starts[1:]), strict=True):
            if place < 0:
                continue
            window = self._window(epoch, *names[place].tolist())
            at = np.searchsorted(window.ids, ids[rows])
            begin[rows], size[rows] = first + window.begin[at], window.size[at]
            members.append(window.members)
            first += len(window.members)
        return _Runs((np.concatenate(members),), np.zeros_like(ids), begin, size)

    def _find_windows(self, epoch: int, ids: Integers, streams: range) -> Integers:
        """Find each sample's window, (n,), a row of `_tabulate`; -1 where it has none."""
        begins, ends, _ = self._windows(epoch, streams)
        served = ids - np.searchsorted(self.order.without, ids)
        place = np.searchsorted(begins, served, side="right") - 1
        return np.where((place >= 0) & (served < ends[place]), place, -1)

    def _tabulate(self, epoch: int, streams: range) -> tuple[Integers, Integers, Integers]:
        """List streams' windows, ascending: first and last + 1 of all samples served, and names.

        Returns:
            (w,), (w,), and (w, 2) stream and number in it.
        """
        tables = [self.order.epoch(epoch).stream(number).windows for number in streams]
        counts = [len(table) for table in tables]
        numbers = np.concatenate([np.arange(count) for count in counts])
        names = np.stack([np.repeat(streams, counts), numbers], axis=1)
        shards, low, high = np.concatenate(tables).T
        before = np.cumsum(self.order.kept) - self.order.kept
        ascending = np.argsort(before[shards] + low)
        begins, ends = (before[shards] + each for each in (low, high))
        return begins[ascending], ends[ascending], names[ascending]

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


# [pairs] on a split


def plan_pairs(pairs: Pairs | None, split: Split, order: Order) -> "Pairing | None":
    """Open the columns of [pairs]; None without the section.

    Raises: DataError where a column does not exist, or its kind cannot serve.
    """
    if pairs is None:
        return None
    with naming("pairs.label"):
        split = relabelled(split, pairs.label)
    return Pairing(split, order, pairs)


def plan_version(pairs: Pairs | None) -> int:
    """Return what stands for the algorithms of order and partners in a digest."""
    return ORDER_VERSION if pairs is None else ORDER_VERSION * 1000 + PARTNERS_VERSION


class Survey(NamedTuple):
    """How many find a partner, of the samples of some global steps."""

    samples: float
    partners: float
    lonely: float  # should have a partner and have none
    outside: float  # partners outside of the window that a stream holds in memory
    outside_bytes: float  # what reading these takes

    def reads_an_epoch(self, order: Order) -> str:
        """Say what partners outside of the window cost."""
        epochs = order.steps_per_epoch * order.batch_size / max(1, self.samples)
        return (
            f"{round(self.outside * epochs):,} single reads of "
            f"{self.outside_bytes * epochs / 1e9:.3g} GB"
        )


class Pairing:
    """What a recipe's [pairs] says of a split's samples; `split.labels_of` are what the loss sees.

    Raises: DataError where a column does not exist, or its kind cannot serve.
    """

    def __init__(self, split: Split, order: Order, pairs: Pairs) -> None:
        self.split, self.order, self.pairs = split, order, pairs
        column = lru_cache(maxsize=None)(split.column)  # opened, and its files hashed, once
        with naming("pairs.positive"):
            same = [_grouped(column(name)) for name in pairs.positive]
        with naming("pairs.different"):
            different = [column(name) for name in pairs.different]
        near = _near(pairs, column)
        self.partners = None
        if pairs.has_partners:
            self.partners = Partners(
                order, pairs.share, pairs.reach, same=same, near=near, different=different
            )
        with naming("pairs.never_negative"):
            self._masks = [[_grouped(column(name)) for name in names] for names in pairs.masks]
        self.drawn = lru_cache(maxsize=_STEPS_KEPT)(self._drawn)

    def _drawn(self, step: int, streams: range) -> Drawn | None:
        """Return the partners of what the streams serve in a global step; None: nobody has one."""
        return None if self.partners is None else self.partners.of_step(step, streams)

    def describe(self, step: int, streams: range, batch: Batch, shown: Integers | None) -> Batch:
        """Return the batch with its `pairs`; `shown` (B,): the samples of second views, or None."""
        own, count = batch.source_ids.numpy(), len(batch.ids)
        image, lonely = np.arange(count), np.zeros(count, bool)
        if shown is not None and (drawn := self.drawn(step, streams)) is not None:
            lonely = drawn.lonely
        shown = own if shown is None else shown
        differs = own != shown
        image[differs] = count + np.arange(differs.sum())
        ids = np.stack([own, shown], axis=1)  # (B, 2)
        groups = np.empty((count, 2, len(self._masks)), np.int64)
        for number, columns in enumerate(self._masks):
            groups[:, :, number] = joint_codes(columns, ids.ravel()).reshape(-1, 2)
        labels = np.stack([batch.labels.numpy(), batch.labels.numpy()], axis=1)
        labels[differs, 1] = self.split.labels_of(shown[differs])
        parts = (image, ids, labels, groups, lonely)
        return batch._replace(pairs=PairRows(*(torch.from_numpy(part) for part in parts)))

    def survey(self, steps: Sequence[int], reach: str | None = None) -> Survey:
        """Count who finds a partner in some global steps, and where; `reach` as pairs.reach."""
        assert self.partners is not None
        streams, counts = range(self.order.num_streams), np.zeros(len(Survey._fields))
        bytes_each = np.array([shard.bytes / shard.samples for shard in self.split.shards])
        for step in steps:
            epoch, ids = self.order.ids(step, streams)
            drawn = self.partners.of_samples(epoch, ids, streams, reach)
            has = drawn.ids != ids
            outside = has & ~self.partners.in_window(step, streams, drawn.ids)
            size = bytes_each[self.split.locate(drawn.ids[outside])[0]].sum()
            counts += (len(ids), has.sum(), drawn.lonely.sum(), outside.sum(), size)
        return Survey(*counts.tolist())

    def warnings(self, cache: str) -> list[str]:
        """List what a user should know before the first step. cache: run.cache."""
        steps = self.order.steps_per_epoch
        looked = max(1, _SAMPLES_LOOKED_AT // self.order.batch_size)
        some = np.linspace(0, steps - 1, min(steps, looked)).astype(int).tolist()
        warnings = self._mask_warnings(some)
        if self.partners is None:
            return warnings
        found = self.survey(some)
        where = "in the split" if self.pairs.reach == "split" else "in the window that is read"
        if found.lonely > 0.5 * (found.partners + found.lonely):
            warnings.append(
                f"[pairs]: {found.lonely / (found.partners + found.lonely):.0%} of the samples "
                f"looked at have no partner {where}; both of their views show themselves"
            )
        if cache == "none" and found.outside > 0.05 * found.partners:
            warnings.append(
                f"[pairs]: {found.outside / found.partners:.0%} of the partners are outside of the "
                f"window that is read, and cost {found.reads_an_epoch(self.order)} an epoch; build "
                "the shards with --group-by, or set run.cache = 'memory' or 'device', or "
                "pairs.reach = 'window'"
            )
        return warnings

    def _mask_warnings(self, steps: Sequence[int]) -> list[str]:
        """Say which columns mask most of the pairs of different samples in a batch."""
        streams, warnings = range(self.order.num_streams), []
        for names, columns in zip(self.pairs.masks, self._masks, strict=True):
            masked = 0.0
            for step in steps:
                codes = joint_codes(columns, self.order.ids(step, streams)[1])
                same = np.unique(codes[codes >= 0], return_counts=True)[1]
                masked += (same * (same - 1)).sum() / (len(codes) * max(1, len(codes) - 1))
            if masked > _MOST_MASKED * len(steps):
                warnings.append(
                    f"[pairs]: {masked / len(steps):.0%} of the pairs of samples in a batch have "
                    f"the same {' and '.join(names)} and are no negatives of each other; a sample "
                    "without negatives teaches nothing"
                )
        return warnings


def joint_codes(columns: Sequence[Column], ids: ArrayLike) -> Integers:
    """Number the combinations of values: equal where all columns' are. (n,) -> (n,), -1: missing.

    Raises:
        DataError: There may be more than 2^63 of them.
    """
    sizes = [len(column.groups) for column in columns]
    if math.prod(sizes) >= 2**63:
        names = ", ".join(column.name for column in columns)
        raise DataError(f"the columns {names} have more than 2^63 combinations; name fewer")
    joint, missing = np.zeros(np.shape(ids), np.int64), np.zeros(np.shape(ids), bool)
    for column, size in zip(columns, sizes, strict=True):
        codes = column.groups.code_of(ids)
        missing |= codes < 0
        joint = joint * size + codes
    joint[missing] = -1
    return joint


def _grouped(column: Column) -> Column:
    """Return a column that can be grouped. Raises: DataError where it is of floats."""
    assert column.groups is not None  # or an error: floats have none
    return column


def _near(pairs: Pairs, open_column: Callable[[str], Column]) -> Near | None:
    """Return [pairs] time and within. Raises: DataError where the unit does not fit the column."""
    if pairs.time is None:
        return None
    with naming("pairs.time"):
        column, span = open_column(pairs.time), pairs.within_us
    if column.kind == "text":
        raise DataError(f"pairs.time = {pairs.time!r} is a column of texts; give times or numbers")
    if (column.kind == "time") != (span is not None):
        right = "'60 s'" if column.kind == "time" else "60"
        raise DataError(
            f"pairs.within = {pairs.within!r}, but {pairs.time!r} is a column of kind "
            f"{column.kind}; write it as {right}"
        )
    assert pairs.within is not None
    return Near(column, float(pairs.within) if span is None else span)
