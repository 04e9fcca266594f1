"""In the child process: how many bytes device operations read and write."""

from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

# what an indexed operation touches is as much as it picks or puts
_PICKED = {"index_select": 0, "index": 0, "gather": 0}  # as much as the result
_PUT = {"index_copy_": 3, "index_put_": 2, "scatter_add_": 3}  # the argument that is put


class Moved(TorchDispatchMode):
    """Sum up the operands of each operation on the device: what is read plus what is written.

    A dimension of stride 0 counts once. Caches are not seen: two operations on the same memory
    read it twice.

    Attributes:
        bytes: By name of the operation.
        calls: By name of the operation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.calls = Counter[str](), Counter[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        name = func._schema.name.removeprefix("aten::")
        made = _on_device(out)
        if func.is_view or not made or name.startswith(("empty", "new_empty", "_unsafe_view")):
            return out
        given = _on_device((args, kwargs))
        if name in _PICKED:
            given = [*made, *given[1:]]
        elif name in _PUT:
            put = args[_PUT[name]]
            # a sum is read before it is written
            made, given = [put] * (1 + (name == "scatter_add_")), given[1:]
        elif name in ("copy_", "fill_", "zero_", "zeros", "zeros_like", "arange"):
            given = given[1:] if name == "copy_" else []
        elif "out" in func._schema.overload_name:  # written, and read only where it is given, too
            given = _on_device(args)
        self.bytes[name] += sum(map(_size, [*given, *made]))
        self.calls[name] += 1
        return out


def _on_device(tree: Any) -> list[Tensor]:
    return [x for x in tree_leaves(tree) if isinstance(x, Tensor) and x.is_cuda]


def _size(x: Tensor) -> int:
    count = 1
    for size, stride in zip(x.shape, x.stride(), strict=True):
        count *= size if stride else 1
    return count * x.element_size()
