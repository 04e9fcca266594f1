"""Batched image operations at given parameters: what torchvision does one image at a time.

Images are (n, 3, S, S) float32 RGB in [0, 1], planar (not channels_last); parameters have one row
per image. A name that ends in `_` changes its argument in place. Formulas are those of
torchvision.transforms.v2 on float tensors; each function is tested against it.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # columns of factors, values of order
GRAY_WEIGHTS = (0.2989, 0.587, 0.114)  # of R, G, B; torchvision _rgb_to_grayscale_image


def rotate(images: Tensor, angle_deg: Tensor) -> Tensor:
    """Rotate each image counter-clockwise about its centre; bilinear, black outside.

    Args:
        images: (n, 3, S, S).
        angle_deg: (n,) float32.
    """
    n, _, side, _ = images.shape
    angle = torch.deg2rad(angle_deg)[:, None, None]
    cos, sin = angle.cos(), angle.sin()
    line = torch.arange(1 - side, side, 2, device=images.device) / side  # (S,) in (-1, 1)
    x, y = line, line[:, None]
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

    def to(self, device: torch.device | str) -> "Blends":
        """Return the same on a device."""
        return Blends(*(field.to(device, non_blocking=True) for field in self))


# for each step: whether some image does it, uses its gray, and its mean gray
Needs = Sequence[tuple[bool, bool, bool]]


def make_blends(order: Tensor, factors: Tensor, jitter: Tensor) -> Blends:
    """Write the steps of `order` without hue as blends.

    Args:
        order: (n, k) int64, the op (BRIGHTNESS, ...) of each step; HUE in all rows or in none.
        factors: (n, 4) float32, a column an op.
        jitter: (n,) bool, whether it is done.

    Returns:
        Blends of k steps, or k - 1 where one is hue.
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


class Colours(NamedTuple):
    """The kernels of change_colours. Each returns the changed images, perhaps its argument.

    Args:
        blend: as blend_ below.
        shift_hue: as shift_hue_.
    """

    blend: Callable[[Tensor, Tensor, Tensor, Tensor, bool, bool], Tensor]
    shift_hue: Callable[[Tensor, Tensor], Tensor]


def change_colours(
    images: Tensor,
    blends: Blends,
    hue_shift: Tensor,
    hue_step: int | None,
    needs: Needs,
    colours: Colours,
) -> Tensor:
    """Jitter colours, each image in its own order; what no image needs is not computed.

    Args:
        images: may be changed too.
        blends: the steps but hue.
        hue_shift: (n,) float32, in cycles.
        hue_step: hue is shifted before this blend of every image, so that its price is paid once;
            None: of none.
        needs: of each step, over all images.
        colours: the kernels.
    """
    for step, (done, needs_gray, needs_mean) in enumerate(needs):
        if step == hue_step:
            images = colours.shift_hue(images, hue_shift)
        if done:
            factor, gray, mean = (field[:, step] for field in blends)
            images = colours.blend(images, factor, gray, mean, needs_gray, needs_mean)
    return colours.shift_hue(images, hue_shift) if hue_step == len(needs) else images


def blend_(
    images: Tensor, factor: Tensor, gray: Tensor, mean: Tensor, needs_gray: bool, needs_mean: bool
) -> Tensor:
    """Do one step of Blends.

    Args:
        images: (n, 3, S, S).
        factor: (n,) float32, of the images.
        gray: (n,) float32, of their gray.
        mean: (n,) float32, of their mean gray.
        needs_gray: whether some image's `gray` is not 0.
        needs_mean: whether some image's `mean` is not 0.
    """
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
    """Shift the hue of HSV; value and chroma stay.

    With v = max, c = max - min, m = min and the hue h in sixths of a cycle, the way back is
    r = m + c clip(|h - 3| - 1), g = v - c clip(|h - 2| - 1), b = v - c clip(|h - 4| - 1).
    Choices are float masks and lerp: torch.where is 20 times slower than either on a CPU.

    Args:
        images: (n, 3, S, S).
        hue_shift: (n,) float32 in [-0.5, 0.5], in cycles.
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


EAGER = Colours(blend_, shift_hue_)


def solarize(images: Tensor, threshold: Tensor | float) -> Tensor:
    """Invert what is at or above the threshold: (n,) float32, or one for all."""
    if isinstance(threshold, Tensor):
        threshold = threshold[:, None, None, None]
    bright = torch.ge(images, threshold, out=torch.empty_like(images))  # 1.0 or 0.0
    return torch.sub(images, bright, out=bright).abs_()  # torch.where is 20 times slower on a CPU


def normalize_(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """Make each channel (x - mean) / std; mean, std: (3,)."""
    return images.sub_(mean[:, None, None]).div_(std[:, None, None])
