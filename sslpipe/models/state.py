"""What must be as before after an evaluation: a module's modes, and its weights, by a hash."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn


@contextmanager
def evaluating(module: nn.Module) -> Iterator[None]:
    """Set eval mode inside; afterwards every submodule is in the mode it was in."""
    modes = {part: part.training for part in module.modules()}
    module.eval()
    try:
        yield
    finally:
        for part, training in modes.items():
            part.training = training


def module_sha256(module: nn.Module) -> str:
    """Compute a sha256 over names, types, shapes and bytes of all parameters and buffers."""
    state = hashlib.sha256()
    hash_tensors(state, {**dict(module.named_parameters()), **dict(module.named_buffers())})
    return state.hexdigest()


def hash_tensors(state: Any, tensors: Mapping[str, Tensor]) -> None:
    """Add the names, types, shapes and bytes of tensors to a hash, sorted by name.

    Args:
        state: Of hashlib.
        tensors: By name.
    """
    for name, tensor in sorted(tensors.items()):
        state.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}\n".encode())
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        state.update(np.from_dlpack(raw).data)  # .numpy() would forbid FSDP to free the memory
