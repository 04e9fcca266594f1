"""Miner: what all miners share, and their two ways of being called."""

from abc import abstractmethod
from collections.abc import Callable
from typing import cast

import torch
from torch import Tensor

from sslpipe.metric_learning.losses.base import Configured
from sslpipe.metric_learning.losses.pairwise import (
    LabelledRows,
    Pairs,
    compare,
    labelled_rows,
    unit,
)
from sslpipe.random import uniform

Loss = Callable[[Pairs], Tensor]


class Miner(Configured):
    """Select pairs or triplets of a batch; never add one.

    A subclass defines `select`. `RandomMiner` is for those that draw.
    """

    def forward(
        self, rows: LabelledRows | Tensor, pairs: Pairs | Tensor, *, loss: Loss | None = None
    ) -> Pairs:
        """Return the pairs that are left, as boolean masks `.positive` and `.negative` (n, M).

        Args:
            rows: Embeddings (n, D), compared as they are: bring them to length 1 first where the
                loss does. A loss gives what it has prepared instead.
            pairs: Labels (n,) int64, < 0 for none; a loss gives all pairs instead.
            loss: What the loss would be on some pairs, for the one miner that asks.

        In one process M = n. Miners of triplets fill `.triplets` too; see `Pairs`. Without
        gradient.
        Collective: all ranks call it.
        """
        with torch.no_grad():
            if not isinstance(rows, LabelledRows):
                rows, pairs = compare(*labelled_rows(rows, cast(Tensor, pairs)), None, None)
            pairs = cast(Pairs, pairs)
            return self.select(rows, pairs, loss=loss) if len(rows.columns) else pairs

    @abstractmethod
    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        """Return those of `pairs` that a loss shall see; called without gradient."""


class RandomMiner(Miner):
    """Draw from (seed, call, row of the global batch): the same on any number of processes.

    The number of the call is a buffer, so a resumed run draws on.

    Args:
        seed: Of the draws.
    """

    calls: Tensor
    seed: int

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        self.seed = seed
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def uniform_rows(self, batch: LabelledRows, lanes: int) -> Tensor:
        """Return (n, lanes) float64 in [0, 1), named by global rows; the next call draws others."""
        rows = range(batch.first, batch.first + len(batch.labels))
        numbers = torch.from_numpy(uniform(self.seed, int(self.calls), list(rows), 0, lanes))
        self.calls += 1
        return numbers.to(batch.anchors.device)


class CurriculumMiner(Miner):
    """Change to another miner after some steps: easy first, harder later.

    Args:
        first: A name of MINERS, with its defaults.
        then: The one from step `steps` on.
        steps: Calls of the first.
    """

    calls: Tensor

    def __init__(self, first: str = "all", then: str = "batch_hard", steps: int = 1000) -> None:
        from sslpipe.metric_learning.miners import MINERS  # the table holds this class too

        super().__init__()
        self.steps = steps
        self.first, self.then = MINERS[first](), MINERS[then]()
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))

    def select(self, batch: LabelledRows, pairs: Pairs, *, loss: Loss | None = None) -> Pairs:
        """Ask the miner whose turn it is."""
        miner = self.first if int(self.calls) < self.steps else self.then
        self.calls += 1
        return miner.select(batch, pairs, loss=loss)


def only_at(columns: Tensor, mask: Tensor) -> Tensor:
    """Keep the mask's entries (n, M) at one column (n,) of each row alone."""
    return torch.zeros_like(mask).scatter_(1, columns[:, None], True) & mask


def unit_rows(batch: LabelledRows) -> LabelledRows:
    """Bring anchors and columns to length 1."""
    return batch._replace(anchors=unit(batch.anchors), columns=unit(batch.columns))
