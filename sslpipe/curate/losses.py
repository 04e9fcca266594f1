"""Give one picture the losses that another shows: fewer pixels, JPEG, whites or blacks cut off.

A shirt of 28 px that was saved at quality 30 differs more from itself than two shirts differ. But
such a loss is no chance: where both are one picture, the same loss makes the other one equal to
it, and where they are two, it brings them no nearer.

Source:
    Farid 2009, IEEE Transactions on Information Forensics and Security 4(1) (JPEG ghosts: how a
    picture was saved is found by saving it so once more).
"""

import io
from functools import cache
from math import ceil

import numpy as np
from numpy.typing import NDArray
from PIL import Image
from scipy.fft import dct

from sslpipe.curate.scan import Pictures
from sslpipe.curate.thumbnails import GRID_PX, THUMB_PX, luminance, resampling, thumbnail
from sslpipe.curate.verify import Verdicts, compare_wholes, same_shape
from sslpipe.data.decode import MAX_PIXELS, decode

Integers = NDArray[np.int64]
Pixels = NDArray[np.uint8]
Floats = NDArray[np.float32]

BLOCK_PX = 8  # of JPEG
LARGEST_PX = 128  # of a picture whose pixels are made of a thumbnail: more do not show in it
# steps that JPEG's luma is rounded to at quality 25, of the lowest frequencies: the mean, and one
# wave along either axis; half of them would do, but for what black and white cut off
STEPS = np.array([[32.0, 22.0], [24.0, np.inf]], np.float32)
# share of blocks and frequencies that are as near as that, of what JPEG may have made
WITHIN = 0.85
FILTERS = (Image.Resampling.BICUBIC, Image.Resampling.BOX)  # the best one is taken
STARTS = (0.0, 0.5)  # where in a target pixel lies the one that it is a copy of: programs differ
BORDER_FILTERS = (
    Image.Resampling.BILINEAR,
    Image.Resampling.BICUBIC,
    Image.Resampling.LANCZOS,
    Image.Resampling.BOX,
)
MOST_BORDER = 0.05  # of the shorter side, but a px at least
FRAMED = 0.4  # of what differs, that is left at most where a border is what was added
MOST_SAVED = 0.1  # share of the variance that JPEG takes at most of what was resized
QUALITIES, NEARBY = range(25, 96, 10), range(-5, 6)  # searched; then around the best
# share of the variance that differs, and share of that which the best of QUALITIES leaves, above
# which none around it helps: of 1,063 small copies that differ so much it left 0.873 at most, of
# 88 % of look-alikes over 0.95
HOPELESS, LEFT = 0.1, 0.93
# of a picture that a thumbnail reduces only the very quality, or the next one, shows
QUALITIES_LARGE, NEARBY_LARGE = range(25, 96, 3), range(-2, 3)
DARKEST, LIGHTEST = 8.0, 225.0  # levels between which two pictures' brightness is compared
LEAST_LEVELS = 50  # as many of a thumbnail's for it, of 256 of each of three channels
MOST_GAIN = 1.3  # of contrast, or its inverse
LEAST_GAIN, LEAST_SHIFT = 1.02, 4.0  # and levels of brightness: less is no change
WHITE, BLACK = 250.0, 5.0  # levels that at least, and at most, most of what is cut off has


def compare_with_losses(
    pairs: Integers, mirrored: NDArray[np.bool_], pictures: Pictures
) -> Verdicts:
    """Compare pairs of whole pictures, each with the losses of the other.

    Args:
        pairs: (P, 2) int64 rows of `pictures`.
        mirrored: (P,) whether they are compared in a mirror.
        pictures: What is compared.

    Returns:
        Scores of the better way; 0 where no loss shows.
    """
    thumbs = pictures.thumbs.read(pairs.ravel()).reshape(len(pairs), 2, THUMB_PX, THUMB_PX, 3)
    thumbs[mirrored, 0] = thumbs[mirrored, 0, :, ::-1].copy()
    none, no = np.zeros(len(pairs), np.float32), np.zeros(len(pairs), bool)
    verdicts = Verdicts(none, none.copy(), mirrored, no)
    grey = ~pictures.thumbs.coloured(pairs).any(1)
    for own, channels in ((grey, 1), (~grey, 3)):  # of what is grey one channel says all
        if own.any():
            found = _compare_likewise(thumbs[own][..., :channels], pictures.sizes[pairs[own]])
            verdicts.score[own], verdicts.outside[own] = found
    return verdicts


def _compare_likewise(thumbs: Pixels, sizes: Integers) -> tuple[Floats, Floats]:
    """Compare thumbnails, each with the losses of the other.

    Args:
        thumbs: (P, 2, 64, 64, C), C 1 or 3.
        sizes: (P, 2, 2) height and width in px of the pictures.

    Returns:
        (P,) shares explained, of all and outside of the worst window, of the better way; 0 where no
        loss shows.
    """
    fits = same_shape(np.ones((len(sizes), 4), np.float32), sizes[:, 0], sizes[:, 1])
    saved, lit = fits & _may_be_saved(thumbs, sizes), fits[:, None] & _may_be_lit(thumbs)
    rows, made, others = [], [], []
    channels, whole = thumbs.shape[4], np.broadcast_to(thumbs, (*thumbs.shape[:4], 3))
    for row, way, px in _may_be_framed(thumbs, sizes, fits).tolist():
        likewise = _framed_likewise(whole[row, way], whole[row, 1 - way], sizes[row, 0], px)
        made.append(likewise[..., :channels])
        others.append(thumbs[row, 1 - way])
        rows.append(row)
    for way in (0, 1):
        for row in np.flatnonzero(saved | lit[:, way]).tolist():
            shown, other = thumbs[row, way], thumbs[row, 1 - way]
            if saved[row]:
                size = sizes[row, [way, 1 - way]].tolist()
                likewise = _saved_likewise(whole[row, way], whole[row, 1 - way], *size)
                made.append(likewise[..., :channels])
                others.append(other)
                rows.append(row)
            if lit[row, way]:
                made.append(_lit_likewise(shown, other))
                others.append(other)
                rows.append(row)
    score, outside = np.zeros((2, len(sizes)), np.float32)
    if rows:
        found = compare_wholes(np.stack(made), np.stack(others), sizes[np.array(rows), 0])
        for at in np.argsort(np.maximum(*found), kind="stable").tolist():  # the best one last
            score[rows[at]], outside[rows[at]] = found[0][at], found[1][at]
    return score, outside


def _may_be_saved(thumbs: Pixels, sizes: Integers) -> NDArray[np.bool_]:
    """Say of which pairs one may be the other resized, or saved as JPEG, so that it shows.

    Of two small pictures of one size the lowest frequencies of JPEG's blocks must be within steps.

    Args:
        thumbs: (P, 2, 64, 64, C).
        sizes: (P, 2, 2) height and width in px.
    """
    differ = (sizes[:, 0] != sizes[:, 1]).any(1)
    may: NDArray[np.bool_] = differ & (sizes.max(2).min(1) <= THUMB_PX)
    rows = np.flatnonzero(~differ & (sizes[:, 0].max(1) <= LARGEST_PX))
    rows = rows[sizes[rows, 0].min(1) >= BLOCK_PX]
    kinds, kind = np.unique(sizes[rows, 0], axis=0, return_inverse=True)
    for number, (height, width) in enumerate(kinds.tolist()):
        own = rows[kind.ravel() == number]
        # luma and frequencies are sums of levels: first those along y, of which few are left
        differ = (thumbs[own, 0].astype(np.int16) - thumbs[own, 1]).astype(np.float32)
        low = _low(height) @ differ.reshape(len(own), THUMB_PX, differ[0, 0].size)
        low = low.reshape(len(own), -1, *differ.shape[2:])
        low = (luminance(low) if low.shape[3] == 3 else low[..., 0]) @ _low(width).T
        low = low.reshape(len(own), height // BLOCK_PX, 2, width // BLOCK_PX, 2)
        within = np.abs(low) <= STEPS[:, None]
        may[own] = within.mean((1, 2, 3, 4)) >= WITHIN
    return may


def _may_be_lit(thumbs: Pixels) -> NDArray[np.bool_]:
    """Say which picture of each pair, made as light as the other, is cut off where that one is.

    Args:
        thumbs: (P, 2, 64, 64, C).

    Returns:
        (P, 2).
    """
    may = np.zeros((len(thumbs), 2), bool)
    levels = thumbs[:, :, ::4, ::4].astype(np.float32).reshape(len(thumbs), 2, 1, -1)
    levels = levels[:, :, 0]
    seen = ((levels.min(1) >= DARKEST) & (levels.max(1) <= LIGHTEST)).astype(np.float32)
    total = np.maximum(seen.sum(1), 1)
    means = (levels * seen[:, None]).sum(2) / total[:, None]
    about = (levels - means[:, :, None]) * seen[:, None]
    squares, product = (about**2).sum(2), about[:, 0] * about[:, 1]
    for way in (0, 1):
        gain = product.sum(1) / np.maximum(squares[:, way], 1)
        shift = means[:, 1 - way] - means[:, way]
        made = gain[:, None] * (levels[:, way] - means[:, way, None]) + means[:, 1 - way, None]
        other, above, below = levels[:, 1 - way], made > 256, made < -1
        cut_off = ((above & (other >= WHITE)) | (below & (other <= BLACK))).sum(1)
        fits = (
            (gain >= 1 / MOST_GAIN)
            & (gain <= MOST_GAIN)
            & (3 * total >= LEAST_LEVELS * thumbs.shape[4])
        )
        fits &= (np.abs(gain - 1) >= LEAST_GAIN - 1) | (np.abs(shift) >= LEAST_SHIFT)
        may[:, way] = fits & (cut_off > 0) & (cut_off >= 0.5 * (above | below).sum(1))
    return may


def _may_be_framed(thumbs: Pixels, sizes: Integers, fits: NDArray[np.bool_]) -> NDArray[np.int64]:
    """Say which small picture got a border and was reduced to the size it had, as the other is.

    Args:
        thumbs: (P, 2, 64, 64, C).
        sizes: (P, 2, 2) height and width in px.
        fits: (P,) which have the same shape.

    Returns:
        (n, 3): row, which picture of the pair, and px of its border.
    """
    rows = np.flatnonzero(
        fits & (sizes[:, 0] == sizes[:, 1]).all(1) & (sizes[:, 0].max(1) <= GRID_PX)
    )
    green = thumbs[rows, :, ::2, ::2, thumbs.shape[4] // 2]  # or grey; of two px one
    grid = green.astype(np.float32)  # (n, 2, 32, 32)
    plain = ((grid[:, 0] - grid[:, 1]) ** 2).mean((1, 2))
    found = [np.zeros((0, 3), np.int64)]
    sides = sizes[rows, 0].min(1)
    tried = [
        (side, px)
        for side in np.unique(sides).tolist()
        for px in range(1, max(1, round(MOST_BORDER * side)) + 1)
    ]
    for side, px in tried:
        own, border = np.flatnonzero(sides == side), GRID_PX * px / side
        pad = ceil(border)
        whole = GRID_PX + 2 * pad
        start, size = (pad - border) / whole, (GRID_PX + 2 * border) / whole
        shrink = resampling(start, size, GRID_PX, whole)
        for way in (0, 1):
            colour = grid[own, 1 - way, :1, :1]
            levels = np.pad(grid[own, way] - colour, ((0, 0), (pad, pad), (pad, pad)))
            differ = shrink @ levels @ shrink.T + colour - grid[own, 1 - way]
            less = np.flatnonzero((differ**2).mean((1, 2)) <= FRAMED * plain[own])
            found.append(np.stack([rows[own[less]], np.full_like(less, way), 0 * less + px], 1))
    return np.concatenate(found)


def _framed_likewise(shown: Pixels, other: Pixels, size: Integers, px: int) -> Pixels:
    """Add a border of the colour that another thumbnail's corner has, and reduce to the size."""
    height, width = size.tolist()
    made = np.empty((height + 2 * px, width + 2 * px, 3), np.uint8)
    made[:] = other[0, 0]
    made[px:-px, px:-px] = _pixels(shown, [height, width])
    image, target = Image.fromarray(made), other.astype(np.float32)
    ways = [thumbnail(np.asarray(image.resize((width, height), by))) for by in BORDER_FILTERS]
    return min(ways, key=lambda way: float(((way - target) ** 2).mean()))


def _saved_likewise(shown: Pixels, other: Pixels, size: list[int], wanted: list[int]) -> Pixels:
    """Resize a picture to another's size, and save it as that one was, where JPEG shows.

    Args:
        shown: (64, 64, 3) thumbnail.
        other: (64, 64, 3) of the other one.
        size: Height and width in px.
        wanted: Of the other one.

    Returns:
        (64, 64, 3) thumbnail.
    """
    pixels = _pixels(shown, size)
    if size != wanted:
        height, width = (min(side, LARGEST_PX) for side in wanted)
        target, ways = other.astype(np.float32), _resized(pixels, height, width)
        differ = [float(((thumbnail(way) - target) ** 2).mean()) for way in ways]
        pixels = ways[int(np.argmin(differ))]
        if min(differ) > MOST_SAVED * target.var():
            return thumbnail(pixels)
    if max(wanted) <= LARGEST_PX and min(wanted) >= BLOCK_PX:
        pixels = _saved_as(pixels, other)
    return thumbnail(pixels)


def _resized(pixels: Pixels, height: int, width: int) -> list[Pixels]:
    """Resize a picture in all the ways that differ: by filters, and of single or of four pixels."""
    image, size = Image.fromarray(pixels), (width, height)
    ways = [np.asarray(image.resize(size, by)) for by in FILTERS]
    down, right = pixels.shape[0] / height, pixels.shape[1] / width
    matrix = (right, 0, 0, 0, down, 0)
    four = image.transform(size, Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR)
    ways.append(np.asarray(four))
    for start in STARTS:
        rows, columns = (
            ((np.arange(px) + start) * step).astype(np.int64)
            for px, step in ((height, down), (width, right))
        )
        ways.append(pixels[rows][:, columns])
    return ways


def _lit_likewise(shown: Pixels, other: Pixels) -> Pixels:
    """Give a thumbnail the brightness and contrast of another; what is beyond is cut off."""
    levels, target = shown.astype(np.float32), other.astype(np.float32)
    seen = (np.minimum(levels, target) >= DARKEST) & (np.maximum(levels, target) <= LIGHTEST)
    few, many = levels[seen], target[seen]
    about = few - few.mean()
    gain = (about * (many - many.mean())).sum() / (about**2).sum()
    made = gain * (levels - few.mean()) + many.mean()
    lit: Pixels = np.rint(np.clip(made, 0, 255)).astype(np.uint8)
    return lit


def _pixels(thumb: Pixels, size: list[int]) -> Pixels:
    """Undo what made a thumbnail. (64, 64, 3) -> size, of either axis at most LARGEST_PX."""
    down, right = (_reduction(min(side, LARGEST_PX)) for side in size)
    levels = down @ np.moveaxis(thumb, 2, 0).astype(np.float32) @ right.T
    return np.moveaxis(np.rint(np.clip(levels, 0, 255)).astype(np.uint8), 0, 2)


@cache
def _low(px: int) -> Floats:
    """What makes of a thumbnail's axis the two lowest frequencies of JPEG's blocks, (2 n, 64)."""
    blocks = px // BLOCK_PX
    waves = dct(np.eye(BLOCK_PX), axis=0, norm="ortho")[:2]
    low: Floats = np.kron(np.eye(blocks), waves) @ _reduction(px)[: blocks * BLOCK_PX]
    return low.astype(np.float32)


@cache
def _reduction(px: int) -> Floats:
    """Return the inverse of what makes of an axis of some pixels a thumbnail's, (px, 64)."""
    inverse: Floats = np.linalg.pinv(resampling(0.0, 1.0, THUMB_PX, px))
    return inverse


def _saved_as(pixels: Pixels, other: Pixels) -> Pixels:
    """Save a picture at the quality that makes it most like another; as it is where none does.

    Args:
        pixels: (h, w, 3), of either axis at most LARGEST_PX.
        other: (64, 64, 3) thumbnail of the other one, of as many pixels.
    """
    image, size = Image.fromarray(np.ascontiguousarray(pixels)), list(pixels.shape[:2])
    # pixels are compared that a thumbnail keeps
    small = max(size) <= THUMB_PX
    wanted = (_pixels(other, size) if small else other).astype(np.float32)
    qualities, nearby = (QUALITIES, NEARBY) if small else (QUALITIES_LARGE, NEARBY_LARGE)

    def differ(again: Pixels) -> float:
        return float((((again if small else thumbnail(again)) - wanted) ** 2).mean())

    def saved(quality: int) -> tuple[float, int, Pixels]:
        file = io.BytesIO()
        image.save(file, "JPEG", quality=quality)
        again = decode(file.getvalue(), MAX_PIXELS).transpose(1, 2, 0)
        return differ(again), quality, again

    def first(each: tuple[float, int, Pixels]) -> tuple[float, int]:
        return each[:2]

    plain = differ(pixels)
    best = min((saved(quality) for quality in qualities), key=first)
    if small and plain > HOPELESS * wanted.var() and best[0] > LEFT * plain:
        return pixels
    best = min((saved(best[1] + by) for by in nearby), key=first)
    return best[2] if best[0] < plain else pixels
