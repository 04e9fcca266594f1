"""The colour jitter on a GPU: Planes, where all that is linear in a pixel's channels is a product.

A GPU waits for memory, so an op costs what it reads and writes. torch's operations on single
channels read and write them some twenty times an op; one small product mixes all channels, adds a
constant and touches each number once. Formulas: pixels.py; each function is tested against it.
"""

from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.augment.pixels import GRAY_WEIGHTS
from sslpipe.data.pipeline import send

_RED, _ONES, _LEAST, _VALUE, _PLANES = 0, 3, 4, 5, 6
_ABOVE = 2.0**-22  # what rounding may take from a colour that hue makes: none is below 0


class Planes:
    """n views (n, 3, S, S) float32, and three planes of working memory beside those of each.

    The planes of a view: red, green, blue; ones, which a product multiplies by what it adds; the
    least and the largest of the colours. Products are as exact as full_float32 around the calls
    makes them.

    Args:
        count: n.
        side: S, in pixels.
        device: Where.
    """

    def __init__(self, count: int, side: int, device: torch.device) -> None:
        self._planes = torch.empty(count, _PLANES, side**2, device=device)
        self._planes[:, _ONES] = 1.0
        self._side = side

    @property
    def views(self) -> Tensor:
        """(n, 3, S, S), planar; changed by what is called here."""
        return self._planes[:, :_ONES].view(-1, _ONES, self._side, self._side)

    def blend_(self, rows: slice, weights: Tensor, mean: Tensor | None) -> None:
        """Do one step of pixels.Blends to some views.

        Args:
            rows: Which, m views.
            weights: (m, 3, 4), their part of `blend_weights`; the last column is written.
            mean: (m,) float32, of their mean gray; None: nobody's is used.
        """
        planes, constants = self._planes[rows], _constants(self._planes.device)
        if mean is not None:
            grays = planes[:, :_ONES].mean(2) @ constants.gray  # (m, 3), all three the same
            torch.mul(grays, mean[:, None], out=weights[:, :, 3])
        mixed = weights @ planes[:, :_LEAST]  # (m, 3, S S)
        torch.clamp(mixed, 0.0, 1.0, out=planes[:, :_ONES])

    def shift_hue_(self, rows: slice, shift: Tensor) -> None:
        """Shift the hue of some views, as pixels.shift_hue_ does.

        With T = 1 + (g + b - r - m) / c the hue is T sixths where g >= b and -T elsewhere: between
        red and green T is 0 + (g - m) / c, then 1 + (v - r) / c, and so on; the other half mirrors
        it. A ramp clip(|h - 3| - 1, 0, 1) is a Huber loss of h to 3, |h - 3| - 1/2 from 1 on, cut
        off at 1/2 and 3/2; the half is in the bases that the ramps are added to.

        Args:
            rows: Which, m views.
            shift: (m,) float32 in [-3, 3], in sixths of a cycle.
        """
        planes, constants = self._planes[rows], _constants(self._planes.device)
        colours = planes[:, :_ONES]
        torch.aminmax(colours, dim=1, out=(planes[:, _LEAST], planes[:, _VALUE]))
        mixed = constants.hue.expand(len(planes), -1, -1) @ planes  # (m, 5, S S)
        sixths, green_leads, chroma, low, high = mixed.unbind(1)  # (m, S S) each
        sixths.copysign_(green_leads)  # T times chroma, or - T
        chroma.clamp_min_(1e-30)  # of a gray pixel, whose hue it hides
        torch.addcdiv(shift[:, None], sixths, chroma, out=sixths).remainder_(6.0)
        whole = len(planes), 3, -1
        ramps = F.smooth_l1_loss(
            sixths[:, None].expand(whole), constants.centres.expand_as(colours), reduction="none"
        ).clamp_(0.5, 1.5)
        torch.addcmul(low, chroma, ramps[:, 0], out=planes[:, _RED])
        rest = colours[:, 1:]
        torch.addcmul(high[:, None], chroma[:, None], ramps[:, 1:], value=-1, out=rest)


def blend_weights(terms: Tensor) -> Tensor:
    """Write blends as products over red, green, blue and ones.

    Args:
        terms: (k, 3, n): factor, gray and mean of k blends.

    Returns:
        (k, n, 3, 4); its last column is 0, for what the mean gray adds.
    """
    weights = terms[:, :2].mT @ _constants(terms.device).blend
    return weights.view(*weights.shape[:2], 3, 4)


class _Constants(NamedTuple):
    blend: Tensor  # (2, 12): what factor and gray are multiplied by
    gray: Tensor  # (3, 3): red, green and blue to three times their gray
    hue: Tensor  # (5, 6): T chroma, green - blue, chroma, and what the ramps are added to
    centres: Tensor  # (1, 3, 1): where red, green and blue ramp, in sixths


@cache
def _constants(device: torch.device) -> _Constants:
    """Shared by all calls: not to be changed."""
    gray = torch.tensor(GRAY_WEIGHTS)
    blend = torch.zeros(2, 3, 4)
    blend[0, :, :3], blend[1, :, :3] = torch.eye(3), gray
    hue = torch.tensor(
        [  # red, green, blue, one, least, value
            [-1.0, 1.0, 1.0, 0.0, -2.0, 1.0],
            [0.0, 1.0, -1.0, 0.0, 0.0, 0.0],
            [0.0, 0.0, 0.0, 0.0, -1.0, 1.0],
            [0.0, 0.0, 0.0, _ABOVE, 1.5, -0.5],  # least - chroma / 2
            [0.0, 0.0, 0.0, _ABOVE, -0.5, 1.5],  # value + chroma / 2
        ]
    )
    centres = torch.tensor([3.0, 2.0, 4.0])[:, None]
    grays = gray[:, None].expand(3, 3).contiguous()
    return _Constants(*send([blend.flatten(1), grays, hue, centres[None]], device))
