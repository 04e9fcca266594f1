"""Decide by pixels whether two pictures are one: register one to the other, and compare.

The first estimate is the view of one whose descriptor is most like the other's, mirrored or not.
From there Gauss and Newton's steps find the four numbers of a box (its place and its size) by which
the second picture is cut out of the first. What is compared, in that box and in the whole, is what
a contrast, a brightness and a sharpness for the whole picture do not explain; the score is the
share of the second picture's variance about a linear ramp that is explained.

Source:
    Lucas and Kanade 1981, IJCAI (image registration by linear least squares), with the gain and the
    bias of Baker, Gross and Matthews 2003, CMU-RI-TR-03-35; the Laplacian stands for sharpness.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.candidates import LEAST_SIMILAR, similarities
from sslpipe.curate.scan import Pictures
from sslpipe.curate.thumbnails import FULL, THUMB_PX, VIEW_BOXES, VIEWS, luminance, resampling

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

GRID_PX = 32  # pictures are compared on a grid of as many
PROMISING = (0.55, 0.75, 0.85, 0.9)  # least score after each step of registration that goes on
LIKELY = 0.95  # least score by brightness with which colours are compared
SURER = 0.05  # cosine by which one of both mirrorings is taken without a look at the other
WHOLE_SIMILAR = 0.7  # least cosine of the wholes with which these are compared
NOISE = 0.5  # levels of a pixel that saving alone leaves unexplained
WHITE, BLACK = 251.0, 4.0  # levels from which on a picture may have been cut off by its brightness
EDGE = 2  # px of the grid, all around, that do not count: a border's blur reaches so far
SMALLEST_BOX, LARGEST_BOX = 0.82, 1.02  # share of a side that is cut out
FARTHEST = 0.03  # share of a side that a box may reach beyond the picture
WHOLE_BOX = 0.97  # share of either side from which on a part is the whole
LEAST_GAIN, MOST_GAIN = 0.75, 1.3
MOST_OFFSET = 32.0  # levels that a channel's brightness may differ beside the gain
FAINT = 3.0  # levels; a picture that deviates less from a ramp is like nothing
WINDOW = (5, 14)  # height and width in px of the grid that a small text may hide
_ASPECT = 0.06  # of the logarithm of shapes, beside a pixel's rounding

# what counts of the grid, (px, px)
_INNER = np.zeros((GRID_PX, GRID_PX), bool)
_INNER[EDGE:-EDGE, EDGE:-EDGE] = True
# what makes a grid of a thumbnail, (px, 64): as `_cut` does of the whole
_SHRINK = resampling(0.0, 1.0, GRID_PX)
_RAMP = ((np.arange(GRID_PX) + 0.5) / GRID_PX - 0.5).astype(np.float32)


class Verdicts(NamedTuple):
    """What pixels say of some pairs, (P,) each.

    Args:
        score: Share of the variance explained, at most 1.
        outside: The same outside of the window that is explained worst.
        mirrored: Whether one is the other's mirror image.
        cropped: Whether one is a part of the other.
    """

    score: Floats
    outside: Floats
    mirrored: NDArray[np.bool_]
    cropped: NDArray[np.bool_]

    def best(self) -> Floats:
        """Return the larger of both scores."""
        larger: Floats = np.maximum(self.score, self.outside)
        return larger

    def take(self, better: "Verdicts", rows: Integers) -> None:
        """Put other verdicts in the place of some rows where their scores are larger."""
        taken = better.best() > self.best()[rows]
        for ours, theirs in zip(self, better, strict=True):
            ours[rows[taken]] = theirs[taken]


def compare(pairs: Integers, pictures: Pictures) -> Verdicts:
    """Compare pairs of pictures by their pixels, mirrored or not.

    Args:
        pairs: (P, 2) int64 rows of `pictures`; a hundred or so at a time.
        pictures: What is compared.
    """
    count = len(pairs)
    none, no = np.zeros(count, np.float32), np.zeros(count, bool)
    verdicts = Verdicts(none, none.copy(), no, no.copy())
    first, second = (pictures.thumbs.read(side) for side in pairs.T)
    # of each view of either picture, how like the whole of the other it is
    ways = [similarities(pictures.descriptors, *side) for side in (pairs.T, pairs.T[::-1])]
    even, odd = (np.concatenate(parts, axis=1) for parts in zip(*ways, strict=True))  # (P, 2 VIEWS)
    sides = even + odd, even - odd
    surest = np.maximum(sides[0].max(1), sides[1].max(1)) - SURER
    for mirrored, alike in enumerate(sides):
        likely = alike.max(1) >= np.maximum(surest, LEAST_SIMILAR)
        # cut out of the one or out of the other
        swapped, view = np.divmod(alike.argmax(1), VIEWS)
        for way, whole, part in ((0, first, second), (1, second, first)):
            rows = np.flatnonzero(likely & (swapped == way))
            if len(rows):
                sizes = pictures.sizes[pairs[rows]][:, [way, 1 - way]]  # (n, 2, 2)
                flipped = part[rows][:, :, ::-1] if mirrored else part[rows]
                same = alike[rows, way * VIEWS + FULL] >= WHOLE_SIMILAR
                found = _compare(whole[rows], flipped, sizes, VIEW_BOXES[view[rows]], same)
                verdicts.take(found._replace(mirrored=np.full(len(rows), mirrored > 0)), rows)
    return verdicts


def _compare(
    whole: NDArray[np.uint8],
    part: NDArray[np.uint8],
    sizes: Integers,
    box: Floats,
    same: NDArray[np.bool_],
) -> Verdicts:
    """Compare pictures with parts of others, and with all of them.

    Args:
        whole: (n, 64, 64, 3) levels.
        part: (n, 64, 64, 3).
        sizes: (n, 2, 2) of both, height and width in px.
        box: (n, 4) first estimates of where the part is.
        same: (n,) whether the part may be the whole.
    """
    score, outside = np.zeros((2, len(whole)), np.float32)
    grey = [luminance(side)[:, None] for side in (whole, part)]  # (n, 1, 64, 64)
    registered, alike = _register(grey[0][:, 0], grey[1][:, 0], box)
    chosen = np.broadcast_to(VIEW_BOXES[FULL], box.shape).copy()
    # all of it or a part, by brightness; then the better one by colours, where it may be a pair
    for tried, boxes in ((same, chosen), (alike >= PROMISING[-1], registered)):
        rows = np.flatnonzero(tried & _same_shape(boxes, sizes[:, 0], sizes[:, 1]))
        found = _score(grey[0][rows], grey[1][rows], boxes[rows])
        better = np.maximum(*found) > np.maximum(score[rows], outside[rows])
        rows = rows[better]
        score[rows], outside[rows] = found[0][better], found[1][better]
        chosen[rows] = boxes[rows]
    rows = np.flatnonzero(np.maximum(score, outside) >= LIKELY)
    colours = [np.moveaxis(side[rows], 3, 1).astype(np.float32) for side in (whole, part)]
    score[rows], outside[rows] = _score(colours[0], colours[1], chosen[rows])
    cropped = chosen[:, 2:].min(1) < WHOLE_BOX
    return Verdicts(score, outside, np.zeros(len(whole), bool), cropped)


def _cut(pictures: Floats, box: Floats) -> Floats:
    """Resample boxes of pictures. (n, 64, 64) or (n, c, 64, 64), (n, 4) -> (n, [c,] px, px).

    Weights are triangles, as wide as two pixels of the grid: what is finer must not be seen in one
    picture as something else than in the other.
    """
    target = (np.arange(GRID_PX, dtype=np.float32) + 0.5) * (THUMB_PX / GRID_PX)
    places = np.arange(THUMB_PX, dtype=np.float32) + 0.5
    hats = []
    for axis in (1, 0):  # rows, then columns
        size = box[:, axis + 2, None]
        centres = box[:, axis, None] * THUMB_PX + size * target
        centres = np.clip(centres, 0.5, THUMB_PX - 0.5)  # edges repeated
        wide = size * (THUMB_PX / GRID_PX)
        hat = np.maximum(0, 1 - np.abs(centres[:, :, None] - places) / wide[:, :, None])
        hats.append((hat / hat.sum(2, keepdims=True)).astype(np.float32))
    rows, columns = hats if pictures.ndim == 3 else (hat[:, None] for hat in hats)
    cut: NDArray[Any] = rows @ pictures @ columns.swapaxes(-1, -2)
    return cut


def _laplacian(pictures: Floats) -> Floats:
    """(..., px, px) -> the same, edges repeated."""
    sides = [(0, 0)] * (pictures.ndim - 2)
    wide = np.pad(pictures, (*sides, (1, 1), (1, 1)), mode="edge")
    around = wide[..., :-2, 1:-1] + wide[..., 2:, 1:-1] + wide[..., 1:-1, :-2] + wide[..., 1:-1, 2:]
    laplacian: Floats = around - 4 * pictures
    return laplacian


def _register(whole: Floats, part: Floats, box: Floats) -> tuple[Floats, Floats]:
    """Improve boxes by steps of linear least squares.

    Args:
        whole: (n, 64, 64) grey.
        part: (n, 64, 64), cut out of it.
        box: (n, 4) first estimates.

    Returns:
        (n, 4) boxes, (n,) share of the variance explained by the last step.
    """
    axis = (np.arange(GRID_PX, dtype=np.float32) + 0.5) / GRID_PX
    inside = np.flatnonzero(_INNER)
    box, alike = box.copy(), np.zeros(len(box), np.float32)
    target = (_SHRINK @ part @ _SHRINK.T).reshape(len(part), -1)[:, inside]
    target -= target.mean(1, keepdims=True)
    energy = (target**2).mean(1)
    live = np.flatnonzero(energy >= FAINT**2)
    for least in PROMISING:
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
        move = np.clip(solved[:, 1:5] / gain / GRID_PX, -0.05, 0.05)
        box[live] = _allowed(box[live] + move)
        live = live[alike[live] >= least]
    return box, alike


def _allowed(box: Floats) -> Floats:
    """Keep boxes among those that a crop or a border makes."""
    size = np.clip(box[:, 2:], SMALLEST_BOX, LARGEST_BOX)
    corner = np.clip(box[:, :2], -FARTHEST, 1 + FARTHEST - size)
    return np.concatenate([corner, size], 1).astype(np.float32)


def _score(whole: Floats, part: Floats, box: Floats) -> tuple[Floats, Floats]:
    """Share of variance explained, of all and outside the worst window. (n, c, 64, 64) levels."""
    cut = _cut(whole, box)  # (n, c, px, px)
    target: NDArray[Any] = _SHRINK @ part @ _SHRINK.T
    sharp = _laplacian(cut)
    weights = np.broadcast_to(_INNER.astype(np.float32), (len(cut), 1, GRID_PX, GRID_PX))
    score, rest = _explained(cut, sharp, target, weights)
    outside, _ = _explained(cut, sharp, target, weights * _without_window(rest))
    return score, outside


def _explained(
    cut: Floats, sharp: Floats, target: Floats, weights: Floats
) -> tuple[Floats, Floats]:
    """Fit contrast and sharpness of all, brightness of each channel; (n,) scores, (n, y, x) rest.

    Args:
        cut: (n, c, px, px) what the target may be made of.
        sharp: Its Laplacian.
        target: (n, c, px, px).
        weights: (n, 1, px, px), 0 for what does not count.
    """
    total, channels = weights.sum((2, 3), keepdims=True), cut.shape[1]

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
    xy, zy = product(x, y), product(z, y)
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
    lost = np.maximum(lost - channels * NOISE**2 * total[:, 0, 0, 0], 0)
    detail = _without_ramp(y)
    detail = product(detail, detail)
    faint = detail < channels * FAINT**2 * total[:, 0, 0, 0]
    score = np.where(faint, 0, 1 - lost / np.maximum(detail, 1))
    return score.astype(np.float32), (rest**2 * weights).sum(1)


def _without_ramp(levels: Floats) -> Floats:
    """Take a linear ramp off each channel, which all skies and walls share. (n, c, px, px)."""
    inner = levels * _INNER
    energy = float((_RAMP**2 * _INNER).sum())
    right = (inner * _RAMP).sum((2, 3), keepdims=True) / energy * _RAMP
    down = (inner * _RAMP[:, None]).sum((2, 3), keepdims=True) / energy * _RAMP[:, None]
    flat: Floats = levels - right - down
    return flat


def _without_window(rest: Floats) -> Floats:
    """Weights 0 in the window where most is unexplained, else 1. (n, px, px) -> (n, 1, px, px)."""
    count, (high, wide) = len(rest), WINDOW
    sums = np.pad(rest, ((0, 0), (1, 0), (1, 0))).astype(np.float64).cumsum(1).cumsum(2)
    windows = sums[:, high:, wide:] - sums[:, :-high, wide:]
    windows += sums[:, :-high, :-wide] - sums[:, high:, :-wide]
    flat = windows.reshape(count, windows.shape[1] * windows.shape[2])
    top, left = np.unravel_index(flat.argmax(1), windows.shape[1:])
    places = np.arange(GRID_PX)
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
