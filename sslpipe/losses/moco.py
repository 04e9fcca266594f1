"""MoCo's objective: queries against their keys and a queue of earlier keys."""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.distributed import all_gather_rows, current_rank, row_counts
from sslpipe.losses.base import ContrastiveObjective, check_views
from sslpipe.losses.engine.contrast import (
    normalised,
    project_out,
    with_gradient,
    without_autocast,
)
from sslpipe.losses.engine.products import Multiply, Products
from sslpipe.losses.engine.queue import enqueue
from sslpipe.losses.engine.tiles import Tiles


class MoCoLoss(ContrastiveObjective):
    """Find each query's key among that key and a queue of earlier keys (cross entropy).

    Queue entries that show the query's own sample id are no negatives. The queue starts empty and
    only what is in it counts: the first step's loss is 0. In training mode, a call ends by
    replacing the oldest entries with the N keys of all ranks in rank order, which is the order of
    one process. The whole state is in buffers: keys (normalised), ids, where the next key goes and
    how many rows are filled. Processes and errors are as in NTXentLoss.

    Args:
        dim: D, numbers of an embedding.
        queue_rows: keys kept, over all ranks the same.
        temperature: as in NTXentLoss.
        products: as in NTXentLoss.
        tile_rows: as in NTXentLoss.

    Shape:
        z_a: queries (B, D), with gradient; z_b: keys (B, D) of the same images through the momentum
        encoder, without. Any scale. Output: (), the mean over the N queries of all ranks, equal on
        all ranks.

    Attributes:
        masked_pairs: after a call, the (query, queue entry) pairs masked because of equal ids.
        last_negatives: after a call, the mean number of negatives of a query.

    Source:
        He et al. 2020, arXiv:1911.05722, eq. 1 and algorithm 1; temperature of Chen et al. 2020,
        arXiv:2003.04297 (MoCo v2). The paper's queue starts with random keys.
    """

    needs_momentum_encoder = True
    keys: Tensor
    key_ids: Tensor
    next_row: Tensor
    filled_rows: Tensor

    def __init__(
        self,
        dim: int = 128,
        queue_rows: int = 65_536,
        temperature: float = 0.2,
        products: Products = "float32",
        tile_rows: int | None = None,
    ) -> None:
        super().__init__(temperature, products, tile_rows)
        for name, number in (("dim", dim), ("queue_rows", queue_rows)):
            if number < 1:
                raise ValueError(f"{name} = {number} must be at least 1")
        self.dim = dim
        self.queue_rows = queue_rows
        self.register_buffer("keys", torch.zeros(queue_rows, dim))
        self.register_buffer("key_ids", torch.full((queue_rows,), -1))
        self.register_buffer("next_row", torch.tensor(0))
        self.register_buffer("filled_rows", torch.tensor(0))

    def negatives_per_anchor(self, batch_size: int) -> int:
        """Return the size of the queue, once it is full."""
        del batch_size
        return self.queue_rows

    def forward(
        self, z_a: Tensor, z_b: Tensor, *, ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        """Compute the global mean over all N queries; see `Objective.forward`."""
        del labels
        check_views(z_a, z_b, ids, None)
        if z_a.shape[1] != self.dim:
            raise ValueError(
                f"loss.dim = {self.dim}, but the embeddings have {z_a.shape[1]} numbers"
            )
        counts = row_counts(z_a.shape[0], z_a.device)
        if sum(counts) == 0:
            raise ValueError("a contrastive loss of an empty batch is not defined")
        if ids is None:
            ids = torch.full_like(z_a[:, 0], -1, dtype=torch.int64)
        with torch.no_grad(), without_autocast(z_a.device.type):
            wide = torch.promote_types(z_a.dtype, self.keys.dtype)
            keys, _ = normalised(z_b.to(wide))
            loss, grad = self._loss_and_grad(z_a.to(wide), keys, ids, counts)
            if self.training:
                rows = all_gather_rows(keys, counts), all_gather_rows(ids, counts)
                enqueue((self.keys, self.key_ids), rows, self.next_row, self.filled_rows)
        return with_gradient(loss, grad, z_a) if z_a.requires_grad else loss

    def _loss_and_grad(
        self, z: Tensor, keys: Tensor, ids: Tensor, counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the global loss () and W times the gradient of this rank's queries (B, 1, D).

        The textbook: logits = cat([positive, queries @ queue.T / t], 1), cross entropy with the
        label 0, pairs of equal ids at -inf.
        """
        queries, inverse_norms = normalised(z)
        positive = (queries * keys).sum(1) / self.temperature  # (B,)
        filled = int(self.filled_rows)
        queue = self.keys[:filled].to(z.dtype)
        mask = _mask_of_ids(ids, self.key_ids[:filled])
        order = slice(None) if mask is None else mask.query_order

        tiles = Tiles(
            queries[order] / self.temperature,
            queue if mask is None else queue[mask.queue_order],
            largest=self.engine.largest,
            multiply=Multiply(
                self.products, z, self.engine.largest, pairs=sum(counts) * len(queue)
            ),
            tile_rows=self.engine.tile_rows_on(z.device),
            groups=None if mask is None else mask.groups,
        )
        with tiles.multiply.kernels():
            # forward: sums over the queue, then the mean over the queries of all ranks
            sums = torch.empty_like(positive)
            sums[order] = tiles.log_sums()[0]
            margin = positive - sums
            same = torch.zeros_like(ids) if mask is None else mask.same
            values = torch.stack([-F.logsigmoid(margin), (filled - same).to(z.dtype), same], dim=1)
            values = all_gather_rows(values, counts)  # (N, 3)
            loss, negatives, _ = values.mean(0).unbind()
            self.last_negatives, self.masked_pairs = float(negatives), int(values[:, 2].sum())

            # gradient: of the queue's part of the logits, then of the keys'
            missing = torch.sigmoid(-margin)[:, None] / sum(counts)  # 1 - p of the key, over N
            part = torch.zeros_like(queries)
            tiles.add_gradient(part, missing[order].T, sums[order][None], None)
            grad = torch.empty_like(part)
            grad[order] = part
        grad = project_out(grad.addcmul_(missing, keys, value=-1), queries, 1.0)
        scale = inverse_norms * (current_rank().world_size / self.temperature)
        return loss, (grad * scale)[:, None]


class _IdMask(NamedTuple):
    """Which queries and queue entries show the same sample; both sides sorted by id.

    same: (B,) how many entries show a query's own sample, in the order of the batch. groups: of the
    sorted queries and entries, for Tiles.
    """

    same: Tensor
    query_order: Tensor
    queue_order: Tensor
    groups: tuple[Tensor, Tensor]


def _mask_of_ids(ids: Tensor, queue_ids: Tensor) -> _IdMask | None:
    """None where no query meets its own sample. ids (B,), queue_ids (Q,); -1: without an id."""
    sorted_ids = queue_ids.sort().values
    same = torch.searchsorted(sorted_ids, ids, right=True) - torch.searchsorted(sorted_ids, ids)
    same = same.masked_fill(ids < 0, 0)
    if not bool(same.any()):
        return None
    query_order, queue_order = ids.argsort(), queue_ids.argsort()
    # a query without an id has no group in common with an entry without one
    groups = torch.where(ids < 0, -2, ids)[query_order], queue_ids[queue_order]
    return _IdMask(same, query_order, queue_order, groups)
