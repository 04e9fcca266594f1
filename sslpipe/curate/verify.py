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

from sslpipe.curate.candidates import similarities
from sslpipe.curate.scan import Pictures
from sslpipe.curate.thumbnails import FULL, THUMB_PX, VIEW_BOXES, VIEWS, luminance, resampling

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

GRID_PX = 32  # pictures are compared on a grid of as many
SIMILAR = 0.7  # least cosine of a view and a whole with which pictures are compared
PROMISING = (0.85, 0.9, 0.9, 0.9)  # least score after each step of registration that goes on
LIKELY = 0.95  # least score by brightness with which colours are compared
SURER = 0.05  # cosine by which one of both mirrorings is taken without a look at the other
WHOLE_SIMILAR = 0.7  # least cosine of the wholes with which these are compared
OVERLAID = 0.5  # least score of a picture that only a small text may hide
NOISE = 0.5  # levels of a pixel that saving alone leaves unexplained
# levels from which on brightness may have cut off some of what a pixel of the grid is made of
WHITE, BLACK = 220.0, 4.0
EDGE = 2  # px of the grid, all around, that do not count: a border's blur reaches so far
SMALLEST_BOX, LARGEST_BOX = 0.82, 1.02  # share of a side that is cut out
FARTHEST = 0.03  # share of a side that a box may reach beyond the picture
WHOLE_BOX = 0.97  # share of either side from which on a part is the whole
LEAST_GAIN, MOST_GAIN = 0.75, 1.3
MOST_OFFSET = 32.0  # levels that a channel's brightness may differ beside the gain
FAINT = 3.0  # levels; a picture that deviates less from a ramp is like nothing
WINDOW = (5, 14)  # height and width in px of the grid that a small text may hide
_ASPECT = 0.06  # of the logarithm of shapes, beside a pixel's rounding

INNER_PX = GRID_PX - 2 * EDGE  # of either axis, which count
# what makes a grid of a thumbnail, (px, 64): as `_cut` does of the whole
_SHRINK = resampling(0.0, 1.0, GRID_PX)
_AXIS = ((np.arange(GRID_PX, dtype=np.float32) + 0.5) / GRID_PX)[EDGE:-EDGE]
_RAMP = _AXIS - np.float32(0.5)


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
    # of each view of either picture, how like the whole of the other it is
    ways = [similarities(pictures.descriptors, *side) for side in (pairs.T, pairs.T[::-1])]
    even, odd = (np.concatenate(parts, axis=1) for parts in zip(*ways, strict=True))  # (P, 2 VIEWS)
    kept = np.flatnonzero((even + np.abs(odd)).max(1) >= SIMILAR)
    even, odd, sizes = even[kept], odd[kept], pictures.sizes[pairs[kept]]
    sides = [_Side.of(pictures.thumbs.read(side)) for side in pairs[kept].T]
    ways_alike = even + odd, even - odd
    surest = np.maximum(ways_alike[0].max(1), ways_alike[1].max(1)) - SURER
    for mirrored, alike in enumerate(ways_alike):
        likely = alike.max(1) >= np.maximum(surest, SIMILAR)
        # cut out of the one or out of the other
        swapped, view = np.divmod(alike.argmax(1), VIEWS)
        for way in (0, 1):
            rows = np.flatnonzero(likely & (swapped == way))
            if len(rows):
                whole, part = sides[way].rows(rows), sides[1 - way].rows(rows)
                shapes = sizes[rows][:, [way, 1 - way]]  # (n, 2, 2)
                same = alike[rows, way * VIEWS + FULL] >= WHOLE_SIMILAR
                part = part.mirrored() if mirrored else part
                found = _compare(whole, part, shapes, VIEW_BOXES[view[rows]], same)
                of_way = found._replace(mirrored=np.full(len(rows), mirrored > 0))
                verdicts.take(of_way, kept[rows])
    return verdicts


class _Side(NamedTuple):
    """One picture of each pair.

    Args:
        levels: (n, 64, 64, 3) uint8.
        grey: (n, 64, 64) their luma.
        small: (n, px, px) that, on the grid.
    """

    levels: NDArray[np.uint8]
    grey: Floats
    small: Floats

    @classmethod
    def of(cls, levels: NDArray[np.uint8]) -> "_Side":
        grey = luminance(levels)
        small: NDArray[Any] = _SHRINK @ grey @ _SHRINK.T
        return cls(levels, grey, small)

    def rows(self, index: Integers) -> "_Side":
        return _Side(self.levels[index], self.grey[index], self.small[index])

    def mirrored(self) -> "_Side":
        return _Side(self.levels[:, :, ::-1], self.grey[:, :, ::-1], self.small[:, :, ::-1])


def _compare(
    whole: _Side, part: _Side, sizes: Integers, box: Floats, same: NDArray[np.bool_]
) -> Verdicts:
    """Compare pictures with parts of others, and with all of them.

    Args:
        whole: n pictures.
        part: n others.
        sizes: (n, 2, 2) of both, height and width in px.
        box: (n, 4) first estimates of where the part is.
        same: (n,) whether the part may be the whole.
    """
    score, outside = np.zeros((2, len(box)), np.float32)
    registered, alike = _register(whole.grey, part.small, box)
    chosen = np.broadcast_to(VIEW_BOXES[FULL], box.shape).copy()
    # all of it or a part, by brightness; then the better one by colours, where it may be a pair
    for tried, boxes in ((same, chosen), (alike >= PROMISING[-1], registered)):
        rows = np.flatnonzero(tried & _same_shape(boxes, sizes[:, 0], sizes[:, 1]))
        cut = whole.small[rows] if boxes is chosen else _cut(whole.grey[rows], boxes[rows])
        found = _score(cut[:, None], part.small[rows, None])
        better = np.maximum(*found) > np.maximum(score[rows], outside[rows])
        rows = rows[better]
        score[rows], outside[rows] = found[0][better], found[1][better]
        chosen[rows] = boxes[rows]
    rows = np.flatnonzero(np.maximum(score, outside) >= LIKELY)
    colours = [np.moveaxis(side.levels[rows], 3, 1).astype(np.float32) for side in (whole, part)]
    target: NDArray[Any] = _SHRINK @ colours[1] @ _SHRINK.T
    score[rows], outside[rows] = _score(_cut(colours[0], chosen[rows]), target)
    cropped = chosen[:, 2:].min(1) < WHOLE_BOX
    return Verdicts(score, outside, np.zeros(len(box), bool), cropped)


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
        hat = centres[:, :, None] - places
        np.abs(hat, out=hat)
        hat /= -wide[:, :, None]
        hat += 1
        np.maximum(hat, 0, out=hat)
        hat /= hat.sum(2, keepdims=True)
        hats.append(hat)
    rows, columns = hats if pictures.ndim == 3 else (hat[:, None] for hat in hats)
    cut: NDArray[Any] = rows @ pictures @ columns.swapaxes(-1, -2)
    return cut


def _inner(grid: Floats, down: int = 0, right: int = 0) -> Floats:
    """What counts of a grid, or what lies beside it by a pixel. (..., px, px), a view."""
    rows, columns = (slice(EDGE + by, GRID_PX - EDGE + by) for by in (down, right))
    return grid[..., rows, columns]


def _laplacian(grid: Floats) -> Floats:
    """Of what counts of a grid."""
    laplacian: Floats = _inner(grid, -1) + _inner(grid, 1) + _inner(grid, 0, -1)
    laplacian += _inner(grid, 0, 1)
    laplacian -= 4 * _inner(grid)
    return laplacian


def _register(whole: Floats, part: Floats, box: Floats) -> tuple[Floats, Floats]:
    """Improve boxes by steps of linear least squares.

    Args:
        whole: (n, 64, 64) grey.
        part: (n, px, px) on the grid, cut out of it.
        box: (n, 4) first estimates.

    Returns:
        (n, 4) boxes, (n,) share of the variance explained by the last step.
    """
    box, alike = box.copy(), np.zeros(len(box), np.float32)
    target = _inner(part).reshape(len(part), INNER_PX**2)
    target = target - target.mean(1, keepdims=True)
    energy = (target**2).mean(1)
    live = np.flatnonzero(energy >= FAINT**2)
    for least in PROMISING:
        if not len(live):
            break
        cut = _cut(whole[live], box[live])
        basis: NDArray[Any] = np.empty((len(live), 6, INNER_PX, INNER_PX), np.float32)
        basis[:, 0], basis[:, 5] = _inner(cut), _laplacian(cut)
        np.subtract(_inner(cut, 0, 1), _inner(cut, 0, -1), out=basis[:, 1])
        np.subtract(_inner(cut, 1), _inner(cut, -1), out=basis[:, 2])
        basis[:, 1:3] *= 0.5  # central differences
        np.multiply(basis[:, 1], _AXIS, out=basis[:, 3])
        np.multiply(basis[:, 2], _AXIS[:, None], out=basis[:, 4])
        basis = basis.reshape(len(live), 6, INNER_PX**2)
        basis -= basis.mean(2, keepdims=True)  # (n, 6, inner px)
        gram, moments = basis @ basis.transpose(0, 2, 1), basis @ target[live][:, :, None]
        # a little of the diagonal: where a picture has no detail along an axis, it stays
        diagonal = 1e-4 * np.einsum("nii->ni", gram) + 1e-3
        gram += np.eye(6, dtype=np.float32) * diagonal[:, None]
        solved = np.linalg.solve(gram, moments)[:, :, 0]  # (n, 6)
        explained = (solved * moments[:, :, 0]).sum(1) / INNER_PX**2
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


def _score(cut: Floats, target: Floats) -> tuple[Floats, Floats]:
    """Share of variance explained, of all and outside the worst window.

    Args:
        cut: (n, c, px, px) levels, what the target may be made of.
        target: (n, c, px, px).
    """
    count, channels = cut.shape[:2]
    made = np.empty((4, count, channels, INNER_PX, INNER_PX), np.float32)
    made[0], made[1], made[2] = _inner(cut), _laplacian(cut), _inner(target)
    # what brightness has cut off in one of both is known to be at least, or at most, so bright
    most = np.where((made[0] >= WHITE) | (made[2] <= BLACK), 0, np.inf).astype(np.float32)
    least = np.where((made[2] >= WHITE) | (made[0] <= BLACK), 0, -np.inf).astype(np.float32)
    means = made[:3].mean((3, 4), keepdims=True)
    made[:3] -= means
    made[3] = _without_ramp(made[2])
    shift = (means[2] - means[0])[:, :, 0, 0]  # (n, c)
    score, rest = _explained(made, shift, (least, most), None)
    # a text hides little of a picture: where more is unexplained, nothing is left out
    rows = np.flatnonzero(score >= OVERLAID)
    outside = np.where(score >= OVERLAID, 0, score)
    if len(rows):
        weights = _without_window(rest[rows])
        limits = least[rows], most[rows]
        outside[rows], _ = _explained(made[:, rows], shift[rows], limits, weights)
    return score, outside


def _explained(
    made: Floats, shift: Floats, limits: tuple[Floats, Floats], weights: Floats | None
) -> tuple[Floats, Floats]:
    """Fit contrast and sharpness of all, brightness of each channel; (n,) scores, (n, y, x) rest.

    Args:
        made: (4, n, c, y, x): what the target may be made of, its Laplacian, the target, and the
            target without a ramp.
        shift: (n, c), mean of the target less that of what it is made of, before these were 0.
        limits: (n, c, y, x) each, what is unexplained is at least, and at most, to count so.
        weights: (n, y, x), 0 for what does not count; None: all does.
    """
    terms, count, channels = made.shape[:3]
    flat = made.reshape(terms, count, channels, INNER_PX**2).transpose(1, 2, 0, 3)  # (n, c, 4, px)
    # sums of products about the means of what counts, (n, 4, 4)
    if weights is None:
        total = np.full(count, INNER_PX**2, np.float32)
        products, sums = flat @ flat.swapaxes(2, 3), np.zeros(flat.shape[:3], np.float32)
    else:
        kept = weights.reshape(count, 1, 1, INNER_PX**2)
        total, weighted = weights.sum((1, 2)), flat * kept
        products, sums = weighted @ flat.swapaxes(2, 3), weighted.sum(3)
    means = sums / total[:, None, None]  # (n, c, 4)
    about = (products - sums[..., None] * means[..., None, :]).sum(1)
    xx, xz, zz = about[:, 0, 0], about[:, 0, 1], about[:, 1, 1] + 1.0
    xy, zy = about[:, 0, 2], about[:, 1, 2]
    determinant = np.maximum(xx * zz - xz**2, 1e-6)
    gain = np.clip((xy * zz - zy * xz) / determinant, LEAST_GAIN, MOST_GAIN)
    sharpness = np.clip((zy - gain * xz) / zz, -0.5, 0.5)
    base = means[..., 2] - gain[:, None] * means[..., 0] - sharpness[:, None] * means[..., 1]
    rest = made[2] - gain[:, None, None, None] * made[0]
    rest -= sharpness[:, None, None, None] * made[1]
    rest -= base[..., None, None]
    np.clip(rest, *limits, out=rest)
    rest *= rest
    squares: Floats = rest.sum(1) if weights is None else rest.sum(1) * weights
    # another brightness or tint is a little one, or another colour
    beyond = np.maximum(np.abs(shift + means[..., 2] - means[..., 0]) - MOST_OFFSET, 0)
    lost = squares.sum((1, 2)) + (beyond**2).sum(1) * total
    lost = np.maximum(lost - channels * NOISE**2 * total, 0)
    faint = about[:, 3, 3] < channels * FAINT**2 * total
    score = np.where(faint, 0, 1 - lost / np.maximum(about[:, 3, 3], 1))
    return score.astype(np.float32), squares


def _without_ramp(levels: Floats) -> Floats:
    """Take a linear ramp off each channel, which all skies and walls share. (n, c, y, x)."""
    energy = float((_RAMP**2).sum()) * INNER_PX
    right = (levels @ _RAMP).sum(2)[..., None, None] / energy * _RAMP
    down = (levels.sum(3) @ _RAMP)[..., None, None] / energy * _RAMP[:, None]
    flat: Floats = levels - right - down
    return flat


def _without_window(rest: Floats) -> Floats:
    """Weights 0 in the window where most is unexplained, else 1. (n, y, x) -> (n, y, x)."""
    count, (high, wide) = len(rest), WINDOW
    sums = np.pad(rest, ((0, 0), (1, 0), (1, 0))).astype(np.float64).cumsum(1).cumsum(2)
    windows = sums[:, high:, wide:] - sums[:, :-high, wide:]
    windows += sums[:, :-high, :-wide] - sums[:, high:, :-wide]
    flat = windows.reshape(count, windows.shape[1] * windows.shape[2])
    top, left = np.unravel_index(flat.argmax(1), windows.shape[1:])
    places = np.arange(INNER_PX)
    rows = (places >= top[:, None]) & (places < top[:, None] + high)
    columns = (places >= left[:, None]) & (places < left[:, None] + wide)
    weights: Floats = (~(rows[:, :, None] & columns[:, None, :])).astype(np.float32)
    return weights


def _same_shape(box: Floats, whole: Integers, part: Integers) -> NDArray[np.bool_]:
    """Say whether boxes have the shapes of the parts. (n, 4), (n, 2), (n, 2) -> (n,)."""
    height, width = box[:, 3] * whole[:, 0], box[:, 2] * whole[:, 1]
    differ = np.abs(np.log(width / height) - np.log(part[:, 1] / part[:, 0]))
    fits: NDArray[np.bool_] = differ <= _ASPECT + 1.5 / part.min(1)
    return fits
