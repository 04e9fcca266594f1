"""MoCo's objective: queries against their keys and a queue of earlier keys."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows, current_rank, row_counts
from sslpipe.losses.engine.contrast import (
    across,
    check_settings,
    check_views,
    normalised,
    with_gradient,
    without_autocast,
)
from sslpipe.losses.engine.products import Multiply, Products
from sslpipe.losses.engine.tiles import Tiles


class MoCoLoss(nn.Module):
    """Cross entropy of finding each query's key among that key and the queue.

    z_a: queries (B, D), with gradient; z_b: keys (B, D) of the same images through the momentum
    encoder, without. Any scale. dim: D. queue_rows: keys kept, over all ranks the same.
    temperature, products, tile_rows, processes, errors: as in NTXentLoss. The value is the mean
    over the N queries of all ranks, equal on all ranks.
    Queue entries that show the query's own sample id are no negatives. The queue starts empty and
    only what is in it counts: the first step's loss is 0. In training mode, a call ends by
    replacing the oldest entries with the N keys of all ranks in rank order, which is the order of
    one process. The whole state is in buffers: keys (normalised), ids, where the next key goes and
    how many rows are filled.
    After a call: `masked_pairs`, the (query, queue entry) pairs left out because of equal ids, and
    `last_negatives`, the mean number of negatives of a query.
    Source: He et al. 2020, arXiv:1911.05722, eq. 1 and algorithm 1; temperature of Chen et al.
    2020, arXiv:2003.04297 (MoCo v2). The paper's queue starts with random keys.
    """

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
        super().__init__()
        check_settings(temperature, products, tile_rows)
        for name, number in (("dim", dim), ("queue_rows", queue_rows)):
            if number < 1:
                raise ValueError(f"{name} = {number} must be at least 1")
        self.temperature = temperature
        self.products: Products = products
        self.tile_rows = tile_rows
        self.register_buffer("keys", torch.zeros(queue_rows, dim))
        self.register_buffer("key_ids", torch.full((queue_rows,), -1))
        self.register_buffer("next_row", torch.tensor(0))
        self.register_buffer("filled_rows", torch.tensor(0))
        self.masked_pairs = 0
        self.last_negatives = 0.0

    def extra_repr(self) -> str:
        rows, dim = self.keys.shape
        return f"queue_rows={rows}, dim={dim}, temperature={self.temperature}"

    def forward(
        self, z_a: Tensor, z_b: Tensor, *, ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        del labels
        check_views(z_a, z_b, ids, None)
        if z_a.shape[1] != self.keys.shape[1]:
            raise ValueError(
                f"loss.dim = {self.keys.shape[1]}, but the embeddings have {z_a.shape[1]} numbers"
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
                self._enqueue(all_gather_rows(keys, counts), all_gather_rows(ids, counts))
        return with_gradient(loss, grad, z_a) if z_a.requires_grad else loss

    def _loss_and_grad(
        self, z: Tensor, keys: Tensor, ids: Tensor, counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """The global loss () and W times the gradient of this rank's queries (B, 1, D)."""
        queries, inverse_norms = normalised(z)
        positive = (queries * keys).sum(1) / self.temperature  # (B,)
        filled = int(self.filled_rows)
        queue, queue_ids = self.keys[:filled].to(z.dtype), self.key_ids[:filled]

        # (B,) how many entries show a query's own sample; if any, both sides are sorted by id
        sorted_ids = queue_ids.sort().values
        same = torch.searchsorted(sorted_ids, ids, right=True) - torch.searchsorted(sorted_ids, ids)
        same = same.masked_fill(ids < 0, 0)
        order, groups, rows = torch.arange(len(ids), device=z.device), None, queries
        if bool(same.any()):
            order, queue_order = ids.argsort(), queue_ids.argsort()
            queue, rows = queue[queue_order], queries[order]
            # a query without an id has no group in common with an entry without one
            groups = torch.where(ids < 0, -2, ids)[order], queue_ids[queue_order]

        pairs = sum(counts) * len(queue)
        multiply = Multiply(self.products, z, 1 / self.temperature, pairs)
        tiles = Tiles(
            rows / self.temperature,
            queue,
            largest=1 / self.temperature,
            multiply=multiply,
            tile_rows=self.tile_rows or (512 if z.device.type == "cpu" else 4096),
            groups=groups,
        )
        with multiply.kernels():
            sums = torch.empty_like(positive)
            sums[order] = tiles.log_sums()[0]
            margin = positive - sums
            values = torch.stack([-F.logsigmoid(margin), (filled - same).to(z.dtype), same], dim=1)
            values = all_gather_rows(values, counts)  # (N, 3)
            loss, negatives, _ = values.mean(0).unbind()
            self.last_negatives, self.masked_pairs = float(negatives), int(values[:, 2].sum())

            missing = torch.sigmoid(-margin)[:, None] / sum(counts)  # 1 - p of the key, over N
            grad = torch.zeros_like(queries)
            tiles.add_gradient(grad, missing[order].T, sums[order][None], None)
            grad[order] = grad.clone()
        grad = across(grad.addcmul_(missing, keys, value=-1), queries, 1.0)
        scale = inverse_norms * (current_rank().world_size / self.temperature)
        return loss, (grad * scale)[:, None]

    def _enqueue(self, keys: Tensor, ids: Tensor) -> None:
        """The last rows of keys (N, D) and ids (N,) take the place of the oldest."""
        rows = self.keys.shape[0]
        take = min(len(keys), rows)
        first = int(self.next_row) + len(keys) - take
        at = torch.arange(first, first + take, device=keys.device) % rows
        self.keys[at] = keys[-take:].to(self.keys.dtype)
        self.key_ids[at] = ids[-take:]
        self.next_row.fill_((first + take) % rows)
        self.filled_rows.copy_((self.filled_rows + len(keys)).clamp_max(rows))
