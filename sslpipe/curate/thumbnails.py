"""Reduce pictures to thumbnails, and thumbnails to what is compared: the whole and crops of it."""

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

THUMB_PX = 32
CROP = 0.9  # share of either side
STARTS = (0.0, 0.025, 0.05, 0.075, 0.1)  # of a crop along an axis, as shares of the side

Thumbs = NDArray[np.uint8]


def thumbnail(pixels: Thumbs) -> Thumbs:
    """Resize a picture, antialiased, whatever its shape. (h, w, 3) uint8 -> (32, 32, 3) uint8."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    small = image.resize((THUMB_PX, THUMB_PX), Image.Resampling.BILINEAR, reducing_gap=3.0)
    return np.asarray(small)


def pictures(thumbs: Thumbs) -> Tensor:
    """(n, 32, 32, 3) uint8 -> (n, 3, 32, 32) float32."""
    return torch.from_numpy(thumbs).permute(0, 3, 1, 2).float()


def whole(pictures: Tensor, px: int) -> Tensor:
    """Resample whole pictures. (n, C, 32, 32) -> (n, C, px, px)."""
    axis = resampling(0.0, 1.0, px)
    return axis @ pictures @ axis.T


def whole_and_crops(pictures: Tensor, px: int) -> Tensor:
    """Resample whole pictures and their crops at all STARTS. (n, C, 32, 32) -> (n, V, C, px, px).

    The whole is the first of V.
    """
    axis = torch.cat([resampling(start, CROP, px) for start in STARTS])
    count, channels = pictures.shape[:2]
    grid = axis @ pictures @ axis.T  # (n, C, STARTS * px, STARTS * px)
    grid = grid.reshape(count, channels, len(STARTS), px, len(STARTS), px)
    crops = grid.permute(0, 2, 4, 1, 3, 5).flatten(1, 2)
    return torch.cat([whole(pictures, px)[:, None], crops], 1)


def resampling(start: float, size: float, px: int) -> Tensor:
    """Return the matrix that resamples a part of an axis, with triangles two target px wide.

    start and size of the part are shares of the axis -> (px, 32), rows of sum 1.
    """
    step = size * THUMB_PX / px
    centres = start * THUMB_PX + (torch.arange(px, dtype=torch.float32) + 0.5) * step
    places = torch.arange(THUMB_PX, dtype=torch.float32) + 0.5
    far = (places - centres[:, None]).abs() / max(step, 1.0)
    weights = (1.0 - far).clamp_min(0)
    return weights / weights.sum(1, keepdim=True)
