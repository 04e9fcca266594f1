"""In the child process: the log of the fake CUDA runtime, and the values that kernels would give.

Importing this module needs the stubs loaded (tests.helpers.fakecuda); it replaces a few functions
of torch, in this process only.
"""

import ctypes
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from tests.fakecuda.build import stub_folder
from tests.fakecuda.formulas import CUDA_ONLY

_stubs = ctypes.CDLL(None)
_stubs.fake_log.argtypes = [ctypes.c_char, ctypes.c_char_p, *[ctypes.c_long] * 3, ctypes.c_void_p]
_stubs.fake_answer.argtypes = [ctypes.c_long, ctypes.c_int]
_names: list[bytes] = []  # the log keeps pointers


class Event(NamedTuple):
    """A line of the log.

    kind: K kernel, G product, M copy, Z memset, C collective, Y or D wait of the host, A
    cudaMalloc, F cudaFree, H pinned allocation, R event recorded, W a stream waits for an
    event, J program compiled by NVRTC.
    """

    kind: str
    section: str  # the last mark before it
    name: str  # of the kernel; of a copy H2D, D2H, D2D or 2D; of a collective ncclAllReduce etc.
    size: int  # bytes; numbers of a collective; blocks of a kernel; m n of a product
    detail: int  # of a copy 1 if asynchronous, of a product k, of a collective its ncclDataType_t
    flag: int  # of a copy 1 if the host's side is pinned, of a product 1 if in TF32
    stream: int
    main_thread: bool  # whether Python's main thread called


def mark(text: str) -> None:
    """Begin a section of the log."""
    _stubs.fake_mark(text.encode())


def reset() -> None:
    """Empty the log."""
    _stubs.fake_reset()


def events() -> list[Event]:
    """The log since the last reset."""
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "log")
        _stubs.fake_dump(path.encode())
        with open(path, errors="replace") as file:
            lines = [line.rstrip("\n").split("\t", 6) for line in file]
    section, found = "", []
    for kind, a, b, c, stream, main, name in lines:
        if kind == "#":
            section = name
            continue
        numbers = int(a), int(b), int(c), int(stream)
        found.append(Event(kind, section, name, *numbers, main == "1"))
    return found


def operations(log: list[Event]) -> int:
    """Count what the device does: kernels, products, copies, memsets."""
    return sum(event.kind in "KGMZ" for event in log)


def waits(log: list[Event]) -> list[Event]:
    """What makes the host wait for the device; a synchronous copy does."""
    return [
        event
        for event in log
        if event.kind in "YD" or (event.kind == "M" and event.name != "D2D" and not event.detail)
    ]


def counts(log: list[Event]) -> dict[str, dict[str, int]]:
    """For each section: operations, waits, collectives, allocations; zeros are left out."""
    table: dict[str, dict[str, int]] = {}
    for section in dict.fromkeys(event.section for event in log):
        part = [event for event in log if event.section == section]
        row = {
            "operations": operations(part),
            "waits": len(waits(part)),
            "collectives": sum(event.kind == "C" for event in part),
            "allocations": sum(event.kind in "AH" for event in part),
        }
        table[section] = {name: count for name, count in row.items() if count}
    return table


@contextmanager
def section(name: str) -> Iterator[None]:
    """Mark a part of the log; behind it the section "" goes on."""
    mark(name)
    try:
        yield
    finally:
        mark("")


def allow_triton() -> None:
    """Have Triton compile for the fake card and launch on it; its kernels do nothing either."""
    sys.modules.pop("triton", None)
    os.environ["TRITON_LIBCUDA_PATH"] = str(stub_folder())


# ---- what kernels would give


def _kernel(name: str) -> None:
    _names.append(name.encode())
    _stubs.fake_log(b"K", _names[-1], 0, 0, 0, None)


@contextmanager
def _unlogged() -> Iterator[None]:
    _stubs.fake_pause(1)
    try:
        yield
    finally:
        _stubs.fake_pause(0)


def _conv(x: Tensor, w: Tensor, padding: Any, stride: Any, dilation: Any, *rest: Any) -> Tensor:
    """One launch; cuDNN's real host code reads too much of what the device says."""
    _kernel("cudnn conv forward")
    sides = [
        (side + 2 * pad - dil * (kernel - 1) - 1) // step + 1
        for side, kernel, pad, step, dil in zip(
            x.shape[2:], w.shape[2:], padding, stride, dilation, strict=True
        )
    ]
    last = any(t.is_contiguous(memory_format=torch.channels_last) for t in (x, w))
    layout = torch.channels_last if last and x.dim() == 4 else torch.contiguous_format
    return torch.empty(
        (x.shape[0], w.shape[0], *sides), dtype=x.dtype, device=x.device, memory_format=layout
    )


def _conv_backward(
    dy: Tensor, x: Tensor, w: Tensor, bias_sizes: Any, *rest: Any
) -> tuple[Tensor | None, ...]:
    wanted = rest[-1]
    dx = dw = db = None
    if wanted[0]:
        _kernel("cudnn conv backward data")
        dx = torch.empty_like(x)
    if wanted[1]:
        _kernel("cudnn conv backward filter")
        dw = torch.empty_like(w)
    if wanted[2]:
        _kernel("conv bias gradient")
        db = torch.empty(bias_sizes, dtype=dy.dtype, device=dy.device)
    return dx, dw, db


_library = torch.library.Library("aten", "IMPL")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # overriding is meant
    _library.impl("cudnn_convolution", _conv, "CUDA")
    _library.impl("convolution_backward", _conv_backward, "CUDA")


class Values(TorchDispatchMode):
    """Write what a CPU computes where each kernel would have written: device memory is host memory.

    The real CUDA call comes first, so its launches and checks are as without this mode. Skipped:
    operations with a tensor of more than `most_numbers`, unless they decide a shape.
    """

    def __init__(self, most_numbers: int) -> None:
        super().__init__()
        self.most_numbers = most_numbers

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(issubclass(each, FakeTensor) for each in types):
            return func(*args, **kwargs)  # by which that finds the result's shape
        name = func._schema.name
        solves = ("linalg_" in name and "norm" not in name) or name == "aten::isin"
        if solves and any(_on_device(x) for x in tree_leaves(args)):
            return _solved(func, args, kwargs, self.most_numbers)
        length = _selected(name, args)
        if length is not None:  # its own code reads what no kernel has counted
            _stubs.fake_answer(length, 8)
        out = func(*args, **kwargs)
        _stubs.fake_answer(0, 0)
        if func.is_view or not name.startswith("aten::") or name in _WITHOUT_VALUES:
            return out
        tensors = [x for x in tree_leaves((args, kwargs, out)) if _on_device(x)]
        if not tensors:
            return out
        if isinstance(out, bool):  # torch.equal: it was waited for, and read what no kernel wrote
            with _unlogged():
                return _computed(func, *aliases((args, kwargs)))
        if length is None and any(x.numel() > self.most_numbers for x in tensors):
            return out
        with _unlogged():
            written = [_alias(x) if _on_device(x) else None for x in tree_leaves(out)]
            given = aliases((args, kwargs))
            try:
                if length is not None and not name.endswith("_"):
                    return _on_cuda(_computed(func, *given))
                _write(func, *given, written)
            except (NotImplementedError, RuntimeError) as error:
                raise NotImplementedError(f"the fake runtime has no values of {name}") from error
        return out


def _write(func: Any, args: Any, kwargs: Any, written: list[Tensor | None]) -> None:
    values = _computed(func, args, kwargs)
    for made, value in zip(written, tree_leaves(values), strict=True):
        if made is not None and made.numel() and value.numel():
            made.copy_(value)


def _on_cuda(values: Any) -> Any:
    return tree_map(lambda x: x.cuda() if isinstance(x, Tensor) else x, values)


def _solved(func: Any, args: Any, kwargs: Any, most_numbers: int) -> Any:
    """A decomposition, or `isin`, whose code reads too much: a kernel, and the wait for a check."""
    _kernel(func._schema.name)
    _stubs.fake_log(b"Y", b"cudaStreamSynchronize", 0, 0, 0, None)
    with _unlogged():
        given = aliases((args, kwargs))
        # without values the memory holds what lay there before, which may have no solution
        if any(_on_device(x) and x.numel() > most_numbers for x in tree_leaves((args, kwargs))):
            given = tree_map(_identity, given)
        return _on_cuda(_computed(func, *given))


def _identity(x: Any) -> Any:
    if not isinstance(x, Tensor):
        return x
    x = torch.zeros_like(x)
    if x.dim() > 1:
        x.diagonal(dim1=-2, dim2=-1).fill_(1)
    return x


def _selected(name: str, args: Any) -> int | None:
    """How many rows an operation selects whose result's shape depends on values, else None."""
    counted = name.removeprefix("aten::").removesuffix("_")
    if counted in ("nonzero", "_unique2", "unique_dim", "unique_consecutive"):
        rows = args[0]
    elif counted in ("index", "index_put", "masked_select"):
        masks = [x for x in tree_leaves(args[1]) if isinstance(x, Tensor) and x.dtype == torch.bool]
        rows = masks[0] if masks else None
    else:
        rows = None
    if not _on_device(rows):
        return None
    with _unlogged():
        host = _alias(rows)
        return len(host.unique()) if "unique" in counted else int(host.count_nonzero())


_WITHOUT_VALUES = {
    f"aten::{name}"
    for name in (
        *("record_stream", "_pin_memory", "set_", "resize_", "_local_scalar_dense", "is_pinned"),
        *("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"),
    )
}


def _on_device(x: Any) -> bool:
    return isinstance(x, Tensor) and x.is_cuda


def _alias(x: Tensor) -> Tensor:
    """The same memory as a CPU tensor."""
    storage = x.untyped_storage()
    if not x.numel():
        return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype)
    raw = (ctypes.c_byte * storage.nbytes()).from_address(storage.data_ptr())
    numbers = torch.frombuffer(raw, dtype=torch.uint8).untyped_storage()
    alias = torch.empty(0, dtype=x.dtype)
    return alias.set_(numbers, x.storage_offset(), x.shape, x.stride())


def aliases(tree: Any) -> Any:
    """Replace what is on the device in a tree by the same memory as CPU tensors."""

    def moved(x: Any) -> Any:
        if _on_device(x):
            return _alias(x)
        return torch.device("cpu") if isinstance(x, torch.device) else x

    return tree_map(moved, tree)


def _computed(func: Any, args: Any, kwargs: Any) -> Any:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        formula = CUDA_ONLY.get(func._schema.name.removeprefix("aten::"), func)
        return formula(*args, **kwargs)


values = Values(int(os.environ.get("FAKE_VALUES", 2**20)))
