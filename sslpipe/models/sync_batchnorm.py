"""BatchNorm over the global batch, on CPU and CUDA: what one process would compute."""

from functools import lru_cache
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from sslpipe.distributed import all_gather_single, current_rank
from sslpipe.gradients import first_order


def sync_batchnorm(module: nn.Module, world: int) -> nn.Module:
    """Replace every BatchNorm of the module by `SyncBatchNorm`, in place.

    Parameters, buffers, their names, mode and device stay, so checkpoints and exports are
    unchanged. A norm that applies children afterwards (timm's BatchNormAct2d: drop, act) keeps
    them.

    Args:
        module: the model, before DDP wraps it.
        world: number of processes; with 1 nothing is replaced.

    Returns:
        The module, or its replacement where it is a BatchNorm itself.

    Raises:
        TypeError: a BatchNorm subclass whose forward is not known to be one of these.
        ValueError: DDP wraps the module already.
    """
    if isinstance(module, DistributedDataParallel):
        raise ValueError("BatchNorm is made global before DDP wraps the model, not after")
    if world == 1:
        return module
    if isinstance(module, _BatchNorm):
        return module if isinstance(module, SyncBatchNorm) else _converted(module)
    for name, child in module.named_children():
        setattr(module, name, sync_batchnorm(child, world))
    return module


def _converted(norm: _BatchNorm) -> "SyncBatchNorm":
    plain = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm)
    children = [name for name, _ in norm.named_children()]
    if type(norm) not in plain and children != ["drop", "act"]:
        raise TypeError(
            f"{type(norm).__module__}.{type(norm).__qualname__} is a BatchNorm with a forward of"
            " its own; use another backbone"
        )
    new = SyncBatchNorm(
        num_features=norm.num_features,
        eps=norm.eps,
        momentum=norm.momentum,
        affine=norm.affine,
        track_running_stats=norm.track_running_stats,
    )
    new.__dict__.update(training=norm.training)
    # as they are: a momentum encoder's weight and bias are buffers
    new._parameters = norm._parameters
    new._buffers = norm._buffers
    new._modules.update(norm._modules)
    return new


class SyncBatchNorm(_BatchNorm):
    """BatchNorm whose training statistics are those of all ranks' rows together.

    Value, gradient and running statistics equal one process's nn.BatchNorm on the concatenated
    batch, also when ranks hold different numbers of rows (even none). Statistics are computed in
    float32 at least, in one small collective each way. The gradients of weight and bias are this
    rank's share; DDP's mean completes them. In eval mode: plain BatchNorm. torch's SyncBatchNorm is
    refused by DDP on CPU, and waits for the device three times a layer.

    Args:
        num_features: channels; this and the other arguments are those of nn.BatchNorm.

    Shape:
        (rows, channels, ...) -> the same, in the same dtype and memory format.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Normalise x by the statistics of all ranks' rows; in eval mode, by the running ones."""
        if x.dim() < 2:
            raise ValueError(f"BatchNorm needs (rows, channels, ...), got shape {tuple(x.shape)}")
        mean = self.running_mean
        var = self.running_var
        if self.training or mean is None:
            y = self._normalised_by_batch(x)
        else:
            y = F.batch_norm(x, mean, var, self.weight, self.bias, False, 0.0, self.eps)
        for child in self.children():
            y = child(y)
        return y

    def _normalised_by_batch(self, x: Tensor) -> Tensor:
        running = self._running() if self.training else None
        if _has_fused_kernels(x):
            y = _FusedNormalise.apply(x, self.weight, self.bias, *(running or _NONE), self.eps)
            return cast(Tensor, y)
        with torch.no_grad():
            mean, var, count = global_moments(x.detach())
            if running is not None:
                running_mean, running_var, momentum = running
                unbiased = var * (count / (count - 1).clamp_min(1))
                running_mean.lerp_(mean.to(running_mean.dtype), momentum)
                running_var.lerp_(unbiased.to(running_var.dtype), momentum)
        y = _Normalise.apply(x, self.weight, self.bias, mean, var, count, self.eps)
        return cast(Tensor, y)

    def _running(self) -> tuple[Tensor, Tensor, float] | None:
        """Running mean, variance and the new batch's weight in them; None without them."""
        if self.running_mean is None:
            return None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        momentum = self.momentum
        if momentum is None:  # a plain average over all batches so far
            momentum = 1.0 / float(self.num_batches_tracked)
        return self.running_mean, self.running_var, momentum


_NONE = (None, None, 0.0)  # no running statistics


def _has_fused_kernels(x: Tensor) -> bool:
    """Whether torch has its own SyncBatchNorm's kernels on this device; ROCm's count as CUDA."""
    return x.is_cuda


class _FusedNormalise(torch.autograd.Function):
    """What `global_moments` and `_Normalise` compute, by CUDA's kernels, without a wait.

    Forward: mean and 1 / sqrt(var + eps) of the own rows, one gather of (2C + 1,) numbers, one
    kernel that merges them by Chan's formula and moves the running statistics, one that normalises.
    Backward: the two sums, one reduction of (2C,), one kernel for dx. Float32 at least, as
    nn.BatchNorm on one GPU.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        running_mean: Tensor | None,
        running_var: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        x = x.contiguous(memory_format=_memory_format(x))
        channels = x.shape[1]
        dtype = _wide_dtype(x)
        rows = x.numel() // channels
        if rows:
            mean, invstd = torch.batch_norm_stats(x, eps)
        else:
            mean = torch.zeros(channels, dtype=dtype, device=x.device)
            invstd = torch.ones_like(mean)
        mine = torch.cat([mean, invstd, _row_count(rows, dtype, x.device)])  # (2C + 1,)
        everyone = _gathered(mine)  # (W, 2C + 1)
        # (W, C) each
        means = everyone[:, :channels]
        invstds = everyone[:, channels:-1]
        counts = everyone[:, -1]  # (W,)
        mean, invstd = torch.batch_norm_gather_stats_with_counts(
            mean,  # for its dtype, where there are no running statistics
            means,
            invstds,
            running_mean,
            running_var,
            momentum,
            eps,
            counts if running_mean is None else counts.to(running_mean.dtype),
        )
        ctx.save_for_backward(x, weight, mean, invstd, counts.to(torch.int32))
        if not rows:
            return torch.empty_like(x)
        return torch.batch_norm_elemt(x, weight, bias, mean, invstd, eps)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, invstd, counts = ctx.saved_tensors
        dy = grad.contiguous(memory_format=_memory_format(x))
        affine = weight is not None
        grad_weight = grad_bias = None
        if x.numel():
            *sums, grad_weight, grad_bias = torch.batch_norm_backward_reduce(
                dy, x, mean, invstd, weight, True, affine, affine
            )
            both = torch.cat(sums)  # (2C,): of dy, and of dy (x - mean)
        else:
            both = mean.new_zeros(2 * len(mean))
            if affine:
                grad_weight = grad_bias = torch.zeros_like(weight)
        if current_rank().world_size > 1:
            dist.all_reduce(both)
        grad_x = torch.empty_like(x)
        if x.numel():
            weight = weight.to(mean.dtype) if affine else None
            sum_dy, sum_dy_x = both.chunk(2)
            grad_x = torch.batch_norm_backward_elemt(
                dy, x, mean, invstd, weight, sum_dy, sum_dy_x, counts
            )
        grads = (grad_weight, grad_bias) if affine else (None, None)
        return grad_x, *grads, None, None, None, None


@lru_cache(maxsize=256)
def _row_count(rows: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Make the number of rows a tensor (1,), once for each; shared: not to be changed."""
    # of no rows: with 0 the kernel that merges would divide 0 by 0, and this it rounds away
    return torch.full((1,), rows or 1e-30, dtype=dtype, device=device)


def _gathered(mine: Tensor) -> Tensor:
    """Gather the numbers (n,) of all ranks, (W, n)."""
    world = current_rank().world_size
    if world == 1:
        return mine[None]
    everyone = mine.new_empty((world, mine.numel()))
    all_gather_single(everyone.view(-1), mine)
    return everyone


def global_moments(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Compute mean, biased variance and count per channel over the rows of all ranks. Collective.

    Each rank's squares are about its own mean, and the parts are merged in float64 by Chan's
    formula, so a mean far larger than the spread costs no digits.

    Args:
        x: (rows, C, ...), any float dtype.

    Returns:
        Mean (C,), variance (C,) and count (), float64.
    """
    channels = x.shape[1]
    count = x.numel() // channels
    parts = x.new_zeros((2, channels), dtype=torch.float64)
    if count:
        # what nn.BatchNorm itself computes: squares about the mean, summed in float32 at least
        unused = torch.zeros(2, channels, dtype=_wide_dtype(x), device=x.device)  # sets the dtype
        local_mean, local_var = torch.batch_norm_update_stats(x, unused[0], unused[1], 0.0)
        parts[0] = local_mean.double()
        parts[1] = local_var.double() * count
    everyone = _gathered(torch.cat([parts.flatten(), parts.new_full((1,), count)]))  # (W, 2C + 1)
    # (W, C) each
    means = everyone[:, :channels]
    squares = everyone[:, channels:-1]
    counts = everyone[:, -1:]  # (W, 1)
    total = counts.sum()
    mean = (counts * means).sum(0) / total
    squares = (squares + counts * (means - mean).square()).sum(0)
    return mean, squares / total, total


class _Normalise(torch.autograd.Function):
    """y = weight (x - mean) / sqrt(var + eps) + bias, differentiated through the global moments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        var: Tensor,
        count: Tensor,
        eps: float,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, var, count)
        ctx.eps = eps
        scale = (var + eps).rsqrt()  # (C,) float64
        gain = scale if weight is None else scale * weight.double()
        offset = -gain * mean if bias is None else bias.double() - gain * mean
        return _affine(x, gain, offset)

    @staticmethod
    @first_order
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var, count = ctx.saved_tensors
        dy = grad.contiguous(memory_format=_memory_format(x))
        scale = (var + ctx.eps).rsqrt()  # (C,) float64
        # local sums of dy (x - mean) and of dy: the gradients of weight (unscaled) and bias
        dy_x, dy_1 = _channel_sums(dy, x, mean.to(_wide_dtype(x)))
        grad_weight = dy_x.double() * scale
        grad_bias = dy_1.double()
        sums = torch.stack([grad_weight, grad_bias])  # (2, C)
        if current_rank().world_size > 1:
            dist.all_reduce(sums)
        # dx = weight * scale * (dy - mean(dy) - xhat mean(dy xhat)), gathered per channel
        gain = scale if weight is None else scale * weight.double()
        slope = -gain * scale * sums[0] / count
        offset = -gain * sums[1] / count - slope * mean
        grad_x = _affine(dy, gain, offset).add_(_affine(x, slope, torch.zeros_like(slope)))
        if weight is None:
            return grad_x, None, None, None, None, None, None
        grads = grad_weight.to(weight.dtype), grad_bias.to(weight.dtype)
        return grad_x, *grads, None, None, None, None


def _channel_sums(factor: Tensor, x: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """(C,) sums of factor * (x - mean) and of factor, in one pass over memory."""
    if not x.numel():
        return torch.zeros_like(mean), torch.zeros_like(mean)
    # the backward of an eval-mode BatchNorm with unit variance computes exactly these two sums
    _, products, plain = torch.ops.aten.native_batch_norm_backward(
        factor, x, None, mean, torch.ones_like(mean), None, None, False, 0.0, [False, True, True]
    )
    return products, plain


def _affine(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    """Compute gain * x + offset by channel in one pass; dtype and memory format are those of x."""
    dtype = _wide_dtype(x)  # an eval-mode BatchNorm computes in this one and rounds once
    one = torch.ones_like(gain, dtype=dtype)
    zero = torch.zeros_like(one)
    # not F.batch_norm: in torch 2.11 it refuses eps = 0
    return torch.batch_norm(
        input=x,
        weight=gain.to(dtype),
        bias=offset.to(dtype),
        running_mean=zero,
        running_var=one,
        training=False,
        momentum=0.0,
        eps=0.0,
        cudnn_enabled=torch.backends.cudnn.enabled,
    )


def _wide_dtype(x: Tensor) -> torch.dtype:
    return torch.promote_types(x.dtype, torch.float32)


def _memory_format(x: Tensor) -> torch.memory_format:
    if x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last):
        return torch.channels_last
    if x.dim() == 5 and x.is_contiguous(memory_format=torch.channels_last_3d):
        return torch.channels_last_3d
    return torch.contiguous_format
