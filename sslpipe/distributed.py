"""What the ranks of a run say to each other; with no process group everything is the identity.

Every function here except `current_rank` is collective: all ranks call it, in the same order.
"""

from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

T = TypeVar("T")


class Rank(NamedTuple):
    """This process's place among all: `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1


def current_rank() -> Rank:
    """This process in the default process group; Rank(0, 1) when there is none."""
    if dist.is_available() and dist.is_initialized():
        return Rank(dist.get_rank(), dist.get_world_size())
    return Rank()


def row_counts(rows: int, device: torch.device | str = "cpu") -> tuple[int, ...]:
    """How many rows each rank holds, in rank order. device: where the rows are."""
    world = current_rank().world_size
    if world == 1:
        return (rows,)
    counts = torch.empty(world, dtype=torch.int64, device=device)
    dist.all_gather_into_tensor(counts, torch.tensor([rows], device=device))
    return tuple(counts.tolist())


def all_gather_rows(x: Tensor, counts: tuple[int, ...] | None = None) -> Tensor:
    """(rows here, ...) -> (rows of all ranks, ...) in rank order, without gradient.

    counts: what `row_counts` gave, if it is known already. Row counts may differ between ranks
    (the shorter ones are padded on the way); everything behind the first dimension may not.
    """
    if current_rank().world_size == 1:
        return x.detach()
    counts = counts or row_counts(x.shape[0], x.device)
    longest = max(counts)
    padded = _pad_rows(x.detach(), longest)
    everyone = padded.new_empty((len(counts) * longest, *x.shape[1:]))
    dist.all_gather_into_tensor(everyone, padded)
    if min(counts) == longest:
        return everyone
    parts = torch.split(everyone, longest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def gather_with_grad(x: Tensor) -> Tensor:
    """(rows here, ...) -> (rows of all ranks, ...) in rank order; backward sums over the ranks.

    A row's gradient is the sum of what every rank's loss says about it. So with a local loss that
    is a mean over the own rows, DDP's mean of the gradients is the gradient of the global mean.
    Row counts may differ between ranks.
    """
    if current_rank().world_size == 1:
        return x
    return cast(Tensor, _GatherWithGrad.apply(x))


class _GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.counts = row_counts(x.shape[0], x.device)
        return all_gather_rows(x, ctx.counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        longest = max(ctx.counts)
        padded = torch.cat([_pad_rows(part, longest) for part in torch.split(grad, ctx.counts)])
        mine = grad.new_empty((longest, *grad.shape[1:]))
        dist.reduce_scatter_tensor(mine, padded)  # a sum
        return mine[: ctx.counts[current_rank().rank]]


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros((rows - x.shape[0], *x.shape[1:]))])


def global_row_mean(values: Tensor) -> Tensor:
    """(rows here,) -> (): local sum / (global rows / world).

    Its mean over the ranks is the mean over all rows, in value and, as DDP averages gradients, in
    gradient: exactly one process's, also when the ranks hold different numbers of rows.
    """
    process = current_rank()
    rows = sum(row_counts(values.shape[0], values.device))
    return values.sum() * (process.world_size / rows)


def global_sum(values: Tensor) -> Tensor:
    """Each entry's sum over the ranks, the same on all, without gradient."""
    values = values.detach()
    if current_rank().world_size == 1:
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values


def global_mean(total: Tensor, count: Tensor) -> Tensor:
    """Sum over the ranks of `total` / sum over the ranks of `count`; 0 where nothing was counted.

    Both have one shape, (T,) say, counts in total's dtype. The value is the same on all ranks; the
    gradient is W times that of the own part, so that DDP's mean is one process's gradient.
    """
    sums, counts = global_sum(torch.stack([total.detach(), count])).unbind()
    scale = 1 / counts.clamp_min(1)
    own = total * (current_rank().world_size * scale)
    return own - own.detach() + sums * scale  # the difference is exactly 0


def agree(flag: bool) -> bool:
    """True on all ranks as soon as `flag` is true on any."""
    if current_rank().world_size == 1:
        return flag
    votes = torch.tensor([float(flag)], device=message_device())
    dist.all_reduce(votes, op=dist.ReduceOp.MAX)
    return bool(votes.item() > 0)


def broadcast_object(value: T) -> T:
    """Rank 0's value, on all ranks. It is pickled: plain settings, not tensors."""
    if current_rank().world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, device=message_device())
    return box[0]


def broadcast_(x: Tensor) -> None:
    """Write rank 0's values into x (any shape, contiguous), in place, on all ranks."""
    if current_rank().world_size > 1:
        dist.broadcast(x, src=0)


def message_device() -> torch.device:
    """Where small messages have to live: nccl alone moves nothing that is not on its GPU."""
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order, on all ranks. Pickled: small things for messages."""
    world = current_rank().world_size
    if world == 1:
        return [value]
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, value)
    return everyone
