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
GRID_PX = 32  # pictures are compared on a grid of as many
FREQUENCIES = 8  # of either axis
LEVELS = 127  # of a descriptor, int8: sums of products are whole numbers below 2^24, so exact
# start and size of the parts of an axis: all of it, what crops to 90 % leave, and to 95 %
_AXIS_PARTS = (
    (0.0, 1.0),
    *((start, 0.9) for start in (0.0, 0.025, 0.05, 0.075, 0.1)),
    *((start, 0.95) for start in (0.0, 0.025, 0.05)),
)
# of each view, the part of the vertical and of the horizontal axis: the whole; 90 % of both sides;
# 95 % of both (90 % of the area); 90 % of one. Trousers cut to 95 % are like neither of the first
_VIEW_PARTS = (
    (0, 0),
    *((down, right) for down in range(1, 6) for right in range(1, 6)),
    *((6, 6), (6, 8), (7, 7), (8, 6), (8, 8)),
    *((part, 0) for part in (1, 3, 5)),
    *((0, part) for part in (1, 3, 5)),
)
VIEWS = len(_VIEW_PARTS)
FULL = 0  # the view that is the whole
# views that are searched among all: the whole, and crops at the corners, the edges' middles and the
# centre; with fewer, one in thirty crops of 20,000 garments was not among the WIDER of its source
COARSE = (0, 1, 3, 5, 11, 13, 15, 21, 23, 25)
MOST_FRAME = 0.09  # of a side; what is wider belongs to the picture
_FRAME_LEVELS = 6  # that a frame's pixels differ, at most
WIDTH = FREQUENCIES**2  # of a descriptor
EVEN = np.tile(np.arange(FREQUENCIES) % 2 == 0, FREQUENCIES)  # (64,), which mirroring leaves alone

Thumbs = NDArray[np.uint8]
Floats = NDArray[np.float32]

# left, top, width and height of each view as shares of the sides, (VIEWS, 4)
VIEW_BOXES: Floats = np.array(
    [
        (_AXIS_PARTS[right][0], _AXIS_PARTS[down][0], _AXIS_PARTS[right][1], _AXIS_PARTS[down][1])
        for down, right in _VIEW_PARTS
    ],
    np.float32,
)


def inside_frame(pixels: Thumbs) -> Thumbs | None:
    """Take off a frame of one colour: at least a pixel on each side, at most MOST_FRAME of it.

    Args:
        pixels: (h, w, 3) uint8.

    Returns:
        What is inside, (h', w', 3); None without a frame.
    """
    if min(pixels.shape[:2]) < 3:
        return None
    corner = pixels[0, 0].astype(np.int16)
    edges = (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1])
    if any((np.abs(edge - corner) > _FRAME_LEVELS).any() for edge in edges):
        return None
    odd = np.abs(pixels - corner) > _FRAME_LEVELS  # (h, w, 3)
    ends = []
    for lines in (odd.any((1, 2)), odd.any(0).any(1)):  # rows, columns
        inside = np.flatnonzero(lines)
        if not len(inside):
            return None
        first, end = int(inside[0]), int(inside[-1]) + 1
        if max(first, len(lines) - end) > MOST_FRAME * len(lines):
            return None
        ends.append(slice(first, end))
    return pixels[ends[0], ends[1]]


def thumbnail(pixels: Thumbs) -> Thumbs:
    """Squash a picture. (h, w, 3) uint8 -> (64, 64, 3) uint8, antialiased."""
    image = Image.fromarray(np.ascontiguousarray(pixels))
    small = image.resize((THUMB_PX, THUMB_PX), Image.Resampling.BILINEAR, reducing_gap=3.0)
    return np.asarray(small)


def thumbnails(pictures: Sequence[Thumbs]) -> Thumbs:
    """Squash pictures that are no larger than a thumbnail, as `thumbnail` does each, but faster.

    Those of one size are enlarged at once, and grey ones in one channel.

    Args:
        pictures: n of (h, w, 3) uint8, at most 64 px a side.

    Returns:
        (n, 64, 64, C) uint8; C is 1 where all are grey, else 3.
    """
    of_shape: dict[tuple[int, ...], list[int]] = {}
    for place, pixels in enumerate(pictures):
        of_shape.setdefault(pixels.shape, []).append(place)
    stacks = [np.stack([pictures[place] for place in places]) for places in of_shape.values()]
    grey = all(np.array_equal(each[..., 0], each[..., k]) for each in stacks for k in (1, 2))
    channels = 1 if grey else 3
    found = np.empty((len(pictures), THUMB_PX, THUMB_PX, channels), np.uint8)
    for places, stack in zip(of_shape.values(), stacks, strict=True):
        found[places] = _enlarged(stack[..., :channels])
    return found


def _enlarged(stack: Thumbs) -> Thumbs:
    """(n, h, w, C) -> (n, 64, 64, C), C 1 or 3: rows, then columns, as Pillow enlarges one."""
    n, height, width, channels = stack.shape
    rows = stack.reshape(n * height, width, channels)  # all pictures below each other
    rows = _resized(rows[..., 0] if channels == 1 else rows, THUMB_PX, n * height)
    columns = rows.reshape(n, height, -1).swapaxes(0, 1).reshape(height, -1)  # beside each other
    columns = _resized(columns, columns.shape[1], THUMB_PX)
    return columns.reshape(THUMB_PX, n, THUMB_PX, channels).swapaxes(0, 1)


def _resized(pixels: Thumbs, width: int, height: int) -> Thumbs:
    image = Image.fromarray(pixels)
    return np.asarray(image.resize((width, height), Image.Resampling.BILINEAR))


def luminance(thumbs: NDArray[Any]) -> Floats:
    """Return ITU-R BT.601's luma in [0, 255]. (..., 3) levels, or (..., 1) -> (...) float32."""
    red, *others = np.moveaxis(np.broadcast_to(thumbs, (*thumbs.shape[:-1], 3)), -1, 0)
    # by pixels, not as a product of matrices: the same whatever stands beside a picture
    luma: Floats = np.multiply(red, np.float32(0.299), dtype=np.float32)
    for channel, share in zip(others, (0.587, 0.114), strict=True):
        luma += np.multiply(channel, np.float32(share), dtype=np.float32)
    return luma


def resampling(start: float, size: float, px: int, of_px: int = THUMB_PX) -> Floats:
    """Return the matrix that resamples a part of an axis of a thumbnail, (px, of_px) float32.

    A triangle as wide as two target pixels, at least two of the thumbnail's, as Pillow's.

    Args:
        start: Of the part, as a share of the axis.
        size: Of the part, as a share.
        px: Target pixels.
        of_px: Pixels of the axis.
    """
    step = size * of_px / px
    centres = start * of_px + (np.arange(px) + 0.5) * step
    far = np.abs(np.arange(of_px) + 0.5 - centres[:, None]) / max(step, 1.0)
    weights = np.maximum(0.0, 1.0 - far)
    whole: Floats = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    return whole


def on_grid(levels: Floats) -> Floats:
    """Shrink thumbnails to the grid on which they are compared. (..., 64, 64) -> (..., 32, 32)."""
    shrunk: NDArray[Any] = _TO_GRID @ levels @ _TO_GRID.T
    return shrunk


def _frequencies(start: float, size: float) -> Floats:
    """The lowest frequencies of a part of an axis, (FREQUENCIES, 64)."""
    px = 2 * FREQUENCIES
    waves = np.cos(np.pi * np.arange(FREQUENCIES)[:, None] * (np.arange(px) + 0.5) / px)
    rows: Floats = (waves @ resampling(start, size, px)).astype(np.float32)
    return rows


def describe(thumbs: Thumbs) -> NDArray[np.int8]:
    """Compute the descriptors of every view of some thumbnails.

    Args:
        thumbs: (n, 64, 64, 3) uint8, or grey ones, (n, 64, 64, 1).

    Returns:
        (n, VIEWS, 64) int8 of length 127 but for rounding; zeros where a view is constant.
    """
    found = np.empty((len(thumbs), VIEWS, WIDTH), np.int8)
    down, right = np.array(_VIEW_PARTS).T
    for first in range(0, len(thumbs), _AT_A_TIME):
        part = luminance(thumbs[first : first + _AT_A_TIME])
        waves = _FILTERS @ part @ _FILTERS.T  # (n, 72, 72): each part of y with each of x
        blocks = waves.reshape(-1, _PARTS, FREQUENCIES, _PARTS, FREQUENCIES)
        views = blocks[:, down, :, right].reshape(VIEWS, len(part), WIDTH)
        found[first : first + len(part)] = rounded(views * _WEIGHTS).swapaxes(0, 1)
    return found


def rounded(rows: Floats) -> NDArray[np.int8]:
    """Scale rows to length 127 and round; zeros for what is shorter than 1. (..., d)."""
    lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
    units = np.where(lengths > 1.0, rows / np.maximum(lengths, 1.0), 0.0)
    found: NDArray[np.int8] = np.rint(LEVELS * units).astype(np.int8)
    return found


_AT_A_TIME = 32  # thumbnails, so that their waves need little memory
_PARTS = len(_AXIS_PARTS)
_FILTERS = np.concatenate([_frequencies(*part) for part in _AXIS_PARTS])  # (9 * 8, 64)
# natural pictures fall with the frequency, and without weights the lowest would be all; the mean 0
_WEIGHTS = np.sqrt(np.hypot(np.arange(FREQUENCIES)[:, None], np.arange(FREQUENCIES)))
_WEIGHTS = _WEIGHTS.astype(np.float32).ravel()


_TO_GRID = resampling(0.0, 1.0, GRID_PX)


class ThumbFile:
    """Thumbnails by row, with their luma on the grid, in a temporary file: they need no memory.

    Args:
        folder: Where the file, which has no name, is; None: the system's folder for such files.
    """

    _THUMB = np.dtype((np.uint8, (THUMB_PX, THUMB_PX, 3)))
    _GRID = np.dtype((np.float32, (GRID_PX, GRID_PX)))
    _ROW = np.dtype([("thumb", _THUMB), ("grid", _GRID)])
    ROW_BYTES = _ROW.itemsize

    def __init__(self, folder: str | None = None) -> None:
        self._file: IO[Any] = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115 (see close)
        self._coloured = np.zeros(0, bool)

    def __len__(self) -> int:
        return len(self._coloured)

    def append(self, thumbs: Thumbs) -> None:
        """Add rows, (n, 64, 64, 3), or grey ones, (n, 64, 64, 1)."""
        channels = thumbs.shape[3]
        rows = np.empty(len(thumbs), self._ROW)
        rows["thumb"] = np.repeat(thumbs, 3 // channels, axis=3)
        rows["grid"] = on_grid(luminance(thumbs))
        self._file.write(rows.data)
        self._file.flush()
        others = range(1, channels)
        differs = [(thumbs[..., 0] != thumbs[..., k]).any((1, 2)) for k in others]
        coloured = np.any([np.zeros(len(thumbs), bool), *differs], axis=0)
        self._coloured = np.concatenate([self._coloured, coloured])

    def read(self, rows: ArrayLike) -> Thumbs:
        """Read rows, (n,) -> (n, 64, 64, 3); from any thread."""
        return self._read(rows, self._THUMB, 0)

    def read_grids(self, rows: ArrayLike) -> Floats:
        """Read the luma on the grid, (n,) -> (n, 32, 32); from any thread."""
        return self._read(rows, self._GRID, self._THUMB.itemsize)

    def coloured(self, rows: ArrayLike) -> NDArray[np.bool_]:
        """Say which rows have other colours than grey, of any shape."""
        return self._coloured[np.asarray(rows, np.int64)]

    def close(self) -> None:
        """Give the disk space back."""
        self._file.close()

    def _read(self, rows: ArrayLike, kind: np.dtype[Any], start: int) -> NDArray[Any]:
        wanted = np.asarray(rows, np.int64)
        found = np.empty(len(wanted), kind)
        number = self._file.fileno()
        for place, row in zip(found, wanted.tolist(), strict=True):
            raw = read_at(number, kind.itemsize, row * self.ROW_BYTES + start)
            place[:] = np.frombuffer(raw, kind)[0]
        return found
