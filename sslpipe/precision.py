"""At what precision float32 matrices are multiplied: switches of the whole process, put around.

Training may allow TF32 or bfloat16 for its own products; exact searches and resamplings must not
feel it, and the tiles of a loss choose for themselves.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def full_float32() -> Iterator[None]:
    """Multiply matrices in true float32 inside, whatever training has allowed (TF32, bf16)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


@contextmanager
def rounded_float32(backend: Any, precision: str) -> Iterator[None]:
    """Let one backend round the factors of float32 products inside.

    Args:
        backend: `torch.backends.mkldnn` or `torch.backends.cuda`.
        precision: what it may round to: "bf16" for mkldnn, "tf32" for cuda.
    """
    before = backend.matmul.fp32_precision
    backend.matmul.fp32_precision = precision
    try:
        yield
    finally:
        backend.matmul.fp32_precision = before
