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

from collections.abc import Iterable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.candidates import similarities
from sslpipe.curate.explained import explained, without_window
from sslpipe.curate.register import COARSE_PX, INNER_PX, cut, inner, register
from sslpipe.curate.scan import Pictures
from sslpipe.curate.thumbnails import (
    FULL,
    GRID_PX,
    VIEW_BOXES,
    VIEWS,
    ThumbFile,
    luminance,
    on_grid,
    resampling,
)

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

SIMILAR = 0.6  # least cosine of a view and a whole with which pictures are compared
# least score after each step of registration that goes on, on the coarse grid and on the fine one;
# what is refused there has no say in `duplicates.others_rests`, for which 0.975 is as good as 0.
# Of 7,000 trials that came to 0.975 by a box, in three sources, the least were 0.81, 0.913 and
# 0.936 on the coarse grid, and 0.943, 0.950, 0.950 and 0.951 on the fine one
PROMISING_COARSE = (0.8, 0.9, 0.93)
PROMISING = (0.93, 0.945, 0.95, 0.95)
OUTWARD = 1.015  # share of both sides from which on the whole is rather a part of the part
ALIKE = 0.7  # least squared correlation of wholes on the coarse grid with which they are compared
# or outside of a window, height and width in px of the coarse grid, that a small text may hide
ALIKE_OUTSIDE, WINDOW_COARSE = 0.9, (3, 8)
LIKELY = 0.96  # least score by brightness with which colours are compared
MISFIT = 0.03  # cosine that a view has less that is of another shape than the part
SURER = 0.05  # cosine by which one of both mirrorings is taken without a look at the other
WHOLE_SIMILAR = 0.4  # least cosine of the wholes with which these are compared
WHOLE_BOX = 0.97  # share of either side from which on a part is the whole
_ASPECT = 0.06  # of the logarithm of shapes, beside a pixel's rounding
WHOLE, PART = 0, 1  # sides of a trial

_TO_COARSE = resampling(0.0, 1.0, COARSE_PX, GRID_PX)


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


class _Trials(NamedTuple):
    """Pictures, and what may be parts of them.

    Args:
        pair: (n,) row of the pair that is tried.
        shown: (n, 2) the picture, and the one that may be a part of it, rows of `_Seen`.
        mirrored: (n, 2) which of them are looked at in a mirror: one at most.
        sizes: (n, 2, 2) of both, height and width in px.
        box: (n, 4) where the part is.
        same: (n,) whether the part may be the whole.
    """

    pair: Integers
    shown: Integers
    mirrored: Flags
    sizes: Integers
    box: Floats
    same: Flags

    def of(self, rows: NDArray[Any]) -> "_Trials":
        """Return some of them."""
        return _Trials(*(column[rows] for column in self))

    def turned(self) -> "_Trials":
        """Look for the picture in what was a part of it."""
        corner, size = self.box[:, :2], self.box[:, 2:]
        box = np.concatenate([-corner / size, 1 / size], 1)
        return self._replace(
            shown=self.shown[:, ::-1],
            mirrored=self.mirrored[:, ::-1],
            sizes=self.sizes[:, ::-1],
            box=box,
            same=np.zeros_like(self.same),
        )

    def fitting(self) -> Flags:
        """Say of which the box has the shape of the part, (n,)."""
        return same_shape(self.box, self.sizes[:, WHOLE], self.sizes[:, PART])


class _Seen(NamedTuple):
    """Some pictures, in grey on two grids; and all that the disk has of them.

    Args:
        thumbs: Thumbnails of these and others.
        rows: (m,) of them.
        grid: (m, 32, 32) luma on the grid.
        coarse: (m, 16, 16) luma on the coarse grid.
    """

    thumbs: ThumbFile
    rows: Integers
    grid: Floats
    coarse: Floats

    @classmethod
    def of(cls, thumbs: ThumbFile, rows: Integers) -> "_Seen":
        grid = thumbs.read_grids(rows)
        coarse: NDArray[Any] = _TO_COARSE @ grid @ _TO_COARSE.T
        return cls(thumbs, rows, grid, coarse)

    def take(self, trials: _Trials, side: int, grids: Floats) -> Floats:
        """Return one side of some trials, of `grid` or `coarse`."""
        return _mirrored(grids[trials.shown[:, side]], trials.mirrored[:, side])

    def levels(self, trials: _Trials, side: int) -> NDArray[np.uint8]:
        """Return the colours of one side of some trials, (n, 64, 64, 3)."""
        which, place = np.unique(trials.shown[:, side], return_inverse=True)
        levels = self.thumbs.read(self.rows[which])
        return _mirrored(levels[place.ravel()], trials.mirrored[:, side])

    def grey(self, trials: _Trials, side: int) -> Floats:
        """Return the luma of one side of some trials, (n, 64, 64)."""
        which, place = np.unique(trials.shown[:, side], return_inverse=True)
        levels, coloured = (
            self.thumbs.read(self.rows[which]),
            self.thumbs.coloured(self.rows[which]),
        )
        grey = levels[..., 0].astype(np.float32)
        grey[coloured] = luminance(levels[coloured])
        return _mirrored(grey[place.ravel()], trials.mirrored[:, side])


def compare(pairs: Integers, pictures: Pictures) -> Verdicts:
    """Compare pairs of pictures by their pixels, mirrored or not.

    Args:
        pairs: (P, 2) int64 rows of `pictures`; a few hundred at a time, that a core's cache holds.
        pictures: What is compared.
    """
    trials, rows = _first_trials(pairs, pictures)
    seen = _Seen.of(pictures.thumbs, rows)
    wholes = trials.of(trials.same & trials._replace(box=_all_of(trials)).fitting())
    wholes = wholes._replace(box=_all_of(wholes)).of(_may_be_equal(wholes, seen))
    parts, grey = _registered(trials, seen)

    # all of it or a part, by brightness; then the better one by colours, where it may be a pair
    tried = _joined(wholes, parts)
    made = np.concatenate([seen.take(wholes, WHOLE, seen.grid), cut(grey, parts.box)])
    target = seen.take(tried, PART, seen.grid)
    found = explained(made[:, None], target[:, None], tried.sizes[:, PART])
    mirrored: Flags = np.logical_or(*tried.mirrored.T)
    order = np.lexsort((-np.maximum(*found), mirrored, tried.pair))
    _, first = np.unique(2 * tried.pair[order] + mirrored[order], return_index=True)
    best, mirrored = tried.of(order[first]), mirrored[order[first]]
    score, outside = (each[order[first]] for each in found)
    coloured = pictures.thumbs.coloured(seen.rows[best.shown]).any(1)
    likely = np.flatnonzero((np.maximum(score, outside) >= LIKELY) & coloured)
    if len(likely):
        shown, others = (_channels(seen.levels(best.of(likely), side)) for side in (WHOLE, PART))
        sides = cut(shown, best.box[likely]), on_grid(others)
        score[likely], outside[likely] = explained(*sides, best.sizes[likely, PART])

    none, no = np.zeros(len(pairs), np.float32), np.zeros(len(pairs), bool)
    verdicts = Verdicts(none, none.copy(), no, no.copy())
    of_best = Verdicts(score, outside, mirrored, best.box[:, 2:].min(1) < WHOLE_BOX)
    for way in (np.flatnonzero(~mirrored), np.flatnonzero(mirrored)):
        verdicts.take(of_best.of(way), best.pair[way])
    return verdicts


def compare_wholes(
    shown: NDArray[np.uint8], other: NDArray[np.uint8], sizes: Integers
) -> tuple[Floats, Floats]:
    """Compare all of some thumbnails with all of others, by colours.

    Args:
        shown: (n, 64, 64, C), C 1 where all are grey, else 3.
        other: (n, 64, 64, C).
        sizes: (n, 2), height and width in px of the pictures.

    Returns:
        (n,) shares of the variance explained, of all and outside of the worst window.
    """
    return explained(on_grid(_channels(shown)), on_grid(_channels(other)), sizes)


def _first_trials(pairs: Integers, pictures: Pictures) -> tuple[_Trials, Integers]:
    """Choose what of a pair is cut out of the other, by descriptors. -> trials, (m,) pictures."""
    # of each view of either picture, how like the whole of the other it is
    ways = [similarities(pictures.descriptors, *side) for side in (pairs.T, pairs.T[::-1])]
    even, odd = (np.concatenate(parts, axis=1) for parts in zip(*ways, strict=True))  # (P, 2 VIEWS)
    alike = np.stack([even + odd, even - odd], 1)  # (P, mirrored or not, 2 VIEWS)
    alike -= MISFIT * _of_other_shapes(pictures.sizes[pairs])[:, None]
    most = alike.max(2)
    pair, mirrored = np.nonzero(most >= np.maximum(most.max(1) - SURER, SIMILAR)[:, None])
    alike = alike[pair, mirrored]
    # cut out of the one or out of the other
    swapped, view = np.divmod(alike.argmax(1), VIEWS)
    same = alike[np.arange(len(pair)), swapped * VIEWS + FULL] >= WHOLE_SIMILAR
    sides = pairs[pair[:, None], np.stack([swapped, 1 - swapped], 1)]
    rows, shown = np.unique(sides, return_inverse=True)
    turned = np.stack([np.zeros_like(mirrored), mirrored], 1) > 0
    return _Trials(
        pair, shown.reshape(sides.shape), turned, pictures.sizes[sides], VIEW_BOXES[view], same
    ), rows


def _of_other_shapes(sizes: Integers) -> Flags:
    """Say which views have not the shape of the other picture. (P, 2, 2) -> (P, 2 VIEWS)."""
    shapes = np.log(sizes[:, :, 1] / sizes[:, :, 0])  # (P, 2)
    views = np.log(VIEW_BOXES[:, 2] / VIEW_BOXES[:, 3])
    differ = shapes - shapes[:, ::-1]
    most = _tolerance(sizes[:, ::-1])[:, :, None]
    found: Flags = np.abs(differ[:, :, None] + views) > most
    return found.reshape(len(sizes), 2 * VIEWS)


def _registered(trials: _Trials, seen: _Seen) -> tuple[_Trials, Floats]:
    """Find where parts are: on the coarse grid, and of the few that are left on the fine one.

    Where the part is larger than the whole, it has a border: the whole is looked for in it.

    Returns:
        Trials that are promising, and their wholes' luma, (n, 64, 64).
    """

    def coarse(trials: _Trials) -> tuple[_Trials, Flags]:
        sides = seen.take(trials, WHOLE, seen.grid), seen.take(trials, PART, seen.coarse)
        box, alike = register(*sides, trials.box, PROMISING_COARSE)
        return trials._replace(box=box), alike >= PROMISING_COARSE[-1]

    trials, promising = coarse(trials)
    outward = promising & (trials.box[:, 2:].min(1) >= OUTWARD)
    turned, kept = coarse(trials.of(outward).turned())
    parts = _joined(trials.of(promising & ~outward), turned.of(kept))
    grey = seen.grey(parts, WHOLE)
    box, alike = register(grey, seen.take(parts, PART, seen.grid), parts.box, PROMISING)
    parts = parts._replace(box=box)
    kept = (alike >= PROMISING[-1]) & parts.fitting()
    return parts.of(kept), grey[kept]


def _joined(one: _Trials, other: _Trials) -> _Trials:
    columns: Iterable[Any] = zip(one, other, strict=True)
    return _Trials._make(np.concatenate(both) for both in columns)


def _all_of(trials: _Trials) -> Floats:
    """Boxes that are the whole, (n, 4)."""
    return np.broadcast_to(VIEW_BOXES[FULL], trials.box.shape)


def _mirrored(pictures: NDArray[Any], which: Flags) -> NDArray[Any]:
    """Mirror some of a copy of pictures. (n, y, x, ...), (n,)."""
    pictures[which] = pictures[which, :, ::-1]
    return pictures


def _channels(levels: NDArray[np.uint8]) -> Floats:
    """(n, y, x, C) -> (n, C, y, x) float32."""
    return np.moveaxis(levels, 3, 1).astype(np.float32)


def _may_be_equal(wholes: _Trials, seen: _Seen) -> Flags:
    """Say of which trials both are alike on the coarse grid, or but for a small text, (n,)."""
    one, other = (_counting(seen.take(wholes, side, seen.coarse)) for side in (WHOLE, PART))
    alike = _correlation(one, other, np.ones((1, one.shape[1]), np.float32)) >= ALIKE
    rows = np.flatnonzero(~alike)
    one, other = one[rows], other[rows]
    differ = one - other
    differ -= np.median(differ, axis=1, keepdims=True)
    px = INNER_PX * COARSE_PX // GRID_PX
    weights = without_window((differ**2).reshape(len(rows), px, px), WINDOW_COARSE)
    alike[rows] = _correlation(one, other, weights.reshape(len(rows), px**2)) >= ALIKE_OUTSIDE
    return alike


def _counting(grid: Floats) -> Floats:
    """What counts of a coarse grid, in rows. (n, 16, 16) -> (n, 196)."""
    return inner(grid).reshape(len(grid), (INNER_PX * COARSE_PX // GRID_PX) ** 2)


def _correlation(one: Floats, other: Floats, weights: Floats) -> Floats:
    """Squared correlation of rows where weights are 1, not 0, with its sign. (n, p) -> (n,)."""
    total = weights.sum(1, keepdims=True)
    flat = [
        (rows - (rows * weights).sum(1, keepdims=True) / total) * weights for rows in (one, other)
    ]
    product, *squares = (
        np.einsum("np,np->n", flat[a], flat[b]) for a, b in ((0, 1), (0, 0), (1, 1))
    )
    squared: Floats = product * np.abs(product) / np.maximum(squares[0] * squares[1], 1e-6)
    return squared


def same_shape(box: Floats, whole: Integers, part: Integers) -> NDArray[np.bool_]:
    """Say whether boxes of wholes have the shapes of parts. (n, 4), (n, 2), (n, 2) -> (n,)."""
    height, width = box[:, 3] * whole[:, 0], box[:, 2] * whole[:, 1]
    differ = np.abs(np.log(width / height) - np.log(part[:, 1] / part[:, 0]))
    fits: NDArray[np.bool_] = differ <= _tolerance(part)
    return fits


def _tolerance(sizes: Integers) -> NDArray[np.float64]:
    """By how much the logarithm of a shape may differ from that of some px. (..., 2) -> (...)."""
    most: NDArray[np.float64] = _ASPECT + 1.5 / sizes.min(-1)
    return most
