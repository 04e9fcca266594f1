"""How tiles multiply: at what precision, and with which of the machine's kernels."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any, Literal

import torch
from torch import Tensor

Products = Literal["float32", "bfloat16"]

FEW_PAIRS = 2**15  # of rows and columns; below, oneDNN's overhead is more than its products save
LARGEST_BFLOAT16_SIMILARITY = 20.0  # nats; above, a rounding by 2^-9 would move exp() by over 4 %


class Multiply:
    """The two products of a tile. largest: no |similarity| is above this, nats.

    pairs: of a row and a column, on all ranks; few are multiplied in full, as that is quicker.
    "bfloat16" on a CPU with AMX rounds what goes in, on CUDA to TF32; on a CPU that has bfloat16
    without AMX it rounds what goes in and what comes out, and similarities only where they stay
    small. Sums over tiles are float32. float64 stays float64.
    """

    def __init__(self, products: Products, x: Tensor, largest: float, pairs: int) -> None:
        self.device_type = x.device.type
        self.few = pairs < FEW_PAIRS
        self.low = products == "bfloat16" and x.dtype == torch.float32 and not self.few
        self.native = self.low and self.device_type == "cpu" and _bfloat16_without_amx()
        self.native_similarities = self.native and largest <= LARGEST_BFLOAT16_SIMILARITY

    def factor(self, x: Tensor) -> Tensor:
        """x as `similarities` takes it: rounded once, where it is rounded."""
        return x.bfloat16() if self.native_similarities else x

    def operand(self, x: Tensor) -> Tensor:
        """x as `add` takes it: equal to `factor`, where that rounds."""
        return x.bfloat16() if self.native else x

    def similarities(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """out (R, C) = left (R, D) right (C, D)^T, both factors."""
        if self.native_similarities:
            out.copy_(torch.mm(left, right.T))
        else:
            torch.mm(left, right.T, out=out)

    def add(self, out: Tensor, weights: Tensor, x: Tensor) -> None:
        """out (R, D) += weights (R, C) x (C, D), both operands."""
        if self.native:
            out.add_(torch.mm(weights, x))
        else:
            torch.addmm(out, weights, x, out=out)

    def kernels(self) -> AbstractContextManager[None]:
        """Let the process choose this precision's kernels; what it chose before comes back."""
        on_cpu = self.device_type == "cpu"
        if self.few or not (self.low or (on_cpu and _onednn_keeps_float32())):
            return nullcontext()
        return _allowed(
            torch.backends.mkldnn if on_cpu else torch.backends.cuda, "bf16" if on_cpu else "tf32"
        )


@contextmanager
def _allowed(backend: Any, precision: str) -> Iterator[None]:
    """Float32 products of this backend may round to `precision`; a switch of the whole process."""
    before = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = precision
    try:
        yield
    finally:
        backend.matmul.fp32_precision = before


@cache
def _bfloat16_without_amx() -> bool:
    has = torch.cpu.get_capabilities()
    return bool(has.get("avx512_bf16")) and not has.get("amx_bf16")


@cache
def _onednn_keeps_float32() -> bool:
    """Whether oneDNN multiplies in float32 although allowed bfloat16: then its kernels are free.

    So it is on x86 without AMX, where they are up to twice as quick as MKL's (AMD Zen 5).
    """
    x = torch.linspace(1, 2, 128 * 128).view(128, 128)
    with _allowed(torch.backends.mkldnn, "bf16"):
        product = torch.mm(x, x)
    exact = torch.mm(x.double(), x.double())
    return float((product - exact).abs().max() / exact.max()) < 1e-6
