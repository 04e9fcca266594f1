"""Batched image operations at given parameters: what torchvision does one image at a time.

Images are (n, 3, S, S) float32 RGB in [0, 1], planar (not channels_last); parameters have one row
an image. A name that ends in `_` changes its argument in place. Formulas: torchvision.transforms.v2
on float tensors; each function is tested against it.
"""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.augment.parameters import CONTRAST, HUE, SATURATION

GRAY_WEIGHTS = (0.2989, 0.587, 0.114)  # of R, G, B; torchvision _rgb_to_grayscale_image

# Up to this image side products with dense interpolation matrices beat one sparse resample a view
# on a CPU (6 against 29 us at 32 px, 120 against 107 at 96); on a GPU they always do.
MATRICES_PX = 80
_BLUR_BLOCK_PX = 32  # 16 to 48 are equally fast, and 2.5 times faster than all of 224 at once


@contextmanager
def full_float32() -> Iterator[None]:
    """Matrix products in full float32, whatever the training loop has allowed for its own."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def crop_by_matrices(
    images: Tensor, source: Tensor, boxes: Tensor, flip: Tensor, crop_px: int
) -> Tensor:
    """Cut a box out of an image, resample it to the view (bilinear, antialiased), mirror it.

    images: (B, 3, H, W) uint8; source: (n,) int64, the image of each view; boxes: (n, 4) int64
    top, left, height, width, inside the image; flip: (n,) bool.
    Returns (n, 3, crop_px, crop_px) float32 in [0, 1], by two products with dense matrices.
    """
    n, (channels, height, width) = len(source), images.shape[1:]
    top, left, box_h, box_w = boxes.unbind(1)
    rows = _interpolation_matrices(top, box_h, torch.zeros_like(flip), height, crop_px)  # (n, S, H)
    columns = _interpolation_matrices(left, box_w, flip, width, crop_px)  # (n, S, W)
    columns.mul_(1 / 255)
    canvas = images.index_select(0, source).float()
    with full_float32():
        wide = canvas.view(n, channels * height, width) @ columns.transpose(1, 2)
        return rows[:, None] @ wide.view(n, channels, height, crop_px)  # (n, 3, S, S)


def _interpolation_matrices(
    start: Tensor, length: Tensor, backwards: Tensor, in_px: int, out_px: int
) -> Tensor:
    """(n, out_px, in_px) weights that resample [start, start + length) of a line to out_px.

    A triangle around each output pixel's centre, as wide as two input pixels, or two output
    pixels where the line is shrunk (antialiasing). Rounded in float32 as torch's own kernel does.
    """
    device = start.device
    scale = (length.float() / out_px)[:, None, None]  # input pixels an output pixel
    place = torch.arange(out_px, device=device)[:, None]  # (out, 1)
    place = place + backwards[:, None, None] * (out_px - 1 - 2 * place)  # (n, out, 1)
    centre = scale * (place + 0.5)
    position = torch.arange(in_px, device=device) - start[:, None, None]  # (n, 1, in)
    outside = (position < 0) | (position >= length[:, None, None])
    position = (position + 0.5).masked_fill_(outside, 1e9)
    weights = (position - centre).abs_().div_(scale.clamp_min(1.0)).neg_().add_(1.0).clamp_min_(0.0)
    return weights.div_(weights.sum(-1, keepdim=True))


def crop_by_resampling(
    images: Tensor, source: Tensor, boxes: Tensor, flip: Tensor, crop_px: int
) -> Tensor:
    """The same as crop_by_matrices, one sparse resample a view."""
    views = torch.empty(len(boxes), 3, crop_px, crop_px, device=images.device)
    plan = zip(source.tolist(), boxes.tolist(), flip.tolist(), strict=True)
    for row, (image, (top, left, height, width), mirror) in enumerate(plan):
        box = images[image, None, :, top : top + height, left : left + width].float().div_(255)
        view = F.interpolate(box, (crop_px, crop_px), mode="bilinear", antialias=True)[0]
        views[row] = view.flip(-1) if mirror else view
    return views


def rotate(images: Tensor, angle_deg: Tensor) -> Tensor:
    """Turn each image counter-clockwise about its centre; bilinear, black outside."""
    n, _, side, _ = images.shape
    angle = torch.deg2rad(angle_deg)[:, None, None]
    cos, sin = angle.cos(), angle.sin()
    line = torch.arange(1 - side, side, 2, device=images.device) / side  # (S,) in (-1, 1)
    x, y = line, line[:, None]
    grid = images.new_empty(n, side, side, 2)  # where each pixel comes from
    torch.sub(cos * x, sin * y, out=grid[..., 0])
    torch.add(sin * x, cos * y, out=grid[..., 1])
    return F.grid_sample(images, grid, mode="bilinear", padding_mode="zeros", align_corners=False)


def gray_of(images: Tensor) -> Tensor:
    """(n, 3, S, S) -> (n, 1, S, S)."""
    red, green, blue = images.unbind(1)
    weight_r, weight_g, weight_b = GRAY_WEIGHTS
    gray = red.mul(weight_r).add_(green, alpha=weight_g).add_(blue, alpha=weight_b)
    return gray[:, None]


def color_jitter_(
    images: Tensor, factors: Tensor, order: Tensor, hue_step: int | None, *, saturation: bool = True
) -> None:
    """Brightness, contrast, saturation and hue, each image in its own order.

    factors: (n, 4), columns BRIGHTNESS, CONTRAST, SATURATION, HUE; order: (n, steps), the column
    used at each step. Hue is done at step `hue_step` of every image of the batch (None: of none),
    so that its price is paid once; the other three are one blend, clamp(f x + (1 - f) target) with
    target 0, the mean gray or the gray. saturation: False says that no order contains it.
    """
    for step in range(order.shape[1]):
        if step == hue_step:
            shift_hue_(images, factors[:, HUE])
        else:
            _blend_(images, factors, order[:, step], saturation)


def _blend_(images: Tensor, factors: Tensor, op: Tensor, saturation: bool) -> None:
    factor = factors.gather(1, op[:, None])[:, :, None, None]  # (n, 1, 1, 1)
    rest = 1.0 - factor
    op = op[:, None, None, None]
    if saturation:
        target = gray_of(images)  # (n, 1, S, S)
        mean = target.mean((1, 2, 3), keepdim=True)
        target.mul_(rest * (op == SATURATION)).add_(mean.mul_(rest * (op == CONTRAST)))
        torch.addcmul(target, images, factor, out=images).clamp_(0.0, 1.0)
    else:
        mean = gray_of(images.mean((2, 3), keepdim=True))  # (n, 1, 1, 1): the mean is linear
        images.mul_(factor).add_(mean.mul_(rest * (op == CONTRAST))).clamp_(0.0, 1.0)


def shift_hue_(images: Tensor, turns: Tensor) -> None:
    """Turn the hue of HSV; value and chroma stay. turns: (n,) in [-0.5, 0.5].

    With v = max, c = max - min, m = min and the hue h in sixths of a turn, the way back is
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

    sixths = (red - green).lerp_(blue - red, green_leads).lerp_(green - blue, red_leads)
    sixths.div_(chroma.clamp_min(1e-30))  # gray pixels: 0 / 1e-30, and chroma 0 hides the hue
    sector = green_leads.mul_(-2.0).add_(4.0).mul_(red_leads.neg_().add_(1.0))  # 0, 2 or 4
    sixths.add_(sector).add_(6.0 * turns[:, None, None])
    sixths.sub_(torch.mul(sixths, 1 / 6, out=sector).floor_(), alpha=6.0)  # into [0, 6]

    ramp = sector
    torch.addcmul(least, chroma, _ramp(sixths, 3.0, ramp), out=red)
    torch.addcmul(value, chroma, _ramp(sixths, 2.0, ramp), value=-1, out=green)
    torch.addcmul(value, chroma, _ramp(sixths, 4.0, ramp), value=-1, out=blue)


def _ramp(sixths: Tensor, centre: float, out: Tensor) -> Tensor:
    return torch.sub(sixths, centre, out=out).abs_().sub_(1.0).clamp_(0.0, 1.0)


def gaussian_blur(images: Tensor, sigma: Tensor, kernel_px: int) -> Tensor:
    """Separable Gaussian of `kernel_px` taps (odd), reflected borders. sigma: (n,) in pixels.

    A product with a band matrix a direction, in blocks of rows: a whole S x S band is mostly zeros.
    """
    n, channels, side, _ = images.shape
    reach = kernel_px // 2
    if reach >= side:
        raise ValueError(f"a blur kernel of {kernel_px} px does not fit an image of {side} px")
    block = min(side, _BLUR_BLOCK_PX)
    taps = torch.arange(kernel_px, device=images.device)
    weights = torch.softmax(-0.5 * ((taps - reach) / sigma[:, None]).square(), dim=1)  # (n, kernel)
    place = torch.arange(block, device=images.device)[:, None] + taps  # (block, kernel)
    band = images.new_zeros(n, block, block + 2 * reach)
    band.scatter_(2, place.expand(n, -1, -1), weights[:, None].expand(n, block, kernel_px))
    band = band.repeat_interleave(channels, dim=0)  # (3n, block, block + 2 reach)

    padded = F.pad(images, (reach,) * 4, mode="reflect").flatten(0, 1)  # (3n, S + 2r, S + 2r)
    down = images.new_empty(n * channels, side, side + 2 * reach)
    blurred = images.new_empty(n * channels, side, side)
    with full_float32():
        for start in range(0, side, block):
            rows = min(block, side - start)
            part, read = band[:, :rows, : rows + 2 * reach], rows + 2 * reach
            torch.bmm(part, padded[:, start : start + read], out=down[:, start : start + rows])
        for start in range(0, side, block):
            columns = min(block, side - start)
            part, read = band[:, :columns, : columns + 2 * reach], columns + 2 * reach
            torch.bmm(
                down[:, :, start : start + read],
                part.transpose(1, 2),
                out=blurred[:, :, start : start + columns],
            )
    return blurred.view(n, channels, side, side)


def solarize(images: Tensor, threshold: Tensor) -> Tensor:
    """Invert what is at or above the threshold. threshold: (n,)."""
    return torch.where(images >= threshold[:, None, None, None], 1.0 - images, images)


def normalize_(images: Tensor, mean: Tensor, std: Tensor) -> Tensor:
    """(x - mean) / std for each channel. mean, std: (3,)."""
    return images.sub_(mean[:, None, None]).div_(std[:, None, None])
