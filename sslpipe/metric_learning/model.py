"""What a fine-tuning trains: a backbone and its losses, in one module and one forward."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sslpipe.errors import RecipeError
from sslpipe.metric_learning.heads.base import Head
from sslpipe.metric_learning.losses.base import MetricLoss
from sslpipe.metric_learning.losses.pairwise import LabelCounts
from sslpipe.metric_learning.memory import EmbeddingQueue
from sslpipe.models.backbones import Backbone


class MetricTask(nn.Module):
    """Turn images and labels into the weighted sum of the losses, and the embeddings.

    Everything is in one module, so that DDP sees one forward.

    Args:
        backbone: Makes the embeddings.
        losses: Entries of METRIC_LOSSES and HEADS.
        weights: Of the losses, one each.
        miner: Goes to each of them.
        queue: Its rows are further references from the call on that says so.
    """

    def __init__(
        self,
        backbone: Backbone,
        losses: Sequence[nn.Module],
        weights: Sequence[float] = (1.0,),
        miner: nn.Module | None = None,
        queue: EmbeddingQueue | None = None,
    ) -> None:
        super().__init__()
        self.backbone, self.losses = backbone, nn.ModuleList(losses)
        self.weights, self.miner, self.queue = tuple(weights), miner, queue
        self.ema: Backbone | None = None  # see models.averaged

    def forward(
        self,
        views: Tensor,
        labels: Tensor,
        ids: Tensor,
        use_queue: bool = False,
        counts: LabelCounts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and the embeddings.

        Args:
            views: Of the images.
            labels: Of the views, < 0 for none.
            ids: Which sample each view shows.
            use_queue: Compare with the queue's rows, too.
            counts: Of the labels, where the host knows them.

        Shape:
            views (B, 3, S, S), labels (B,), ids (B,) -> (), (B, D) not normalised.
        """
        embeddings = self.backbone.raw(views)  # (B, D)
        ref = self.queue.references() if self.queue is not None and use_queue else None
        terms = []
        for weight, loss in zip(self.weights, self.losses, strict=True):
            try:
                own = isinstance(loss, Head | MetricLoss)  # others do not know the argument
                known = {"counts": counts} if own else {}
                term = loss(embeddings, labels, ids=ids, ref=ref, miner=self.miner, **known)
            except ValueError as error:  # sizes and settings that only rows and labels contradict
                raise RecipeError(f"[loss] {type(loss).__name__}: {error}") from error
            terms.append(weight * term)
        return torch.stack(terms).sum(), embeddings
