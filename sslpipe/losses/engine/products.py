"""How tiles multiply: at what precision, and with which of the machine's kernels."""

from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from sslpipe.precision import float32_products

Products = Literal["float32", "bfloat16"]

FEW_PAIRS = 2**15  # of rows and columns; below, oneDNN's overhead is more than its products save
LARGEST_BFLOAT16_SIMILARITY = 20.0  # nats; above, a rounding by 2^-9 would move exp() by over 4 %


class Multiply:
    """The two products of a tile: similarities in forward, weights times columns for the gradient.

    In float32 and float64 they are `left @ right.T` and `out += weights @ x`. "bfloat16" applies to
    float32 inputs; sums over tiles are float32 all the same. What is rounded:

    - CUDA: the factors, to TF32.
    - A CPU with AMX: the factors, to bfloat16.
    - A CPU that has bfloat16 without AMX: factors and result, to bfloat16; those of similarities
      only where these stay small (LARGEST_BFLOAT16_SIMILARITY).

    Args:
        products: the loss's setting.
        x: any tensor of the loss, for dtype and device.
        largest: no |similarity| is above this, nats.
        pairs: of a row and a column, on all ranks; few are multiplied in full, as that is faster.
    """

    def __init__(self, products: Products, x: Tensor, largest: float, pairs: int) -> None:
        self.device_type = x.device.type
        self.few = pairs < FEW_PAIRS
        self.low = products == "bfloat16" and x.dtype == torch.float32 and not self.few
        self.native = self.low and self.device_type == "cpu" and _bfloat16_without_amx()
        self.native_similarities = self.native and largest <= LARGEST_BFLOAT16_SIMILARITY

    def factor(self, x: Tensor) -> Tensor:
        """Return x as `similarities` takes it: rounded once, where it is rounded."""
        return x.bfloat16() if self.native_similarities else x

    def operand(self, x: Tensor) -> Tensor:
        """Return x as `add` takes it: equal to `factor`, where that rounds."""
        return x.bfloat16() if self.native else x

    def similarities(self, left: Tensor, right: Tensor, out: Tensor) -> None:
        """Set out (R, C) = left (R, D) right (C, D)^T, both factors."""
        if self.native_similarities:
            out.copy_(torch.mm(left, right.T))
        else:
            torch.mm(left, right.T, out=out)

    def add(self, out: Tensor, weights: Tensor, x: Tensor) -> None:
        """Add weights (R, C) x (C, D), both operands, to out (R, D)."""
        if self.native:
            out.add_(torch.mm(weights, x))
        else:
            torch.addmm(out, weights, x, out=out)

    def kernels(self) -> AbstractContextManager[None]:
        """Let the process choose this precision's kernels; its former choice is restored."""
        on_cpu = self.device_type == "cpu"
        if self.few or not (self.low or (on_cpu and _onednn_keeps_float32())):
            return nullcontext()
        if on_cpu:
            return float32_products("mkldnn", "bf16")
        return float32_products("cuda", "tf32")


@cache
def _bfloat16_without_amx() -> bool:
    capabilities = torch.cpu.get_capabilities()
    return bool(capabilities.get("avx512_bf16")) and not capabilities.get("amx_bf16")


@cache
def _onednn_keeps_float32() -> bool:
    """Try whether oneDNN, allowed bfloat16, multiplies in float32 all the same.

    So it is on x86 without AMX. There its kernels may be had for free, which are up to twice as
    fast as MKL's (AMD Zen 5).
    """
    x = torch.linspace(1, 2, 128 * 128).view(128, 128)
    with float32_products("mkldnn", "bf16"):
        product = torch.mm(x, x)
    exact = torch.mm(x.double(), x.double())
    return float((product - exact).abs().max() / exact.max()) < 1e-6
