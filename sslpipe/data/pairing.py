"""[pairs] on one split: whom second views show, and who is never whose negative."""

import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sslpipe.data.columns import Column
from sslpipe.data.index import Split, relabelled
from sslpipe.data.order import ORDER_VERSION, Order
from sslpipe.data.partners import PARTNERS_VERSION, Drawn, Near, Partners
from sslpipe.data.pipeline import Batch, PairRows
from sslpipe.errors import DataError, naming
from sslpipe.recipe.pairs import Pairs

Integers = NDArray[np.int64]

_SAMPLES_LOOKED_AT = 2048  # for warnings
_MOST_MASKED = 0.6  # of a batch's pairs; a column of two values masks half of them
_STEPS_KEPT = 64  # drawn partners: of the batches that are being read and collated


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
    """Who finds a partner, of the samples of some global steps.

    `lonely` ones should have a partner and have none; `outside` are partners outside of the window
    that a stream holds in memory, and `outside_bytes` what reading them takes.
    """

    samples: int = 0
    partners: int = 0
    lonely: int = 0
    outside: int = 0
    outside_bytes: float = 0.0

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
        """Return the batch of a step and of this process's streams with its `pairs`.

        The images of the partners are behind the rows' own. `shown` (B,) are the samples that the
        second views show; None: nobody has a partner.
        """
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
        streams, rows = range(self.order.num_streams), [(0, 0, 0, 0, 0.0)]
        bytes_each = np.array([shard.bytes / shard.samples for shard in self.split.shards])
        for step in steps:
            epoch, ids = self.order.ids(step, streams)
            if (reach or self.pairs.reach) == "split":
                drawn = self.partners.in_split(epoch, ids)
            else:
                drawn = self.partners.of_step(step, streams)
            has = drawn.ids != ids
            outside = has & ~self.partners.in_window(step, streams, drawn.ids)
            shards, _ = self.split.locate(drawn.ids[outside])
            lonely, size = drawn.lonely.sum(), float(bytes_each[shards].sum())
            rows.append((len(ids), has.sum(), lonely, outside.sum(), size))
        samples, partners, alone, out, size = np.sum(rows, axis=0).tolist()
        return Survey(int(samples), int(partners), int(alone), int(out), size)

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
