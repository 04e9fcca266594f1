"""Find where one picture lies in another, by Gauss and Newton's steps on a grid of their pixels.

Source:
    Lucas and Kanade 1981, IJCAI (image registration by linear least squares), with the gain and the
    bias of Baker, Gross and Matthews 2003, CMU-RI-TR-03-35; the Laplacian stands for sharpness.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.thumbnails import GRID_PX

Floats = NDArray[np.float32]

COARSE_PX = 16  # of the grid on which most pairs are refused, before that of GRID_PX
EDGE = 2  # px of the grid, all around, that do not count: a border's blur reaches so far
SMALLEST_BOX, LARGEST_BOX = 0.82, 1.02  # share of a side that is cut out
_TAPS = 2 * int(np.ceil(2 * LARGEST_BOX))  # pixels that a triangle of `cut` may weigh
FARTHEST = 0.03  # share of a side that a box may reach beyond the picture
LEAST_GAIN, MOST_GAIN = 0.75, 1.3
FAINT = 3.0  # levels; a picture that deviates less from a ramp is like nothing
INNER_PX = GRID_PX - 2 * EDGE  # of either axis, which count
# places of the pixels that count, as shares of a side, by the pixels of a grid
AXES = {
    px: ((np.arange(px, dtype=np.float32) + 0.5) / px)[EDGE * px // GRID_PX :][
        : INNER_PX * px // GRID_PX
    ]
    for px in (COARSE_PX, GRID_PX)
}


def cut(pictures: Floats, box: Floats) -> Floats:
    """Resample boxes of pictures to half their side.

    Weights are triangles, as wide as two pixels of the grid: what is finer must not be seen in one
    picture as something else than in the other.

    Args:
        pictures: (n, s, s) or (n, c, s, s).
        box: (n, 4).

    Returns:
        (n, [c,] s / 2, s / 2).
    """
    side = pictures.shape[-1]
    rows, columns = _weights(box[:, :2] * side, box[:, 2:], side).transpose(1, 0, 2, 3)[::-1]
    if pictures.ndim == 4:
        rows, columns = rows[:, None], columns[:, None]
    found: NDArray[Any] = rows @ pictures @ columns.swapaxes(-1, -2)
    return found


def _weights(start: Floats, size: Floats, side: int) -> Floats:
    """Triangles that resample parts of axes to half their pixels; most weights are 0.

    Args:
        start: (n, 2) of the part, in px.
        size: (n, 2) of the part, as a share of the axis, at most LARGEST_BOX.
        side: px of the axis.

    Returns:
        (n, 2, side / 2, side).
    """
    target = (np.arange(side // 2, dtype=np.float32) + 0.5) * 2
    centres = start[..., None] + size[..., None] * target  # (n, 2, side / 2)
    centres = np.clip(centres, 0.5, side - 0.5)  # edges repeated
    # of the few pixels around each centre; those first, for numpy is slow along a short last axis
    first = np.floor(centres - 0.5) - (_TAPS // 2 - 1)
    place = first + np.arange(_TAPS, dtype=np.float32)[:, None, None, None]  # (taps, n, 2, ...)
    hat = np.abs(centres - 0.5 - place)
    hat /= -2 * size[..., None]
    hat += 1
    np.maximum(hat, 0, out=hat)
    hat *= (place >= 0) & (place < side)
    hat /= hat.sum(0)
    # with room on both sides for pixels beyond the picture, whose weights are 0
    weights = np.zeros((*first.shape, side + 2 * _TAPS), np.float32)
    line = np.arange(_TAPS, weights.size, weights.shape[-1]).reshape(first.shape)
    weights.ravel()[line + place.astype(np.int64)] = hat
    return weights[..., _TAPS:-_TAPS]


def inner(grid: Floats, down: int = 0, right: int = 0) -> Floats:
    """What counts of a grid, or what lies beside it by a pixel. (..., px, px), a view."""
    px = grid.shape[-1]
    edge = EDGE * px // GRID_PX
    rows, columns = (slice(edge + by, px - edge + by) for by in (down, right))
    return grid[..., rows, columns]


def laplacian(grid: Floats) -> Floats:
    """Of what counts of a grid."""
    # all rows in one line, along which numpy is fast: beside an edge is another row, but that does
    # not count
    line, px = grid.reshape(-1), grid.shape[-1]
    sums = np.zeros_like(line)
    middle, end = sums[px:-px], len(line)
    np.add(line[: -2 * px], line[2 * px :], out=middle)
    middle += line[px - 1 : end - px - 1]
    middle += line[px + 1 : end - px + 1]
    middle -= 4 * line[px:-px]
    return inner(sums.reshape(grid.shape))


def register(
    whole: Floats, part: Floats, box: Floats, promising: Sequence[float]
) -> tuple[Floats, Floats]:
    """Improve boxes by steps of linear least squares.

    Args:
        whole: (n, 2 px, 2 px) grey.
        part: (n, px, px) on the grid, cut out of it.
        box: (n, 4) first estimates.
        promising: Of each step, the least share explained with which the next one is made.

    Returns:
        (n, 4) boxes, (n,) share of the variance explained by the last step.
    """
    box, alike, px = box.copy(), np.zeros(len(box), np.float32), part.shape[-1]
    axis = AXES[px]
    places = np.stack(np.meshgrid(axis, axis)).reshape(2, len(axis) ** 2)
    target = inner(part) - inner(part).mean((1, 2), keepdims=True)
    energy = (target**2).mean((1, 2))
    live = np.flatnonzero(energy >= FAINT**2)
    for least in promising:
        if not len(live):
            break
        shown = cut(whole[live] if len(live) < len(whole) else whole, box[live])
        # what the target is made of, the target, and 1
        terms: NDArray[Any] = np.empty((len(live), 8, len(axis), len(axis)), np.float32)
        np.subtract(inner(shown), shown.mean((1, 2), keepdims=True), out=terms[:, 0])
        np.subtract(inner(shown, 0, 1), inner(shown, 0, -1), out=terms[:, 1])
        np.subtract(inner(shown, 1), inner(shown, -1), out=terms[:, 2])
        terms[:, 5], terms[:, 6], terms[:, 7] = laplacian(shown), target[live], 1
        terms = terms.reshape(len(live), 8, len(axis) ** 2)
        np.multiply(terms[:, 1:3], places, out=terms[:, 3:5])
        # sums of products about the means, (n, 6, 7)
        products = terms[:, :6] @ terms.transpose(0, 2, 1)
        about = products[:, :, :7]
        about[:, :, :6] -= products[:, :, 7:] * (products[:, None, :, 7] / len(axis) ** 2)
        gram, moments = about[:, :, :6], about[:, :, 6]
        # a little of the diagonal: where a picture has no detail along an axis, it stays
        diagonal = 1e-4 * np.einsum("nii->ni", gram) + 1e-3
        gram += np.eye(6, dtype=np.float32) * diagonal[:, None]
        solved = np.linalg.solve(gram, moments[:, :, None])[:, :, 0]  # (n, 6)
        explained = (solved * moments).sum(1) / len(axis) ** 2
        alike[live] = explained / energy[live]
        gain = np.clip(solved[:, :1], LEAST_GAIN, MOST_GAIN)
        # differences were those of two pixels
        move = np.clip(2 * solved[:, 1:5] / gain / px, -0.05, 0.05)
        box[live] = _allowed(box[live] + move)
        live = live[alike[live] >= least]
    return box, alike


def _allowed(box: Floats) -> Floats:
    """Keep boxes among those that a crop or a border makes."""
    size = np.clip(box[:, 2:], SMALLEST_BOX, LARGEST_BOX)
    corner = np.clip(box[:, :2], -FARTHEST, 1 + FARTHEST - size)
    return np.concatenate([corner, size], 1).astype(np.float32)
