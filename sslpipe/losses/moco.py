"""MoCo's objective: queries against their keys and a queue of earlier keys."""

from typing import Annotated, NamedTuple

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows, current_rank, row_counts, to_device
from sslpipe.losses.base import ContrastiveObjective, Scale, check_views
from sslpipe.losses.engine.anchors import Masks, MaskTiles
from sslpipe.losses.engine.contrast import normalised, project_out, with_gradient, without_autocast
from sslpipe.losses.engine.queue import enqueue
from sslpipe.losses.engine.tiles import Tiles, fast_kernels
from sslpipe.registry.part import Derived, Dim

Positive = Annotated[int, Field(ge=1)]


class MoCoLoss(ContrastiveObjective):
    """Find each query's key among that key and a queue of earlier keys (cross entropy).

    Queue entries that show the query's own sample id, or its key's, are no negatives, nor are those
    that share a group >= 0 with the query. The queue starts empty and only what is in it counts:
    the first step's loss is 0. In training mode, a call ends by replacing the oldest entries with
    the N keys of all ranks in rank order. All state is in buffers. Processes and errors are as in
    NTXentLoss.

    Shape:
        z_a: queries (B, D), with gradient; z_b: keys (B, D) of the same images through the momentum
        encoder, without. Any scale. Output: (), the mean over the N queries of all ranks, equal on
        all ranks.

    Source:
        He et al. 2020, arXiv:1911.05722, eq. 1 and algorithm 1; temperature of Chen et al. 2020,
        arXiv:2003.04297 (MoCo v2). The paper's queue starts with random keys.
    """

    needs_momentum_encoder = True
    temperature: Scale = 0.2
    queue_rows: Positive = 65_536
    """Keys kept, over all ranks the same."""
    dim: Dim = 128
    """D, numbers of an embedding."""
    group_columns: Annotated[int, Derived()] = 0
    """Columns of `groups` in each call; their numbers are kept with the keys."""

    def setup(self) -> None:
        """Begin with an empty queue."""
        super().setup()
        self._queue_is_used = False  # an earlier call has filled it
        self.keys = nn.Buffer(torch.zeros(self.queue_rows, self.dim))
        self.key_ids = nn.Buffer(torch.full((self.queue_rows,), -1))
        groups = torch.full((self.queue_rows, self.group_columns), -1)
        self.key_groups = nn.Buffer(groups) if self.group_columns else None
        self.next_row = nn.Buffer(torch.tensor(0))
        self.filled_rows = nn.Buffer(torch.tensor(0))

    def negatives_per_anchor(self, batch_size: int) -> int:
        """Return the size of the queue, once it is full."""
        return self.queue_rows

    def forward(
        self,
        z_a: Tensor,
        z_b: Tensor,
        *,
        ids: Tensor | None = None,
        labels: Tensor | None = None,
        groups: Tensor | None = None,
    ) -> Tensor:
        """Compute the global mean over all N queries; see `Objective.forward`."""
        check_views(z_a=z_a, z_b=z_b, ids=ids, labels=None, groups=groups)
        if z_a.shape[1] != self.dim:
            raise ValueError(
                f"loss.dim = {self.dim}, but the embeddings have {z_a.shape[1]} numbers: set it to "
                f"{z_a.shape[1]}"
            )
        counts = row_counts(z_a.shape[0])
        if sum(counts) == 0:
            raise ValueError("a contrastive loss of an empty batch is not defined")
        known = self._numbers(ids, groups, z_a)
        with torch.no_grad(), without_autocast(z_a.device.type):
            wide = torch.promote_types(z_a.dtype, self.keys.dtype)
            keys, _ = normalised(z_b.to(wide))
            loss, grad = self._loss_and_grad(z_a.to(wide), keys, known, counts)
            if self._queue_is_used:
                self.check_batch(z_a, counts, ids)
            if self.training:
                self._queue_is_used = True
                buffers = [self.keys, self.key_ids]
                rows = [keys, known.keys[0]]
                if self.key_groups is not None:
                    buffers.append(self.key_groups)
                    rows.append(known.keys[1:].T)
                rows = [all_gather_rows(part, counts) for part in rows]
                enqueue(buffers, rows, self.next_row, self.filled_rows)
        return with_gradient(loss, grad, z_a) if z_a.requires_grad else loss

    def _numbers(self, ids: Tensor | None, groups: Tensor | None, z: Tensor) -> "_Numbers":
        """Bring ids and groups of both views to the device."""
        columns = 0 if self.key_groups is None else self.key_groups.shape[1]
        width = 0 if groups is None else groups.shape[2]
        if width != columns:
            raise ValueError(f"loss.group_columns = {columns}, but the groups have {width} columns")
        ids = torch.full((len(z),), -1) if ids is None else ids
        views = ids if ids.dim() == 2 else ids[:, None].expand(-1, 2)
        of_views = (
            views[:, :, None] if groups is None else torch.cat([views[:, :, None], groups], 2)
        )
        sent = to_device(of_views.permute(1, 2, 0).contiguous(), z.device)  # (2, 1 + K, B)
        queries, keys = sent.unbind(0)
        return _Numbers(queries, keys, has_partners=ids.dim() == 2)

    def _loss_and_grad(
        self, z: Tensor, keys: Tensor, known: "_Numbers", counts: tuple[int, ...]
    ) -> tuple[Tensor, Tensor]:
        """Return the global loss () and W times the gradient of this rank's queries (B, 1, D).

        The textbook: logits = cat([positive, queries @ queue.T / t], 1), cross entropy with the
        label 0, pairs of equal ids at -inf.
        """
        queries, inverse_norms = normalised(z)
        positive = (queries * keys).sum(1) / self.temperature  # (B,)
        queue = _columns(self, known, whole=z.is_cuda)
        order = queue.query_order

        tiles = Tiles(
            queries[order] / self.temperature,
            queue.keys.to(z.dtype),
            largest=self.engine.largest,
            tile_rows=self.engine.tile_rows_on(z.device),
            masks=queue.masks,
            absent=queue.absent,
        )
        with fast_kernels(z, sum(counts) * len(queue.keys)):
            # forward: sums over the queue, then the mean over the queries of all ranks
            sums = torch.empty_like(positive)
            sums[order] = tiles.log_sums()[0]
            margin = positive - sums
            negatives = (self.filled_rows - queue.same).to(z.dtype)
            values = torch.stack([-F.logsigmoid(margin), negatives, queue.same], dim=1)
            values = all_gather_rows(values, counts)  # (N, 3)
            loss, self._last_negatives, _ = values.mean(0).unbind()
            self._masked_pairs = values[:, 2].sum()

            # gradient: of the queue's part of the logits, then of the keys'
            missing = torch.sigmoid(-margin)[:, None] / sum(counts)  # 1 - p of the key, over N
            part = torch.zeros_like(queries)
            tiles.add_gradient(part, missing[order].T, sums[order][None], None)
            grad = torch.empty_like(part)
            grad[order] = part
        grad = project_out(grad.addcmul_(missing, keys, value=-1), queries, 1.0)
        scale = inverse_norms * (current_rank().world_size / self.temperature)
        return loss, (grad * scale)[:, None]


class _Numbers(NamedTuple):
    """The id and the K groups of each query's image and of its key's, (1 + K, B), on the device."""

    queries: Tensor
    keys: Tensor
    has_partners: bool  # whether the two may be different images

    @property
    def is_plain(self) -> bool:
        """Whether the queries' ids are all that can be met in the queue."""
        return not self.has_partners and len(self.queries) == 1


class _Queue(NamedTuple):
    """The queue as the tiles' columns, and which of its entries are no negatives of a query."""

    keys: Tensor  # (Q, D)
    same: Tensor  # (B,) how many entries are masked for a query, in the order of the batch
    query_order: Tensor | slice = slice(None)  # of the tiles' rows
    masks: Masks | None = None  # like absent, for Tiles
    absent: Tensor | None = None


def _columns(loss_fn: MoCoLoss, known: _Numbers, *, whole: bool) -> _Queue:
    """Take what is in the queue, and what of it each query does not meet.

    Where a query meets its own sample, both sides are sorted by id, so that few tiles have
    something to mask. `whole` is for CUDA, where to read a value would wait for the device: all
    rows are taken as they lie, those that are not filled yet as absent.
    """
    rows = loss_fn.queue_rows if whole else int(loss_fn.filled_rows)
    keys = loss_fn.keys[:rows]
    key_ids = loss_fn.key_ids[:rows]
    absent = None
    if whole:
        absent = torch.arange(rows, device=keys.device) >= loss_fn.filled_rows
    if not known.is_plain:
        same, masks = _masks_of_groups(loss_fn, known, rows)
        return _Queue(keys, same, masks=masks, absent=absent)
    ids = known.queries[0]
    same = _count_own(ids, key_ids)  # -1 where not filled
    if whole:
        return _Queue(keys, same, masks=Masks(((_apart(ids), key_ids),)), absent=absent)
    if not bool(same.any()):
        return _Queue(keys, same)
    query_order = ids.argsort()
    queue_order = key_ids.argsort()
    masks = Masks(((_apart(ids)[query_order], key_ids[queue_order]),))
    return _Queue(keys[queue_order], same, query_order, masks)


def _masks_of_groups(loss_fn: MoCoLoss, known: _Numbers, rows: int) -> tuple[Tensor, Masks]:
    """Mask by the ids of the query and of its key, and by each group; rows of the queue."""
    key_ids = loss_fn.key_ids[:rows]
    pairs = [(_apart(side[0]), key_ids) for side in (known.queries, known.keys)]
    if loss_fn.key_groups is not None:
        columns = zip(known.queries[1:], loss_fn.key_groups[:rows].unbind(1), strict=True)
        pairs += [(_apart(query_ids), group_keys.contiguous()) for query_ids, group_keys in columns]
    masks = Masks(tuple(pairs))
    tiles = MaskTiles(masks, loss_fn.engine.tile_rows_on(key_ids.device), key_ids.device)
    return tiles.count(), masks


def _count_own(ids: Tensor, key_ids: Tensor) -> Tensor:
    """Count the entries of each query's id: (B,), (Q,) -> (B,); -1: without an id, none."""
    sorted_ids = key_ids.sort().values
    same = torch.searchsorted(sorted_ids, ids, right=True) - torch.searchsorted(sorted_ids, ids)
    return same.masked_fill(ids < 0, 0)


def _apart(ids: Tensor) -> Tensor:
    """A query without an id has no group in common with an entry without one."""
    return torch.where(ids < 0, -2, ids)
