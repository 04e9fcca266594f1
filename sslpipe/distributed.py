"""What the ranks of a run say to each other; with no process group everything is the identity.

Every function here is collective, except `current_rank`, `pick_device`, `to_device`,
`message_device` and `Rank`'s own: all ranks call it, in the same order.

Numbers that are on the host (counts, ids, votes, objects) travel between the hosts, beside nccl
over a group of their own: no device has to be waited for.
"""

from datetime import timedelta
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable

from sslpipe.errors import UserError, one_line

# torch 2.14 renamed them
all_gather_single = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor

T = TypeVar("T")


# of gloo, nccl and torch's store: another process has ended, or its machine
_LOST = (
    *("connection closed by peer", "connection reset by peer", "broken pipe", "socket closed"),
    *("connection was closed", "remote process exited", "ncclremoteerror", "connection refused"),
)


class Rank(NamedTuple):
    """This process's place among all: `rank` of `world_size`."""

    rank: int = 0
    world_size: int = 1

    def share(self, count: int) -> range:
        """Which of `count` things this process takes: a contiguous run, as even as can be."""
        first, last = (count * rank // self.world_size for rank in (self.rank, self.rank + 1))
        return range(first, last)


def current_rank() -> Rank:
    """Look up this process in the default process group; Rank(0, 1) where there is none."""
    if dist.is_available() and dist.is_initialized():
        return Rank(dist.get_rank(), dist.get_world_size())
    return Rank()


def explain_lost_process(error: BaseException) -> str | None:
    """Return one line on another process of the group that has ended; None: another error."""
    text = str(error).lower()
    if not isinstance(error, RuntimeError) or not any(words in text for words in _LOST):
        return None
    reason = one_line(str(error), 300).partition(" Exception raised from")[0]
    reason = reason.partition(". This is typically caused by")[0]
    return (
        f"another process of this run has ended, or its machine ({reason}); what it said is above, "
        "or in the log of its machine"
    )


def pick_device(name: str, setting: str) -> str:
    """Choose the kind of device to compute on: "cpu", "cuda" or "mps".

    Args:
        name: One of these, or "auto": CUDA where torch sees a device, else the CPU; never MPS.
        setting: How the user wrote it, for the message: "run.device = 'mps'", "--device mps".

    Raises:
        UserError: It is unknown, or this machine has no such device.
    """
    cuda = torch.cuda.is_available()
    mps = torch.backends.mps.is_available()
    if name == "auto":
        return "cuda" if cuda else "cpu"
    available = {"cpu": True, "cuda": cuda, "mps": mps}
    if name not in available:
        raise UserError(f"{setting} is unknown; use auto, cpu, cuda or mps")
    if not available[name]:
        raise UserError(f"{setting}, but torch sees no {name.upper()} device; use 'auto' or 'cpu'")
    return name


def to_device(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor of the host, or return one that is there; the host does not wait for the copy.

    A plain `.to("cuda")` waits for all that the device has to do.
    """
    if device.type == "cuda" and x.device.type == "cpu":
        # with gaps between its numbers, torch would copy it by way of memory that is not pinned
        return x.contiguous().pin_memory().to(device, non_blocking=True)
    return x.to(device)


_host_groups: dict[Any, Any] = {}  # the default group -> the one beside it


def host_group(timeout: timedelta | None = None) -> dist.ProcessGroup | None:
    """Return the group that moves CPU tensors: gloo's, made where needed; None: the default does.

    A process group must be there. timeout: Of its collectives, where it is made; None: torch's.
    """
    if "cpu:" in dist.get_backend_config():
        return None
    default = dist.group.WORLD
    if default not in _host_groups:
        _host_groups.clear()  # of a default group that is gone
        _host_groups[default] = dist.new_group(backend="gloo", timeout=timeout)
    return cast(dist.ProcessGroup, _host_groups[default])


def row_counts(rows: int) -> tuple[int, ...]:
    """Gather how many rows each rank holds, in rank order. rows: Those of this rank."""
    if current_rank().world_size == 1:
        return (rows,)
    counts = torch.empty(current_rank().world_size, dtype=torch.int64)
    all_gather_single(counts, torch.tensor([rows]), group=host_group())
    return tuple(counts.tolist())


def all_gather_rows(x: Tensor, counts: tuple[int, ...] | None = None) -> Tensor:
    """Join the rows of all ranks, in rank order, without gradient: (rows, ...) -> (all rows, ...).

    Their number may differ between ranks (shorter ones are padded on the way). counts: What
    `row_counts` gave, where it is known already.
    """
    if current_rank().world_size == 1:
        return x.detach()
    counts = counts or row_counts(x.shape[0])
    longest = max(counts)
    padded = _pad_rows(x.detach(), longest)
    gathered = padded.new_empty((len(counts) * longest, *x.shape[1:]))
    group = host_group() if x.device.type == "cpu" else None
    all_gather_single(gathered, padded, group=group)
    if min(counts) == longest:
        return gathered
    parts = torch.split(gathered, longest)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])


def gather_with_grad(x: Tensor) -> Tensor:
    """Join the rows of all ranks, as `all_gather_rows`; backward sums over the ranks.

    A row's gradient is the sum of what every rank's loss says about it. So with a local loss that
    is a mean over the own rows, DDP's mean of the gradients is the gradient of the global mean.
    """
    if current_rank().world_size == 1:
        return x
    return cast(Tensor, _GatherWithGrad.apply(x))


class _GatherWithGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.counts = row_counts(x.shape[0])
        return all_gather_rows(x, ctx.counts)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        longest = max(ctx.counts)
        padded = torch.cat([_pad_rows(part, longest) for part in torch.split(grad, ctx.counts)])
        mine = grad.new_empty((longest, *grad.shape[1:]))
        _reduce_scatter(mine, padded)  # a sum
        return mine[: ctx.counts[current_rank().rank]]


def _pad_rows(x: Tensor, rows: int) -> Tensor:
    if x.shape[0] == rows:
        return x.contiguous()
    return torch.cat([x, x.new_zeros((rows - x.shape[0], *x.shape[1:]))])


def global_sum(values: Tensor) -> Tensor:
    """Sum each entry over the ranks, without gradient; the same on all."""
    values = values.detach()
    if current_rank().world_size == 1:
        return values
    values = values.clone()
    dist.all_reduce(values)
    return values


def global_mean(total: Tensor, count: Tensor) -> Tensor:
    """Divide the ranks' sum of `total` by that of `count`; 0 where nothing was counted.

    Both are of this rank, of one shape and dtype. The value is the same on all ranks; the gradient
    is W times that of the own part, so that DDP's mean is one process's gradient.
    """
    sums, counts = global_sum(torch.stack([total.detach(), count])).unbind()
    scale = 1 / counts.clamp_min(1)
    local = total * (current_rank().world_size * scale)
    return local - local.detach() + sums * scale  # the difference is exactly 0


def agree(flag: bool) -> bool:
    """Decide together: True on all ranks as soon as `flag` is true on any."""
    if current_rank().world_size == 1:
        return flag
    votes = torch.tensor([float(flag)])
    dist.all_reduce(votes, op=dist.ReduceOp.MAX, group=host_group())
    return bool(votes.item() > 0)


def broadcast_(x: Tensor) -> None:
    """Overwrite a tensor with rank 0's, in place. Collective."""
    if current_rank().world_size > 1:
        dist.broadcast(x, src=0)


def broadcast_object(value: T) -> T:
    """Send rank 0's value to all ranks. It is pickled: plain settings, not tensors."""
    if current_rank().world_size == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box, src=0, group=host_group(), device=torch.device("cpu"))
    return box[0]


def message_device() -> torch.device:
    """Return where small messages have to live: nccl moves only what is on its GPU.

    A process group must be there. MPS has none: a run on it is one process.
    """
    if "cpu:" in dist.get_backend_config():
        return torch.device("cpu")
    return torch.device("cuda", torch.cuda.current_device())


def gather_objects(value: T) -> list[T]:
    """Gather every rank's value, in rank order, on all ranks. It is pickled: for small things."""
    world_size = current_rank().world_size
    if world_size == 1:
        return [value]
    gathered: list[Any] = [None] * world_size
    dist.all_gather_object(gathered, value, group=host_group())
    return gathered


def end_processes() -> None:
    """Leave the process group together: a rank that just exits can abort the others' threads."""
    if dist.is_initialized():
        device = message_device()
        dist.barrier(device_ids=None if device.type == "cpu" else [device.index])
        dist.destroy_process_group()
