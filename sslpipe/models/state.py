"""Modes, dtypes and weights of a module, which an evaluation leaves as they were."""

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.errors import DataError, shown
from sslpipe.precision import torch_defaults


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


def weights_dtype(module: nn.Module) -> torch.dtype:
    """Return the dtype that images are cast to: that of the first weights, float32 without any."""
    tensors = (*module.parameters(), *module.buffers())  # an average has buffers alone
    return next((x.dtype for x in tensors if x.is_floating_point()), torch.float32)


@contextmanager
def torch_as_it_starts() -> Iterator[None]:
    """Compute inside as in a fresh process, whatever a notebook has set.

    Gradients are recorded, nothing is cast by an autocast around it, and defaults are torch's own.
    """
    with (
        torch.inference_mode(False),
        torch.enable_grad(),
        _without_autocast(),
        torch_defaults(),
    ):
        yield


@contextmanager
def _without_autocast() -> Iterator[None]:
    """Cast nothing inside, but where it is asked for there.

    That is no context of `torch.autocast`: the weights that one inside it has cast stay in torch's
    cache until the outermost ends, and all steps of a training would compute with the first one's.
    """
    kinds = ("cpu", "cuda")
    enabled = [torch.is_autocast_enabled(kind) for kind in kinds]
    keeps = torch.is_autocast_cache_enabled()
    is_inside = torch.autocast_increment_nesting() > 1  # one of a notebook
    torch.autocast_decrement_nesting()
    torch.set_autocast_cache_enabled(keeps and not is_inside)
    for kind in kinds:
        torch.set_autocast_enabled(kind, False)
    try:
        yield
    finally:
        for kind, was_enabled in zip(kinds, enabled, strict=True):
            torch.set_autocast_enabled(kind, was_enabled)
        torch.set_autocast_cache_enabled(keeps)


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
        state.update(raw.numpy().data)


def rows_not_finite(features: Tensor) -> list[int]:
    """Return which rows of features (N, F) hold NaN or infinity."""
    # where a number is not finite, the sum is not: that is read in a fifth of the time
    if bool(torch.isfinite(features.sum())):
        return []
    rows: list[int] = (~torch.isfinite(features)).any(dim=1).nonzero()[:, 0].tolist()
    return rows


def check_finite(features: Tensor, samples: Sequence[object], network: str) -> None:
    """Check that features are numbers.

    Args:
        features: (N, F).
        samples: Names each row's sample.
        network: Names what computed them.

    Raises:
        DataError: NaN or infinity; it names the first sample and the network.
    """
    bad = rows_not_finite(features)
    if not bad:
        return
    others = f" and {len(bad) - 1} more" if len(bad) > 1 else ""
    raise DataError(
        f"features of {samples[bad[0]]}{others}, of {len(features)} samples, are not finite; "
        f"network: {shown(network)}. Its weights are damaged or diverged, or overflow in this "
        "precision: load other weights, or compute in float32"
    )
