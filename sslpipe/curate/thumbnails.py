"""What of a picture survives saving, resizing and small crops: a thumbnail, and its frequencies.

A thumbnail is 64 x 64 px whatever the picture's shape; a descriptor are its lowest frequencies
(a discrete cosine transform, as in perceptual hashes), of the whole and of crops of it, so that a
picture is found by what was cut out of it. Mirroring a picture changes the sign of its odd
horizontal frequencies, which costs no view of its own.
"""

import tempfile
from collections.abc import Sequence
from typing import IO, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image

from sslpipe.portable import read_at

THUMB_PX = 64
FREQUENCIES = 8  # of either axis
LEVELS = 127  # of a descriptor, int8: sums of products are whole numbers below 2^24, so exact
CROP = 0.9  # of each side
_STARTS = (0.0, 0.025, 0.05, 0.075, 0.1)  # of crops, on either axis
VIEWS = 2 + len(_STARTS) ** 2
FULL, FRAMED = 0, VIEWS - 1  # the whole, and what a frame of one colour leaves
COARSE = (0, 1, 5, 13, 21, 25, 26)  # views that are searched: whole, corners, centre, framed
MOST_FRAME = 0.09  # of a side; what is wider belongs to the picture
_FRAME_LEVELS = 6  # that a frame's pixels differ, at most
WIDTH = FREQUENCIES**2  # of a descriptor
EVEN = np.tile(np.arange(FREQUENCIES) % 2 == 0, FREQUENCIES)  # (64,), which mirroring leaves alone

Thumbs = NDArray[np.uint8]
Floats = NDArray[np.float32]


def view_boxes(frames: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return left, top, width and height of each view as shares of the sides.

    Args:
        frames: (n, 4), of `inside_frame`.

    Returns:
        (n, VIEWS, 4) float32.
    """
    crops = [(left, top, CROP, CROP) for top in _STARTS for left in _STARTS]
    fixed = np.array([(0.0, 0.0, 1.0, 1.0), *crops], np.float32)
    fixed = np.broadcast_to(fixed, (len(frames), *fixed.shape))
    return np.concatenate([fixed, frames[:, None]], axis=1)


def inside_frame(pixels: Thumbs) -> Floats:
    """Find what a frame of one colour leaves. (h, w, 3) -> (4,): left, top, width, height.

    Rows and columns of the corner's colour are taken off each side, at most MOST_FRAME of it.
    """
    odd = np.abs(pixels.astype(np.int16) - pixels[0, 0]).max(2) > _FRAME_LEVELS  # (h, w)
    ends = []
    for lines in (odd.any(0), odd.any(1)):  # columns, rows
        most = int(MOST_FRAME * len(lines))
        first, last = (next(iter(np.flatnonzero(side)), most) for side in (lines, lines[::-1]))
        first, last = min(int(first), most), min(int(last), most)
        ends.append((first / len(lines), 1 - (first + last) / len(lines)))
    return np.array([ends[0][0], ends[1][0], ends[0][1], ends[1][1]], np.float32)


def thumbnail(pixels: Thumbs) -> Thumbs:
    """Squash a picture. (h, w, 3) uint8 -> (64, 64, 3) uint8, antialiased."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    small = image.resize((THUMB_PX, THUMB_PX), Image.Resampling.BILINEAR, reducing_gap=3.0)
    return np.asarray(small)


def luminance(thumbs: NDArray[Any]) -> Floats:
    """Return ITU-R BT.601's luma in [0, 255]. (..., 3) levels -> (...) float32."""
    return thumbs.astype(np.float32) @ np.array([0.299, 0.587, 0.114], np.float32)


def resampling(start: float, size: float, px: int) -> Floats:
    """Return the matrix that resamples a part of an axis of a thumbnail, (px, 64) float32.

    A triangle as wide as two target pixels, at least two of the thumbnail's, as Pillow's.

    Args:
        start: Of the part, as a share of the axis.
        size: Of the part, as a share.
        px: Target pixels.
    """
    step = size * THUMB_PX / px
    centres = start * THUMB_PX + (np.arange(px) + 0.5) * step
    far = np.abs(np.arange(THUMB_PX) + 0.5 - centres[:, None]) / max(step, 1.0)
    weights = np.maximum(0.0, 1.0 - far)
    whole: Floats = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return whole


def _frequencies(start: float, size: float) -> Floats:
    """The lowest frequencies of a part of an axis, (FREQUENCIES, 64)."""
    px = 2 * FREQUENCIES
    waves = np.cos(np.pi * np.arange(FREQUENCIES)[:, None] * (np.arange(px) + 0.5) / px)
    rows: Floats = (waves @ resampling(start, size, px)).astype(np.float32)
    return rows


def describe(thumb: Thumbs, frame: Floats) -> NDArray[np.int8]:
    """Compute the descriptors of every view of a thumbnail.

    Args:
        thumb: (64, 64, 3) uint8.
        frame: (4,) of `inside_frame`.

    Returns:
        (VIEWS, 64) int8 of length 127 but for rounding; zeros where a view is constant.
    """
    grey = luminance(thumb)
    waves = _FILTERS @ grey @ _FILTERS.T  # (48, 48): each part of y with each of x
    blocks = waves.reshape(-1, FREQUENCIES, _PARTS, FREQUENCIES).transpose(0, 2, 1, 3)
    left, top, width, height = frame.tolist()
    inside = _frequencies(top, height) @ grey @ _frequencies(left, width).T
    crops = blocks[1:, 1:].reshape(-1, FREQUENCIES, FREQUENCIES)
    views = np.concatenate([blocks[0, :1], crops, inside[None]])  # (VIEWS, 8, 8)
    k = np.arange(FREQUENCIES)
    # natural pictures fall with the frequency; without weights the lowest would be all
    views = views * np.sqrt(np.hypot(k[:, None], k)).astype(np.float32)
    flat = views.reshape(VIEWS, WIDTH)
    lengths = np.linalg.norm(flat, axis=1, keepdims=True)
    units = np.where(lengths > 1.0, flat / np.maximum(lengths, 1.0), 0.0)
    found: NDArray[np.int8] = np.rint(LEVELS * units).astype(np.int8)
    return found


_PARTS = 1 + len(_STARTS)
_FILTERS = np.concatenate(
    [_frequencies(*part) for part in [(0.0, 1.0), *((start, CROP) for start in _STARTS)]]
)  # (6 * 8, 64)


class ThumbFile:
    """Thumbnails by row in a temporary file without a name: they need no memory.

    Args:
        folder: Where the file is; None: the system's folder of temporary files.
    """

    _SHAPE = (THUMB_PX, THUMB_PX, 3)
    _BYTES = THUMB_PX * THUMB_PX * 3

    def __init__(self, folder: str | None = None) -> None:
        self._file: IO[Any] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (see close)
        self._rows = 0

    def __len__(self) -> int:
        return self._rows

    def append(self, thumbs: Sequence[Thumbs]) -> None:
        """Add rows, (64, 64, 3) each."""
        for thumb in thumbs:
            self._file.write(np.ascontiguousarray(thumb).data)
        self._file.flush()
        self._rows += len(thumbs)

    def read(self, rows: ArrayLike) -> Thumbs:
        """Read rows, (n,) -> (n, 64, 64, 3); from any thread."""
        wanted = np.asarray(rows, np.int64)
        thumbs = np.empty((len(wanted), *self._SHAPE), np.uint8)
        number = self._file.fileno()
        for thumb, row in zip(thumbs, wanted.tolist(), strict=True):
            raw = read_at(number, self._BYTES, row * self._BYTES)
            thumb[:] = np.frombuffer(raw, np.uint8).reshape(self._SHAPE)
        return thumbs

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()
