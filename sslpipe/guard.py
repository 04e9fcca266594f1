"""A non-finite step changes nothing: neither weights nor BatchNorm statistics nor queues."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.errors import UserError


class StepGuard:
    """Decides every step, from numbers that are equal on all ranks, whether the optimizer steps.

    modules: those whose buffers are put back. folder: where a skipped step's ids are written
    (bad_steps.jsonl of each rank's own rows). skipped: non-finite steps so far.
    """

    def __init__(self, modules: Sequence[nn.Module], *, max_bad_steps: int, folder: Path) -> None:
        self._buffers = [buffer for module in modules for buffer in module.buffers()]
        self._kept = [buffer.clone() for buffer in self._buffers]
        self._max_bad_steps, self._folder = max_bad_steps, folder
        self._in_a_row = 0
        self.skipped = 0

    @torch.no_grad()
    def remember(self) -> None:
        """Call before the forward pass."""
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            kept.copy_(buffer)

    def step_or_undo(
        self,
        accelerator: Any,
        optimizer: Any,
        step: int,
        ids: Tensor,
        loss: Tensor,
        grad_norm: Tensor,
    ) -> bool:
        """Step the optimizer, or put the buffers back; clear the gradients either way.

        Returns whether the weights moved. loss, grad_norm: (), equal on all ranks. An fp16 scaler's
        overflow is its own affair: it skips the step itself and lowers its scale; the buffers go
        back all the same.
        Raises: UserError after max_bad_steps non-finite steps in a row.
        """
        value, norm = float(loss.detach()), float(grad_norm)
        overflow = accelerator.scaler is not None and math.isfinite(value)
        good = math.isfinite(value) and math.isfinite(norm)
        if good or (math.isfinite(value) and overflow):
            optimizer.step()
            self._in_a_row = 0
            if not good:
                self._put_back()
        else:
            self._put_back()
            self.skipped += 1
            self._in_a_row += 1
            record = {"step": step, "loss": str(value), "grad_norm": str(norm)}
            with open(self._folder / f"bad_steps.{accelerator.process_index}.jsonl", "a") as file:
                file.write(json.dumps({**record, "ids": ids.tolist()}) + "\n")
            if accelerator.scaler is not None:
                optimizer.step()  # lets the scaler see its infinities; it does not step
        optimizer.zero_grad(set_to_none=True)
        if self._in_a_row >= self._max_bad_steps:
            raise UserError(
                f"{self._in_a_row} steps in a row had a non-finite loss or gradient (the last: "
                f"step {step}, loss {value}, gradient norm {norm}); the last checkpoint is good. "
                "Lower optim.peak_lr, set optim.clip_norm, or use optim.precision = 'fp32'; the "
                "samples' ids are in bad_steps.*.jsonl"
            )
        return good

    @torch.no_grad()
    def _put_back(self) -> None:
        for kept, buffer in zip(self._kept, self._buffers, strict=True):
            buffer.copy_(kept)
