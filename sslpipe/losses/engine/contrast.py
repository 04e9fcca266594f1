"""What losses over in-batch negatives share: gather, sums over negatives in tiles, exact gradient.

The textbook, on one process, with the matrix of all pairs:

    v = F.normalize(z, dim=1) / sqrt(temperature)             # (2N, D), both views of N images
    s = (v @ v.T).masked_fill(same_group, -inf)               # (2N, 2N), nats; own image is masked
    sums = torch.logsumexp(s, dim=1)                          # (2N,), over an anchor's negatives
    loss = row_loss(v, sums)                                  # NT-Xent: softplus(sums - positive)
    loss.backward()

`contrast` does the same over all ranks in memory O(N D + one tile). An objective writes its
`row_loss` in plain torch over O(N D) numbers; what needs all pairs, the sums and their gradient, is
made here in tiles:

    dL/dv_i = d(row_loss)/dv_i + sum_j (g_i p_ij + g_j p_ji) v_j
    p_ij = exp(s_ij - sums_i),  g_i = d(row_loss)/d(sums_i)
"""

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from sslpipe.distributed import Rank, all_gather_rows, current_rank, to_device
from sslpipe.gradients import first_order
from sslpipe.losses.engine.anchors import Anchors, Masks
from sslpipe.losses.engine.tiles import ONE_SUM, Term, Tiles, fast_kernels
from sslpipe.precision import wide_dtype

Sums = tuple[Tensor, ...]
RowLoss = Callable[[Tensor, Sums, Anchors], Tensor]
Derivatives = Callable[[Tensor, Sums, Anchors], tuple[Tensor, Tensor, Tensor]]


class Engine(NamedTuple):
    """How the sums over negatives are made: settings of a `ContrastiveObjective` and its terms."""

    temperature: float
    tile_rows: int | None = None
    terms: tuple[Term, ...] = ONE_SUM

    @property
    def largest(self) -> float:
        """No |similarity| is above this, nats."""
        return 1 / self.temperature

    def tile_rows_on(self, device: torch.device) -> int:
        """Rows and columns of a tile."""
        return self.tile_rows or (512 if device.type == "cpu" else 4096)


def contrast(
    z_a: Tensor,
    z_b: Tensor,
    anchors: Anchors,
    row_loss: RowLoss,
    engine: Engine,
    derivatives: Derivatives,
) -> Tensor:
    """Compute row_loss over the global batch, with W times its complete gradient.

    Args:
        z_a: (B, D) of this rank, any scale.
        z_b: the same.
        anchors: who is whose negative.
        row_loss: (v, sums, anchors) -> (); see `InBatchLoss.row_loss`.
        engine: how the sums are made.
        derivatives: row_loss with its gradient; see `InBatchLoss.derivatives`.

    Returns:
        (), equal on all ranks. The gradient is made here, so backward communicates nothing.
    """
    needs_grad = torch.is_grad_enabled() and (z_a.requires_grad or z_b.requires_grad)
    with torch.no_grad(), without_autocast(z_a.device.type):
        loss, grad = _loss_and_grad(
            z_a, z_b, anchors, row_loss, engine, derivatives if needs_grad else None
        )
    return loss if grad is None else with_gradient(loss, grad, z_a, z_b)


def differentiate(
    row_loss: RowLoss, v: Tensor, sums: Sums, anchors: Anchors
) -> tuple[Tensor, Tensor, Tensor]:
    """Return row_loss (), and by autograd its gradient in v (N, 2, D) and in sums (terms, N, 2)."""
    with torch.enable_grad():
        leaves = [x.detach().requires_grad_() for x in (v, *sums)]
        loss = row_loss(leaves[0], tuple(leaves[1:]), anchors)
        grad_v, *grad_sums = torch.autograd.grad(loss, leaves)
    return loss.detach(), grad_v, torch.stack(grad_sums)


class _Layout(NamedTuple):
    """Which images stand in the tiles' rows (this rank's) and columns (everyone's); None: all.

    mine: this rank's images in rank order. With masks, rows and columns are sorted by the first of
    their numbers, so that few tiles hold masked pairs; masks: of their views, (2B,) and (2N,).
    """

    alone: bool
    mine: slice
    rows: Tensor | slice | None
    columns: Tensor | None = None
    masks: Masks | None = None

    @classmethod
    def plan(cls, anchors: Anchors, process: Rank, device: torch.device) -> "_Layout":
        alone = process.world_size == 1
        first = sum(anchors.counts[: process.rank])
        mine = slice(first, first + anchors.counts[process.rank])
        if anchors.masks is None:
            return cls(alone, mine, None if alone else mine)
        columns = anchors.masks.numbers[:, 0].argsort(stable=True)
        rows = columns[(columns >= mine.start) & (columns < mine.stop)]
        masks = anchors.masks.select(rows, columns)
        return cls(alone, mine, to_device(rows, device), to_device(columns, device), masks)

    def make_tiles(self, v: Tensor, engine: Engine) -> Tiles:
        columns = _select(v, self.columns).flatten(0, 1)  # (2N, D)
        rows = columns if self.alone else _select(v, self.rows).flatten(0, 1)  # (2B, D)
        return Tiles(
            rows,
            columns,
            largest=engine.largest,
            tile_rows=engine.tile_rows_on(v.device),
            terms=engine.terms,
            symmetric=self.alone,
            pairs_at=2 * self.mine.start if self.masks is None else None,
            masks=self.masks,
        )


def _loss_and_grad(
    z_a: Tensor,
    z_b: Tensor,
    anchors: Anchors,
    row_loss: RowLoss,
    engine: Engine,
    derivatives: Derivatives | None,
) -> tuple[Tensor, Tensor | None]:
    """Return the global loss () and, with `derivatives`, W times this rank's gradient (B, 2, D)."""
    process = current_rank()
    counts = anchors.counts

    # gather: every rank gets all views and computes their directions, v . v a similarity in nats
    wide = torch.float64 if z_a.dtype == torch.float64 else torch.float32
    v, scales = normalised(
        all_gather_rows(torch.stack([z_a, z_b], dim=1), counts).to(wide), engine.temperature**-0.5
    )  # (N, 2, D), (N, 2, 1)
    layout = _Layout.plan(anchors, process, v.device)
    tiles = layout.make_tiles(v, engine)

    with fast_kernels(v, (2 * anchors.images) ** 2):
        # forward: each rank sums over its own anchors' negatives, then all know all sums
        sums = tiles.log_sums().view(len(engine.terms), -1, 2)  # (terms, B, 2)
        sums = _gather_sums(sums, layout, counts, v)  # (terms, N, 2)
        if derivatives is None:
            return row_loss(v, sums.unbind(), anchors), None

        # gradient: through row_loss as written, then through the sums, of this rank's rows
        loss, grad, grad_sums = derivatives(v, sums.unbind(), anchors)  # grad: (N, 2, D)
        _add_gradient_through_sums(
            grad=grad, tiles=tiles, layout=layout, grad_sums=grad_sums, sums=sums
        )

    # from directions to this rank's z; times W, as DDP takes the mean over the ranks
    if not layout.alone:
        v = v[layout.mine]
        scales = scales[layout.mine] * process.world_size
        grad = grad[layout.mine].clone()  # what waits for backward is not everyone's
    return loss, project_out(grad, v, engine.temperature).mul_(scales)


def _gather_sums(sums: Tensor, layout: _Layout, counts: tuple[int, ...], v: Tensor) -> Tensor:
    """Bring this rank's (terms, B, 2), in the order of its tiles, to all images' (terms, N, 2)."""
    if layout.rows is not None:
        placed = v.new_empty(len(sums), *v.shape[:2])  # (terms, N, 2)
        placed[:, layout.rows] = sums
        sums = placed
    if layout.alone:
        return sums
    return all_gather_rows(sums[:, layout.mine].transpose(0, 1), counts).transpose(0, 1)


def _add_gradient_through_sums(
    grad: Tensor, tiles: Tiles, layout: _Layout, grad_sums: Tensor, sums: Tensor
) -> None:
    """Add it to this rank's rows of grad (N, 2, D), in place."""
    row_grad = _of_anchors(grad_sums, layout.rows)
    row_sums = _of_anchors(sums, layout.rows)
    column_terms = None
    if not layout.alone:
        column_terms = _of_anchors(grad_sums, layout.columns), _of_anchors(sums, layout.columns)
    if isinstance(layout.rows, Tensor):  # sorted by group: not a view of grad
        part = torch.zeros_like(tiles.rows)
        tiles.add_gradient(part, row_grad, row_sums, column_terms)
        grad[layout.rows] += part.view(-1, *grad.shape[1:])
    else:
        part = _select(grad, layout.rows).view_as(tiles.rows)
        tiles.add_gradient(part, row_grad, row_sums, column_terms)


def _select(x: Tensor, images: Tensor | slice | None) -> Tensor:
    return x if images is None else x[images]


def _of_anchors(numbers: Tensor, images: Tensor | slice | None) -> Tensor:
    """(terms, N, 2) -> (terms, 2n): those of these images, None: of all."""
    return (numbers if images is None else numbers[:, images]).flatten(1)


def normalised(z: Tensor, length: float = 1.0) -> tuple[Tensor, Tensor]:
    """Scale the rows of z (..., D) to that length, outside of autograd.

    Squares of float32 are summed in float64, whose range they cannot leave.

    Returns:
        The rows, and what each was multiplied by (..., 1): 0 where a row is zero, or shorter than
        length / 3e38 in float32.
    """
    largest = None
    if z.dtype == torch.float64:
        largest = z.abs().amax(-1, keepdim=True).clamp_min_(torch.finfo(z.dtype).tiny)
        z = z / largest
    norms = torch.linalg.vector_norm(z, dim=-1, keepdim=True, dtype=wide_dtype(z.device))
    factors = norms.reciprocal_().mul_(length).to(z.dtype)
    factors = factors.nan_to_num_(nan=math.nan, posinf=0)  # 1 / 0 is 0, and NaN is to be seen
    return z * factors, factors if largest is None else factors / largest


def project_out(grad: Tensor, v: Tensor, scale: float) -> Tensor:
    """Take the part of grad along v away, in place: cosines know no length. scale: 1 / |v|^2."""
    along = (v * grad).sum(-1, keepdim=True)
    return grad.addcmul_(v, along, value=-scale)


def without_autocast(device_type: str) -> AbstractContextManager[object]:
    """Turn autocast off inside, if it is on: to ask first saves a twentieth of 128 rows' time."""
    if torch.is_autocast_enabled(device_type):
        return torch.autocast(device_type, enabled=False)
    return nullcontext()


def with_gradient(loss: Tensor, grad: Tensor, *inputs: Tensor) -> Tensor:
    """Attach a gradient that is known already to a loss.

    Args:
        loss: ().
        grad: (B, inputs, D).
        inputs: (B, D) each, what the loss was made from.
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
    @first_order
    def backward(ctx: Any, upstream: Tensor) -> tuple[Tensor | None, ...]:
        (grad,) = ctx.saved_tensors
        return None, *(grad * upstream).to(ctx.dtype).unbind(1)
