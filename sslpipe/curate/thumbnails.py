"""Reduce pictures to thumbnails, and thumbnails to their lowest frequencies.

A thumbnail has 64 x 64 px whatever the picture's shape. A descriptor holds its lowest frequencies
(a discrete cosine transform, as in perceptual hashes), of the whole and of crops of it, so that a
crop is found by its source. In a mirror image the odd horizontal frequencies change their sign.
"""

import tempfile
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from sslpipe.portable import read_at

THUMB_PX = 64
FREQUENCIES = 8  # of either axis
WIDTH = FREQUENCIES**2  # of a descriptor
LEVELS = 127  # length of a descriptor; products of whole numbers below 2^24 are exact in float32
EVEN = np.tile(np.arange(FREQUENCIES) % 2 == 0, FREQUENCIES)  # (64,), unchanged by mirroring
# start and size of the parts of an axis: all of it, and what crops to 90 % leave
_AXIS_PARTS = ((0.0, 1.0), *((start, 0.9) for start in (0.0, 0.025, 0.05, 0.075, 0.1)))
_VIEW_PARTS = (
    *((0, 0), *((down, right) for down in range(1, 6) for right in range(1, 6))),
    *((1, 0), (3, 0), (5, 0), (0, 1), (0, 3), (0, 5)),
)
VIEWS = len(_VIEW_PARTS)
FULL = 0  # the view that is the whole
COARSE = (0, 1, 3, 5, 11, 13, 15, 21, 23, 25)  # the whole; crops at corners, edges and the centre

Thumbs = NDArray[np.uint8]
Floats = NDArray[np.float32]

# left, top, width and height of each view as shares of the sides, (VIEWS, 4)
_PLACES = np.array(_AXIS_PARTS, np.float32)[np.array(_VIEW_PARTS)]  # (VIEWS, down and right, 2)
VIEW_BOXES: Floats = _PLACES[:, ::-1].swapaxes(1, 2).reshape(-1, 4)


def thumbnail(pixels: Thumbs) -> Thumbs:
    """Resize a picture, antialiased. (h, w, 3) uint8 -> (64, 64, 3) uint8."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    small = image.resize((THUMB_PX, THUMB_PX), Image.Resampling.BILINEAR, reducing_gap=3.0)
    return np.asarray(small)


def luminance(thumbs: NDArray[Any]) -> Floats:
    """Return ITU-R BT.601's luma in [0, 255]. (..., 3) levels -> (...) float32."""
    luma: Floats = np.multiply(thumbs[..., 0], np.float32(0.299), dtype=np.float32)
    luma += np.multiply(thumbs[..., 1], np.float32(0.587), dtype=np.float32)
    luma += np.multiply(thumbs[..., 2], np.float32(0.114), dtype=np.float32)
    return luma


def resampling(start: float, size: float, px: int, of_px: int = THUMB_PX) -> Floats:
    """Return the matrix that resamples a part of an axis, with triangles two target px wide.

    start and size of the part are shares of the axis -> (px, of_px) float32, rows of sum 1.
    """
    step = size * of_px / px
    centres = start * of_px + (np.arange(px) + 0.5) * step
    far = np.abs(np.arange(of_px) + 0.5 - centres[:, None]) / max(step, 1.0)
    weights = np.maximum(0.0, 1.0 - far)
    whole: Floats = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return whole


def describe(thumbs: Thumbs) -> NDArray[np.int8]:
    """Compute the descriptors of every view. (n, 64, 64, 3) uint8 -> (n, VIEWS, 64) int8.

    Their length is 127 but for rounding; zeros where a view is constant.
    """
    found = np.empty((len(thumbs), VIEWS, WIDTH), np.int8)
    down, right = np.array(_VIEW_PARTS).T
    for first in range(0, len(thumbs), 32):  # so that the products fit a core's cache
        part = luminance(thumbs[first : first + 32])
        waves = _FILTERS @ part @ _FILTERS.T  # each part of y with each of x
        blocks = waves.reshape(-1, len(_AXIS_PARTS), FREQUENCIES, len(_AXIS_PARTS), FREQUENCIES)
        views = blocks[:, down, :, right].reshape(VIEWS, len(part), WIDTH)
        found[first : first + len(part)] = rounded(views * _WEIGHTS).swapaxes(0, 1)
    return found


def rounded(rows: Floats) -> NDArray[np.int8]:
    """Scale rows to length 127 and round; zeros for rows shorter than 1. (..., d)."""
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    units = np.where(lengths > 1.0, rows / np.maximum(lengths, 1.0), 0.0)
    found: NDArray[np.int8] = np.rint(LEVELS * units).astype(np.int8)
    return found


def _frequencies(start: float, size: float) -> Floats:
    """The lowest frequencies of a part of an axis, (FREQUENCIES, 64)."""
    px = 2 * FREQUENCIES
    waves = np.cos(np.pi * np.arange(FREQUENCIES)[:, None] * (np.arange(px) + 0.5) / px)
    rows: Floats = (waves @ resampling(start, size, px)).astype(np.float32)
    return rows


_FILTERS = np.concatenate([_frequencies(*part) for part in _AXIS_PARTS])
# natural pictures fall with the frequency: without weights the lowest would count alone
_WEIGHTS = np.sqrt(np.hypot(np.arange(FREQUENCIES)[:, None], np.arange(FREQUENCIES)))
_WEIGHTS = _WEIGHTS.astype(np.float32).ravel()


class ThumbFile:
    """Thumbnails by row in a temporary file without a name, so that they need no memory."""

    ROW_BYTES = THUMB_PX * THUMB_PX * 3

    def __init__(self) -> None:
        self._file: IO[Any] = tempfile.TemporaryFile()  # noqa: SIM115 (see close)
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def append(self, thumbs: Thumbs) -> None:
        """Add rows, (n, 64, 64, 3)."""
        self._file.write(np.ascontiguousarray(thumbs).data)
        self._file.flush()
        self._rows += len(thumbs)

    def read(self, rows: ArrayLike) -> Thumbs:
        """Read rows, (n,) -> (n, 64, 64, 3); from any thread."""
        number, wanted = self._file.fileno(), np.asarray(rows, np.int64)
        raw = [read_at(number, self.ROW_BYTES, row * self.ROW_BYTES) for row in wanted.tolist()]
        return np.frombuffer(b"".join(raw), np.uint8).reshape(-1, THUMB_PX, THUMB_PX, 3)

    def close(self) -> None:
        """Free the disk space."""
        self._file.close()
