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
from sslpipe.curate.register import (
    AXES,
    COARSE_PX,
    FAINT,
    GRID_PX,
    INNER_PX,
    LEAST_GAIN,
    MOST_GAIN,
    cut,
    inner,
    laplacian,
    register,
)
from sslpipe.curate.scan import Pictures
from sslpipe.curate.thumbnails import FULL, VIEW_BOXES, VIEWS, luminance, resampling

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]

SIMILAR = 0.7  # least cosine of a view and a whole with which pictures are compared
# least score after each step of registration that goes on, on the coarse grid and on the fine one;
# what is refused there has no say in `duplicates.others_rests`, for which 0.975 is as good as 0
PROMISING_COARSE = (0.8, 0.87, 0.9)
PROMISING = (0.88, 0.92, 0.95, 0.95)
OUTWARD = 1.015  # share of both sides from which on the whole is rather a part of the part
ALIKE = 0.7  # least squared correlation of wholes on the coarse grid with which they are compared
LIKELY = 0.95  # least score by brightness with which colours are compared
SURER = 0.05  # cosine by which one of both mirrorings is taken without a look at the other
WHOLE_SIMILAR = 0.7  # least cosine of the wholes with which these are compared
OVERLAID = 0.5  # least score of a picture that only a small text may hide
# share unexplained outside of the window, of all that is fitted once more without it
OUTSIDE = 0.25
NOISE = 0.5  # levels of a pixel that saving alone leaves unexplained
# the same of what a channel differs from the luma: JPEG keeps that of four pixels as one, and in
# coarser steps
TINT_NOISE = 3.0
# levels from which on brightness may have cut off some of what a pixel of the grid is made of
WHITE, BLACK = 220.0, 4.0
WHOLE_BOX = 0.97  # share of either side from which on a part is the whole
MOST_OFFSET = 32.0  # levels that a channel's brightness may differ beside the gain
WINDOW = (5, 14)  # height and width in px of the grid that a small text may hide
NARROW, WINDOW_NARROW = 1.4, (5, 22)  # height by width from which on a line takes more of it
_ASPECT = 0.06  # of the logarithm of shapes, beside a pixel's rounding

# what makes grids of a thumbnail, (px, 64) and (px, px): as `register.cut` does of the whole
_SHRINK = resampling(0.0, 1.0, GRID_PX)
_SHRINK_COARSE = resampling(0.0, 1.0, COARSE_PX, GRID_PX)
_RAMP = AXES[GRID_PX] - np.float32(0.5)


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

    def of(self, rows: Integers) -> "Verdicts":
        """Return those of some pairs."""
        return Verdicts(
            self.score[rows], self.outside[rows], self.mirrored[rows], self.cropped[rows]
        )

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
    shown, place = np.unique(pairs[kept], return_inverse=True)
    place = place.reshape(len(kept), 2)
    seen = _Seen.of(pictures.thumbs.read(shown))
    ways_alike = even + odd, even - odd
    surest = np.maximum(ways_alike[0].max(1), ways_alike[1].max(1)) - SURER
    for mirrored, alike in enumerate(ways_alike):
        likely = alike.max(1) >= np.maximum(surest, SIMILAR)
        # cut out of the one or out of the other
        swapped, view = np.divmod(alike.argmax(1), VIEWS)
        for way in (0, 1):
            rows = np.flatnonzero(likely & (swapped == way))
            if len(rows):
                whole, part = seen.of_rows(place[rows, way]), seen.of_rows(place[rows, 1 - way])
                shapes = sizes[rows][:, [way, 1 - way]]  # (n, 2, 2)
                same = alike[rows, way * VIEWS + FULL] >= WHOLE_SIMILAR
                part = part._replace(mirrored=mirrored > 0)
                found = _compare(whole, part, shapes, VIEW_BOXES[view[rows]], same)
                of_way = found._replace(mirrored=np.full(len(rows), mirrored > 0))
                verdicts.take(of_way, kept[rows])
    return verdicts


def compare_wholes(
    shown: NDArray[np.uint8], other: NDArray[np.uint8], sizes: Integers
) -> tuple[Floats, Floats]:
    """Compare all of some thumbnails with all of others, by colours.

    Args:
        shown: (n, 64, 64, 3).
        other: (n, 64, 64, 3).
        sizes: (n, 2), height and width in px of the pictures.

    Returns:
        (n,) shares of the variance explained, of all and outside of the worst window.
    """
    levels = (np.moveaxis(side, 3, 1).astype(np.float32) for side in (shown, other))
    grids: list[NDArray[Any]] = [_SHRINK @ side @ _SHRINK.T for side in levels]
    return _score(grids[0], grids[1], sizes)


class _Seen(NamedTuple):
    """Pictures, or one side of some pairs of them.

    Args:
        levels: (m, 64, 64, 3) uint8.
        grey: (m, 64, 64) their luma.
        small: (m, 32, 32) that, on the grid.
        tiny: (m, 16, 16) that, on the coarse grid.
        which: (n,) the picture of each pair.
        mirrored: Whether they are looked at in a mirror.
    """

    levels: NDArray[np.uint8]
    grey: Floats
    small: Floats
    tiny: Floats
    which: Integers
    mirrored: bool = False

    @classmethod
    def of(cls, levels: NDArray[np.uint8]) -> "_Seen":
        grey = luminance(levels)
        small: NDArray[Any] = _SHRINK @ grey @ _SHRINK.T
        tiny: NDArray[Any] = _SHRINK_COARSE @ small @ _SHRINK_COARSE.T
        return cls(levels, grey, small, tiny, np.arange(len(levels)))

    def of_rows(self, rows: Integers) -> "_Seen":
        return self._replace(which=self.which[rows])

    def take(self, pictures: NDArray[Any], rows: Any = slice(None)) -> NDArray[Any]:
        """Return what is seen of some pairs: `levels`, `grey`, `small` or `tiny`."""
        taken: NDArray[Any] = pictures[self.which[rows]]
        mirror: NDArray[Any] = taken[:, :, ::-1]
        return mirror if self.mirrored else taken


def _compare(
    whole: _Seen,
    part: _Seen,
    sizes: Integers,
    box: Floats,
    same: NDArray[np.bool_],
    may_turn: bool = True,
) -> Verdicts:
    """Compare pictures with parts of others, and with all of them.

    Args:
        whole: n pictures.
        part: n others.
        sizes: (n, 2, 2) of both, height and width in px.
        box: (n, 4) first estimates of where the part is.
        same: (n,) whether the part may be the whole.
        may_turn: Whether to look for the whole in the part where that is larger: it has a border.
    """
    score, outside = np.zeros((2, len(box)), np.float32)
    # where a part is: on the coarse grid, and of the few that are left on the fine one
    tiny = part.take(part.tiny)
    registered, alike = register(whole.take(whole.small), tiny, box, PROMISING_COARSE)
    promising = alike >= PROMISING_COARSE[-1]
    outward = promising & (registered[:, 2:].min(1) >= OUTWARD) & may_turn
    rows, larger = np.flatnonzero(promising & ~outward), registered[outward]
    grey, small = whole.take(whole.grey, rows), part.take(part.small, rows)
    registered, alike = register(grey, small, registered[rows], PROMISING)
    likely = np.flatnonzero(alike >= PROMISING[-1])
    rows, registered, grey = rows[likely], registered[likely], grey[likely]
    same = same & (_correlation(whole.take(whole.tiny), tiny) >= ALIKE)
    # all of it or a part, by brightness; then the better one by colours, where it may be a pair
    chosen = np.broadcast_to(VIEW_BOXES[FULL], box.shape).copy()
    for tried, boxes in ((np.flatnonzero(same), chosen[same]), (rows, registered)):
        fits = same_shape(boxes, sizes[tried, 0], sizes[tried, 1])
        made = (
            cut(grey[fits], boxes[fits]) if tried is rows else whole.take(whole.small, tried[fits])
        )
        tried, boxes = tried[fits], boxes[fits]
        found = _score(made[:, None], part.take(part.small, tried)[:, None], sizes[tried, 1])
        better = np.maximum(*found) > np.maximum(score[tried], outside[tried])
        kept = tried[better]
        score[kept], outside[kept] = found[0][better], found[1][better]
        chosen[kept] = boxes[better]
    rows = np.flatnonzero(np.maximum(score, outside) >= LIKELY)
    colours = [
        np.moveaxis(side.take(side.levels, rows), 3, 1).astype(np.float32) for side in (whole, part)
    ]
    target: NDArray[Any] = _SHRINK @ colours[1] @ _SHRINK.T
    score[rows], outside[rows] = _score(cut(colours[0], chosen[rows]), target, sizes[rows, 1])
    cropped = chosen[:, 2:].min(1) < WHOLE_BOX
    verdicts = Verdicts(score, outside, np.zeros(len(box), bool), cropped)
    rows = np.flatnonzero(outward)
    if len(rows):
        inverse = np.concatenate([-larger[:, :2], np.ones((len(rows), 2), np.float32)], 1)
        inverse /= np.tile(larger[:, 2:], 2)
        no = np.zeros(len(rows), bool)
        sides = part.of_rows(rows), whole.of_rows(rows)
        turned = _compare(*sides, sizes[rows][:, ::-1], inverse, no, may_turn=False)
        verdicts.take(turned, rows)
    return verdicts


def _correlation(one: Floats, other: Floats) -> Floats:
    """Squared correlation of what counts of grids. (n, px, px), (n, px, px) -> (n,)."""
    flat = [inner(grid).reshape(len(grid), -1) for grid in (one, other)]
    flat = [rows - rows.mean(1, keepdims=True) for rows in flat]
    product, *squares = (
        np.einsum("np,np->n", flat[a], flat[b]) for a, b in ((0, 1), (0, 0), (1, 1))
    )
    squared: Floats = product * np.abs(product) / np.maximum(squares[0] * squares[1], 1e-6)
    return squared


def _score(shown: Floats, target: Floats, sizes: Integers) -> tuple[Floats, Floats]:
    """Share of variance explained, of all and outside the worst window.

    Args:
        shown: (n, c, px, px) levels, what the target may be made of.
        target: (n, c, px, px).
        sizes: (n, 2), height and width of the target's picture.
    """
    count, channels = shown.shape[:2]
    made = np.empty((4, count, channels, INNER_PX, INNER_PX), np.float32)
    made[0], made[1], made[2] = inner(shown), laplacian(shown), inner(target)
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
    narrow = sizes[rows, 0] >= NARROW * sizes[rows, 1]
    weights = np.empty((len(rows), INNER_PX, INNER_PX), np.float32)
    for own, window in ((narrow, WINDOW_NARROW), (~narrow, WINDOW)):
        if own.any():
            weights[own] = _without_window(rest[rows[own]], window)
    kept = (rest[rows] * weights).sum((1, 2)) / np.maximum(rest[rows].sum((1, 2)), 1e-6)
    outside[rows] = 1 - (1 - score[rows]) * kept
    few = outside[rows] >= 1 - OUTSIDE
    rows, weights = rows[few], weights[few]
    if len(rows):
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
    squares, tints = _luma_and_tints(rest)
    if weights is not None:
        squares, tints = squares * weights, tints * weights
    # another brightness or tint is a little one, or another colour
    beyond = np.maximum(np.abs(shift + means[..., 2] - means[..., 0]) - MOST_OFFSET, 0)
    lost = squares.sum((1, 2)) - channels * NOISE**2 * total
    lost = np.maximum(lost + (beyond**2).sum(1) * total, 0)
    lost += np.maximum(tints.sum((1, 2)) - channels * TINT_NOISE**2 * total, 0)
    squares += tints
    faint = about[:, 3, 3] < channels * FAINT**2 * total
    score = np.where(faint, 0, 1 - lost / np.maximum(about[:, 3, 3], 1))
    return score.astype(np.float32), squares


def _luma_and_tints(rest: Floats) -> tuple[Floats, Floats]:
    """Sums over channels of the squares of the luma, and of what differs from it.

    Args:
        rest: (n, c, y, x) of grey or of red, green and blue; of grey it is overwritten.

    Returns:
        (n, y, x) each.
    """
    if rest.shape[1] == 1:
        rest *= rest
        return rest[:, 0], np.zeros_like(rest[:, 0])
    luma = luminance(np.moveaxis(rest, 1, 3))
    tints: Floats = ((rest - luma[:, None]) ** 2).sum(1)
    return rest.shape[1] * luma**2, tints


def _without_ramp(levels: Floats) -> Floats:
    """Take a linear ramp off each channel, which all skies and walls share. (n, c, y, x)."""
    energy = float((_RAMP**2).sum()) * INNER_PX
    right = (levels @ _RAMP).sum(2)[..., None, None] / energy * _RAMP
    down = (levels.sum(3) @ _RAMP)[..., None, None] / energy * _RAMP[:, None]
    flat: Floats = levels - right - down
    return flat


def _without_window(rest: Floats, window: tuple[int, int]) -> Floats:
    """Weights 0 in the window where most is unexplained, else 1. (n, y, x) -> (n, y, x)."""
    count, (high, wide) = len(rest), window
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


def same_shape(box: Floats, whole: Integers, part: Integers) -> NDArray[np.bool_]:
    """Say whether boxes of wholes have the shapes of parts. (n, 4), (n, 2), (n, 2) -> (n,)."""
    height, width = box[:, 3] * whole[:, 0], box[:, 2] * whole[:, 1]
    differ = np.abs(np.log(width / height) - np.log(part[:, 1] / part[:, 0]))
    fits: NDArray[np.bool_] = differ <= _ASPECT + 1.5 / part.min(1)
    return fits
