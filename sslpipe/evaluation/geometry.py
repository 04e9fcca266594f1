"""The shape of features: how many dimensions they use, and how evenly they fill the sphere."""

import math

import torch
from torch import Tensor

from sslpipe.precision import to_float64


def effective_rank(rows: Tensor) -> Tensor:
    """Compute exp(entropy of s / sum(s)), s the singular values of rows (R, D), in float64.

    From the smaller Gram matrix; NaN if one number is not finite. On the CPU for tensors on a
    device without float64.
    """
    rows = to_float64(rows)  # squaring halves the digits of small singular values
    gram = rows.T @ rows if rows.shape[0] >= rows.shape[1] else rows @ rows.T
    return rank_of(singular_values(gram))


def singular_values(gram: Tensor) -> Tensor:
    """Compute those of the rows with this Gram matrix (n, n), from the largest; or NaN."""
    if not bool(torch.isfinite(gram).all()):  # eigvalsh would raise
        return gram.new_full((len(gram),), math.nan)
    squares: Tensor = torch.linalg.eigvalsh(gram)
    return squares.clamp_min(0).sqrt().flip(0)


def rank_of(s: Tensor) -> Tensor:
    """Compute exp(entropy of s / sum(s)) of singular values s (n,)."""
    p = s / s.sum().clamp_min(torch.finfo(s.dtype).tiny)
    entropy: Tensor = torch.special.entr(p).sum()
    return entropy.exp()


def uniformity(u: Tensor) -> Tensor:
    """Compute the log of the mean of exp(-2 |u_i - u_j|^2) over i != j; 0 for a single row."""
    if len(u) < 2:
        return u.new_zeros(())
    u = u - u.mean(dim=0)  # distances know no origin, rounding does
    lengths = u.square().sum(dim=1)
    squared = torch.addmm(lengths + lengths[:, None], u, u.T, alpha=-2).clamp_min_(0)
    # less one: the distances of collapsed rows would be lost beside it
    less_one = squared.mul_(-2).expm1_().fill_diagonal_(0)  # (M, M)
    mean: Tensor = to_float64(less_one.sum(dim=1)).sum() / (len(u) * (len(u) - 1))
    return mean.log1p()
