"""A device without float64, as Apple's MPS is, on a machine that has none.

Inside `fakemps()` what is moved to "mps" computes on the CPU in tensors that say that they are on
"mps". They refuse what a Mac refuses: float64, and tensors of the CPU beside them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any
from unittest.mock import patch

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only

MPS = torch.device("mps")


class OnMps(torch.Tensor):
    """A tensor on the stand-in; `inner` holds its numbers on the CPU."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> "OnMps":
        # "meta" for torch's own code: moving it to the CPU is then a copy
        made = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, inner.stride(), inner.storage_offset(), dtype=inner.dtype,
            device="meta",
        )  # fmt: skip
        made.inner = inner
        return made

    @property
    def device(self) -> torch.device:  # type: ignore[override]
        return MPS

    @classmethod
    def __torch_dispatch__(cls, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})

    def __repr__(self) -> str:
        return f"OnMps({self.inner!r})"

    def tolist(self):
        return self.inner.tolist()

    def numpy(self, **_: Any):
        raise TypeError("can't convert mps:0 device type tensor to numpy")


COPIES = (torch.ops.aten.copy_.default, torch.ops.aten._to_copy.default)


def _call(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = tree_leaves((args, kwargs))
    ours = [x for x in leaves if isinstance(x, OnMps)]
    others = [x for x in leaves if isinstance(x, torch.Tensor) and not isinstance(x, OnMps)]
    target = kwargs.get("device")
    target = torch.device(target) if target is not None else None
    if ours and func not in COPIES and any(x.ndim for x in others):
        raise RuntimeError(f"{func}: expected all tensors on mps, found some on the CPU")
    to_mps = target.type == "meta" if target is not None else bool(ours)
    if func is torch.ops.aten.copy_.default:
        to_mps = isinstance(args[0], OnMps)
    own = [tree_map_only(OnMps, lambda x: x.inner, each) for each in (args, kwargs)]
    if target is not None:
        own[1]["device"] = "cpu"
    found = func(*own[0], **own[1])
    if not to_mps:
        return found
    if any(isinstance(x, torch.Tensor) and x.dtype == torch.float64 for x in tree_leaves(found)):
        raise TypeError(f"{func}: the MPS framework has no float64")
    wrapped = tree_map_only(torch.Tensor, OnMps, found)
    return return_and_correct_aliasing(func, args, kwargs, wrapped)


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        return _call(func, args, kwargs or {})


class _Functions(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func is not torch.device:
            args, kwargs = tree_map(_as_meta, (args, kwargs or {}))
        if func in (torch.tensor, torch.as_tensor) and (device := kwargs.pop("device", None)):
            return func(*args, **kwargs).to(device)
        return func(*args, **(kwargs or {}))


def _as_meta(value: Any) -> Any:
    is_mps = isinstance(value, (str, torch.device)) and str(value).split(":")[0] == "mps"
    return torch.device("meta") if is_mps else value


@contextmanager
def fakemps() -> Iterator[None]:
    """Make "mps" a device of this thread, without float64."""
    with patch("torch.backends.mps.is_available", cache(lambda: True)), _Functions(), _Dispatch():
        yield
