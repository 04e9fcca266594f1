"""Register one picture to a part of another, and score what is left unexplained.

Both are resized to 64 x 64 px. Starting from the view whose descriptor is most similar, mirrored or
not, Gauss-Newton steps find the box of one that is the other: first at 16 x 16 px, then at 32 x 32.
A gain, a sharpness and a brightness for the whole picture are fitted. The score is 1 minus the
unexplained share of the *worst window*: two drawings that differ in a mouth differ completely in
one window, however alike they are elsewhere; saving a picture again spoils no window. A difference
smaller than a window (an eighth of the side) can be missed where the picture is busy.

Source:
    Lucas and Kanade 1981, IJCAI (image registration by linear least squares), with the gain and the
    bias of Baker, Gross and Matthews 2003, CMU-RI-TR-03-35; the Laplacian stands for sharpness.
"""

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.thumbnails import EVEN, FULL, LEVELS, VIEW_BOXES, luminance, resampling

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

COARSE_PX, GRID_PX = 16, 32  # grids that pictures are registered on
EDGE = 1 / 16  # share of a side that is not registered; of the score, one pixel of the grid
SMALLEST_BOX, LARGEST_BOX = 0.82, 1.02  # share of a side that a crop leaves
FARTHEST = 0.03  # share of a side that a box may reach beyond the picture
MOST_GAIN = 1.3  # of contrast, or its inverse
FAINT = 3.0  # levels; a picture with less deviation is similar to nothing
SIMILAR, SURER = 0.6, 0.05  # least cosine of descriptors; by how much one mirroring is better
# steps at COARSE_PX, and the least share explained with which a pair is tried further
PROMISING = {1: 0.8, 2: 0.93}
ASPECT = 0.06  # tolerance of the logarithm of an aspect ratio, beside a pixel's rounding
SHARPEN = 2  # of what a picture with few pixels loses when it is reduced to these once more
WINDOW_PX = 4  # of GRID_PX
NOISE = 0.15  # share of the picture's variance that is added to a window's
CHROMA = 0.5  # weight of colour differences, which JPEG halves in resolution


class Verdicts(NamedTuple):
    """What pixels say of some pairs, (P,) each."""

    score: Floats  # 1 minus the unexplained share of the worst window; 0: refused earlier
    whole: Floats  # share of the whole picture's variance that is explained
    mirrored: NDArray[np.bool_]  # one is the other's mirror image
    cropped: NDArray[np.bool_]  # one is a part of the other


def compare(thumbs: NDArray[np.uint8], descriptors: NDArray[np.int8], sizes: Integers) -> Verdicts:
    """Compare pairs of pictures.

    Args:
        thumbs: (P, 2, 64, 64, 3).
        descriptors: (P, 2, VIEWS, 64).
        sizes: (P, 2, 2) height and width in px.
    """
    count = len(thumbs)
    verdicts = Verdicts(*np.zeros((2, count), np.float32), *np.zeros((2, count), bool))
    pair, side, mirrored, box = _trials(descriptors)
    luma = luminance(thumbs)  # (P, 2, 64, 64)

    def both(rows: Integers) -> tuple[Floats, Floats]:
        whole, part = luma[pair[rows], side[rows]], luma[pair[rows], 1 - side[rows]]
        part[mirrored[rows]] = part[mirrored[rows], :, ::-1]
        return whole, part

    # coarse, then fine
    rows = np.arange(len(pair))
    for steps, least in PROMISING.items():
        whole, part = both(rows)
        whole, part = _shrink(whole, GRID_PX), _shrink(part, COARSE_PX)
        box[rows], alike = _register(whole, part, box[rows], steps)
        np.maximum.at(verdicts.whole, pair[rows], alike)
        rows = rows[alike >= least]
    whole, part = both(rows)
    found, _ = _register(whole, _shrink(part, GRID_PX), box[rows], steps=3)
    shapes = sizes[pair[rows], side[rows]], sizes[pair[rows], 1 - side[rows]]
    fits = _same_shape(found, *shapes)
    rows, found, shapes = rows[fits], found[fits], (shapes[0][fits], shapes[1][fits])
    if not len(rows):
        return verdicts
    # scores, in colour; the better trial of a pair is written last
    shown = _opponent(thumbs[pair[rows], side[rows]])
    target = _opponent(thumbs[pair[rows], 1 - side[rows]])
    target = np.where(mirrored[rows, None, None, None], target[..., ::-1], target)
    shown, target = _cut(shown, found), _shrink(target, GRID_PX)
    sharper = np.zeros_like(shown)
    sharper[..., 1:-1, 1:-1] = sum(_beside(shown, 1)) - 4 * _inner(shown, 1)
    strict = _lose_pixels(shown, sharper, target, *shapes)
    score, explained = _score(shown, sharper, target)
    score = 1 - strict * (1 - score)
    order = np.argsort(score, kind="stable")
    last = pair[rows[order]]
    verdicts.score[last], verdicts.whole[last] = score[order], explained[order]
    verdicts.mirrored[last] = mirrored[rows[order]]
    verdicts.cropped[last] = found[order, 2:].min(1) < (1 + 0.9) / 2
    return verdicts


def _trials(descriptors: NDArray[np.int8]) -> tuple[Integers, Integers, NDArray[np.bool_], Floats]:
    """Choose for each pair and mirroring which is the whole, and where the part may be.

    -> (T,) rows of pairs, (T,) which of both is the whole, (T,) mirrored, (T, 4) boxes.
    """
    views = descriptors.astype(np.float32)  # (P, 2, V, 64)
    products = views * views[:, ::-1, FULL, None]
    even, odd = products[..., EVEN].sum(-1), products[..., ~EVEN].sum(-1)
    alike = np.stack([even + odd, even - odd], 1) / LEVELS**2  # (P, mirrored, side, V)
    flat = alike.reshape(len(views), 2, 2 * views.shape[2])
    at, best = flat.argmax(2), flat.max(2)
    tried = (best >= SIMILAR) & (best >= best.max(1, keepdims=True) - SURER)
    pair, mirrored = np.nonzero(tried)
    side, view = np.divmod(at[pair, mirrored], views.shape[2])
    # a mirrored part is looked for in the whole as it is
    return pair, side, mirrored.astype(bool), VIEW_BOXES[view]


def _register(whole: Floats, part: Floats, box: Floats, steps: int) -> tuple[Floats, Floats]:
    """Improve boxes (left, top, width, height as shares) by steps of linear least squares.

    (n, 2 px, 2 px) luma, (n, px, px) cut out of it, (n, 4) -> (n, 4) boxes, (n,) share of the
    variance explained at the last step.
    """
    count, px, _ = part.shape
    edge = round(EDGE * px)
    inner = _inner(part, edge)
    side = inner.shape[1]
    axis = (np.arange(edge, px - edge, dtype=np.float32) + 0.5) / px
    places = np.stack(np.meshgrid(axis, axis))
    target = (inner - inner.mean((1, 2), keepdims=True)).reshape(count, side**2)
    energy, explained = (target**2).sum(1), np.zeros(count, np.float32)
    terms = np.empty((count, 6, side, side), np.float32)
    for _ in range(steps):
        shown = _cut(whole, box)
        up, down, left, right = _beside(shown, edge)
        # the picture, two shifts, two sizes, the Laplacian
        terms[:, 0] = _inner(shown, edge)
        terms[:, 1], terms[:, 2] = right - left, down - up
        terms[:, 3:5] = terms[:, 1:3] * places
        terms[:, 5] = up + down + left + right - 4 * terms[:, 0]
        flat = terms.reshape(count, 6, side**2)
        flat -= flat.mean(2, keepdims=True)
        gram, moments = flat @ flat.swapaxes(1, 2), (flat @ target[:, :, None])[:, :, 0]
        # a little of the diagonal: a box stays where a picture has no detail along an axis
        gram += np.eye(6, dtype=np.float32) * (1e-4 * np.einsum("nii->ni", gram) + 1e-3)[:, None]
        solved = np.linalg.solve(gram, moments[:, :, None])[:, :, 0]  # (n, 6)
        explained = (solved * moments).sum(1)
        gain = np.clip(solved[:, :1], 1 / MOST_GAIN, MOST_GAIN)
        box = box + np.clip(2 * solved[:, 1:5] / gain / px, -0.05, 0.05)  # per two pixels
        size = np.clip(box[:, 2:], SMALLEST_BOX, LARGEST_BOX)
        corner = np.clip(box[:, :2], -FARTHEST, 1 + FARTHEST - size)
        box = np.concatenate([corner, size], 1).astype(np.float32)
    faint = energy < FAINT**2 * side**2
    return box, np.where(faint, 0, explained / np.maximum(energy, 1)).astype(np.float32)


def _lose_pixels(
    shown: Floats, sharper: Floats, target: Floats, whole: Integers, part: Integers
) -> Floats:
    """Reduce the picture with more pixels to those of the other, where these are few.

    What is lost no longer counts as a difference, for copies and look-alikes alike. `shown`,
    `sharper` (what sharpens it) and `target` are (n, 3, px, px), and overwritten; `whole` and
    `part` (n, 2) height and width of theirs in px. Returns how much more an unexplained share
    counts, (n,): the grid's pixels by those that are left.
    """
    px = shown.shape[-1]
    smaller = np.minimum(whole, part)
    lossy = (smaller.min(1) < px) & (np.abs(whole - part).max(1) > 0.2 * smaller.max(1))
    for height, width in np.unique(smaller[lossy], axis=0).tolist():
        rows, columns = (
            resampling(0.0, 1.0, px, some) @ resampling(0.0, 1.0, some, px)
            for some in (min(height, px), min(width, px))
        )
        for pictures, sizes in ((shown, whole), (target, part)):
            own = lossy & (smaller == (height, width)).all(1) & (sizes > smaller).any(1)
            pictures[own] = rows @ pictures[own] @ columns.T
        own = lossy & (smaller == (height, width)).all(1)
        sharper[own] = SHARPEN * (shown[own] - rows @ shown[own] @ columns.T)
    strict: Floats = np.where(lossy, px / smaller.min(1), 1).astype(np.float32)
    return strict


def _score(shown: Floats, sharper: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Score pictures against targets, (n, 3, px, px) of luma and colour differences each.

    -> (n,) scores of the worst window, (n,) shares of the whole that are explained.
    """
    source, sharper, wanted = (
        _inner(each, 1) - _inner(each, 1).mean((2, 3), keepdims=True)
        for each in (shown, sharper, target)
    )
    # gain and sharpness for the whole picture, brightness for each channel
    terms = np.stack([source, sharper], 1).reshape(len(shown), 2, -1)
    gram = terms @ terms.swapaxes(1, 2) + np.eye(2, dtype=np.float32)
    moments = terms @ wanted.reshape(len(shown), -1, 1)
    fit = np.linalg.solve(gram, moments)[:, :, 0]
    gain = np.clip(fit[:, 0], 1 / MOST_GAIN, MOST_GAIN)
    sharpness = np.clip((moments[:, 1, 0] - gain * gram[:, 0, 1]) / gram[:, 1, 1], -0.5, 0.5)
    rest = wanted - gain[:, None, None, None] * source - sharpness[:, None, None, None] * sharper
    unexplained, energy = (rest**2).sum(1), (wanted**2).sum(1)  # (n, px, px)
    variance = energy.mean((1, 2))
    # a window's own variance, and a share of the picture's: a plain ground has little of its own
    own = _windows(energy) - (_windows(wanted.reshape(-1, *rest.shape[2:])) ** 2).reshape(
        len(rest), 3, *_windows(energy).shape[1:]
    ).sum(1)
    worst = (_windows(unexplained) / (own + NOISE * variance[:, None, None] + 1)).max((1, 2))
    whole = 1 - unexplained.mean((1, 2)) / np.maximum(variance, 1e-6)
    score = np.where(variance >= FAINT**2, 1 - worst, 0)
    return score.astype(np.float32), whole.astype(np.float32)


def _windows(grid: Floats) -> Floats:
    """Means of every window. (n, px, px) -> (n, px - w + 1, px - w + 1)."""
    sums = np.pad(grid.astype(np.float64), ((0, 0), (1, 0), (1, 0))).cumsum(1).cumsum(2)
    w = WINDOW_PX
    total = sums[:, w:, w:] - sums[:, :-w, w:] - sums[:, w:, :-w] + sums[:, :-w, :-w]
    means: NDArray[Any] = total / w**2
    return means


def _cut(pictures: Floats, box: Floats) -> Floats:
    """Resample boxes to half the side with triangles. (n, [3,] s, s), (n, 4) -> (n, [3,] s/2, s/2).

    What is finer than two pixels of the grid must not be seen in one picture as something else than
    in the other.
    """
    side = pictures.shape[-1]
    target = (np.arange(side // 2, dtype=np.float32) + 0.5) * 2
    centres = box[:, :2, None] * side + box[:, 2:, None] * target  # (n, 2, s/2)
    centres = np.clip(centres, 0.5, side - 0.5)  # edges repeated
    far = np.abs(np.arange(side, dtype=np.float32) + 0.5 - centres[..., None])
    weights = np.maximum(0, 1 - far / (2 * box[:, 2:, None, None]))
    weights /= weights.sum(3, keepdims=True)
    columns, rows = weights[:, 0], weights[:, 1]
    if pictures.ndim == 4:
        rows, columns = rows[:, None], columns[:, None]
    found: NDArray[Any] = rows @ pictures @ columns.swapaxes(-1, -2)
    return found


def _shrink(pictures: Floats, px: int) -> Floats:
    """Resample whole pictures with the same triangles. (..., s, s) -> (..., px, px)."""
    matrix = resampling(0.0, 1.0, px, pictures.shape[-1])
    found: NDArray[Any] = matrix @ pictures @ matrix.T
    return found


def _inner(grid: Floats, edge: int) -> Floats:
    """What counts of a grid. (..., px, px)."""
    return grid[..., edge:-edge, edge:-edge]


def _beside(grid: Floats, edge: int) -> list[Floats]:
    """What lies a pixel above, below, left and right of what counts."""
    shifts = ((-1, 0), (1, 0), (0, -1), (0, 1))
    return [_inner(np.roll(grid, (-down, -right), (-2, -1)), edge) for down, right in shifts]


def _opponent(thumbs: NDArray[np.uint8]) -> Floats:
    """Luma, and red and blue without it. (n, 64, 64, 3) -> (n, 3, 64, 64)."""
    luma = luminance(thumbs)
    colours = [CHROMA * (thumbs[..., channel] - luma) for channel in (0, 2)]
    return np.stack([luma, *colours], 1)


def _same_shape(box: Floats, whole: Integers, part: Integers) -> NDArray[np.bool_]:
    """Say whether boxes of wholes have the shapes of parts. (n, 4), (n, 2), (n, 2) -> (n,)."""
    height, width = box[:, 3] * whole[:, 0], box[:, 2] * whole[:, 1]
    differ = np.abs(np.log(width / height) - np.log(part[:, 1] / part[:, 0]))
    fits: NDArray[np.bool_] = differ <= ASPECT + 1.5 / part.min(1)
    return fits
