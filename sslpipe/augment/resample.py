"""Crops and blurs as what both are: each pixel of a line is a weighted sum of a few of another.

A Taps says which pixels, with what weights. On a CPU, whole lines of an image are summed by
embedding_bag, then the image is transposed and the lines across are summed in the same way: 1.2 to
2.3 times faster than products with the nearly empty matrices of the taps, and those than
interpolate. Other devices sum likewise, and blur by products.
Images are float32 and planar; formulas: torchvision.transforms.v2 on float tensors.
"""

import math
from functools import cache
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.precision import full_float32

TOGETHER_PX = 96  # images up to this long are read whole, those of many views in one call
# Taps of a Gaussian beyond this many sigmas weigh less than 2^-25 of the middle one: adding them
# to a float32 sum changes its last bit at most.
_LAST_SIGMAS = 5.9
_CUT_PX = 16  # embedding_bag compiles a kernel for each width that it meets: 0.35 ms
_FEW_TAPS = 5  # blurs of so few are sums of shifted images


class Taps(NamedTuple):
    """For each of n lines and each output pixel: the input pixels it sums and their weights."""

    places: Tensor  # (n, out_px, taps) int32
    weight: Tensor  # (n, out_px, taps) float32

    def rows(self, part: slice) -> "Taps":
        """Return some of the lines."""
        return Taps(self.places[part], self.weight[part])


class Crops(NamedTuple):
    """n boxes to be cut out of images, resampled (bilinear, antialiased) and mirrored."""

    source: Tensor  # (n,) int64: the image of each view
    boxes: Tensor  # (n, 4) int64: top, left, height, width, inside the image
    down: Taps
    across: Taps

    def rows(self, part: slice) -> "Crops":
        """Return some of the crops."""
        down = self.down.rows(part)
        across = self.across.rows(part)
        return Crops(self.source[part], self.boxes[part], down, across)


def plan_crops(source: Tensor, boxes: Tensor, flip: Tensor, apart: Tensor, crop_px: int) -> Crops:
    """Compute the taps of n crops of side crop_px.

    `flip` (n,) are mirrored; `apart` (n,) are for crop_apart: taps count from the box.
    """
    top, left, height, width = boxes.unbind(1)
    starts = torch.where(apart, 0, top), torch.where(apart, left % _CUT_PX, left)
    most = [num_crop_taps(int(length.max()), crop_px) for length in (height, width)]
    down, across = (
        crop_taps(start=start, length=length, backwards=backwards, out_px=crop_px, num_taps=count)
        for start, length, backwards, count in zip(
            starts, (height, width), (torch.zeros_like(flip), flip), most, strict=True
        )
    )
    return Crops(source, boxes, down, Taps(across.places, across.weight.mul_(1 / 255)))


def crop_together(images: Tensor, crops: Crops) -> Tensor:
    """Crop images, which are read whole; planned without `apart`.

    (B, C, H, W) in 0..255, uint8 or float32 (fastest channels_last) -> (n, C, crop_px, crop_px)
    float32 in units / 255.
    """
    channels, height, width = images.shape[1:]
    lines = images.permute(0, 2, 3, 1).to(torch.float32, memory_format=torch.contiguous_format)
    first = (crops.source * height).int()[:, None, None]
    return _crop(lines.reshape(-1, channels * width), first, crops, channels)


def crop_gathered(images: Tensor, crops: Crops) -> Tensor:
    """Do the same on any device, converting to float32 only those that the crops show."""
    gathered = images.index_select(0, crops.source)
    each = torch.arange(len(gathered), device=gathered.device)
    return crop_together(gathered, crops._replace(source=each))


def crop_apart(images: Tensor, crops: Crops) -> Tensor:
    """Do the same on a CPU, reading no more of an image than its box; planned with `apart`."""
    side = crops.down.places.shape[1]
    channels = images.shape[1]
    views = torch.empty(len(crops.boxes), channels, side, side)
    plan = zip(crops.source.tolist(), crops.boxes.tolist(), strict=True)
    for row, (image, (top, left, height, width)) in enumerate(plan):
        first = left // _CUT_PX * _CUT_PX
        last = -(-(left + width) // _CUT_PX) * _CUT_PX
        box = images[image, :, top : top + height, first:last].permute(1, 2, 0)
        lines = box.to(torch.float32, memory_format=torch.contiguous_format)
        this = slice(row, row + 1)
        views[this] = _crop(lines.reshape(height, -1), None, crops.rows(this), channels)
    return views


def _crop(lines: Tensor, first: Tensor | None, crops: Crops, channels: int) -> Tensor:
    """Resample down, then across.

    lines: (m, C W) of images, pixel by pixel; first: the line where each crop's image begins, as in
    _sum_lines.
    """
    n, side, _ = crops.down.places.shape
    down = _sum_lines(lines, crops.down, first)  # (n, S, C W)
    columns = transposed(down).view(-1, channels * side)  # (n W, C S)
    first = _first_lines(n, lines.shape[1] // channels, lines.device) if n > 1 else None
    across = _sum_lines(columns, crops.across, first)  # (n, S, C S)
    return transposed(across).view(n, channels, side, side)


def gaussian_blur(images: Tensor, sigma: Tensor, kernel_px: int, largest_sigma: float) -> Tensor:
    """Blur (n, c, S, S) by a separable Gaussian of (n,) sigmas, with reflected borders.

    Taps of the kernel, odd and less than 2 S, that float32 cannot see at `largest_sigma` are
    skipped.
    """
    if kernel_px // 2 >= images.shape[-1]:
        raise ValueError(
            f"a blur kernel of {kernel_px} px does not fit an image of {images.shape[-1]} px"
        )
    if kernel_px <= _FEW_TAPS:
        return _blur_by_shifts(images, sigma, kernel_px)
    taps = blur_taps(sigma, kernel_px, images.shape[-1], largest_sigma)
    if images.device.type != "cpu":
        return blur_by_products(images, taps)
    n, channels, side, _ = images.shape
    planes = images.contiguous().view(n * channels, side, side)
    places = taps.places[:1] + _first_lines(n * channels, side, images.device)
    weight = taps.weight[:, None].expand(n, channels, *taps.weight.shape[1:])
    taps = Taps(places, weight.reshape(places.shape))
    for _ in range(2):
        planes = transposed(_sum_lines(planes.view(-1, side), taps))
    return planes.view(images.shape)


def _blur_by_shifts(images: Tensor, sigma: Tensor, kernel_px: int) -> Tensor:
    reach = kernel_px // 2
    side = images.shape[-1]
    weight = _gaussian(sigma, kernel_px)[:, :, None, None, None].unbind(1)  # each (n, 1, 1, 1)
    for dim, border in ((2, (0, 0, reach, reach)), (3, (reach, reach, 0, 0))):
        padded = F.pad(images, border, mode="reflect")
        shifted = [padded.narrow(dim, first, side) for first in range(kernel_px)]
        images = shifted[reach] * weight[reach]
        for tap in range(reach):
            images.addcmul_(shifted[tap] + shifted[-1 - tap], weight[tap])
    return images


def blur_by_products(images: Tensor, taps: Taps) -> Tensor:
    """Do what gaussian_blur does by dense products."""
    n, _, side, _ = images.shape
    matrices = _matrices(taps, side)
    down = torch.empty_like(images)
    with full_float32():
        for channel in range(images.shape[1]):  # a product over all would need copies of matrices
            torch.bmm(matrices, images[:, channel], out=down[:, channel])
        return (down.view(n, -1, side) @ matrices.mT).view(images.shape)


def num_crop_taps(longest_px: int, out_px: int) -> int:
    """Return how many input pixels one output pixel touches where longest_px become out_px."""
    return math.ceil(2 * max(longest_px / out_px, 1.0)) + 1


def crop_taps(start: Tensor, length: Tensor, backwards: Tensor, out_px: int, num_taps: int) -> Taps:
    """Compute the taps that resample [start, start + length) of each line to out_px.

    A triangle around each output pixel's centre, as wide as two input pixels, or two output
    pixels where the line is shrunk (antialiasing). Rounded in float32 as torch's own kernel does.
    `backwards` (n,) are mirrored; `num_taps` is num_crop_taps of the longest.
    """
    device = start.device
    scale = (length.float() / out_px)[:, None]  # (n, 1), input pixels an output pixel
    support = scale.clamp_min(1.0)
    place = torch.arange(out_px, device=device)
    place = torch.where(backwards[:, None], out_px - 1 - place, place)  # (n, out)
    centre = scale * (place + 0.5)
    first = (centre - support + 0.5).floor_().clamp_min_(0.0)
    last = (centre + support - 0.5).floor_().minimum(length[:, None] - 1.0)
    # (taps, n, out): the few taps as the innermost dimension would be slow
    position = first + torch.arange(num_taps, device=device)[:, None, None]
    weight = (position + 0.5 - centre).abs_().div_(support)
    weight = weight.neg_().add_(1.0).clamp_min_(0.0).mul_(position <= last)
    weight.div_(weight.sum(0))
    position = position.minimum(last).add_(start[:, None])  # taps too many weigh nothing
    return Taps(position.int().permute(1, 2, 0).contiguous(), weight.permute(1, 2, 0).contiguous())


def blur_taps(sigma: Tensor, kernel_px: int, side_px: int, largest_sigma: float) -> Taps:
    """Compute the taps of a Gaussian along each line, reflected at its ends.

    `largest_sigma`, of the whole batch, decides which taps are skipped as float32 cannot see them.
    """
    reach = kernel_px // 2
    kept = min(reach, math.ceil(_LAST_SIGMAS * largest_sigma))
    weight = _gaussian(sigma, kernel_px)[:, None, reach - kept : reach + kept + 1]  # (n, 1, taps)
    places = _reflected(side_px, kept, sigma.device)
    return Taps(places.expand(len(sigma), -1, -1), weight.expand(-1, side_px, -1))


@cache
def _reflected(side_px: int, reach_px: int, device: torch.device) -> Tensor:
    """(S, 2 reach + 1) int32: each pixel of a line and its neighbours, reflected at the ends.

    Shared by all calls: not to be changed.
    """
    line = torch.arange(side_px, device=device)
    place = line[:, None] + torch.arange(-reach_px, reach_px + 1, device=device)
    return (side_px - 1 - (side_px - 1 - place.abs()).abs()).int()


def _gaussian(sigma: Tensor, kernel_px: int) -> Tensor:
    """(n,) -> the weights (n, kernel) of the pixels around the middle one."""
    offset = _offsets(kernel_px, sigma.device)
    return torch.softmax(-0.5 * (offset / sigma[:, None]).square(), dim=1)


@cache
def _offsets(kernel_px: int, device: torch.device) -> Tensor:
    """The kernel's pixels, counted from the middle one. Shared by all calls: not to be changed."""
    return torch.arange(-(kernel_px // 2), kernel_px // 2 + 1, device=device)


def _sum_lines(lines: Tensor, taps: Taps, first: Tensor | None = None) -> Tensor:
    """Weighted sums of lines (m, width) -> (n, out_px, width).

    first: (n, 1, 1) int32, the line that is 0 to each; None: the first of all.
    """
    n, out_px, num_taps = taps.places.shape
    places = taps.places if first is None else taps.places + first
    sums = F.embedding_bag(
        places.view(-1, num_taps),
        lines,
        per_sample_weights=taps.weight.reshape(-1, num_taps),
        mode="sum",
    )
    return sums.view(n, out_px, -1)


def _first_lines(images: int, height: int, device: torch.device) -> Tensor:
    """(images, 1, 1) int32: where each begins, of images one below the other."""
    first = torch.arange(0, images * height, height, dtype=torch.int32, device=device)
    return first[:, None, None]


def transposed(images: Tensor) -> Tensor:
    """Transpose, (n, r, c) -> (n, c, r): images.mT.contiguous(), 3 to 5 times as fast on a CPU.

    A shuffle of channels is the same move, and its kernel does it in blocks of 16 x 16.
    """
    if images.device.type != "cpu":
        return images.mT.contiguous()
    n, rows, columns = images.shape
    channels = images.reshape(1, n, 1, rows * columns).permute(0, 3, 1, 2)  # (1, r c, n, 1)
    return F.channel_shuffle(channels, rows).permute(0, 2, 3, 1).view(n, columns, rows)


def _matrices(taps: Taps, in_px: int) -> Tensor:
    """(n, out_px, in_px): what a column is multiplied by from the left."""
    n, out_px, _ = taps.places.shape
    matrices = torch.zeros(n, out_px, in_px, device=taps.places.device)
    return matrices.scatter_add_(2, taps.places.long(), taps.weight)
