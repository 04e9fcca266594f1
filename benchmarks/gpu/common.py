"""What the parts share: a clock, memory, and the two ways in which a part ends early."""

import gc
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

T = TypeVar("T")
# what is measured, with its unit -> the figure, or why there is none
Figures = dict[str, float | str]


class SkippedError(Exception):
    """This machine cannot run a part, and why."""


class WrongError(Exception):
    """A part's numbers are off by more than is allowed."""


@dataclass(frozen=True)
class Bench:
    """Where the parts run, how far they go, and where data sets are written, once."""

    device: torch.device
    tiny: bool
    folder: Path
    kept: Figures = field(default_factory=dict)

    @property
    def on_cuda(self) -> bool:
        return self.device.type == "cuda"

    def size(self, full: T, tiny: T) -> T:
        return tiny if self.tiny else full

    def keep(self, figures: Figures) -> None:
        """Figures of a part that stay where the rest of it fails or takes too long."""
        self.kept.update(figures)

    def seconds(self, call: Callable[[], Any], rounds: int = 5) -> float:
        """Median of some calls, after two that do not count."""
        times = []
        for _ in range(self.size(rounds, 1) + 2):
            begin_s = time.perf_counter()
            call()
            self.wait()
            times.append(time.perf_counter() - begin_s)
        return statistics.median(times[2:])

    def wait(self) -> None:
        if self.on_cuda:
            torch.cuda.synchronize(self.device)

    def forget_memory(self) -> None:
        """Free what the part before has left, and let `peak_gib` begin anew."""
        if self.on_cuda:
            gc.collect()  # takes seconds where much is imported
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(self.device)

    def peak_gib(self) -> Figures:
        """{"peak GiB": of tensors}; empty on a CPU."""
        if not self.on_cuda:
            return {}
        return {"peak GiB": torch.cuda.max_memory_allocated(self.device) / 2**30}

    def needs_cuda(self, devices: int = 1) -> None:
        if not self.on_cuda:
            raise SkippedError("no CUDA device")
        if (there := torch.cuda.device_count()) < devices:
            raise SkippedError(f"needs {devices} CUDA devices, there is {there}")


def check(what: str, error: float, allowed: float) -> Figures:
    """The error as a figure. Raises: WrongError where it is larger than allowed, or NaN."""
    if not error <= allowed:
        raise WrongError(f"{what}: off by {error:.3g}, allowed {allowed:g}")
    return {f"{what}: error": error}


def relative(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|, in float64 where `expected` is."""
    wide = expected.detach().double()
    return float((actual.detach().to(wide) - wide).norm() / wide.norm())
