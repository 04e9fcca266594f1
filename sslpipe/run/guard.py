"""A non-finite step changes nothing: neither weights nor BatchNorm statistics nor queues."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.errors import UserError
from sslpipe.run.records import append_records, read_records


class StepGuard:
    """Decides every step, from numbers that are equal on all ranks, whether the optimizer steps.

    `skipped` counts the non-finite steps so far, those of the folder's file before first_step among
    them; `overflows` the steps that an fp16 scaler lowered its scale for, which are none of those.

    Args:
        modules: Those whose buffers are restored after a skipped step.
        max_bad_steps: Non-finite steps in a row that end the run.
        folder: Where a skipped step's ids are written (bad_steps.RANK.jsonl, each rank's own rows).
        first_step: Where the run begins or is resumed.
        rank: Of this process.
    """

    def __init__(
        self,
        modules: Sequence[nn.Module],
        *,
        max_bad_steps: int,
        folder: Path,
        first_step: int,
        rank: int,
    ) -> None:
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._max_bad_steps, self._file = max_bad_steps, folder / f"bad_steps.{rank}.jsonl"
        self._in_a_row = self.overflows = 0
        self.skipped = len({step for step in self._recorded() if step < first_step})

    @torch.no_grad()
    def remember(self) -> None:
        """Remember the buffers; call before the forward pass."""
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)

    def step_or_undo(
        self,
        accelerator: Any,
        optimizer: Any,
        step: int,
        ids: Tensor,
        source_ids: Tensor,
        loss: Tensor,
        grad_norm: Tensor,
    ) -> bool:
        """Step the optimizer, or restore the buffers; clear the gradients either way.

        With an fp16 scaler above 1, infinite gradients of a finite loss are its overflow: it lowers
        its scale, and the step is counted apart. At 1 and below, lowering it further does not help:
        a bad step.

        Args:
            accelerator: Holds the scaler, where there is one.
            optimizer: As accelerate prepared it.
            step: The global step.
            ids: (B,) int64, of this rank's places.
            source_ids: (B,) int64, of the images really used.
            loss: (), equal on all ranks.
            grad_norm: (), equal on all ranks.

        Returns:
            Whether the weights changed.

        Raises:
            UserError: max_bad_steps non-finite steps in a row, overflows not counted.
        """
        value, norm = float(loss.detach()), float(grad_norm)
        good = math.isfinite(value) and math.isfinite(norm)
        if good:
            optimizer.step()
            self._in_a_row = 0
        else:
            self._restore()
            overflow = accelerator.scaler is not None and _overflowed(accelerator.scaler)
            if overflow and math.isfinite(value):
                self.overflows += 1
            else:
                self.skipped += 1
                self._in_a_row += 1
                record: dict[str, Any] = {"step": step, "loss": str(value), "grad_norm": str(norm)}
                record |= {"ids": ids.tolist(), "source_ids": source_ids.tolist()}
                append_records(self._file, [record])
        optimizer.zero_grad(set_to_none=True)
        if self._in_a_row >= self._max_bad_steps:
            raise UserError(
                f"{self._in_a_row} steps in a row had a non-finite loss or gradient (the last: "
                f"step {step}, loss {value}, gradient norm {norm}); the last checkpoint is good. "
                "Look at the samples, whose ids are in bad_steps.*.jsonl; or begin in a new run "
                "directory with a lower optim.peak_lr, with optim.clip_norm, or with "
                "optim.precision = 'fp32'"
            )
        return good

    def _recorded(self) -> list[int]:
        """Steps in the file; some twice, where a run was resumed from before them."""
        records, _ = read_records(self._file, {"step": int})
        return [record["step"] for record in records]

    @torch.no_grad()
    def _restore(self) -> None:
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)


def _overflowed(scaler: Any) -> bool:
    """Update the scaler without a step; whether its scale was above 1 and went down.

    It looked before clipping, which makes NaN of finite gradients whose norm is infinite: its own
    step() would put those into the weights.
    """
    before = float(scaler.get_scale())
    scaler.update()
    return before > 1 and float(scaler.get_scale()) < before
