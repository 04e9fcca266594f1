"""Colour ops in the form that a compiler fuses into one pass; same formulas as pixels.py.

There, images are changed in place, which is what eager torch does fastest. A compiler does in-place
changes of single channels by computing the whole image again for each.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from sslpipe.augment.pixels import Colours, to_gray

# Of one kernel in a process. Views take one graph for chunks of one row and one for larger ones;
# other views beside them (a second run in the process) take more. Past the limit, 8 by default,
# compiling is refused.
_GRAPHS = 16


def compiled_colours(**options: Any) -> Colours:
    """Return kernels that are compiled at the first use, once for batches of any size.

    Args:
        options: torch.compile's.
    """
    torch._dynamo.config.recompile_limit = max(_GRAPHS, torch._dynamo.config.recompile_limit)
    blend, shift_hue = (
        torch.compile(kernel, fullgraph=True, **options) for kernel in (_blend, _shift_hue)
    )
    return Colours(
        lambda images, factor, gray, mean, needs_gray, needs_mean: _on_any_rows(
            blend, images, factor, gray, mean
        ),
        lambda images, hue_shift: _on_any_rows(shift_hue, images, hue_shift),
    )


def _on_any_rows(kernel: Callable[..., Tensor], *rows: Tensor) -> Tensor:
    # .data: of a view the compiler looks at what it is a view of too, and compiles for each kind
    rows = tuple(part.contiguous().data for part in rows)
    if len(rows[0]) > 1:  # the compiler takes 1 for a constant
        for part in rows:
            torch._dynamo.mark_dynamic(part, 0)
    return kernel(*rows)


def _blend(images: Tensor, factor: Tensor, gray: Tensor, mean: Tensor) -> Tensor:
    factor, gray, mean = (field[:, None, None, None] for field in (factor, gray, mean))
    own_gray = to_gray(images)  # (n, 1, S, S)
    target = own_gray * gray + own_gray.mean((1, 2, 3), keepdim=True) * mean
    return (images * factor + target).clamp(0.0, 1.0)


def _shift_hue(images: Tensor, hue_shift: Tensor) -> Tensor:
    red, green, blue = images.unbind(1)  # (n, S, S) each
    value = torch.maximum(torch.maximum(red, green), blue)
    least = torch.minimum(torch.minimum(red, green), blue)
    chroma = value - least
    sixths = torch.where(
        value == red,
        green - blue,
        torch.where(value == green, blue - red + 2.0 * chroma, red - green + 4.0 * chroma),
    )
    sixths = sixths / chroma.clamp_min(1e-30) + 6.0 * hue_shift[:, None, None]
    sixths = sixths - 6.0 * torch.floor(sixths * (1 / 6))
    ramps = (((sixths - centre).abs() - 1.0).clamp(0.0, 1.0) for centre in (3.0, 2.0, 4.0))
    of_red, of_green, of_blue = (chroma * ramp for ramp in ramps)
    return torch.stack([least + of_red, value - of_green, value - of_blue], dim=1)
