"""Textbook formulas of what torch has on CUDA only, in float64 on the CPU, by torch's names.

`batch_norm_gather_stats_with_counts` merges rank after rank as the kernel does, so a rank without
rows gives the same NaN.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _over_rows(x: Tensor) -> list[int]:
    return [0, *range(2, x.dim())]


def _by_channel(values: Tensor, x: Tensor) -> Tensor:
    return values.double().view(1, -1, *[1] * (x.dim() - 2))


def batch_norm_stats(x: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    dtype = torch.promote_types(x.dtype, torch.float32)
    var, mean = torch.var_mean(x.double(), _over_rows(x), correction=0)
    return mean.to(dtype), (var + eps).rsqrt().to(dtype)


def batch_norm_gather_stats_with_counts(  # type: ignore[no-untyped-def]
    x, means, invstds, running_mean, running_var, momentum, eps, counts
):
    expected = x.dtype if running_mean is None else running_mean.dtype
    assert counts.dtype == expected, "the kernel reads counts as this"
    mean, squares = torch.zeros(2, means.shape[1], dtype=torch.float64).unbind()
    total = torch.zeros((), dtype=torch.float64)
    for own_mean, invstd, count in zip(
        means.double(), invstds.double(), counts.double(), strict=True
    ):
        share = 1 / (total + count)
        squares = squares + (invstd**-2 - eps) * count
        squares = squares + (mean - own_mean) ** 2 * total * count * share
        mean = total * share * mean + count * share * own_mean
        total = total + count
    if running_mean is not None:
        running_mean.mul_(1 - momentum).add_(momentum * mean)
        running_var.mul_(1 - momentum).add_(momentum * squares / (total - 1))
    return mean.to(means.dtype), (squares / total + eps).rsqrt().to(means.dtype)


def batch_norm_elemt(x, weight, bias, mean, invstd, eps):  # type: ignore[no-untyped-def]
    y = (x.double() - _by_channel(mean, x)) * _by_channel(invstd, x)
    if weight is not None:
        y = y * _by_channel(weight, x) + _by_channel(bias, x)
    return _like(y, x)


def batch_norm_backward_reduce(dy, x, mean, invstd, weight, *wanted):  # type: ignore[no-untyped-def]
    plain = dy.double().sum(_over_rows(x))
    products = (dy.double() * (x.double() - _by_channel(mean, x))).sum(_over_rows(x))
    grad_weight = products * invstd.double()
    of_weight = mean.dtype if weight is None else weight.dtype
    dtypes = mean.dtype, mean.dtype, of_weight, of_weight
    return tuple(
        value.to(dtype) if want else torch.empty(0)
        for value, dtype, want in zip(
            (plain, products, grad_weight, plain), dtypes, (wanted[0], *wanted), strict=True
        )
    )


def batch_norm_backward_elemt(  # type: ignore[no-untyped-def]
    dy, x, mean, invstd, weight, sum_dy, sum_dy_xmu, counts
):
    assert counts.dtype == torch.int32
    total = counts.double().sum()
    centred = x.double() - _by_channel(mean, x)
    scale = invstd.double() ** 2 / total
    dx = dy.double() - _by_channel(sum_dy / total, x) - centred * _by_channel(scale * sum_dy_xmu, x)
    gain = invstd if weight is None else invstd.double() * weight.double()
    return _like(dx * _by_channel(gain, x), x)


def cudnn_batch_norm(x, weight, bias, mean, var, training, momentum, eps):  # type: ignore[no-untyped-def]
    out = torch.native_batch_norm(x, weight, bias, mean, var, training, momentum, eps)
    return *out, torch.empty(0, dtype=torch.uint8)


def cudnn_batch_norm_backward(x, dy, weight, mean, var, save_mean, save_invstd, eps, reserve):  # type: ignore[no-untyped-def]
    return torch.ops.aten.native_batch_norm_backward(
        dy, x, weight, mean, var, save_mean, save_invstd, True, eps, [True] * 3
    )


def log_sigmoid_backward(dy, x, buffer):  # type: ignore[no-untyped-def]
    """The CPU's own wants the buffer, which CUDA's forward leaves empty."""
    return dy * torch.sigmoid(-x)


def _like(y: Tensor, x: Tensor) -> Tensor:
    return torch.empty_like(x).copy_(y)


SYNC_BATCHNORM: dict[str, Callable[..., Any]] = {
    formula.__name__: formula
    for formula in (
        batch_norm_stats,
        batch_norm_gather_stats_with_counts,
        batch_norm_elemt,
        batch_norm_backward_reduce,
        batch_norm_backward_elemt,
    )
}
CUDA_ONLY = {
    **SYNC_BATCHNORM,
    "cudnn_batch_norm": cudnn_batch_norm,
    "cudnn_batch_norm_backward": cudnn_batch_norm_backward,
    "log_sigmoid_backward": log_sigmoid_backward,
}
