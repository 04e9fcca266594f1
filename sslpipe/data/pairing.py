"""[pairs] of a recipe on one split: its columns are opened, and it is judged before the first step.

`partners` draws what it says.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from sslpipe.data.columns import Column
from sslpipe.data.index import Split, relabelled
from sslpipe.data.order import Order
from sslpipe.data.partners import Near, Pairing, Partners, joint_codes
from sslpipe.errors import DataError, naming
from sslpipe.recipe.pretrain import Pairs

_SAMPLES_LOOKED_AT = 2048  # for warnings
_MOST_MASKED = 0.6  # of a batch's pairs; a column of two values masks half of them


def plan_pairs(pairs: Pairs | None, split: Split, order: Order) -> Pairing | None:
    """Open the columns of [pairs]; None without the section.

    Raises: DataError where a column does not exist, or its kind cannot serve.
    """
    if pairs is None:
        return None
    with naming("pairs.label"):
        split = relabelled(split, pairs.label)
    with naming("pairs.positive"):
        same = [_grouped(split.column(name)) for name in pairs.positive]
    with naming("pairs.different"):
        different = [split.column(name) for name in pairs.different]
    near = _near(pairs, split)
    partners = None
    if pairs.has_partners:
        partners = Partners(order, same=same, near=near, different=different)
    with naming("pairs.never_negative"):
        masks = [[_grouped(split.column(name)) for name in names] for names in pairs.masks]
    return Pairing(split, order, partners=partners, masks=masks)


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


def survey(pairing: Pairing, steps: Sequence[int]) -> Survey:
    """Count who finds a partner in some global steps, and what reading them takes.

    Windows are cut anew in each epoch: two samples of a shard are in one with the probability
    1 - distance / window.
    """
    assert pairing.partners is not None
    streams = range(pairing.order.num_streams)
    bytes_each = np.array([shard.bytes / shard.samples for shard in pairing.split.shards])
    samples = partners = 0
    outside = outside_bytes = 0.0
    for step in steps:
        epoch, ids = pairing.order.ids(step, streams)
        partner_ids = pairing.partners.of_samples(epoch, ids)
        has = partner_ids != ids
        shards = pairing.split.locate(ids[has])[0]
        partner_shards = pairing.split.locate(partner_ids[has])[0]
        apart = np.minimum(1, np.abs(ids[has] - partner_ids[has]) / pairing.order.window)
        apart[shards != partner_shards] = 1
        samples += len(ids)
        partners += int(has.sum())
        outside += float(apart.sum())
        outside_bytes += float((apart * bytes_each[partner_shards]).sum())
    return Survey(samples, partners, outside, outside_bytes)


def pairing_warnings(pairing: Pairing, cache: str) -> list[str]:
    """List what a user should know before the first step. cache: run.cache."""
    steps = pairing.order.steps_per_epoch
    looked = max(1, _SAMPLES_LOOKED_AT // pairing.order.batch_size)
    some = np.linspace(0, steps - 1, min(steps, looked)).astype(int).tolist()
    warnings = _mask_warnings(pairing, some)
    if pairing.partners is None:
        return warnings
    counts = survey(pairing, some)
    lonely = counts.samples - counts.partners
    if lonely > 0.5 * counts.samples:
        warnings.append(
            f"[pairs]: {lonely / counts.samples:.0%} of the samples looked at have no partner; "
            "both of their views show themselves"
        )
    if cache == "none" and counts.outside > 0.05 * counts.partners:
        warnings.append(
            f"[pairs]: {counts.outside / counts.partners:.0%} of the partners are outside of the "
            f"window that is read, and cost {counts.reads_an_epoch(pairing.order)} an epoch; build "
            "the shards with --group-by, or set run.cache = 'memory' or 'device'"
        )
    return warnings


def _mask_warnings(pairing: Pairing, steps: Sequence[int]) -> list[str]:
    """Return which columns mask most of the pairs of different samples in a batch."""
    streams = range(pairing.order.num_streams)
    warnings = []
    for columns in pairing.masks:
        masked = 0.0
        for step in steps:
            codes = joint_codes(columns, pairing.order.ids(step, streams)[1])
            same = np.unique(codes[codes >= 0], return_counts=True)[1]
            masked += (same * (same - 1)).sum() / (len(codes) * max(1, len(codes) - 1))
        names = [column.name for column in columns]
        if masked > _MOST_MASKED * len(steps):
            warnings.append(
                f"[pairs]: {masked / len(steps):.0%} of the pairs of samples in a batch have "
                f"the same {' and '.join(names)} and are no negatives of each other; a sample "
                "without negatives teaches nothing"
            )
    return warnings
