"""FLOPs of a network's step, counted in a forward of one view."""

from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from sslpipe.models.state import evaluating


def step_flops(model: nn.Module, images: int, crop_px: int, channels: int = 3) -> float:
    """Count the FLOPs of forward and backward of a step's images, two views of `crop_px` each.

    One view is counted, in eval mode; a multiply-add is 2, backward twice forward.
    """
    parameter = next(model.parameters())
    shape = (1, channels, crop_px, crop_px)
    # without a gradient torch's attention is one kernel, which is not in the table
    view = torch.zeros(shape, dtype=parameter.dtype, device=parameter.device, requires_grad=True)
    with evaluating(model), _FlopCounter() as counter:  # type: ignore[no-untyped-call]
        model(view)
    return 3.0 * 2 * images * float(counter.flops)


class _FlopCounter(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Add up `flops` of what runs inside, by torch's table.

    `FlopCounterMode` counts the same, and imports torch.compile, which takes 2.5 s.
    """

    flops = 0

    @classmethod
    def _should_skip_dynamo(cls) -> bool:  # True: it is imported, to be kept out
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if count := flop_registry.get(func.overloadpacket):
            self.flops += count(*args, **(kwargs or {}), out_val=out)
        return out
