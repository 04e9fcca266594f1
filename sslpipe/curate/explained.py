"""The share of a picture that another one explains, but for contrast, brightness and sharpness."""

from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.register import (
    AXES,
    FAINT,
    INNER_PX,
    LEAST_GAIN,
    MOST_GAIN,
    inner,
    laplacian,
)
from sslpipe.curate.thumbnails import GRID_PX, luminance

Floats = NDArray[np.float32]
Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

# least score with which a text has not spoilt the fit; and, where it has, the least of a brightness
# alone outside of the window
UNSPOILT, OVERLAID = 0.9, 0.8
SPOILING = 0.5  # most of what is unexplained that lies outside of the window, where a text spoils
# share unexplained outside of the window, of all that is fitted once more without it; of 10,000
# pairs that came to 0.992 so, the most was 0.062 before
OUTSIDE = 0.1
NOISE = 0.5  # levels of a pixel that saving alone leaves unexplained
# the same of what a channel differs from the luma: JPEG keeps that of four pixels as one, and in
# coarser steps
TINT_NOISE = 3.0
# levels from which on brightness may have cut off some of what a pixel of the grid is made of
WHITE, BLACK = 220.0, 4.0
MOST_OFFSET = 32.0  # levels that a channel's brightness may differ beside the gain
WINDOW = (5, 14)  # height and width in px of the grid that a small text may hide
NARROW, WINDOW_NARROW = 1.4, (5, 22)  # height by width from which on a line takes more of it
# of the pixels that count, ramps of length 1 to the right and down, (p, 2)
_STEPS = AXES[GRID_PX] - np.float32(0.5)
_RAMPS: NDArray[Any] = np.stack(np.meshgrid(_STEPS, _STEPS), 2).reshape(-1, 2)
_RAMPS /= np.linalg.norm(_RAMPS, axis=0)


def explained(shown: Floats, target: Floats, sizes: Integers) -> tuple[Floats, Floats]:
    """Share of variance explained, of all and outside the worst window.

    Args:
        shown: (n, c, px, px) levels, what the target may be made of.
        target: (n, c, px, px).
        sizes: (n, 2), height and width of the target's picture.
    """
    count, channels = shown.shape[:2]
    made = np.empty((count, channels, 4, INNER_PX**2), np.float32)
    grids = made.reshape(count, channels, 4, INNER_PX, INNER_PX)
    grids[:, :, 0], grids[:, :, 1], grids[:, :, 2] = inner(shown), laplacian(shown), inner(target)
    source, _, wanted, flat = np.moveaxis(made, 2, 0)
    # what brightness has cut off in one of both is known to be at least, or at most, so bright
    at_most = (source >= WHITE) | (wanted <= BLACK)
    at_least = (wanted >= WHITE) | (source <= BLACK)
    means = made[:, :, :3].mean(3, keepdims=True)
    made[:, :, :3] -= means
    flat[:] = _without_ramp(wanted)
    shift = (means[:, :, 2] - means[:, :, 0])[:, :, 0]  # (n, c)
    score, rest = _fit(made, shift, (at_least, at_most), None)
    narrow = sizes[:, 0] >= NARROW * sizes[:, 1]
    weights = _without_text(rest, narrow)
    kept = (rest * weights).sum(1) / np.maximum(rest.sum(1), 1e-6)
    outside = 1 - (1 - score) * kept
    few = outside >= 1 - OUTSIDE
    # a text that is lighter or darker than all else spoils the fit: beside it little differs but a
    # brightness
    spoilt = np.flatnonzero((score < UNSPOILT) & (kept <= SPOILING))
    if len(spoilt):
        differ = wanted[spoilt] - source[spoilt]
        differ -= np.median(differ[:, :, ::5], axis=2, keepdims=True)  # a fifth of them will do
        rest = (differ**2).sum(1)
        weights[spoilt] = _without_text(rest, narrow[spoilt])
        others = (flat[spoilt] ** 2 * weights[spoilt, None]).sum((1, 2))
        few[spoilt] = (rest * weights[spoilt]).sum(1) <= (1 - OVERLAID) * others
        outside[spoilt] = 0
    rows = np.flatnonzero(few)
    if len(rows):
        limits = at_least[rows], at_most[rows]
        outside[rows], _ = _fit(made[rows], shift[rows], limits, weights[rows])
    return score, outside


def _fit(
    made: Floats, shift: Floats, limits: tuple[Flags, Flags], weights: Floats | None
) -> tuple[Floats, Floats]:
    """Fit contrast and sharpness of all, brightness of each channel; (n,) scores, (n, p) rest.

    Args:
        made: (n, c, 4, p): what the target may be made of, its Laplacian, the target, and the
            target without a ramp; of p pixels.
        shift: (n, c), mean of the target less that of what it is made of, before these were 0.
        limits: (n, c, p) each, where what is unexplained counts only above 0, and only below.
        weights: (n, p), 0 for what does not count; None: all does.
    """
    count, channels, terms, pixels = made.shape
    # sums of products about the means of what counts, (n, 4, 4)
    if weights is None:
        total = np.full(count, pixels, np.float32)
        products, sums = made @ made.swapaxes(2, 3), np.zeros((count, channels, terms), np.float32)
    else:
        total, weighted = weights.sum(1), made * weights[:, None, None]
        products, sums = weighted @ made.swapaxes(2, 3), weighted.sum(3)
    means = sums / total[:, None, None]  # (n, c, 4)
    about = (products - sums[..., None] * means[..., None, :]).sum(1)
    xx, xz, zz = about[:, 0, 0], about[:, 0, 1], about[:, 1, 1] + 1.0
    xy, zy = about[:, 0, 2], about[:, 1, 2]
    determinant = np.maximum(xx * zz - xz**2, 1e-6)
    gain = np.clip((xy * zz - zy * xz) / determinant, LEAST_GAIN, MOST_GAIN)
    sharpness = np.clip((zy - gain * xz) / zz, -0.5, 0.5)
    shares = np.stack([-gain, -sharpness, np.ones_like(gain)], 1)[:, :, None]  # (n, 3, 1)
    rest = (shares.swapaxes(1, 2)[:, None] @ made[:, :, :3])[:, :, 0]  # (n, c, p)
    rest -= means[:, :, :3] @ shares
    at_least, at_most = limits
    rest[(at_most & (rest > 0)) | (at_least & (rest < 0))] = 0
    squares, tints = _luma_and_tints(rest)
    if weights is not None:
        squares, tints = squares * weights, tints * weights
    # another brightness or tint is a little one, or another colour
    beyond = np.maximum(np.abs(shift + means[..., 2] - means[..., 0]) - MOST_OFFSET, 0)
    lost = squares.sum(1) - channels * NOISE**2 * total
    lost = np.maximum(lost + (beyond**2).sum(1) * total, 0)
    lost += np.maximum(tints.sum(1) - channels * TINT_NOISE**2 * total, 0)
    squares += tints
    faint = about[:, 3, 3] < channels * FAINT**2 * total
    score = np.where(faint, 0, 1 - lost / np.maximum(about[:, 3, 3], 1))
    return score.astype(np.float32), squares


def _luma_and_tints(rest: Floats) -> tuple[Floats, Floats]:
    """Sums over channels of the squares of the luma, and of what differs from it.

    Args:
        rest: (n, c, p) of grey or of red, green and blue; of grey it is overwritten.

    Returns:
        (n, p) each.
    """
    if rest.shape[1] == 1:
        rest *= rest
        return rest[:, 0], np.zeros_like(rest[:, 0])
    luma = luminance(np.moveaxis(rest, 1, 2))
    tints: Floats = ((rest - luma[:, None]) ** 2).sum(1)
    return rest.shape[1] * luma**2, tints


def _without_ramp(levels: Floats) -> Floats:
    """Take a linear ramp off each channel, which all skies and walls share. (n, c, p)."""
    flat: NDArray[Any] = levels - levels @ _RAMPS @ _RAMPS.T
    return flat


def _without_text(rest: Floats, narrow: Flags) -> Floats:
    """Weights 0 in the window of a small text, of narrow pictures or others. (n, p), (n,)."""
    weights = np.empty_like(rest)
    for own, window in ((narrow, WINDOW_NARROW), (~narrow, WINDOW)):
        if own.any():
            grids = rest[own].reshape(-1, INNER_PX, INNER_PX)
            weights[own] = without_window(grids, window).reshape(-1, INNER_PX**2)
    return weights


def without_window(rest: Floats, window: tuple[int, int]) -> Floats:
    """Weights 0 in the window where most is unexplained, else 1. (n, px, px) -> (n, px, px)."""
    (high, wide), px = window, rest.shape[1]
    sums = _window_sums(high, px) @ rest @ _window_sums(wide, px).T
    flat = sums.reshape(len(rest), sums.shape[1] * sums.shape[2])
    top, left = np.unravel_index(flat.argmax(1), sums.shape[1:])
    places = np.arange(px)
    rows = (places >= top[:, None]) & (places < top[:, None] + high)
    columns = (places >= left[:, None]) & (places < left[:, None] + wide)
    weights: Floats = (~(rows[:, :, None] & columns[:, None, :])).astype(np.float32)
    return weights


@cache
def _window_sums(high: int, px: int) -> Floats:
    """What sums every window of an axis, (px - high + 1, px)."""
    start = np.arange(px - high + 1)[:, None]
    place = np.arange(px)
    sums: Floats = ((place >= start) & (place < start + high)).astype(np.float32)
    return sums
