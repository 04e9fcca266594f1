"""Place each image once at random inside its own frame: photographs are not centred and normalised.

Everything is exact integer or dyadic arithmetic, so that the result has the same bytes on any
machine: coefficients are multiples of 2^-16, and their products with pixels fit a double.
"""

import math
import zlib
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sslpipe.random import uniform

SMALLEST, LARGEST = 0.55, 1.0  # side of the placed image over its original side
MAX_DEGREES = 20.0
DARKEST = 0.5
OVERSAMPLE = 4  # bilinear samples a side of each output pixel, averaged: no aliasing at 0.55
_STEP = 2.0**-16


class Placement(NamedTuple):
    """Where an image is placed in its frame, and how.

    Its side is `scale` of what it was, it is rotated by `degrees` counter-clockwise, its centre
    shifted by dx px to the right and dy px down, its pixels multiplied by `brightness`.
    """

    scale: float
    degrees: float
    brightness: float
    dx: float
    dy: float


def draw_placement(pixels: NDArray[np.uint8], seed: int, split: str, number: int) -> Placement:
    """Draw the placement of one image: a function of (seed, split, number) and of its pixels.

    Angle, brightness and scale are uniform in their ranges, then the place is uniform among those
    that keep all that is not black inside the frame. Where the largest scale does not fit at its
    angle, the range of scales ends at the largest that does; only a picture too long for its frame
    at any scale in the range goes below 0.55.
    """
    numbers = uniform(seed, zlib.crc32(split.encode()), [number], 0, 5)[0]
    degrees = MAX_DEGREES * (2 * numbers[0] - 1)
    brightness = DARKEST + (1 - DARKEST) * numbers[1]
    height, width = pixels.shape[:2]
    left, right, top, bottom = _extent(pixels, degrees)  # at scale 1, from the centre
    fits = min(width / (right - left), height / (bottom - top), LARGEST)
    scale = min(SMALLEST, fits) + (fits - min(SMALLEST, fits)) * numbers[2]
    low_x, high_x = -width / 2 - scale * left, width / 2 - scale * right
    low_y, high_y = -height / 2 - scale * top, height / 2 - scale * bottom
    dx, dy = low_x + (high_x - low_x) * numbers[3], low_y + (high_y - low_y) * numbers[4]
    return Placement(scale, degrees, brightness, dx, dy)


def place(pixels: NDArray[np.uint8], placement: Placement) -> NDArray[np.uint8]:
    """Render the image at its placement on black.

    Shape:
        pixels: (h, w, C) uint8, C = 1 or 3; the result has the same.
    """
    height, width, channels = pixels.shape
    cos, sin = (f(math.radians(placement.degrees)) for f in (math.cos, math.sin))
    # output (x, y), in samples, to input (x, y), in pixels: undo shift, rotation and scale
    a, b = cos / placement.scale, -sin / placement.scale
    d, e = sin / placement.scale, cos / placement.scale
    centre_x, centre_y = width / 2 + placement.dx, height / 2 + placement.dy
    c = width / 2 - a * centre_x - b * centre_y
    f = height / 2 - d * centre_x - e * centre_y
    n = OVERSAMPLE
    matrix = [round(v / _STEP) * _STEP for v in (a / n, b / n, c, d / n, e / n, f)]
    image = Image.fromarray(pixels if channels == 3 else pixels[:, :, 0])
    fine = image.transform(
        (width * n, height * n), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
    )
    level = round(placement.brightness * 256)
    placed = np.asarray(fine.reduce(n)).astype(np.int64).reshape(height, width, channels)
    return ((placed * level + 128) >> 8).astype(np.uint8)  # (h, w, C)


def _extent(pixels: NDArray[np.uint8], degrees: float) -> tuple[float, float, float, float]:
    """Return left, right, top, bottom of what is not black, rotated, in px from the centre."""
    height, width = pixels.shape[:2]
    rows, columns = np.nonzero(pixels.any(axis=2))
    if not len(rows):
        rows, columns = np.array([0, height - 1]), np.array([0, width - 1])
    # a pixel's square, and half a pixel that bilinear sampling spreads it, but not past the image
    xs = np.stack([np.maximum(columns - 0.5, 0), np.minimum(columns + 1.5, width)]) - width / 2
    ys = np.stack([np.maximum(rows - 0.5, 0), np.minimum(rows + 1.5, height)]) - height / 2
    cos, sin = (f(math.radians(degrees)) for f in (math.cos, math.sin))
    x = cos * xs[:, None] + sin * ys[None, :]  # (2, 2, n) corners, y down, counter-clockwise
    y = -sin * xs[:, None] + cos * ys[None, :]
    return float(x.min()), float(x.max()), float(y.min()), float(y.max())
