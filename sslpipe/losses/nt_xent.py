"""NT-Xent, exact over the global batch, in memory O(rows * features + one tile)."""

import math
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from sslpipe.distributed import all_gather_rows, current_shard, row_counts
from sslpipe.losses.tiles import Products, Tiles, Twins, find_twins, normalised, tile_precision


class NTXentLoss(nn.Module):
    """Cross entropy of finding each image's other view among all views of the global batch.

    temperature: divides cosine similarities; > 0, no unit.
    products: "bfloat16" lets float32 tiles multiply in bfloat16 on CPUs with AMX, in TF32 on CUDA
    (loss within 1e-3, gradient within 2e-2); sums stay float32. float64 inputs stay float64.
    tile_rows: rows and columns of a tile of similarities; None: chosen for the device.
    Shapes (B images on this rank, N on all): z_a, z_b (B, D), any scale -> () in nats; B may
    differ between ranks. ids (B,) int64 name the sample really read, or None: all different.
    An anchor has 1 positive, its image's other view, and 2N - 2 negatives, less those that show the
    same sample id as the anchor's; the value is the mean over all 2N anchors, equal on all ranks.
    Gradient: W times the complete gradient of this rank's rows, so that DDP's mean equals one
    process on N images. It is made in forward, so backward communicates nothing. A zero row has
    cosine 0 with everything and gets no gradient. Collective: all ranks call it.
    After a call: `masked_pairs`, the ordered (anchor, negative) pairs left out of the global batch
    because of equal ids, and `last_negatives`, the mean number of negatives an anchor had.
    Raises: ValueError if temperature <= 0, or shapes or device do not fit.
    Source: Chen et al. 2020, arXiv:2002.05709, eq. 1; gradient in closed form: tests compare it
    with loops and finite differences.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        products: Products = "float32",
        tile_rows: int | None = None,
    ) -> None:
        super().__init__()
        if not (temperature > 0 and math.isfinite(temperature)):
            raise ValueError(f"temperature = {temperature} must be a finite number above 0")
        if products not in ("float32", "bfloat16"):
            raise ValueError(f"products = {products!r} must be 'float32' or 'bfloat16'")
        if tile_rows is not None and tile_rows < 1:
            raise ValueError(f"tile_rows = {tile_rows} must be at least 1")
        self.temperature = temperature
        self.products = products
        self.tile_rows = tile_rows
        self.masked_pairs = 0
        self.last_negatives = 0.0

    def extra_repr(self) -> str:
        return f"temperature={self.temperature}, products={self.products!r}"

    def forward(
        self, z_a: Tensor, z_b: Tensor, *, ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        if z_a.dim() != 2 or z_a.shape != z_b.shape:
            raise ValueError(
                f"z_a and z_b must be (B, D) both; got {tuple(z_a.shape)} and {tuple(z_b.shape)}"
            )
        if ids is not None and ids.shape != z_a.shape[:1]:
            raise ValueError(f"ids must be ({z_a.shape[0]},), got {tuple(ids.shape)}")
        counts = row_counts(z_a.shape[0], z_a.device)
        images = sum(counts)
        if images == 0:
            raise ValueError("NT-Xent of an empty batch is not defined")
        twins = None if ids is None else find_twins(all_gather_rows(ids, counts))
        self.masked_pairs = 0 if twins is None else twins.masked_pairs
        self.last_negatives = 2 * images - 2 - self.masked_pairs / (2 * images)
        rows = self.tile_rows or (512 if z_a.device.type == "cpu" else 4096)
        needs_grad = torch.is_grad_enabled() and (z_a.requires_grad or z_b.requires_grad)
        spec = _Spec(self.temperature, self.products, rows, counts, twins, needs_grad)
        return cast(Tensor, _NTXent.apply(z_a, z_b, spec))


class _Spec(NamedTuple):
    temperature: float
    products: Products
    tile_rows: int
    counts: tuple[int, ...]  # images of each rank
    twins: Twins | None
    needs_grad: bool


class _NTXent(torch.autograd.Function):
    """(z_a, z_b) -> loss, with the gradient made in forward: the upstream gradient is one number.

    So nothing but this rank's gradient, (2B, D), waits for backward.
    """

    @staticmethod
    def forward(ctx: Any, z_a: Tensor, z_b: Tensor, spec: _Spec) -> Tensor:
        with torch.autocast(z_a.device.type, enabled=False), tile_precision(spec.products):
            loss, grad = _loss_and_grad(z_a, z_b, spec)
        ctx.dtype = z_a.dtype
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor, Tensor, None]:
        (grad,) = ctx.saved_tensors
        grad_a, grad_b = (grad * upstream).to(ctx.dtype).chunk(2)
        return grad_a, grad_b, None


def _loss_and_grad(z_a: Tensor, z_b: Tensor, spec: _Spec) -> tuple[Tensor, Tensor | None]:
    """The global mean () and, if wanted, W times the gradient of this rank's rows (2B, D)."""
    rank, world = current_shard()
    images, first = sum(spec.counts), sum(spec.counts[:rank])
    if world == 1:
        z = torch.cat([z_a, z_b])  # (2N, D)
    else:
        both = all_gather_rows(torch.cat([z_a, z_b], dim=1), spec.counts)  # (N, 2D)
        z = torch.cat(both.chunk(2, dim=1))
    z = z.to(torch.promote_types(z.dtype, torch.float32))
    directions, inverse_norms = normalised(z)  # (2N, D), (2N, 1)

    mine = slice(first, first + z_a.shape[0])
    mine_b = slice(images + mine.start, images + mine.stop)
    spans = [mine, mine_b] if world > 1 else [slice(0, 2 * images)]
    tiles = Tiles(
        directions,
        spec.temperature,
        spans,
        symmetric=world == 1,
        tile_rows=spec.tile_rows,
        twins=spec.twins,
    )
    negatives, positive = tiles.negatives()  # (2N,), (2N,) in bits; own rows are filled
    own = torch.stack([negatives[mine], negatives[mine_b], positive[mine]], dim=1)  # (B, 3)
    negatives_a, negatives_b, positive = all_gather_rows(own, spec.counts).unbind(1)  # (N,) each
    margin = torch.cat([positive - negatives_a, positive - negatives_b]) * math.log(2)  # nats
    loss = -F.logsigmoid(margin).mean()  # -log p of the positive
    if not spec.needs_grad:
        return loss, None

    lse = positive.repeat(2) - F.logsigmoid(margin) / math.log(2)  # (2N,) bits
    grad = tiles.gradient(lse, missing=torch.sigmoid(-margin))  # (2N, D), own rows filled
    grad, u, inverse = (torch.cat([t[mine], t[mine_b]]) for t in (grad, directions, inverse_norms))
    grad = grad - u * (u * grad).sum(1, keepdim=True)  # the part across u: cosines know no length
    return loss, grad * (inverse * world)
