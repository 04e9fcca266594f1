"""Crops and blurs as what both are: each pixel of a line is a weighted sum of a few of another.

A Taps says which pixels, with what weights; rows_by_taps and columns_by_taps do it to images. On a
CPU, rows are sums of whole image lines (embedding_bag, 8 times faster than interpolate's kernel at
224 px) and columns are products with the nearly empty matrix of the taps, cut into dense blocks.
Images are float32 and planar; formulas: torchvision.transforms.v2 on float tensors.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

TOGETHER_PX = 96  # images up to this long are read whole, those of many views in one call
DENSE_PX = 64  # lines up to this long are multiplied by one whole matrix
# Blocks of output columns. Narrow ones hold fewer zeros, wide ones multiply faster; measured from
# 8 to 112 at 96 and 224 px. bfloat16 products are cheap against their overhead.
_BLOCK_PX, _SMALL_BLOCK_PX, _BF16_BLOCK_PX = 16, 32, 64
# Taps of a Gaussian beyond this many sigmas weigh less than 2^-25 of the middle one: adding them
# to a float32 sum changes nothing.
_LAST_SIGMAS = 5.9
_FIRST = torch.zeros(1, dtype=torch.int64)


class Taps(NamedTuple):
    """For each of n lines and each output pixel: the input pixels it sums and their weights."""

    places: Tensor  # (n, out_px, taps) int32
    weight: Tensor  # (n, out_px, taps) float32

    def rows(self, part: slice) -> "Taps":
        return Taps(self.places[part], self.weight[part])


_CUT_PX = 16  # embedding_bag compiles a kernel for each width that it meets: 0.35 ms


@contextmanager
def full_float32() -> Iterator[None]:
    """Matrix products in full float32, whatever the training loop has allowed for its own."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


class Crops(NamedTuple):
    """n boxes to be cut out of images, resampled (bilinear, antialiased) and mirrored.

    apart: read no more of an image than its box; else lines of whole images are read.
    """

    source: Tensor  # (n,) int64: the image of each view
    boxes: Tensor  # (n, 4) int64: top, left, height, width, inside the image
    down: Taps
    across: Taps

    def rows(self, part: slice) -> "Crops":
        down, across = self.down.rows(part), self.across.rows(part)
        return Crops(self.source[part], self.boxes[part], down, across)


def plan_crops(
    source: Tensor, boxes: Tensor, flip: Tensor, apart: Tensor, crop_px: int, device: torch.device
) -> Crops:
    """source, boxes: as in Crops; flip, apart (for crop_apart): (n,) bool. All on the CPU."""
    top, left, height, width = boxes.unbind(1)
    starts = torch.where(apart, 0, top), torch.where(apart, left % _CUT_PX, left)
    most = [num_crop_taps(int(length.max()), crop_px) for length in (height, width)]
    flip = flip.to(device)
    down, across = (
        crop_taps(start.to(device), length.to(device), backwards, crop_px, count)
        for start, length, backwards, count in zip(
            starts, (height, width), (torch.zeros_like(flip), flip), most, strict=True
        )
    )
    return Crops(source.to(device), boxes, down, Taps(across.places, across.weight.mul_(1 / 255)))


def crop_together(images: Tensor, crops: Crops) -> Tensor:
    """(B, 3, H, W) in 0..255, uint8 or float32 -> (n, 3, crop_px, crop_px) float32 in [0, 1].

    For a GPU, and small images on a CPU: a view is one product with a matrix of columns.
    """
    wide = rows_by_taps(images, crops.source, crops.down)  # (n, 3, S, W)
    return columns_by_taps(wide, crops.across)


def crop_apart(images: Tensor, crops: Crops) -> Tensor:
    """The same on a CPU, reading no more of an image than its box; crops planned with `apart`."""
    wide = []
    plan = zip(crops.source.tolist(), crops.boxes.tolist(), strict=True)
    for row, (image, (top, left, height, width)) in enumerate(plan):
        first, last = left // _CUT_PX * _CUT_PX, -(-(left + width) // _CUT_PX) * _CUT_PX
        box = images[image, :, top : top + height, first:last]
        taps = crops.down.rows(slice(row, row + 1))
        if box.stride(0) == 1:  # channels last: an image line holds all three
            line = box.permute(1, 2, 0).to(torch.float32, memory_format=torch.contiguous_format)
            short = rows_by_taps(line.view(1, 1, height, -1), _FIRST, taps)  # (1, 1, S, 3 W)
            wide.append(short.view(taps.places.shape[1], -1, 3).permute(2, 0, 1).contiguous())
        else:
            wide.append(rows_by_taps(box.float()[None], _FIRST, taps)[0])
    return columns_by_taps(wide, crops.across)


def gaussian_blur(
    images: Tensor, sigma: Tensor, kernel_px: int, largest_sigma: float, *, bfloat16: bool = False
) -> Tensor:
    """Separable Gaussian of `kernel_px` taps (odd), reflected borders: (n, c, S, S) -> the same.

    sigma: (n,) in pixels, none over largest_sigma. bfloat16: see columns_by_taps.
    """
    taps = blur_taps(sigma, kernel_px, images.shape[-1], largest_sigma)
    source = torch.arange(len(images), device=images.device)
    return columns_by_taps(rows_by_taps(images, source, taps), taps, bfloat16=bfloat16)


def num_crop_taps(longest_px: int, out_px: int) -> int:
    """The most input pixels that one output pixel touches where `longest_px` become `out_px`."""
    return math.ceil(2 * max(longest_px / out_px, 1.0)) + 1


def crop_taps(start: Tensor, length: Tensor, backwards: Tensor, out_px: int, num_taps: int) -> Taps:
    """Resample [start, start + length) of each line to out_px; backwards: mirrored.

    start, length: (n,) int64; backwards: (n,) bool; num_taps: num_crop_taps of the longest.
    A triangle around each output pixel's centre, as wide as two input pixels, or two output
    pixels where the line is shrunk (antialiasing). Rounded in float32 as torch's own kernel does.
    """
    device = start.device
    scale = (length.float() / out_px)[:, None]  # (n, 1), input pixels an output pixel
    support = scale.clamp_min(1.0)
    place = torch.arange(out_px, device=device)
    place = torch.where(backwards[:, None], out_px - 1 - place, place)  # (n, out)
    centre = scale * (place + 0.5)
    first = (centre - support + 0.5).floor_().clamp_min_(0.0)
    last = (centre + support - 0.5).floor_().minimum(length[:, None] - 1.0)
    position = first[..., None] + torch.arange(num_taps, device=device)  # (n, out, taps)
    weight = (position + 0.5 - centre[..., None]).abs_().div_(support[..., None])
    weight = weight.neg_().add_(1.0).clamp_min_(0.0).mul_(position <= last[..., None])
    weight.div_(weight.sum(-1, keepdim=True))
    position = position.minimum(last[..., None]).int()  # taps too many weigh nothing
    return Taps(position.add_(start.int()[:, None, None]), weight)


def blur_taps(sigma: Tensor, kernel_px: int, side_px: int, largest_sigma: float) -> Taps:
    """A Gaussian of `kernel_px` taps (odd) along each line, reflected at its ends.

    sigma: (n,) in pixels, none over largest_sigma. Taps that float32 cannot see are left out.
    """
    reach = kernel_px // 2
    if reach >= side_px:
        raise ValueError(f"a blur kernel of {kernel_px} px does not fit an image of {side_px} px")
    offset = torch.arange(-reach, reach + 1, device=sigma.device)
    weight = torch.softmax(-0.5 * (offset / sigma[:, None]).square(), dim=1)  # (n, kernel)
    kept = min(reach, math.ceil(_LAST_SIGMAS * largest_sigma))
    offset, weight = (part[..., reach - kept : reach + kept + 1] for part in (offset, weight))
    place = torch.arange(side_px, device=sigma.device)[:, None] + offset  # (S, taps)
    place = side_px - 1 - (side_px - 1 - place.abs()).abs()
    shape = (len(sigma), *place.shape)
    return Taps(place.int().expand(shape), weight[:, None].expand(shape))


def rows_by_taps(images: Tensor, source: Tensor, taps: Taps) -> Tensor:
    """Weighted sums of image rows: (B, c, H, W), (n,) the image of each output, n lines of taps.

    Returns (n, c, out_px, W).
    """
    (_, channels, height, width), (n, out_px, num_taps) = images.shape, taps.places.shape
    if images.is_cuda:
        with full_float32():
            return _matrices(taps, height).mT[:, None] @ images[source].float()
    line = (source[:, None] * channels + torch.arange(channels)) * height  # (n, c)
    index = line.int()[:, :, None, None] + taps.places[:, None]  # (n, c, out, taps)
    weight = taps.weight[:, None].expand(index.shape)
    rows = F.embedding_bag(
        index.view(-1, num_taps),
        images.reshape(-1, width).float(),
        per_sample_weights=weight.reshape(-1, num_taps),
        mode="sum",
    )
    return rows.view(n, channels, out_px, width)


def columns_by_taps(
    images: Tensor | Sequence[Tensor], taps: Taps, *, bfloat16: bool = False
) -> Tensor:
    """Weighted sums of image columns: n images (c, H, W), n lines of taps -> (n, c, H, out_px).

    The images of a sequence may differ in W. bfloat16: pixels, weights and sums are rounded to it
    (each to a relative 2^-9), products are accumulated in float32.
    """
    dtype = torch.bfloat16 if bfloat16 else torch.float32
    (channels, height, width), out_px = images[0].shape, taps.places.shape[1]
    if isinstance(images, Tensor) and (images.is_cuda or width <= DENSE_PX):
        flat = images.to(dtype).view(-1, channels * height, width)
        with full_float32():
            product = torch.bmm(flat, _matrices(taps, width).to(dtype))
        return product.float().view(-1, channels, height, out_px)
    block = _BF16_BLOCK_PX if bfloat16 else _BLOCK_PX if out_px > 128 else _SMALL_BLOCK_PX
    first, bands = _bands(taps, block)
    bands = bands.to(dtype)
    out = torch.empty(len(images), channels * height, out_px, dtype=dtype)
    with full_float32():
        for image, starts, of_image, target in zip(images, first, bands, out, strict=True):
            pixels = image.view(channels * height, -1).to(dtype)
            for number, (start, band) in enumerate(zip(starts, of_image, strict=True)):
                seen = pixels[:, start : start + len(band)]
                columns = target[:, number * block : (number + 1) * block]
                torch.mm(seen, band[: seen.shape[1], : columns.shape[1]], out=columns)
    return out.float().view(-1, channels, height, out_px)


def _matrices(taps: Taps, in_px: int) -> Tensor:
    """(n, in_px, out_px): what a line is multiplied by from the right."""
    n, out_px, _ = taps.places.shape
    matrices = torch.zeros(n, out_px, in_px, device=taps.places.device)
    return matrices.scatter_add_(2, taps.places.long(), taps.weight).mT


def _bands(taps: Taps, block: int) -> tuple[list[list[int]], Tensor]:
    """The matrices without most of their zeros: for each `block` of output pixels, the rows used.

    Returns for each line the first input pixel of each block, and (n, blocks, rows, block).
    """
    n, out_px, num_taps = taps.places.shape
    blocks = -(-out_px // block)
    index, weight = taps.places.long(), taps.weight
    if missing := blocks * block - out_px:  # repeat the last pixel, with weight 0
        index = torch.cat([index, index[:, -1:].expand(-1, missing, -1)], dim=1)
        weight = torch.cat([weight, weight.new_zeros(n, missing, num_taps)], dim=1)
    index = index.reshape(n, blocks, block * num_taps)
    first, last = index.aminmax(dim=2)  # (n, blocks)
    bands = torch.zeros(n, blocks, block, int((last - first).max()) + 1)
    index = (index - first[:, :, None]).view(n, blocks, block, num_taps)
    bands.scatter_add_(3, index, weight.view(n, blocks, block, num_taps))
    return first.tolist(), bands.transpose(2, 3).contiguous()
