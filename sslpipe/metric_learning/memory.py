"""Embeddings of past batches, kept as further references: many negatives for few activations."""

import torch
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows
from sslpipe.losses.engine.queue import enqueue
from sslpipe.metric_learning.losses.pairwise import References


class EmbeddingQueue(nn.Module):
    """Keep the last rows that all ranks pushed, oldest overwritten first; equal on all ranks.

    All state (rows, labels, ids, head, count) lies in buffers: it moves with the module, is saved
    with it, and is restored when a step is undone.

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
        if size < 1 or dim < 1:
            raise ValueError(f"size = {size} and dim = {dim} must be at least 1")
        self.register_buffer("embeddings", torch.zeros(size, dim))
        self.register_buffer("labels", torch.full((size,), -1))
        self.register_buffer("ids", torch.full((size,), -1))
        self.register_buffer("head", torch.zeros((), dtype=torch.int64))  # the next row to write
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    @torch.no_grad()
    def push(self, embeddings: Tensor, labels: Tensor, ids: Tensor) -> None:
        """Take in embeddings (n, D), labels (n,), ids (n,) of this rank. Collective.

        n may differ between ranks. Rows enter in rank order, without gradient, in float32.
        """
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
