"""Distances and log-sum-exps of whole matrices, in tiles that stay in a core's cache.

Each has its textbook formula beside it, and a gradient of its own that keeps one matrix at most.
"""

from typing import Any, cast

import torch
from torch import Tensor

from sslpipe.gradients import first_order

# In a log-sum-exp: a term that is not there. Finite, so that its gradient is 0; below the square of
# any float32, as rows that keep their lengths are compared in float64.
NEVER = {torch.float32: -1e30, torch.float64: -1e200}
TILE_NUMBERS = 2**16  # of a tile: it stays in a core's cache


def middle_row(rows: Tensor) -> Tensor:
    """Return the row nearest to the mean of rows (M, D), M > 0, as (D,) without gradient.

    Differences from a row are exact wherever those of the rows are, so distances that are equal
    stay equal; differences from the mean are rounded, each in its own way.
    """
    rows = rows.detach()
    apart = torch.linalg.vector_norm(rows - rows.mean(0), dim=1)
    return rows.index_select(0, apart.argmin()[None])[0]


def centered_columns(columns: Tensor) -> Tensor:
    """Subtract `middle_row`, which gets no gradient, from columns (M, D)."""
    return columns - middle_row(columns) if len(columns) else columns


def distances(a: Tensor, b: Tensor, *, squared: bool) -> Tensor:
    """Compute the Euclidean distances of rows, or their squares: (n, D), (M, D) -> (n, M).

    The textbook: torch.cdist(a, b). `middle_row` of b is subtracted from both sides first, so that
    a common offset costs no digits. Rows that rounding cannot tell apart have distance 0, without
    gradient.
    """
    return cast(Tensor, _Distances.apply(a, b, squared))


class _Distances(torch.autograd.Function):
    """In tiles: nothing else of size (n, M) is there, in backward nothing at all."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, squared: bool) -> Tensor:
        if len(b):  # distances know no origin, rounding does
            center = middle_row(b)
            a = a - center
            b = b - center
        length_a = a.square().sum(1, keepdim=True)
        length_b = b.square().sum(1)
        d = a.new_empty(len(a), len(b))
        for rows in tiles(len(a), len(b) // 4):  # wider than others, for the products' sake
            lengths = length_a[rows] + length_b
            tile = torch.addmm(lengths, a[rows], b.T, alpha=-2, out=d[rows])
            # what is left of |a|^2 + |b|^2 - 2ab by rounding alone is no distance; a product with
            # 0 or 1, as a boolean mask takes three times as long
            above = torch.sub(tile, lengths, alpha=8 * torch.finfo(d.dtype).eps, out=lengths)
            tile.mul_(above.clamp_min_(0).sign_())
            if not squared:
                tile.sqrt_()
        ctx.squared = squared
        ctx.save_for_backward(a, b, d)
        return d

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        a, b, d = ctx.saved_tensors
        grad_a = torch.empty_like(a)
        grad_b = torch.zeros_like(b)
        sum_b = b.new_zeros(len(b), 1)
        for rows in tiles(len(a), len(b) // 4):
            w = grad[rows] * d[rows].sign()  # of a pair: w (a - b), 0 where the distance is
            w = w.mul_(2) if ctx.squared else w.div_(d[rows].clamp_min(torch.finfo(d.dtype).tiny))
            grad_a[rows] = torch.addmm(w.sum(1, keepdim=True) * a[rows], w, b, alpha=-1)
            grad_b.addmm_(w.T, a[rows], alpha=-1)
            sum_b += w.sum(0)[:, None]
        return grad_a, grad_b.addcmul_(sum_b, b), None


def masked_lse(x: Tensor, mask: Tensor, scale: float = 1.0) -> Tensor:
    """Take the log of the sum of e^(scale x) over a row's mask: (n, M) -> (n,); empty: NEVER.

    The textbook: (scale * x).masked_fill(~mask, NEVER).logsumexp(1).
    """
    return cast(Tensor, _MaskedLSE.apply(x, mask, scale))


class _MaskedLSE(torch.autograd.Function):
    """In tiles; of the size of x it keeps the softmax alone, the gradient but for its scale."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, mask: Tensor, scale: float) -> Tensor:
        out = x.new_empty(len(x))
        softmax = torch.empty_like(x)
        never = NEVER[x.dtype]
        for rows in tiles(*x.shape):
            tile = torch.mul(x[rows], scale, out=softmax[rows]).masked_fill_(~mask[rows], never)
            top = tile.amax(1, keepdim=True).clamp_min_(never / 2)  # an empty row's terms are 0
            total = tile.sub_(top).exp_().sum(1, keepdim=True)
            total.clamp_min_(torch.finfo(x.dtype).tiny)
            tile.div_(total)
            out[rows] = top.add_(total.log_())[:, 0]
        ctx.scale = scale
        ctx.save_for_backward(softmax)
        return out

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (softmax,) = ctx.saved_tensors
        return softmax * (ctx.scale * grad)[:, None], None, None


def tiles(rows: int, numbers_a_row: int) -> list[slice]:
    """Part rows into blocks small enough for a core's cache."""
    size = max(1, TILE_NUMBERS // max(1, numbers_a_row))
    return [slice(start, min(start + size, rows)) for start in range(0, rows, size)]
