"""One batch in several micro-batches: the memory of one, the negatives and the gradient of all."""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DistributedDataParallel

from sslpipe.distributed import current_rank, to_device
from sslpipe.models.state import evaluating
from sslpipe.models.sync_batchnorm import SyncBatchNorm
from sslpipe.precision import to_float64, wide_dtype


def micro_batch_rows(images: int, streams: int, micro_batches: int) -> list[Tensor]:
    """Choose which of a rank's rows each micro-batch takes: the k-th slice of every stream.

    Args:
        images: B rows on this rank, stream-major.
        streams: Of this rank.
        micro_batches: How many to make; they divide each stream's rows, as recipes are checked.

    Returns:
        micro_batches tensors (B / micro_batches,) int64.
    """
    rows = torch.arange(images).view(streams, micro_batches, -1)
    return [rows[:, k].flatten() for k in range(micro_batches)]


class GradientCache:
    """Embeds a batch one micro-batch at a time, and carries the loss's gradient back likewise.

    `embed` takes every micro-batch without gradient. The loss of all embeddings gives dL/dz.
    `backward` embeds every micro-batch again and carries its part of dL/dz back. Activations and
    views of one micro-batch are alive at a time; the gradient is that of one graph over the same
    micro-batches, over each of which BatchNorm normalises.

    Args:
        wrapped: The model, or DDP around it; ranks exchange gradients once.
        statistics: Of the model's BatchNorms, by the side of the views in pixels.
        rows: From `micro_batch_rows`.

    Source:
        Gao et al. 2021 (GradCache), arXiv:2101.06983, section 3.
    """

    def __init__(
        self, wrapped: nn.Module, statistics: Mapping[int, "PooledStatistics"], rows: list[Tensor]
    ) -> None:
        self._wrapped = wrapped
        self._statistics = statistics
        self._rows = rows
        self._step: _CachedStep | None = None  # between `embed` and `backward`

    def embed(self, make_views: Callable[[Tensor], Tensor], seed: Callable[[int], None]) -> Tensor:
        """Embed everything and keep no activations; the model's buffers stay as they were.

        Args:
            make_views: Rows (b,) -> views (2b, 3, S, S), the same ones each time.
            seed: Sets torch's generators for micro-batch k.

        Returns:
            z (2B, D) of the whole batch, first views first; its gradient is for `backward`.
        """
        wrapped = self._wrapped
        model = wrapped.module if isinstance(wrapped, DistributedDataParallel) else wrapped
        buffers = list(model.buffers())
        before = [buffer.clone() for buffer in buffers]
        # from micro-batch order to the batch's; on the device
        order = to_device(torch.cat(self._rows).argsort(), next(model.parameters()).device)
        with torch.no_grad():
            firsts = []
            seconds = []
            for k, part in enumerate(self._rows):
                seed(k)
                views = make_views(part)  # (2b, 3, S, S)
                side = views.shape[-1]
                z_a, z_b = model(views).chunk(2)  # (b, D) each
                del views  # those of one micro-batch are alive at a time
                firsts.append(z_a)
                seconds.append(z_b)
            z = torch.cat([torch.cat(firsts)[order], torch.cat(seconds)[order]])  # (2B, D)
            if buffers:  # torch takes no empty list
                torch._foreach_copy_(buffers, before)  # as if nothing had been
        self._step = _CachedStep(z.requires_grad_(), make_views, seed, side)
        return z

    def backward(self) -> None:
        """Add the gradient of the batch's loss to .grad, once its own backward ran. Collective."""
        assert self._step is not None
        z, make_views, seed, side = self._step
        self._step = None
        images = len(z) // 2
        # zero where the loss does not depend on z
        gradient = torch.zeros_like(z) if z.grad is None else z.grad
        of_view = gradient.chunk(2)
        with self._statistics[side].over_micro_batches(images // len(self._rows)) as note:
            for k, part in enumerate(self._rows):
                seed(k)
                with _exchange_gradients(self._wrapped, k == len(self._rows) - 1):
                    again = self._wrapped(make_views(part))  # (2b, D)
                    here = to_device(part, z.device)
                    again.backward(torch.cat([each[here] for each in of_view]).to(again.dtype))
                note()


class _CachedStep(NamedTuple):
    """What `GradientCache` keeps from a batch's embedding to its gradient."""

    z: Tensor
    make_views: Callable[[Tensor], Tensor]
    seed: Callable[[int], None]
    side: int  # of the views, in pixels


def _exchange_gradients(wrapped: nn.Module, now: bool) -> AbstractContextManager[None]:
    if now or not isinstance(wrapped, DistributedDataParallel):
        return nullcontext()
    return wrapped.no_sync()


class PooledStatistics:
    """Running statistics of a model's BatchNorms when one step's batch comes in micro-batches.

    They change once a step, by the mean and the unbiased variance of all micro-batches' values
    together, as one BatchNorm over the whole batch would have changed them had it seen these.

    Args:
        model: Bare; left as it was.
        views: (2, 3, S, S), two views as the model takes them; their values do not matter.
    """

    def __init__(self, model: nn.Module, views: Tensor) -> None:
        seen = _values_per_channel(model, views)
        self._norms = [norm for norm, _ in seen]
        # a SyncBatchNorm sees the rows of all ranks
        world = current_rank().world_size
        counts = [count * (world if isinstance(n, SyncBatchNorm) else 1) for n, count in seen]
        widths = [norm.num_features for norm in self._norms]
        self._widths = widths
        # of each channel, C over all norms: its norm, and its values for one image here
        norm_of = torch.arange(len(counts)).repeat_interleave(torch.tensor(widths).long())  # (C,)
        self._norm_of = norm_of.to(views.device)
        # of each norm; NaN: none, then its statistics are averages over all steps
        momenta = [math.nan if norm.momentum is None else norm.momentum for norm in self._norms]
        self._momenta = torch.tensor(momenta, dtype=wide_dtype(views.device), device=views.device)
        per_image = torch.tensor(counts, dtype=torch.float64)[norm_of]
        self._per_image = per_image.to(to_float64(views.new_zeros(())).device)  # if float64 can be

    @contextmanager
    def over_micro_batches(self, images: int) -> Iterator[Callable[[], None]]:
        """Yield what to call after each micro-batch of `images` images on this rank.

        On leaving, the running statistics are what they were before, moved on by one step.
        """
        norms = self._norms
        if not norms:
            yield lambda: None
            return
        momenta = [norm.momentum for norm in norms]
        before = self._running()
        steps = torch.stack([_tracked(norm) for norm in norms])  # (norms,)
        moments: list[Tensor] = []  # of each micro-batch
        for norm in norms:
            norm.momentum = 1.0  # a forward leaves its own moments
        try:
            yield lambda: moments.append(self._running())
        finally:
            for norm, momentum in zip(norms, momenta, strict=True):
                norm.momentum = momentum
        pooled = self._pooled(moments, images)
        steps = steps + 1
        averaged = torch.isnan(self._momenta)  # over all steps
        rates = torch.where(averaged, steps.to(self._momenta.dtype).reciprocal(), self._momenta)
        if not all(norm.training for norm in norms):  # a frozen one keeps its statistics
            frozen = torch.tensor([not norm.training for norm in norms], device=rates.device)
            rates = rates.masked_fill(frozen, 0)
            steps = steps - frozen.to(steps)
        rate = rates.to(before.dtype)[self._norm_of]
        now = before.lerp(pooled, rate)
        for norm, mean, var in zip(norms, *(row.split(self._widths) for row in now), strict=True):
            _kept(norm.running_mean).copy_(mean)
            _kept(norm.running_var).copy_(var)
        torch._foreach_copy_([_tracked(norm) for norm in norms], list(steps.unbind()))

    def _running(self) -> Tensor:
        """(2, C): means and unbiased variances, the norms' channels one after another."""
        means = torch.cat([_kept(norm.running_mean) for norm in self._norms])
        return torch.stack([means, torch.cat([_kept(norm.running_var) for norm in self._norms])])

    def _pooled(self, parts: list[Tensor], images: int) -> Tensor:
        """Mean and unbiased variance (2, C) of all values, from those of equal parts of them."""
        n = self._per_image * images  # (C,) values of a channel in one part
        means, variances = to_float64(torch.stack(parts)).unbind(1)  # (K, C) each
        mean = means.mean(0)
        squares = ((n - 1) * variances + n * (means - mean).square()).sum(0)
        var = squares / (n * len(parts) - 1).clamp_min(1)
        return torch.stack([mean, var]).to(parts[0])  # dtype and device


def _values_per_channel(model: nn.Module, views: Tensor) -> list[tuple[_BatchNorm, int]]:
    """Count the values a channel sees for one image, both views, of each norm in use."""
    seen: dict[_BatchNorm, int] = {}

    def look(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        assert isinstance(norm, _BatchNorm)
        if norm in seen:
            raise TypeError(
                "a BatchNorm that is used twice in a forward has no defined running statistics "
                "over micro-batches; drop data.micro_batch, or take another backbone"
            )
        seen[norm] = inputs[0].numel() // norm.num_features

    norms = [m for m in model.modules() if isinstance(m, _BatchNorm) and m.running_mean is not None]
    handles = [norm.register_forward_pre_hook(look) for norm in norms]
    before = [buffer.clone() for buffer in model.buffers()]
    try:
        with evaluating(model), torch.no_grad():
            model(views)
    finally:
        for handle in handles:
            handle.remove()
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
    return list(seen.items())


def _kept(statistic: Tensor | None) -> Tensor:
    assert statistic is not None
    return statistic


def _tracked(norm: _BatchNorm) -> Tensor:
    return _kept(norm.num_batches_tracked)
