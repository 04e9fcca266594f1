"""The miner that changes over time."""

import torch
from torch import Tensor

from sslpipe.metric_learning.losses.pairwise import LabelledRows, Pairs
from sslpipe.metric_learning.miners.base import Loss, Miner


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
