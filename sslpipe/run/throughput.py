"""How fast training is: images a second, waiting for data, and FLOPs against a device's peak."""

import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")

# Dense peak in TFLOP/s, without sparsity; "fp32" is that of the CUDA cores. Written from memory and
# still to be compared with NVIDIA's data sheets of each (B200: HGX, a GPU's eighth); for GeForce
# and RTX, its architecture whitepapers (Ampere GA102, Ada, Blackwell), tensor cores with FP32
# accumulate. Keys: words of a device's name.
PEAK_TFLOPS: dict[str, dict[str, float]] = {
    "B200": {"bf16": 2250, "fp16": 2250, "tf32": 1125, "fp32": 75},
    "GH200": {"bf16": 990, "fp16": 990, "tf32": 494, "fp32": 67},
    "H200": {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67},  # SXM
    "H200 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60},
    "H100": {"bf16": 989.5, "fp16": 989.5, "tf32": 494.5, "fp32": 67},  # SXM
    "H100 NVL": {"bf16": 835.5, "fp16": 835.5, "tf32": 417.5, "fp32": 60},
    "H100 PCIe": {"bf16": 756, "fp16": 756, "tf32": 378, "fp32": 51},
    "A100": {"bf16": 312, "fp16": 312, "tf32": 156, "fp32": 19.5},  # SXM and PCIe
    "A40": {"bf16": 149.7, "fp16": 149.7, "tf32": 74.8, "fp32": 37.4},
    "A30": {"bf16": 165, "fp16": 165, "tf32": 82, "fp32": 10.3},
    "A10": {"bf16": 125, "fp16": 125, "tf32": 62.5, "fp32": 31.2},
    "L40S": {"bf16": 362, "fp16": 362, "tf32": 183, "fp32": 91.6},
    "L40": {"bf16": 181, "fp16": 181, "tf32": 90.5, "fp32": 90.5},
    "L4": {"bf16": 121, "fp16": 121, "tf32": 60, "fp32": 30.3},
    "V100": {"fp16": 125, "fp32": 15.7},  # SXM2
    "V100 PCIe": {"fp16": 112, "fp32": 14},
    "T4": {"fp16": 65, "fp32": 8.1},
    "RTX 5090": {"bf16": 209.5, "fp16": 209.5, "tf32": 104.8, "fp32": 104.8},
    "RTX 4090": {"bf16": 165.2, "fp16": 165.2, "tf32": 82.6, "fp32": 82.6},
    "RTX 3090": {"bf16": 71, "fp16": 71, "tf32": 35.6, "fp32": 35.6},
    "RTX 6000 Ada": {"bf16": 364.2, "fp16": 364.2, "tf32": 182.1, "fp32": 91.1},
    "RTX A6000": {"bf16": 154.8, "fp16": 154.8, "tf32": 77.4, "fp32": 38.7},
}
_SMALLER = {"mig", "laptop", "max", "d"}  # a slice of a card, or a slower one of nearly its name


def peak_flops(device: torch.device, precision: str) -> float | None:
    """Look up the device's dense peak in FLOP/s; None where it is not known (every CPU).

    For fp32 that of TF32, where convolutions may round to it: torch's default on CUDA.
    """
    if device.type != "cuda":
        return None
    words = set(re.split("[ -]", torch.cuda.get_device_name(device).lower()))
    fitting = [known for known in PEAK_TFLOPS if words.issuperset(known.lower().split())]
    if not fitting or words & _SMALLER:
        return None
    peaks = PEAK_TFLOPS[max(fitting, key=lambda known: len(known.split()))]
    if precision == "fp32" and torch._C._get_fp32_precision_getter("cuda", "conv") == "tf32":
        precision = "tf32" if "tf32" in peaks else "fp32"
    tflops = peaks.get(precision)
    return None if tflops is None else 1e12 * tflops


class Meter:
    """Speed between two readings, without the time spent in evaluation and in saving.

    Args:
        batch_size: Images of a global step.
        flops: Of a global step.
        peak: FLOP/s of one process's device, None where unknown.
        world_size: Processes.
    """

    def __init__(self, batch_size: int, flops: float, peak: float | None, world_size: int) -> None:
        self._batch_size = batch_size
        self._flops = flops
        self._peak = peak * world_size if peak else None
        self._begin_s = time.perf_counter()
        self._wait_s = 0.0
        self._steps = 0

    def begin(self) -> None:
        """Start the clock anew: what came before the first step does not count."""
        self._begin_s = time.perf_counter()

    def waiting(self, stream: Iterator[T]) -> Iterator[T]:
        """Yield the stream's items; the time each takes to come counts as waiting."""
        while True:
            begin_s = time.perf_counter()
            item = next(stream)  # the stream is endless
            self._wait_s += time.perf_counter() - begin_s
            yield item

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside."""
        begin_s = time.perf_counter()
        yield
        self._begin_s += time.perf_counter() - begin_s

    def read(self, steps_done: int) -> dict[str, float]:
        """Measure images_per_s, data_wait_percent and, with a peak, mfu_percent."""
        now_s = time.perf_counter()
        elapsed_s = now_s - self._begin_s
        steps = steps_done - self._steps
        numbers = {
            "images_per_s": self._batch_size * steps / elapsed_s,
            "data_wait_percent": 100 * self._wait_s / elapsed_s,
        }
        if self._peak:
            numbers["mfu_percent"] = 100 * self._flops * steps / elapsed_s / self._peak
        self._begin_s = now_s
        self._wait_s = 0.0
        self._steps = steps_done
        return numbers
