"""Batched image operations at given parameters: what torchvision does one image at a time.

Images are (n, 3, S, S) float32 RGB in [0, 1], planar (not channels_last); what is no colour op
takes any number of channels. Parameters have one row per image. A name that ends in `_` changes its
argument in place. Formulas are those of torchvision.transforms.v2 on float tensors; each function
is tested against it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # columns of factors, values of order
BLEND = 1  # kinds of a colour step in Triton's tables; 0: nothing is done
SHIFT_HUE = 2
GRAY_WEIGHTS = (0.2989, 0.587, 0.114)  # of R, G, B; torchvision _rgb_to_grayscale_image


def rotate(images: Tensor, angle_deg: Tensor) -> Tensor:
    """Rotate each image counter-clockwise about its centre; bilinear, black outside."""
    n, _, side, _ = images.shape
    angle = torch.deg2rad(angle_deg)[:, None, None]
    cos = angle.cos()
    sin = angle.sin()
    line = torch.arange(1 - side, side, 2, device=images.device) / side  # (S,) in (-1, 1)
    x = line
    y = line[:, None]
    grid = images.new_empty(n, side, side, 2)  # where each pixel comes from
    torch.sub(cos * x, sin * y, out=grid[..., 0])
    torch.add(sin * x, cos * y, out=grid[..., 1])
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def to_gray(images: Tensor) -> Tensor:
    """Return the weighted sum of the channels: (n, 3, S, S) -> (n, 1, S, S)."""
    red, green, blue = images.unbind(1)
    weight_r, weight_g, weight_b = GRAY_WEIGHTS
    gray = red.mul(weight_r).add_(green, alpha=weight_g).add_(blue, alpha=weight_b)
    return gray[:, None]


def grayscale_(images: Tensor) -> None:
    """Set all three channels to the gray."""
    images.copy_(to_gray(images))


class Blends(NamedTuple):
    """A step of brightness, contrast or saturation: clamp(f x + g gray + m mean gray).

    Each (n, steps) float32; an image that does nothing at a step has 1, 0, 0.
    """

    factor: Tensor
    gray: Tensor
    mean: Tensor

    def rows(self, index: Tensor | slice) -> "Blends":
        """Return some of the rows, in the order of `index`."""
        return Blends(*(field[index] for field in self))


# for each step: whether some image does it, uses its gray, and its mean gray
Needs = Sequence[tuple[bool, bool, bool]]


def make_blends(order: Tensor, factors: Tensor, jitter: Tensor) -> Blends:
    """Write the steps of `order` (n, k), ops as BRIGHTNESS, without hue as blends.

    `factors` (n, 4) have a column an op; `jitter` (n,) says whether it is done. HUE is in all rows
    or in none.
    """
    order = order[order != HUE].view(len(order), -1)
    done = jitter[:, None]
    factor = factors.gather(1, order)
    rest = 1.0 - factor
    return Blends(
        torch.where(done, factor, 1.0),
        rest * (done & (order == SATURATION)),
        rest * (done & (order == CONTRAST)),
    )


# A step of `Blends`: images and (n,) factor, gray, mean; whether some gray, some mean is not 0
Blend = Callable[[Tensor, Tensor, Tensor, Tensor, bool, bool], Tensor]


def change_colours(
    images: Tensor,
    blends: Blends,
    hue_shift: Tensor,
    hue_step: int | None,
    needs: Needs,
    blend: Blend,
) -> Tensor:
    """Jitter colours, each image in its own order, perhaps in place; what none needs is not done.

    Hue is shifted by (n,) cycles before blend `hue_step` of every image, so that its price is paid
    once; None: of none. `blend` is `blend_`, or `blend_channels_` of what is no colour.
    """
    for step, (done, needs_gray, needs_mean) in enumerate(needs):
        if step == hue_step:
            images = shift_hue_(images, hue_shift)
        if done:
            factor, gray, mean = (field[:, step] for field in blends)
            images = blend(images, factor, gray, mean, needs_gray, needs_mean)
    return shift_hue_(images, hue_shift) if hue_step == len(needs) else images


def blend_(
    images: Tensor, factor: Tensor, gray: Tensor, mean: Tensor, needs_gray: bool, needs_mean: bool
) -> Tensor:
    """Do one step of Blends, (n,) each; needs_gray, needs_mean: whether some is not 0."""
    factor, gray, mean = (field[:, None, None, None] for field in (factor, gray, mean))
    if needs_gray:
        target = to_gray(images)  # (n, 1, S, S)
        if needs_mean:
            mean = target.mean((1, 2, 3), keepdim=True) * mean
        target.mul_(gray).add_(mean)
        images.mul_(factor).add_(target)
    elif needs_mean:
        mean = to_gray(images.mean((2, 3), keepdim=True)) * mean  # the mean is linear
        images.mul_(factor).add_(mean)
    else:
        images.mul_(factor)
    return images.clamp_(0.0, 1.0)


def shift_hue_(images: Tensor, hue_shift: Tensor) -> Tensor:
    """Shift the hue of HSV by (n,) cycles in [-0.5, 0.5]; value and chroma stay.

    With v = max, c = max - min, m = min and the hue h in sixths of a cycle, the way back is
    r = m + c clip(|h - 3| - 1), g = v - c clip(|h - 2| - 1), b = v - c clip(|h - 4| - 1).
    Choices are float masks and lerp: torch.where is 20 times slower than either on a CPU.
    """
    red, green, blue = images.unbind(1)  # (n, S, S) each
    value = torch.maximum(red, green)
    torch.maximum(value, blue, out=value)
    least = torch.minimum(red, green)
    torch.minimum(least, blue, out=least)
    chroma = value - least
    red_leads = torch.eq(value, red, out=torch.empty_like(value))  # 1.0 or 0.0; wins a tie
    green_leads = torch.eq(value, green, out=torch.empty_like(value))

    sixths = (red - green).add_(chroma, alpha=4.0)  # times chroma, up to the division
    sixths.lerp_((blue - red).add_(chroma, alpha=2.0), green_leads).lerp_(green - blue, red_leads)
    sixths.div_(chroma.clamp_min(1e-30))  # gray pixels: 0 / 1e-30, and chroma 0 hides the hue
    sixths.add_(6.0 * hue_shift[:, None, None])
    ramp = green_leads
    sixths.sub_(torch.mul(sixths, 1 / 6, out=ramp).floor_(), alpha=6.0)  # into [0, 6]

    torch.addcmul(least, chroma, _ramp(sixths, 3.0, ramp), out=red)
    torch.addcmul(value, chroma, _ramp(sixths, 2.0, ramp), value=-1, out=green)
    torch.addcmul(value, chroma, _ramp(sixths, 4.0, ramp), value=-1, out=blue)
    return images


def _ramp(sixths: Tensor, centre: float, out: Tensor) -> Tensor:
    return torch.sub(sixths, centre, out=out).abs_().sub_(1.0).clamp_(0.0, 1.0)


def blend_channels_(
    images: Tensor, factor: Tensor, gray: Tensor, mean: Tensor, needs_gray: bool, needs_mean: bool
) -> Tensor:
    """Do one step of brightness or contrast to channels that are no colours: blend_'s arguments.

    Each of (n, C, S, S) has its own mean, there is no gray, and nothing is clamped.
    """
    added = images.mean((2, 3), keepdim=True).mul_(mean[:, None, None, None]) if needs_mean else 0.0
    return images.mul_(factor[:, None, None, None]).add_(added)


def solarize(images: Tensor, threshold: Tensor | float, *, in_range: bool = True) -> Tensor:
    """Invert what is at or above the threshold: (n,) float32, or one for all.

    in_range: whether all values are in [0, 1].
    """
    if isinstance(threshold, Tensor):
        threshold = threshold[:, None, None, None]
    if not in_range:
        return torch.where(images >= threshold, 1.0 - images, images)
    bright = torch.ge(images, threshold, out=torch.empty_like(images))  # 1.0 or 0.0
    return torch.sub(images, bright, out=bright).abs_()  # torch.where is 20 times slower on a CPU


def normalize_(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Make each channel (x - mean) / std; mean, std: (C,)."""
    return images.sub_(mean[:, None, None]).div_(std[:, None, None])
