"""Dtypes of the precisions of a training, wider ones where a device has them, and defaults."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Literal

import torch
from torch import Tensor

AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # the others compute as weights are


@contextmanager
def torch_defaults() -> Iterator[None]:
    """Make floats float32 inside, and tensors on the CPU, whatever torch's defaults are."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float32)
    try:
        with cpu_by_default():
            yield
    finally:
        torch.set_default_dtype(before)


def cpu_by_default() -> AbstractContextManager[object]:
    """Make tensors on the CPU inside where no device is named; a mode only where it is needed."""
    return nullcontext() if torch.get_default_device().type == "cpu" else torch.device("cpu")


def wide_dtype(device: torch.device | str) -> torch.dtype:
    """Choose float64, or float32 on a device that has no float64 (Apple's MPS)."""
    return torch.float32 if torch.device(device).type == "mps" else torch.float64


def to_float64(x: Tensor) -> Tensor:
    """Convert to float64: on the tensor's own device, or on the CPU where that one has none."""
    return x.cpu().double() if x.device.type == "mps" else x.double()


Backend = Literal["cuda", "mkldnn"]


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply matrices in true float32 inside, whatever training or a user allows (TF32, bf16)."""
    with float32_products("cuda", "ieee"), float32_products("mkldnn", "ieee"):
        yield


@contextmanager
def float32_products(backend: Backend, precision: str) -> Iterator[None]:
    """Choose how one backend multiplies float32 matrices inside; its setting is then as before.

    Only torch's current settings (`torch.backends.cuda.matmul.fp32_precision`) are read and
    written: the older ones raise where a user has set a current one.

    Args:
        backend: "cuda", or "mkldnn" for a CPU's oneDNN.
        precision: "ieee": not rounded; "tf32" or "bf16": factors may be rounded to it.
    """
    before = _own_precision(backend)
    torch._C._set_fp32_precision_setter(backend, "matmul", precision)
    try:
        yield
    finally:
        torch._C._set_fp32_precision_setter(backend, "matmul", before)


def _own_precision(backend: Backend) -> str:
    """What matrix products are set to themselves: "none" where a wider setting decides.

    torch gives the deciding one, so the wider ones are lifted, the widest first.
    """
    setting = torch._C._get_fp32_precision_getter(backend, "matmul")
    if setting == "none":
        return setting
    wider = [("generic", "all"), (backend, "all")]
    before = []
    for place, operation in wider:
        before.append(torch._C._get_fp32_precision_getter(place, operation))
        torch._C._set_fp32_precision_setter(place, operation, "none")
    setting = torch._C._get_fp32_precision_getter(backend, "matmul")
    for (place, operation), value in zip(wider, before, strict=True):
        torch._C._set_fp32_precision_setter(place, operation, value)
    return setting
