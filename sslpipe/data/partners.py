"""Partners: whom second views show in a step, and who is never whose negative.

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
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sslpipe.data.columns import Column
from sslpipe.data.index import Split
from sslpipe.data.order import Order
from sslpipe.data.pipeline import Batch, PairRows
from sslpipe.errors import DataError
from sslpipe.random import hash_integers

# names of independent draws
_PARTNER = 0x5A02
_LISTED = 0x5A03
_TRIES = 32  # so many places are drawn before all that fit are listed
_LISTS_KEPT = 64  # of those that fit, where they are few among many
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
        is_float = self.column.kind == "float"
        reach = self.within if is_float else int(min(self.within, 2**62))
        return values - reach, values + reach


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
            others = self._members[self._begin[samples] + places].astype(np.int64)
            fit = (others != samples) & self._differ(self._values_that_differ(samples), others)
            partners[rows[fit]] = others[fit]
            rows = rows[~fit]

        # few fit, or none: list them
        for row in rows.tolist():
            sample = ids[row : row + 1]
            values = tuple(value.item() for value in self._values_that_differ(sample))
            fitting = self._fitting(int(self._begin[sample[0]]), int(self._size[sample[0]]), values)
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


@dataclass(eq=False)
class Pairing:
    """What [pairs] says of a split's samples: partners of second views, and masked negatives."""

    split: Split  # its `labels_of` are what the loss sees
    order: Order
    partners: Partners | None  # draws the samples of second views; None: both show one
    # columns whose values count together: samples that share all of any are no negatives of
    # each other
    masks: Sequence[Sequence[Column]]

    def __post_init__(self) -> None:
        self.partners_of_step = lru_cache(maxsize=_STEPS_KEPT)(self._partners_of_step)

    def _partners_of_step(self, step: int, streams: range) -> Integers | None:
        """Return the partners of what the streams serve in a global step; None: none has one."""
        if self.partners is None:
            return None
        epoch, ids = self.order.ids(step, streams)
        return self.partners.of_samples(epoch, ids)

    def describe(self, step: int, streams: range, batch: Batch, shown: Integers | None) -> Batch:
        """Return the batch with its `pairs`; `shown` (B,): the samples of second views, or None."""
        sample_ids = batch.source_ids.numpy()
        count = len(batch.ids)
        image = np.arange(count)
        lonely = np.zeros(count, bool)
        if shown is not None and (partners := self.partners_of_step(step, streams)) is not None:
            lonely = partners == batch.ids.numpy()
        shown = sample_ids if shown is None else shown
        differs = sample_ids != shown
        image[differs] = count + np.arange(differs.sum())
        ids = np.stack([sample_ids, shown], axis=1)  # (B, 2)
        groups = np.empty((count, 2, len(self.masks)), np.int64)
        for number, columns in enumerate(self.masks):
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
