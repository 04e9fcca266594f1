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
    grid = side // 2
    target = (np.arange(grid, dtype=np.float32) + 0.5) * 2
    places = np.arange(side, dtype=np.float32) + 0.5
    hats = []
    for axis in (1, 0):  # rows, then columns
        size = box[:, axis + 2, None]
        centres = box[:, axis, None] * side + size * target
        centres = np.clip(centres, 0.5, side - 0.5)  # edges repeated
        hat = centres[:, :, None] - places
        np.abs(hat, out=hat)
        hat /= -2 * size[:, :, None]
        hat += 1
        np.maximum(hat, 0, out=hat)
        hat /= hat.sum(2, keepdims=True)
        hats.append(hat)
    rows, columns = hats if pictures.ndim == 3 else (hat[:, None] for hat in hats)
    found: NDArray[Any] = rows @ pictures @ columns.swapaxes(-1, -2)
    return found


def inner(grid: Floats, down: int = 0, right: int = 0) -> Floats:
    """What counts of a grid, or what lies beside it by a pixel. (..., px, px), a view."""
    px = grid.shape[-1]
    edge = EDGE * px // GRID_PX
    rows, columns = (slice(edge + by, px - edge + by) for by in (down, right))
    return grid[..., rows, columns]


def laplacian(grid: Floats) -> Floats:
    """Of what counts of a grid."""
    sums: Floats = inner(grid, -1) + inner(grid, 1) + inner(grid, 0, -1)
    sums += inner(grid, 0, 1)
    sums -= 4 * inner(grid)
    return sums


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
    target = inner(part).reshape(len(part), len(axis) ** 2)
    target = target - target.mean(1, keepdims=True)
    energy = (target**2).mean(1)
    live = np.flatnonzero(energy >= FAINT**2)
    for least in promising:
        if not len(live):
            break
        shown = cut(whole[live] if len(live) < len(whole) else whole, box[live])
        basis: NDArray[Any] = np.empty((len(live), 6, len(axis), len(axis)), np.float32)
        basis[:, 0], basis[:, 5] = inner(shown), laplacian(shown)
        np.subtract(inner(shown, 0, 1), inner(shown, 0, -1), out=basis[:, 1])
        np.subtract(inner(shown, 1), inner(shown, -1), out=basis[:, 2])
        basis[:, 1:3] *= 0.5  # central differences
        np.multiply(basis[:, 1], axis, out=basis[:, 3])
        np.multiply(basis[:, 2], axis[:, None], out=basis[:, 4])
        basis = basis.reshape(len(live), 6, len(axis) ** 2)
        basis -= basis.mean(2, keepdims=True)  # (n, 6, inner px)
        gram, moments = basis @ basis.transpose(0, 2, 1), basis @ target[live][:, :, None]
        # a little of the diagonal: where a picture has no detail along an axis, it stays
        diagonal = 1e-4 * np.einsum("nii->ni", gram) + 1e-3
        gram += np.eye(6, dtype=np.float32) * diagonal[:, None]
        solved = np.linalg.solve(gram, moments)[:, :, 0]  # (n, 6)
        explained = (solved * moments[:, :, 0]).sum(1) / len(axis) ** 2
        alike[live] = explained / energy[live]
        gain = np.clip(solved[:, :1], LEAST_GAIN, MOST_GAIN)
        move = np.clip(solved[:, 1:5] / gain / px, -0.05, 0.05)
        box[live] = _allowed(box[live] + move)
        live = live[alike[live] >= least]
    return box, alike


def _allowed(box: Floats) -> Floats:
    """Keep boxes among those that a crop or a border makes."""
    size = np.clip(box[:, 2:], SMALLEST_BOX, LARGEST_BOX)
    corner = np.clip(box[:, :2], -FARTHEST, 1 + FARTHEST - size)
    return np.concatenate([corner, size], 1).astype(np.float32)
