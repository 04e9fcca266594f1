"""What the NT-Xent family shares: gather, sum over negatives in tiles, gradient in closed form.

An objective of the family is a function of the directions and of each anchor's log-sum-exps over
its negatives. It is written as plain torch over O(N D) numbers and differentiated by autograd; what
needs all pairs, the log-sum-exps and their gradient, is made here in tiles.
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sslpipe.distributed import all_gather_rows, current_rank, row_counts
from sslpipe.losses.engine.products import Multiply, Products
from sslpipe.losses.engine.tiles import Term, Tiles

Sums = tuple[Tensor, ...]
RowLoss = Callable[[Tensor, Sums, "Anchors"], Tensor]
Derivatives = Callable[[Tensor, Sums, "Anchors"], tuple[Tensor, Tensor, Tensor]]


class Anchors(NamedTuple):
    """Who is whose negative in the global batch of N images.

    counts: images of each rank. groups: (N,) int64, images of one group are no negatives of each
    other; None: each is its own group. negatives: (N,) how many an anchor of each image has,
    counting both views, and None for 2N - 2.
    """

    counts: tuple[int, ...]
    groups: Tensor | None = None
    negatives: Tensor | None = None

    @property
    def images(self) -> int:
        return sum(self.counts)

    @property
    def mean_negatives(self) -> float:
        return 2 * self.images - 2 if self.negatives is None else float(self.negatives.mean())

    @property
    def masked_pairs(self) -> int:
        """Ordered (anchor, view of another image) pairs that are not anchor and negative."""
        return round(2 * self.images * (2 * self.images - 2 - self.mean_negatives))


def check_views(z_a: Tensor, z_b: Tensor, ids: Tensor | None, labels: Tensor | None) -> None:
    """ValueError unless z_a and z_b are (B, D) and ids and labels (B,) or None."""
    if z_a.dim() != 2 or z_a.shape != z_b.shape:
        raise ValueError(
            f"z_a and z_b must be (B, D) both; got {tuple(z_a.shape)} and {tuple(z_b.shape)}"
        )
    for name, numbers in (("ids", ids), ("labels", labels)):
        if numbers is not None and numbers.shape != z_a.shape[:1]:
            raise ValueError(f"{name} must be ({z_a.shape[0]},), got {tuple(numbers.shape)}")


def check_settings(temperature: float, products: str, tile_rows: int | None) -> None:
    """ValueError naming the setting that is out of its range."""
    if not (temperature > 0 and math.isfinite(temperature)):
        raise ValueError(f"temperature = {temperature} must be a finite number above 0")
    if products not in ("float32", "bfloat16"):
        raise ValueError(f"products = {products!r} must be 'float32' or 'bfloat16'")
    if tile_rows is not None and tile_rows < 1:
        raise ValueError(f"tile_rows = {tile_rows} must be at least 1")


def anchors_of(
    z: Tensor, ids: Tensor | None, labels: Tensor | None = None, own: Tensor | None = None
) -> Anchors:
    """Gather who must not be whose negative: equal ids, and equal labels >= 0 if labels are given.

    z (B, D), for row count and device. own: (B,) bool, rows whose id counts for nothing.
    Collective. Raises: ValueError if no rank has a row.
    """
    counts = row_counts(z.shape[0], z.device)
    images = sum(counts)
    if images == 0:
        raise ValueError("a contrastive loss of an empty batch is not defined")
    group = None
    for numbers, is_alone in ((ids, own), (labels, None if labels is None else labels < 0)):
        if numbers is None:
            continue
        numbers = all_gather_rows(numbers, counts)
        dense = torch.unique(numbers, return_inverse=True)[1]
        fallback = torch.arange(images, device=z.device) if group is None else group
        if is_alone is None:
            group = dense
        else:
            group = torch.where(all_gather_rows(is_alone, counts), images + fallback, dense)
    if group is None:
        return Anchors(counts)
    _, group, sizes = torch.unique(group, return_inverse=True, return_counts=True)
    if sizes.numel() == images:
        return Anchors(counts)
    return Anchors(counts, group, (2 * images - 2 * sizes[group]).double())


class Engine(NamedTuple):
    """How the sums are made. largest: no |similarity| is above this, nats."""

    temperature: float
    products: Products = "float32"
    tile_rows: int | None = None
    terms: tuple[Term, ...] = (Term(),)


def contrast(
    z_a: Tensor,
    z_b: Tensor,
    anchors: Anchors,
    row_loss: RowLoss,
    engine: Engine,
    derivatives: Derivatives | None = None,
) -> Tensor:
    """row_loss of the global batch (), equal on all ranks, with W times its complete gradient.

    row_loss(v, sums, anchors) gets v (N, 2, D), directions over sqrt(temperature), so that v . v
    is a similarity in nats, and, for each of engine.terms, log sum_j exp(power * s_ij) (N, 2) over
    the negatives j of each anchor, -inf where it has none. z_a, z_b (B, D) of this rank, any scale.
    derivatives: (row_loss, its gradient in v, in sums (terms, N, 2)); None: autograd finds them.
    """
    needs_grad = torch.is_grad_enabled() and (z_a.requires_grad or z_b.requires_grad)
    with torch.no_grad(), without_autocast(z_a.device.type):
        derivatives = derivatives or partial(_differentiate, row_loss)
        wanted = derivatives if needs_grad else None
        loss, grad = _loss_and_grad(z_a, z_b, anchors, row_loss, engine, wanted)
    return loss if grad is None else with_gradient(loss, grad, z_a, z_b)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Entered only where it is on: with 128 rows that saves a twentieth of the loss's time."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def with_gradient(loss: Tensor, grad: Tensor, *inputs: Tensor) -> Tensor:
    """loss, a number whose gradient is known: grad (B, inputs, D), made in forward.

    So nothing but this rank's gradient waits for backward.
    """
    return cast(Tensor, _WithGradient.apply((loss, grad), *inputs))


class _WithGradient(torch.autograd.Function):
    """known: loss and grad, in a tuple, so that autograd takes neither for an input."""

    @staticmethod
    def forward(ctx: Any, known: tuple[Tensor, Tensor], *inputs: Tensor) -> Tensor:
        loss, grad = known
        ctx.dtype = inputs[0].dtype
        ctx.save_for_backward(grad)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return None, *(grad * upstream).to(ctx.dtype).unbind(1)


def _loss_and_grad(
    z_a: Tensor,
    z_b: Tensor,
    anchors: Anchors,
    row_loss: RowLoss,
    engine: Engine,
    derivatives: Derivatives | None,
) -> tuple[Tensor, Tensor | None]:
    """The global loss () and, if wanted, W times the gradient of this rank's rows (B, 2, D)."""
    process, counts, groups = current_rank(), anchors.counts, anchors.groups
    alone = process.world_size == 1
    first = sum(counts[: process.rank])
    mine = slice(first, first + counts[process.rank])
    wide = torch.float64 if z_a.dtype == torch.float64 else torch.float32
    v, inverse_norms = normalised(
        all_gather_rows(torch.stack([z_a, z_b], dim=1), counts).to(wide), engine.temperature**-0.5
    )  # (N, 2, D), (N, 2, 1)

    # the images of the tiles' rows and columns, None: all in their order. By group, where groups
    # are, so that few tiles hold pairs that must be left out
    own: Tensor | slice | None = None if alone else mine
    everyone: Tensor | None = None
    if groups is not None:
        everyone = groups.argsort(stable=True)
        own = everyone[(everyone >= mine.start) & (everyone < mine.stop)]
    columns = (v if everyone is None else v[everyone]).flatten(0, 1)  # (2N, D)
    rows = columns if alone else v[own].flatten(0, 1)
    largest = 1 / engine.temperature
    multiply = Multiply(engine.products, v, largest, len(columns) ** 2)
    tiles = Tiles(
        rows,
        columns,
        largest=largest,
        multiply=multiply,
        tile_rows=engine.tile_rows or (512 if v.device.type == "cpu" else 4096),
        terms=engine.terms,
        symmetric=alone,
        pairs_at=2 * first if groups is None else None,
        groups=None if groups is None else (_per_view(groups[own]), _per_view(groups[everyone])),
    )
    with multiply.kernels():
        sums = tiles.log_sums().view(len(engine.terms), -1, 2)  # (terms, B, 2)
        if own is not None:
            placed = v.new_empty(len(engine.terms), *v.shape[:2])  # (terms, N, 2)
            placed[:, own] = sums
            sums = placed
        if not alone:
            sums = all_gather_rows(sums[:, mine].transpose(0, 1), counts).transpose(0, 1)
        if derivatives is None:
            return row_loss(v, sums.unbind(), anchors), None

        loss, grad, pull = derivatives(v, sums.unbind(), anchors)  # grad: (N, 2, D)
        of_rows = _of_anchors(pull, own), _of_anchors(sums, own)
        of_columns = None
        if not alone:
            of_columns = _of_anchors(pull, everyone), _of_anchors(sums, everyone)
        if groups is None:
            into = grad if own is None else grad[own]
            tiles.add_gradient(into.view(rows.shape), *of_rows, of_columns)
        else:
            part = torch.zeros_like(rows)
            tiles.add_gradient(part, *of_rows, of_columns)
            grad[own] += part.view(-1, *v.shape[1:])
    if not alone:
        v, inverse_norms = v[mine], inverse_norms[mine] * process.world_size
        grad = grad[mine].clone()  # what waits for backward is not everyone's
    return loss, across(grad, v, engine.temperature).mul_(inverse_norms)


def _differentiate(
    row_loss: RowLoss, v: Tensor, sums: Sums, anchors: Anchors
) -> tuple[Tensor, Tensor, Tensor]:
    """row_loss (), and its gradient in v (N, 2, D) and in sums (terms, N, 2)."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (v, *sums)]
        loss = row_loss(leaves[0], tuple(leaves[1:]), anchors)
        of_v, *of_sums = torch.autograd.grad(loss, leaves)
    return loss.detach(), of_v, torch.stack(of_sums)


def _of_anchors(numbers: Tensor, images: Tensor | slice | None) -> Tensor:
    """(terms, N, 2) -> (terms, 2n): those of these images, None: of all."""
    return (numbers if images is None else numbers[:, images]).flatten(1)


def _per_view(of_images: Tensor) -> Tensor:
    return of_images.repeat_interleave(2)


def normalised(z: Tensor, length: float = 1.0) -> tuple[Tensor, Tensor]:
    """Rows of z (..., D) at that length, and what each was multiplied by (..., 1).

    A zero row stays zero, with 0, and so does a float32 row shorter than length / 3e38. Squares of
    float32 are summed in float64, whose range they cannot leave.
    """
    largest = None
    if z.dtype == torch.float64:
        largest = z.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(z.dtype).tiny)
        z = z / largest
    norms = torch.linalg.vector_norm(z, dim=-1, keepdim=True, dtype=torch.float64)
    factors = norms.reciprocal_().mul_(length).to(z.dtype)
    factors = factors.nan_to_num_(nan=math.nan, posinf=0)  # 1 / 0 is 0, and NaN is to be seen
    return z * factors, factors if largest is None else factors / largest


def across(grad: Tensor, v: Tensor, scale: float) -> Tensor:
    """The part of grad across v, in place: cosines know no length. scale: 1 / |v|^2."""
    along = (v * grad).sum(-1, keepdim=True)
    return grad.addcmul_(v, along, value=-scale)
