"""What a fine-tuning trains: a backbone and its losses, in one module; the queue of past rows."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows
from sslpipe.errors import RecipeError
from sslpipe.losses.engine.queue import enqueue
from sslpipe.metric_learning.losses.pairwise import LabelCounts, References
from sslpipe.models.backbones import Backbone


class EmbeddingQueue(nn.Module):
    """Keep the last rows that all ranks pushed, oldest overwritten first; equal on all ranks.

    All state lies in buffers, which are saved, and restored when a step is undone.

    Args:
        size: How many rows.
        dim: D of the embeddings.

    Source:
        Wang et al. 2020 (cross-batch memory), arXiv:1912.06798, alg. 1. There the current batch
        enters before it is compared; here it is compared as itself, with its gradient, so push
        after.
    """

    embeddings: Tensor
    labels: Tensor
    ids: Tensor
    head: Tensor
    count: Tensor

    def __init__(self, size: int, dim: int) -> None:
        super().__init__()
        self.register_buffer("embeddings", torch.zeros(size, dim))
        self.register_buffer("labels", torch.full((size,), -1))
        self.register_buffer("ids", torch.full((size,), -1))
        self.register_buffer("head", torch.zeros((), dtype=torch.int64))  # the next row to write
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, embeddings: Tensor, labels: Tensor, ids: Tensor) -> None:
        """Take in embeddings (n, D), labels, ids (n,) of all ranks, in rank order. Collective."""
        rows = [all_gather_rows(part) for part in (embeddings, labels, ids)]
        buffers = self.embeddings, self.labels, self.ids
        enqueue(buffers, rows, self.head, self.count)

    def references(self) -> References | None:
        """Return what is there so far, in storage order; None while that is nothing.

        These are copies: the next push changes the buffers, which autograd may still need.
        """
        filled = int(self.count)
        if not filled:
            return None
        return References(*(t[:filled].clone() for t in (self.embeddings, self.labels, self.ids)))


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
        self.backbone = backbone
        self.losses = nn.ModuleList(losses)
        self.weights = tuple(weights)
        self.miner = miner
        self.queue = queue

    def forward(
        self,
        views: Tensor,
        labels: Tensor,
        ids: Tensor,
        counts: LabelCounts | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Compute the loss and the embeddings.

        Args:
            views: Of the images.
            labels: Of the views, < 0 for none.
            ids: Which sample each view shows.
            counts: Of the labels, where the host knows them.

        Shape:
            views (B, 3, S, S), labels (B,), ids (B,) -> (), (B, D) not normalised.
        """
        embeddings = self.backbone.raw(views)  # (B, D)
        ref = self.queue.references() if self.queue is not None else None
        terms = []
        for weight, loss in zip(self.weights, self.losses, strict=True):
            try:
                term = loss(embeddings, labels, ids=ids, ref=ref, miner=self.miner, counts=counts)
            except ValueError as error:  # sizes and settings that only rows and labels contradict
                raise RecipeError(f"[loss] {type(loss).__name__}: {error}") from error
            terms.append(weight * term)
        return torch.stack(terms).sum(), embeddings
