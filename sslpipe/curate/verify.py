"""Decide by pixels whether two samples are one picture: register one to the other, and compare.

The first estimate is the view of one whose descriptor is most like the other's, mirrored or not.
From there Gauss and Newton's steps find the four numbers of a box (its place and its size) by which
the second picture is cut out of the first. What is compared is what a contrast, a brightness and a
sharpness for the whole picture do not explain; the score is the share of the second picture's
variance that is explained (a squared correlation).

Source:
    Lucas and Kanade 1981, IJCAI (image registration by linear least squares), with the gain and the
    bias of Baker, Gross and Matthews 2003, CMU-RI-TR-03-35; the Laplacian stands for sharpness.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.candidates import LEAST_SIMILAR, similarities
from sslpipe.curate.scan import Samples
from sslpipe.curate.thumbnails import luminance, resampling, view_boxes

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

GRIDS_PX = (16, 24, 32, 48, 64)  # pictures are compared on one that neither is much smaller than
COARSE_PX = 32  # pictures are registered on a grid that is no finer, then once on their own
FINER = 1.4  # a grid's side over the least side of two pictures, at most
PROMISING = (0.55, 0.7, 0.8, 0.8)  # least score after each step of registration that goes on
NOISE = 1.5  # levels of a pixel that saving alone leaves unexplained
WHITE, BLACK = 251.0, 4.0  # levels from which on a picture may have been cut off by its brightness
SETTLED = 0.99  # score of a registered box above which the first estimate is not tried
EDGE = 0.05  # share of a side, all around, that does not count: a border's blur reaches so far
SMALLEST_BOX, LARGEST_BOX = 0.82, 1.02  # share of a side that is cut out
FARTHEST = 0.03  # share of a side that a box may reach beyond the picture
LEAST_GAIN, MOST_GAIN = 0.6, 1.6
MOST_OFFSET = 32.0  # levels that a channel's brightness may differ beside the gain
FAINT = 3.0  # levels; a picture whose deviation is below is constant, and like nothing
WINDOW = (0.16, 0.44)  # height and width that a small text may hide, as shares of the sides
_ASPECT = 0.06  # of the logarithm of shapes, beside a pixel's rounding


class Verdicts(NamedTuple):
    """What pixels say of some pairs, (P,) each.

    Args:
        score: Share of the variance explained, at most 1.
        outside: The same outside of the window that is explained worst.
        mirrored: Whether one is the other's mirror image.
        box: (P, 4) float32, left, top, width, height of the part of `whole` that is compared.
        swapped: Whether the second of the pair is the whole, and the first a part of it.
    """

    score: Floats
    outside: Floats
    mirrored: NDArray[np.bool_]
    box: Floats
    swapped: NDArray[np.bool_]


class _Start(NamedTuple):
    swapped: NDArray[np.bool_]
    box: Floats
    near: NDArray[np.bool_]


def compare(pairs: Integers, samples: Samples) -> Verdicts:
    """Compare pairs of samples by their pixels.

    Args:
        pairs: (P, 2) int64 rows; some hundreds at a time.
        samples: Their thumbnails, descriptors and sizes.
    """
    plain = _compare(pairs, samples, mirrored=False)
    doubtful = np.maximum(plain.score, plain.outside) < SETTLED
    mirrored = _compare(pairs[doubtful], samples, mirrored=True)
    taken = mirrored.score > plain.score[doubtful]
    better = np.flatnonzero(doubtful)[taken]
    for ours, theirs in zip(plain, mirrored, strict=True):
        ours[better] = theirs[taken]
    return plain


def _compare(pairs: Integers, samples: Samples, *, mirrored: bool) -> Verdicts:
    """Compare pairs, the second of which is mirrored or not."""
    start = _first_boxes(pairs, samples, mirrored)
    count, sizes = len(pairs), samples.sizes
    score, outside = np.zeros(count, np.float32), np.zeros(count, np.float32)
    box = start.box.copy()
    whole = np.where(start.swapped, pairs[:, 1], pairs[:, 0])
    part = np.where(start.swapped, pairs[:, 0], pairs[:, 1])
    grid = _grids(sizes[pairs].min(axis=(1, 2)))
    for px in np.unique(grid[start.near]).tolist():
        own = np.flatnonzero((grid == px) & start.near)
        first, second = (samples.thumbs.read(side[own]) for side in (whole, part))
        if mirrored:
            second = second[:, :, ::-1]
        registered, alike = _registered(first, second, px, box[own])
        score[own], outside[own], box[own] = _best_score(
            first, second, px, (registered, box[own]), alike
        )
    fits = _same_shape(box, sizes[whole], sizes[part])
    score[~fits] = outside[~fits] = 0.0
    return Verdicts(score, outside, np.full(count, mirrored), box, start.swapped)


def _registered(
    whole: NDArray[np.uint8], part: NDArray[np.uint8], px: int, box: Floats
) -> tuple[Floats, Floats]:
    """Register thumbnails on a coarse grid, then what is promising on a grid of px."""
    grey = [luminance(side)[..., None] for side in (whole, part)]
    coarse = [_resampled(side, min(px, COARSE_PX))[..., 0] for side in grey]
    box, alike = _register(coarse[0], coarse[1], box, PROMISING)
    close = np.flatnonzero(alike >= PROMISING[-1])
    if px > COARSE_PX and len(close):
        fine = [_resampled(side[close], px)[..., 0] for side in grey]
        box[close], alike[close] = _register(fine[0], fine[1], box[close], (0.0,))
    return box, alike


def _best_score(
    whole: NDArray[np.uint8],
    part: NDArray[np.uint8],
    px: int,
    boxes: Sequence[Floats],
    alike: Floats,
) -> tuple[Floats, Floats, Floats]:
    """Compare colours in the registered box and, where that explains too little, in the first one.

    Returns:
        (n,) score and score outside of the window, (n, 4) the box; `alike` where neither is tried.
    """
    score, outside, box = alike.copy(), alike.copy(), boxes[0].copy()
    for number, each in enumerate(boxes):
        least = PROMISING[0] if number else PROMISING[-1]
        settled = number > 0 and np.maximum(score, outside) >= SETTLED
        rows = np.flatnonzero((alike >= least) & ~np.asarray(settled))
        if not len(rows):
            continue
        colours = [_resampled(side[rows], px) for side in (whole, part)]
        found = _score(colours[0], colours[1], each[rows])
        better = np.maximum(*found) > outside[rows] if number else np.ones(len(rows), bool)
        score[rows[better]], outside[rows[better]] = (values[better] for values in found)
        box[rows[better]] = each[rows[better]]
    return score, outside, box


def _first_boxes(pairs: Integers, samples: Samples, mirrored: bool) -> _Start:
    """The view of either sample that is most like the whole of the other, or of its mirror image.

    Returns:
        Whether the view is of the second sample, its box, and whether it is like the other at all.
    """
    found = []
    for whole, part in ((0, 1), (1, 0)):
        even, odd = similarities(samples.descriptors, pairs[:, whole], pairs[:, part])
        found.append(even - odd if mirrored else even + odd)
    alike = np.concatenate(found, axis=1)  # (P, 2 VIEWS)
    swapped, view = np.divmod(alike.argmax(1), found[0].shape[1])
    whole_rows = np.where(swapped == 1, pairs[:, 1], pairs[:, 0])
    boxes = view_boxes(samples.frames[whole_rows])[np.arange(len(pairs)), view]
    return _Start(swapped == 1, boxes, alike.max(1) >= LEAST_SIMILAR)


def _grids(smallest_px: Integers) -> Integers:
    """The grid on which each pair is compared, by the least side of both pictures."""
    grids = np.array(GRIDS_PX)
    place = np.searchsorted(grids, FINER * smallest_px, side="right") - 1
    fitting: Integers = grids[np.maximum(place, 0)]
    return fitting


def _resampled(thumbs: NDArray[Any], px: int) -> Floats:
    """(n, 64, 64, c) -> (n, px, px, c) float32 levels."""
    matrix = resampling(0.0, 1.0, px)
    wide = np.moveaxis(thumbs.astype(np.float32), 3, 1)  # (n, c, 64, 64)
    small: NDArray[Any] = matrix @ wide @ matrix.T
    return np.moveaxis(small, 1, 3)


def _cut(pictures: Floats, box: Floats) -> Floats:
    """Cut boxes out of pictures, to the same grid. (n, px, px) and (n, 4) -> (n, px, px)."""
    px = pictures.shape[1]
    target = (np.arange(px, dtype=np.float32) + 0.5) / px
    hats = []
    for axis in (1, 0):  # rows, then columns
        places = (box[:, axis, None] + box[:, axis + 2, None] * target) * px - 0.5
        inside = np.clip(places, 0, px - 1)[:, :, None]
        far: NDArray[Any] = np.abs(inside - np.arange(px, dtype=np.float32))
        hats.append(_cubic(far))
    cut: NDArray[Any] = hats[0] @ pictures @ hats[1].transpose(0, 2, 1)
    return cut


def _cubic(far: NDArray[Any]) -> Floats:
    """Weights of pixels at distances, rows of sum 1. Source: Keys 1981, IEEE TASSP 29(6)."""
    near = (1.5 * far - 2.5) * far**2 + 1
    outer = ((-0.5 * far + 2.5) * far - 4) * far + 2
    weights = np.where(far <= 1, near, np.where(far < 2, outer, 0))
    sums_to_1: Floats = (weights / weights.sum(2, keepdims=True)).astype(np.float32)
    return sums_to_1


def _laplacian(pictures: Floats) -> Floats:
    """(n, px, px) -> the same, edges repeated."""
    wide = np.pad(pictures, ((0, 0), (1, 1), (1, 1)), mode="edge")
    around = wide[:, :-2, 1:-1] + wide[:, 2:, 1:-1] + wide[:, 1:-1, :-2] + wide[:, 1:-1, 2:]
    laplacian: Floats = around - 4 * pictures
    return laplacian


def _register(
    whole: Floats, part: Floats, box: Floats, least_scores: Sequence[float]
) -> tuple[Floats, Floats]:
    """Improve boxes by steps of linear least squares.

    Args:
        whole: (n, px, px) grey.
        part: (n, px, px), cut out of it.
        box: (n, 4) first estimates.
        least_scores: Of each step, with which the next one is made.

    Returns:
        (n, 4) boxes, (n,) share of the variance explained by the last step.
    """
    px = whole.shape[1]
    axis = (np.arange(px, dtype=np.float32) + 0.5) / px
    inside = np.flatnonzero(_inner(px))
    box, alike = box.copy(), np.zeros(len(box), np.float32)
    target = part.reshape(len(part), -1)[:, inside]
    target = target - target.mean(1, keepdims=True)
    energy = (target**2).mean(1)
    live = np.flatnonzero(energy >= FAINT**2)
    for least in least_scores:
        if not len(live):
            break
        cut = _cut(whole[live], box[live])
        down, right = np.gradient(cut, axis=(1, 2))
        terms = (cut, right, down, right * axis, down * axis[:, None], _laplacian(cut))
        basis = np.stack(terms, 1).reshape(len(live), len(terms), -1)[:, :, inside]
        basis -= basis.mean(2, keepdims=True)  # (n, 6, inner px)
        gram, moments = basis @ basis.transpose(0, 2, 1), basis @ target[live][:, :, None]
        # a little of the diagonal: where a picture has no detail along an axis, it stays
        diagonal = 1e-4 * np.einsum("nii->ni", gram) + 1e-3
        gram += np.eye(len(terms), dtype=np.float32) * diagonal[:, None]
        solved = np.linalg.solve(gram, moments)[:, :, 0]  # (n, 6)
        explained = (solved * moments[:, :, 0]).sum(1) / len(inside)
        alike[live] = explained / energy[live]
        gain = np.clip(solved[:, :1], LEAST_GAIN, MOST_GAIN)
        move = np.clip(solved[:, 1:5] / gain / px, -0.05, 0.05)
        box[live] = _allowed(box[live] + move)
        live = live[alike[live] >= least]
    return box, alike


def _inner(px: int) -> NDArray[np.bool_]:
    """All of a grid but its edge, (px, px)."""
    edge = max(1, round(EDGE * px))
    inner = np.zeros((px, px), bool)
    inner[edge:-edge, edge:-edge] = True
    return inner


def _allowed(box: Floats) -> Floats:
    """Keep boxes among those that a crop or a border makes."""
    size = np.clip(box[:, 2:], SMALLEST_BOX, LARGEST_BOX)
    corner = np.clip(box[:, :2], -FARTHEST, 1 + FARTHEST - size)
    return np.concatenate([corner, size], 1).astype(np.float32)


def _score(whole: Floats, part: Floats, box: Floats) -> tuple[Floats, Floats]:
    """Share of variance explained, of all and outside the worst window. (n, px, px, 3) colours."""
    px = whole.shape[1]
    cut = np.stack([_cut(whole[..., c], box) for c in range(3)], 1)  # (n, 3, px, px)
    sharp = np.stack([_laplacian(cut[:, c]) for c in range(3)], 1)
    target = np.moveaxis(part, 3, 1)
    weights = np.broadcast_to(_inner(px).astype(np.float32), (len(cut), 1, px, px))
    score, rest = _explained(cut, sharp, target, weights)
    weights = weights * _without_window(rest, WINDOW)
    outside, _ = _explained(cut, sharp, target, weights)
    return score, outside


def _explained(
    cut: Floats, sharp: Floats, target: Floats, weights: Floats
) -> tuple[Floats, Floats]:
    """Fit contrast and sharpness of all, brightness of each channel; (n,) scores, (n, y, x) rest.

    Args:
        cut: (n, 3, px, px) what the target may be made of.
        sharp: Its Laplacian.
        target: (n, 3, px, px).
        weights: (n, 1, px, px), 0 for what does not count.
    """
    total = weights.sum((2, 3), keepdims=True)

    def mean(values: Floats) -> Floats:
        weighted: Floats = (values * weights).sum((2, 3), keepdims=True) / total
        return weighted

    means = mean(cut), mean(target)
    x, y = cut - means[0], target - means[1]
    z = sharp - mean(sharp)

    def product(a: Floats, b: Floats) -> Floats:
        summed: Floats = (a * b * weights).sum((1, 2, 3))
        return summed

    xx, xz, zz = product(x, x), product(x, z), product(z, z) + 1.0
    xy, zy, yy = product(x, y), product(z, y), product(y, y)
    determinant = np.maximum(xx * zz - xz**2, 1e-6)
    gain = np.clip((xy * zz - zy * xz) / determinant, LEAST_GAIN, MOST_GAIN)
    sharpness = np.clip((zy - gain * xz) / zz, -0.5, 0.5)
    rest = y - gain[:, None, None, None] * x - sharpness[:, None, None, None] * z
    # what brightness has cut off in one of both is known to be at least, or at most, so bright
    bright = (cut >= WHITE) & (rest > 0) | (target >= WHITE) & (rest < 0)
    dark = (cut <= BLACK) & (rest < 0) | (target <= BLACK) & (rest > 0)
    rest = np.where(bright | dark, 0, rest)
    # another brightness or tint is a little one, or another colour
    beyond = np.maximum(np.abs(means[1] - means[0]) - MOST_OFFSET, 0)
    lost = (rest**2 * weights).sum((1, 2, 3)) + (beyond**2 * total).sum((1, 2, 3))
    lost = np.maximum(lost - 3 * NOISE**2 * total[:, 0, 0, 0], 0)
    faint = yy < 3 * FAINT**2 * total[:, 0, 0, 0]
    score = np.where(faint, 0, 1 - lost / np.maximum(yy, 1))
    return score.astype(np.float32), (rest**2 * weights).sum(1)


def _without_window(rest: Floats, shares: tuple[float, float]) -> Floats:
    """Weights 0 in the window where most is unexplained, else 1. (n, px, px) -> (n, 1, px, px)."""
    count, px = len(rest), rest.shape[1]
    high, wide = (max(1, round(share * px)) for share in shares)
    sums = np.pad(rest, ((0, 0), (1, 0), (1, 0))).astype(np.float64).cumsum(1).cumsum(2)
    windows = sums[:, high:, wide:] - sums[:, :-high, wide:]
    windows += sums[:, :-high, :-wide] - sums[:, high:, :-wide]
    top, left = np.unravel_index(windows.reshape(count, -1).argmax(1), windows.shape[1:])
    places = np.arange(px)
    rows = (places >= top[:, None]) & (places < top[:, None] + high)
    columns = (places >= left[:, None]) & (places < left[:, None] + wide)
    weights: Floats = (~(rows[:, :, None] & columns[:, None, :])).astype(np.float32)
    return weights[:, None]


def _same_shape(box: Floats, whole: Integers, part: Integers) -> NDArray[np.bool_]:
    """Say whether boxes have the shapes of the parts. (n, 4), (n, 2), (n, 2) -> (n,)."""
    height, width = box[:, 3] * whole[:, 0], box[:, 2] * whole[:, 1]
    differ = np.abs(np.log(width / height) - np.log(part[:, 1] / part[:, 0]))
    fits: NDArray[np.bool_] = differ <= _ASPECT + 1.5 / part.min(1)
    return fits
