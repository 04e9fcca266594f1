"""Losses that are rare enough to come from pytorch-metric-learning (the extra `pml`)."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows, gather_with_grad
from sslpipe.errors import UserError, did_you_mean, install
from sslpipe.metric_learning.losses.pairwise import LabelCounts, References, unit
from sslpipe.registry.part import Part

DELEGATED = (
    *("DynamicSoftMarginLoss", "FastAPLoss", "HistogramLoss", "PNPLoss", "RankedListLoss"),
    *("SignalToNoiseRatioContrastiveLoss", "SmoothAPLoss", "ThresholdConsistentMarginLoss"),
)
REFUSED = {
    "swap": "it reads another row's distance when there are references",
    "efficient": "its gradient over several processes is not that of one",
}


class DelegatedLoss(Part):
    """Compute a loss of pytorch-metric-learning, on the global batch, on all ranks alike.

    Rows are brought to length 1 first and are float32, also under autocast. Rows with a label < 0
    are skipped. SmoothAPLoss wants classes of equal size; DynamicSoftMarginLoss keeps a histogram
    outside its state. Each rank computes the whole batch's loss, so that DDP's mean of the
    gradients is one process's. Collective: all ranks call it.

    Raises:
        UserError: the name is not delegated, an argument is refused, or the extra `pml` is missing.
    """

    name: str
    """One of DELEGATED."""
    arguments: Mapping[str, Any] | None = None
    """Its own."""

    def setup(self) -> None:
        super().setup()
        arguments = dict(self.arguments or {})
        if self.name not in DELEGATED:
            raise UserError(
                f"name = {self.name!r} is not delegated{did_you_mean(self.name, DELEGATED)}; "
                f"delegated: {', '.join(DELEGATED)}; the usual ones are entries of METRIC_LOSSES"
            )
        for key in REFUSED.keys() & arguments.keys():
            raise UserError(f"arguments.{key} is refused: {REFUSED[key]}")
        try:
            from pytorch_metric_learning import losses
        except ImportError as error:
            raise UserError(
                f"{self.name} comes from pytorch-metric-learning: {install('pml')}"
            ) from error
        self.loss = getattr(losses, self.name)(**arguments)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        ids: Tensor | None = None,
        ref: References | None = None,
        miner: nn.Module | None = None,
        counts: LabelCounts | None = None,
    ) -> Tensor:
        """Return the loss of the global batch; it takes neither references nor a miner."""
        if miner is not None or ref is not None:
            raise UserError(f"{self.name} takes no miner and no queue: leave [miner], [queue] out")
        with torch.autocast(embeddings.device.type, enabled=False):
            x = gather_with_grad(unit(embeddings.float()))
            labels = all_gather_rows(labels)
            known = labels >= 0
            with torch.random.fork_rng(devices=[], enabled=True):
                torch.manual_seed(0)  # some draw: all ranks must draw the same
                loss: Tensor = self.loss(x[known], labels[known])
                return loss
