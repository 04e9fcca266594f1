"""[pairs] on one split: whom second views show, and who is never whose negative.

Partners are a pure function of integers, like the order in `order.py`.
A partner of a sample is another sample of the split that is not held out, has the same value in all
of some columns, is near in a column of times or numbers, and differs in other columns. A sample
with a missing value in any of these has no partner, and is not one.

The textbook, for one sample:

    fitting = sorted(c for c in split if c is a partner of sample)
    partner = fitting[hash(seed, epoch, sample) % len(fitting)]     # without any: the sample itself

The draw below has this distribution. Members are listed once, sorted so that those with equal
values stand side by side, by time: a sample's candidates are one run of this list, and places in it
are drawn by (seed, epoch, sample, try) until who stands there fits. Only where few do are all of
them listed.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sslpipe.data.columns import Column
from sslpipe.data.index import Split, relabelled
from sslpipe.data.order import Order
from sslpipe.data.pipeline import Batch, PairRows
from sslpipe.errors import DataError, naming
from sslpipe.random import hash_integers
from sslpipe.recipe.pretrain import Pairs

# names of independent draws
_PARTNER = 0x5A02
_LISTED = 0x5A03
_TRIES = 32  # so many places are drawn before all that fit are listed
_LISTS_KEPT = 64  # of those that fit, where they are few among many
_LEAST = -(2**63) + 1
_MOST = 2**63 - 1
_SAMPLES_LOOKED_AT = 2048  # for warnings
_MOST_MASKED = 0.6  # of a batch's pairs; a column of two values masks half of them
_STEPS_KEPT = 64  # drawn partners: of the batches that are being read and collated

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]
Values = NDArray[Any]


class Near(NamedTuple):
    """A column of times or numbers, and how far apart in it partners may be, in its own unit."""

    column: Column
    within: float

    def bounds(self, values: Values) -> tuple[Values, Values]:
        """Return the least and the largest value that is near. (n,) -> (n,), (n,)."""
        if self.column.kind == "float":
            return values - self.within, values + self.within
        reach = int(min(self.within, 2**62))  # no sum leaves 64 bits
        low = np.where(values < _LEAST + reach, _LEAST, values - reach)
        high = np.where(values > _MOST - reach, _MOST, values + reach)
        return low, high


class Partners:
    """Draw the partners of an order's samples: none that the order never serves, by its seed.

    They have the same value in all columns of `same`, are `near` in another (needed without any),
    and differ in each of `different`; one is drawn anew in each epoch.

    Raises:
        DataError: `same` names a column of floats, which are in no groups.
    """

    def __init__(
        self,
        order: Order,
        *,
        same: Sequence[Column],
        near: Near | None = None,
        different: Sequence[Column] = (),
    ) -> None:
        self.order = order
        self.same = tuple(same)
        self.different = tuple(different)
        samples = int(order.starts[-1])

        # members: who may have a partner, sorted by group and time
        ids = np.setdiff1d(np.arange(samples), order.without, assume_unique=True)
        codes = joint_codes(self.same, ids) if same else np.zeros_like(ids)
        times = np.zeros_like(ids) if near is None else near.column.values_of(ids)
        known = codes >= 0
        for column in (*self.different, *([near.column] if near else [])):
            known &= ~column.missing(ids)
        ids = ids[known]
        codes = codes[known]
        times = times[known]
        ranked = np.lexsort((ids, times, codes))
        dtype = np.dtype(np.int32 if samples < 2**31 else np.int64)
        self._members = ids[ranked].astype(dtype)

        # the candidates of each member: `size` of them from `begin` on
        codes = codes[ranked]
        times = times[ranked]
        if near is None:
            begin = np.searchsorted(codes, codes, side="left")
            end = np.searchsorted(codes, codes, side="right")
        else:
            low, high = near.bounds(times)
            begin = _count_before(codes, times, low, with_equal=False)
            end = _count_before(codes, times, high, with_equal=True)
        self._begin = np.zeros(samples, dtype)
        self._begin[self._members] = begin
        self._size = np.zeros(samples, dtype)
        self._size[self._members] = end - begin
        self._fitting = lru_cache(maxsize=_LISTS_KEPT)(self._list_fitting)

    def of_samples(self, epoch: int, ids: Integers) -> Integers:
        """Draw the partners of samples (n,) in an epoch; a sample's own id where it has none."""
        partners = ids.copy()
        rows = np.flatnonzero(self._size[ids] > 1)
        for attempt in range(_TRIES):
            if not len(rows):
                break
            samples = ids[rows]
            words = hash_integers((self.order.seed, epoch, samples, _PARTNER, attempt))
            places = (words % self._size[samples].astype(np.uint64)).astype(np.int64)
            drawn = self._members[self._begin[samples] + places].astype(np.int64)
            fit = (drawn != samples) & self._differ(self._values_that_differ(samples), drawn)
            partners[rows[fit]] = drawn[fit]
            rows = rows[~fit]

        # few fit, or none: list them
        for row in rows.tolist():
            sample = ids[row : row + 1]
            own = tuple(value.item() for value in self._values_that_differ(sample))
            fitting = self._fitting(int(self._begin[sample[0]]), int(self._size[sample[0]]), own)
            fitting = fitting[fitting != sample]
            if len(fitting):
                word = int(hash_integers((self.order.seed, epoch, sample[0], _LISTED)))
                partners[row] = fitting[word % len(fitting)]
        return partners

    def _values_that_differ(self, ids: Integers) -> list[Values]:
        return [column.values_of(ids) for column in self.different]

    def _differ(self, values: Sequence[Any], candidates: Integers) -> Flags:
        """Return which candidates (n,) differ from samples with these values, each (n,) or one."""
        differ = np.ones(len(candidates), bool)
        for value, column in zip(values, self._values_that_differ(candidates), strict=True):
            differ &= column != value
        return differ

    def _list_fitting(self, begin: int, size: int, values: tuple[float, ...]) -> Integers:
        """List who among a run of members differs from a sample with these values."""
        candidates = self._members[begin : begin + size].astype(np.int64)
        return candidates[self._differ(values, candidates)]


def _count_before(codes: Integers, values: Values, bounds: Values, *, with_equal: bool) -> Integers:
    """Count, for each member, the members before its bound: (n,) each -> (n,).

    codes, values: Of members, sorted by both. A bound is a value in the member's own group.
    """
    count = len(codes)
    bound_last = np.repeat([0, 1] if with_equal else [1, 0], count)
    ranked = np.lexsort((bound_last, np.append(values, bounds), np.append(codes, codes)))
    is_member = ranked < count
    before = np.empty(count, np.int64)
    before[ranked[~is_member] - count] = np.cumsum(is_member)[~is_member]
    return before


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


class Survey(NamedTuple):
    """How many find a partner, of the samples of some global steps."""

    samples: int
    partners: int
    outside: float  # partners outside of the window that a stream holds in memory, about
    outside_bytes: float  # what reading these takes

    def reads_an_epoch(self, order: Order) -> str:
        """Return what partners outside of the window cost."""
        epochs = order.steps_per_epoch * order.batch_size / max(1, self.samples)
        return (
            f"about {round(self.outside * epochs):,} single reads of "
            f"{self.outside_bytes * epochs / 1e9:.3g} GB"
        )


class Pairing:
    """What a recipe's [pairs] says of a split's samples; `split.labels_of` are what the loss sees.

    Raises: DataError where a column does not exist, or its kind cannot serve.
    """

    def __init__(self, split: Split, order: Order, pairs: Pairs) -> None:
        self.split = split
        self.order = order
        self.pairs = pairs
        with naming("pairs.positive"):
            same = [_grouped(split.column(name)) for name in pairs.positive]
        with naming("pairs.different"):
            different = [split.column(name) for name in pairs.different]
        near = _near(pairs, split)
        self.partners = None
        if pairs.has_partners:
            self.partners = Partners(order, same=same, near=near, different=different)
        with naming("pairs.never_negative"):
            self._masks = [
                [_grouped(split.column(name)) for name in names] for names in pairs.masks
            ]
        self.partners_of_step = lru_cache(maxsize=_STEPS_KEPT)(self._partners_of_step)

    def _partners_of_step(self, step: int, streams: range) -> Integers | None:
        """Return the partners of what the streams serve in a global step; None: none has one."""
        if self.partners is None:
            return None
        epoch, ids = self.order.ids(step, streams)
        return self.partners.of_samples(epoch, ids)

    def describe(self, step: int, streams: range, batch: Batch, shown: Integers | None) -> Batch:
        """Return the batch with its `pairs`; `shown` (B,): the samples of second views, or None."""
        own = batch.source_ids.numpy()
        count = len(batch.ids)
        image = np.arange(count)
        lonely = np.zeros(count, bool)
        if shown is not None and (partners := self.partners_of_step(step, streams)) is not None:
            lonely = partners == batch.ids.numpy()
        shown = own if shown is None else shown
        differs = own != shown
        image[differs] = count + np.arange(differs.sum())
        ids = np.stack([own, shown], axis=1)  # (B, 2)
        groups = np.empty((count, 2, len(self._masks)), np.int64)
        for number, columns in enumerate(self._masks):
            groups[:, :, number] = joint_codes(columns, ids.ravel()).reshape(-1, 2)
        labels = np.stack([batch.labels.numpy(), batch.labels.numpy()], axis=1)
        labels[differs, 1] = self.split.labels_of(shown[differs])
        rows = PairRows(
            image=torch.from_numpy(image),
            ids=torch.from_numpy(ids),
            labels=torch.from_numpy(labels),
            groups=torch.from_numpy(groups),
            lonely=torch.from_numpy(lonely),
        )
        return batch._replace(pairs=rows)

    def survey(self, steps: Sequence[int]) -> Survey:
        """Count who finds a partner in some global steps, and what reading them takes.

        Windows are cut anew in each epoch: two samples of a shard are in one with the probability
        1 - distance / window.
        """
        assert self.partners is not None
        streams = range(self.order.num_streams)
        bytes_each = np.array([shard.bytes / shard.samples for shard in self.split.shards])
        samples = partners = 0
        outside = outside_bytes = 0.0
        for step in steps:
            epoch, ids = self.order.ids(step, streams)
            drawn = self.partners.of_samples(epoch, ids)
            has = drawn != ids
            own = self.split.locate(ids[has])[0]
            theirs = self.split.locate(drawn[has])[0]
            apart = np.minimum(1, np.abs(ids[has] - drawn[has]) / self.order.window)
            apart[own != theirs] = 1
            samples += len(ids)
            partners += int(has.sum())
            outside += float(apart.sum())
            outside_bytes += float((apart * bytes_each[theirs]).sum())
        return Survey(samples, partners, outside, outside_bytes)

    def warnings(self, cache: str) -> list[str]:
        """List what a user should know before the first step. cache: run.cache."""
        steps = self.order.steps_per_epoch
        looked = max(1, _SAMPLES_LOOKED_AT // self.order.batch_size)
        some = np.linspace(0, steps - 1, min(steps, looked)).astype(int).tolist()
        warnings = self._mask_warnings(some)
        if self.partners is None:
            return warnings
        found = self.survey(some)
        lonely = found.samples - found.partners
        if lonely > 0.5 * found.samples:
            warnings.append(
                f"[pairs]: {lonely / found.samples:.0%} of the samples looked at have no partner; "
                "both of their views show themselves"
            )
        if cache == "none" and found.outside > 0.05 * found.partners:
            warnings.append(
                f"[pairs]: {found.outside / found.partners:.0%} of the partners are outside of the "
                f"window that is read, and cost {found.reads_an_epoch(self.order)} an epoch; build "
                "the shards with --group-by, or set run.cache = 'memory' or 'device'"
            )
        return warnings

    def _mask_warnings(self, steps: Sequence[int]) -> list[str]:
        """Return which columns mask most of the pairs of different samples in a batch."""
        streams = range(self.order.num_streams)
        warnings = []
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
    joint = np.zeros(np.shape(ids), np.int64)
    missing = np.zeros(np.shape(ids), bool)
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


def _near(pairs: Pairs, split: Split) -> Near | None:
    """Return [pairs] time and within. Raises: DataError where the unit does not fit the column."""
    if pairs.time is None:
        return None
    with naming("pairs.time"):
        column = split.column(pairs.time)
        span = pairs.within_us
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
