"""A non-finite step changes nothing: neither weights nor BatchNorm statistics nor queues.

Off CUDA the host looks at each step's loss and gradient norm before the optimizer steps. On CUDA
that would wait for the device. There the decision is a number on the device: the optimizer takes
it as `found_inf` (torch's convention for gradient scalers), buffers are chosen by `torch.where`,
and the host reads a step's numbers while the device is at the next one.
"""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sslpipe.errors import UserError
from sslpipe.files import append_lines
from sslpipe.optim.step import takes_found_inf
from sslpipe.recipe.sections import Optim
from sslpipe.run.checkpoint_files import describe_newest
from sslpipe.run.log import read_metrics, read_skipped

WARNED_SINGLY = 3  # skipped steps of a start; then a warning at each doubling of their number

_LOGGED = ("loss", "lr", "grad_norm")  # of a log line, and said where a run ends


class Decision(NamedTuple):
    """What became of a step; on its device."""

    numbers: Tensor  # (2,), the loss and the gradient's length
    skipped: Tensor  # () bool, the step is bad
    overflow: Tensor | None = None  # () bool, it is an fp16 scaler's overflow; None: no scaler

    @property
    def values(self) -> Tensor:
        """What the host reads: (2,) or (3,)."""
        if self.overflow is None:
            return self.numbers
        return torch.cat([self.numbers, self.overflow.view(1)])


class StepGuard:
    """Decides every step, from numbers that are equal on all ranks, whether the optimizer steps.

    With an fp16 scaler above 1, infinite gradients of a finite loss are its overflow: it lowers its
    scale, and the step is counted apart. At 1 and below, lowering does not help: a bad step.

    Attributes:
        skipped: Non-finite steps, those before first_step included; `settle` reads the last.
        overflows: Steps that an fp16 scaler lowered its scale for, which are not among those.
        on_device: Whether the device decides, and the host does not wait for it.

    Args:
        modules: Those whose buffers are restored after a skipped step.
        accelerator: Holds the scaler, where there is one.
        optimizer: As accelerate prepared it.
        max_bad_steps: Non-finite steps in a row that end the run.
        folder: Where a skipped step's ids are written (bad_steps.RANK.jsonl, each rank's own rows).
        first_step: Where the run begins or is resumed.
        rank: Of this process.
        warn: Called for a skipped step when its numbers are read.
        optim: The recipe's section, for the message that ends a run.
        precision: Of the run, for the same.
        on_device: None: on CUDA, with an optimizer that takes `found_inf`.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        accelerator: Any,
        optimizer: Any,
        *,
        max_bad_steps: int,
        folder: Path,
        first_step: int,
        rank: int,
        warn: Callable[[str], None],
        optim: Optim,
        precision: str,
        on_device: bool | None = None,
    ) -> None:
        self._accelerator = accelerator
        self._optimizer = optimizer
        self._max_bad_steps = max_bad_steps
        self._file = folder / f"bad_steps.{rank}.jsonl"
        self._in_a_row = 0
        self._skipped_since_start = 0
        self.overflows = 0
        self._optim = optim
        self._precision = precision
        self._warn = warn
        self._moved = first_step > 0  # a step has changed the weights
        self.skipped = len({step for step in read_skipped([self._file]) if step < first_step})
        buffers = [buffer for module in modules for buffer in module.buffers()]
        self._memory = _Memory(buffers)
        device: torch.device = accelerator.device
        if on_device is None:
            on_device = device.type == "cuda" and takes_found_inf(optimizer.optimizer)
        self.on_device = on_device
        self._unread: list[_Record] = []
        self._last: Decision | None = None  # of the last step, on the device

    def remember(self) -> None:
        """Remember the buffers; call before the forward pass."""
        self._memory.remember()

    @contextmanager
    def step(self, loss: Tensor, grad_norm: Tensor) -> Iterator["Decision"]:
        """Step the optimizer; on leaving, restore the buffers of a bad step, clear the gradients.

        What the block does to buffers is undone, too. On the device all of it is launches. Loss
        and norm are (), equal on all ranks.
        """
        numbers = torch.cat([loss.detach().view(1), grad_norm.view(1)])
        bad = self._is_bad(numbers)

        # the weights: where they must not move, no optimizer state does either
        scaler = self._accelerator.scaler
        overflow = None
        if self.on_device:
            optimizer = self._optimizer.optimizer  # accelerate's would ask the scaler, and wait
            optimizer.found_inf = bad.float()
            optimizer.step()  # it divides by the grad_scale that clipping has left, if any
            optimizer.grad_scale = optimizer.found_inf = None
        elif not bad:
            self._optimizer.step()
        if scaler is not None and (self.on_device or bad):
            overflow = bad & torch.isfinite(loss) & _lowered(scaler)
        yield Decision(numbers, bad, overflow)

        # the buffers
        if self.on_device or bad:
            self._memory.restore_where(bad)
        self._optimizer.optimizer.zero_grad(set_to_none=True)  # accelerate's looks it up first

    def count(
        self, step: int, ids: Tensor, source_ids: Tensor, decision: "Decision", *, epoch: int
    ) -> None:
        """Count a step as good or bad; on CUDA its numbers are read at the next one.

        Args:
            step: The global step.
            ids: (B,) int64, of this rank's places; on the host.
            source_ids: (B,) int64, of the images used.
            decision: Of that step.
            epoch: Of the batch.

        Raises:
            UserError: max_bad_steps non-finite steps in a row. On CUDA a step later, with weights
                and buffers as they were.
        """
        if self.on_device:
            self._last = decision
        values = decision.values
        copied = None
        if values.is_cuda:
            values = values.to("cpu", non_blocking=True)  # into pinned memory
            copied = torch.cuda.current_stream().record_event()
        self._unread.append(
            _Record(
                step=step, epoch=epoch, ids=ids, source_ids=source_ids, values=values, copied=copied
            )
        )
        self._read(keep=int(self.on_device))

    def settle(self) -> None:
        """Read the numbers of all steps so far, which waits for the device. Raises: as `step`."""
        self._read(keep=0)

    def _is_bad(self, numbers: Tensor) -> Tensor:
        """() bool: one number is not finite, or the last step was bad and has ended the run."""
        bad = (numbers * 0).any()  # of 0, or NaN, which counts as true
        # if the last step was bad, which the host does not know yet, the run may end with it
        may_end = self._in_a_row + len(self._unread) >= self._max_bad_steps
        if self._last is not None and may_end:
            last = self._last.skipped
            overflow = self._last.overflow
            bad = bad | (last if overflow is None else last & ~overflow)
        return bad

    def _read(self, keep: int) -> None:
        """Count the steps that are not read yet, but for the last `keep`."""
        while len(self._unread) > keep:
            self._count(self._unread.pop(0))

    def _count(self, record: "_Record") -> None:
        value, norm, *overflow = record.read()
        if math.isfinite(value) and math.isfinite(norm):
            self._in_a_row = 0
            self._moved = True
        elif any(overflow):
            self.overflows += 1
        else:
            self.skipped += 1
            self._in_a_row += 1
            record.write(self._file, loss=str(value), grad_norm=str(norm))
            self._warn_of_skipped(record.step + 1, value, norm)
        if self._in_a_row >= self._max_bad_steps:
            self._unread.clear()  # they changed nothing
            run_dir = self._file.parent
            remedy = advice(self._optim, self._precision, moved=self._moved)
            last = f"step {record.step + 1}, loss {value}, gradient norm {norm}"
            raise UserError(
                f"{self._in_a_row} steps in a row had a non-finite loss or gradient (the last: "
                f"{last}){_before(run_dir)}. {remedy}"
            )

    def _warn_of_skipped(self, done: int, loss: float, norm: float) -> None:
        """Warn of a skipped step, numbered as in the log; of many, now and then."""
        self._skipped_since_start += 1
        number = self._skipped_since_start
        if number > WARNED_SINGLY and number & (number - 1):
            return
        what = f"gradient norm {norm}" if math.isfinite(loss) else f"loss {loss}"
        alone = self._accelerator.num_processes == 1
        files = self._file.name if alone else "bad_steps.*.jsonl"
        so_far = f" ({number} skipped since this start)" if number > WARNED_SINGLY else ""
        self._warn(f"step {done} skipped: {what}; its samples are in {files}{so_far}")


def advice(optim: Optim, precision: str, *, moved: bool) -> str:
    """Return what to change, of what is not set already, after a row of skipped steps."""
    rounded = precision not in ("fp32", "fp64")
    if not moved:
        other = "; or begin in a new run directory with optim.precision = 'fp32'" if rounded else ""
        return (
            "No step has changed the weights, so the rate is not the cause: look at the samples "
            "with `sslpipe preview --ids` (their ids are in bad_steps.*.jsonl) and at the weights "
            f"of --init, if any{other}"
        )
    rate = f"it is {optim.peak_lr:g}; try optim.peak_lr={optim.peak_lr / 10:.3g}"
    changes = [f"a lower optim.peak_lr ({rate})"]
    changes += ["optim.clip_norm"] if optim.clip_norm is None else []
    changes += ["optim.precision = 'fp32'"] if rounded else []
    return (
        f"Every step since then was skipped, so the rate{' or the precision' if rounded else ''} "
        f"is the likely cause: begin in a new run directory with {', or with '.join(changes)}"
    )


def _before(run_dir: Path) -> str:
    """Describe what a run has from before its skipped steps: a finite log line, a checkpoint."""
    lines = [line for line in read_metrics(run_dir) if None not in map(line.get, _LOGGED)]
    numbers = ", ".join(f"{key} {lines[-1][key]:.4g}" for key in _LOGGED) if lines else ""
    none = "no log line is finite (run.log_steps = 1 logs every step)"
    last = f"the last finite log line: step {lines[-1]['step']}, {numbers}" if lines else none
    return f"; {last}; {describe_newest(run_dir)}"


class _Record(NamedTuple):
    """A step's numbers on their way to the host, and whose they are."""

    step: int
    epoch: int
    ids: Tensor
    source_ids: Tensor
    values: Tensor
    copied: torch.cuda.Event | None

    def read(self) -> list[float]:
        """Wait for the copy, which mostly has arrived."""
        if self.copied is not None and not self.copied.query():  # type: ignore[no-untyped-call]
            self.copied.synchronize()
        return self.values.tolist()

    def write(self, path: Path, **numbers: str) -> None:
        """Append the step's ids to a file."""
        ids = {"ids": self.ids.tolist(), "source_ids": self.source_ids.tolist()}
        append_lines(path, [{"step": self.step, "epoch": self.epoch, **numbers, **ids}])


class _Memory:
    """What buffers held, as integers, which no copy rounds: few large copies, not many small."""

    def __init__(self, buffers: Sequence[Tensor]) -> None:
        rows: dict[torch.dtype, list[Tensor]] = {}
        for buffer in buffers:
            unit = torch.int32 if buffer.element_size() % 4 == 0 else torch.uint8
            rows.setdefault(unit, []).append(_flat(buffer).view(unit))
        self._blocks = [_Block(each) for each in rows.values()]

    @torch.no_grad()
    def remember(self) -> None:
        for block in self._blocks:
            torch.cat(block.rows, out=block.kept)

    @torch.no_grad()
    def restore_where(self, bad: Tensor) -> None:
        """Restore where () bool is true; the device decides."""
        for block in self._blocks:
            torch.cat(block.rows, out=block.written)
            torch.where(bad, block.kept, block.written, out=block.written)
            torch._foreach_copy_(block.rows, block.parts)


class _Block:
    """Buffers of one dtype as rows of integers, and what they held, one after another."""

    def __init__(self, rows: list[Tensor]) -> None:
        self.rows = rows
        self.kept = torch.cat(rows)
        self.written = torch.empty_like(self.kept)  # back to the rows, each from its part
        self.parts = torch.split(self.written, [len(row) for row in rows])


def _flat(buffer: Tensor) -> Tensor:
    """View a buffer's memory as one row, in whatever order its dimensions lie there."""
    order = sorted(range(buffer.dim()), key=lambda dim: buffer.stride(dim), reverse=True)
    return buffer.permute(order).view(-1)


def _lowered(scaler: Any) -> Tensor:
    """Update the scaler without a step; () bool, whether its scale was above 1 and went down.

    It looked before clipping, which makes NaN of gradients of infinite norm: its own step() would
    put those into the weights.
    """
    before = scaler._get_scale_async().clone()
    scaler.update()
    lowered: Tensor = (before > 1) & (scaler._get_scale_async() < before)
    return lowered
