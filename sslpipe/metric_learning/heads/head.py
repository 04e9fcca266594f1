"""Head: what all heads share."""

from abc import abstractmethod
from typing import Annotated

import torch
from pydantic import Field
from torch import Tensor, nn

from sslpipe.distributed import global_mean
from sslpipe.metric_learning.losses.pairwise import (
    LabelCounts,
    LabelledPart,
    References,
    labelled_rows,
)
from sslpipe.registry.part import Derived, Dim


class Head(LabelledPart):
    """Compare embeddings with weights of their classes.

    Shape:
        embeddings (B, D), labels (B,) int64 in 0..C-1, < 0 for none: such rows are skipped -> ().
        Products are float32 at least, also under autocast.
    """

    num_classes: Annotated[int, Field(ge=2), Derived()]
    """C."""
    dim: Dim
    """D."""

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
        """Return the loss of the rows of all ranks; ids, ref and miner mean nothing to a head."""
        # float32 at least: half precision rounds a cosine by 0.002, times 64 in a logit
        x, labels = labelled_rows(embeddings, labels, num_classes=self.num_classes, dim=self.dim)
        all_known = counts is not None and not counts.unlabelled
        if not all_known and not bool((known := labels >= 0).all()):
            x = x[known]
            labels = labels[known]
        with torch.autocast(x.device.type, enabled=False):
            return self.compute_loss(x, labels)

    @abstractmethod
    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return the loss of x (B, D) float32 or wider and labels (B,); autocast is off."""


def row_mean(values: Tensor) -> Tensor:
    """Average (n,) of this rank over the rows of all ranks -> (). Collective."""
    return global_mean(values.sum(), values.new_full((), len(values)))
