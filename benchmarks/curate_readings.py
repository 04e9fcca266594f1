"""Other people's readings of the seven kinds of `curate_plants`, and of what is near them."""

import io
from collections.abc import Callable

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from benchmarks.curate_plants import Picture, Random

Resampling = Image.Resampling
Make = Callable[[Picture, Random], Picture]
FILTERS = (Resampling.BILINEAR, Resampling.BICUBIC, Resampling.LANCZOS, Resampling.BOX)
INKS = {"black": (0, 0, 0), "white": (255, 255, 255), "coloured": None}  # None: at random


def encoded(form: str, low: int, high: int) -> Make:
    """Save at a quality between two, both possible."""

    def make(picture: Picture, rng: Random) -> Picture:
        file = io.BytesIO()
        Image.fromarray(np.ascontiguousarray(picture)).save(
            file, form, quality=int(rng.integers(low, high + 1))
        )
        return np.asarray(Image.open(file).convert("RGB"))

    return make


def resized(low: float, high: float, *filters: Resampling) -> Make:
    """Resize by a share between two, with one of some filters."""

    def make(picture: Picture, rng: Random) -> Picture:
        share, by = rng.uniform(low, high), filters[rng.integers(len(filters))]
        height, width = (max(8, round(share * side)) for side in picture.shape[:2])
        return np.asarray(Image.fromarray(picture).resize((width, height), by))

    return make


def sampled(low: float, high: float) -> Make:
    """Resize by a share between two, of the four nearest pixels only: not antialiased."""

    def make(picture: Picture, rng: Random) -> Picture:
        share = rng.uniform(low, high)
        height, width = (max(8, round(share * side)) for side in picture.shape[:2])
        step = picture.shape[1] / width, picture.shape[0] / height
        image = Image.fromarray(picture)
        matrix = (step[0], 0, 0, 0, step[1], 0)
        way = Image.Transform.AFFINE
        return np.asarray(image.transform((width, height), way, matrix, Resampling.BILINEAR))

    return make


def cropped(share: float, where: str, back: bool = False) -> Make:
    """Keep a share of both sides in the centre or anywhere, or of one side from an end.

    Args:
        share: Of a side.
        where: centre, anywhere or one side.
        back: Whether what is left is enlarged to the size that the picture had.
    """

    def make(picture: Picture, rng: Random) -> Picture:
        sides = list(picture.shape[:2])
        kept = [round(share * side) for side in sides]
        if where == "centre":
            start = [(side - own) // 2 for side, own in zip(sides, kept, strict=True)]
        elif where == "anywhere":
            start = [int(rng.integers(s - k + 1)) for s, k in zip(sides, kept, strict=True)]
        else:
            axis = rng.integers(2)
            kept[1 - axis] = sides[1 - axis]
            start = [(s - k) * int(rng.integers(2)) for s, k in zip(sides, kept, strict=True)]
        part = picture[start[0] : start[0] + kept[0], start[1] : start[1] + kept[1]]
        if not back:
            return part
        image = Image.fromarray(np.ascontiguousarray(part))
        return np.asarray(image.resize((sides[1], sides[0]), Resampling.BILINEAR))

    return make


def mirrored_and_saved(picture: Picture, rng: Random) -> Picture:
    return encoded("JPEG", 75, 95)(picture[:, ::-1], rng)


def levels(made: np.ndarray) -> Picture:
    return np.rint(np.clip(made, 0, 255)).astype(np.uint8)


def factor(picture: Picture, rng: Random) -> Picture:
    return levels(picture * rng.uniform(0.9, 1.1))


def shift(picture: Picture, rng: Random) -> Picture:
    return levels(picture + 25.5 * rng.choice([-1, 1]))


def contrast(picture: Picture, rng: Random) -> Picture:
    mean = picture.mean()
    return levels(mean + (picture - mean) * rng.choice([0.9, 1.1]))


def channels(picture: Picture, rng: Random) -> Picture:
    """Another factor for red, green and blue, as of a lamp."""
    return levels(picture * rng.uniform(0.95, 1.05, 3))


def bordered(how: str, low: float, high: float, coloured: bool = False) -> Make:
    """A border of one colour, a share of the shorter side wide, at least a pixel.

    Args:
        how: added around, drawn over the edge, or shrunk: added, then all at the former size.
        low: Least share.
        high: Largest share.
        coloured: Whether its colour is any; black, white or grey otherwise.
    """

    def make(picture: Picture, rng: Random) -> Picture:
        height, width = picture.shape[:2]
        px = max(1, round(rng.uniform(low, high) * min(height, width)))
        level = rng.integers(0, 256, 3) if coloured else np.full(3, (0, 255, 128)[rng.integers(3)])
        if how == "drawn":
            made = picture.copy()
            made[:px] = made[-px:] = made[:, :px] = made[:, -px:] = level
            return made
        made = np.empty((height + 2 * px, width + 2 * px, 3), np.uint8)
        made[:] = level
        made[px:-px, px:-px] = picture
        if how == "added":
            return made
        return np.asarray(Image.fromarray(made).resize((width, height), Resampling.BILINEAR))

    return make


def written(share: float | tuple[float, float], ink: str, anywhere: bool) -> Make:
    """A word whose font is some share of the height, in a corner or anywhere."""

    def make(picture: Picture, rng: Random) -> Picture:
        height, width = picture.shape[:2]
        own = share if isinstance(share, float) else rng.uniform(*share)
        scale = max(1, -(-200 // height))  # drawn large and reduced: no font has letters of 3 px
        font = ImageFont.load_default(size=max(6, round(own * height * scale)))
        mask = Image.new("L", (width * scale, height * scale))
        word = ("sample", "proof", "abc", "2021")[rng.integers(4)]
        pen = ImageDraw.Draw(mask)
        left, top, right, bottom = pen.textbbox((0, 0), word, font=font)
        free = width * scale - (right - left) - 4, height * scale - (bottom - top) - 4
        if anywhere:
            x, y = (2 + rng.integers(max(1, px)) for px in free)
        else:
            x, y = (2 + max(0, px) * int(rng.integers(2)) for px in free)
        pen.text((x - left, y - top), word, fill=255, font=font)
        covered = np.asarray(mask.resize((width, height), Resampling.BOX))[..., None] / 255
        colour = INKS[ink] or tuple(rng.integers(0, 256, 3).tolist())
        return levels(picture * (1 - covered) + np.array(colour) * covered)

    return make


def written_and_saved(picture: Picture, rng: Random) -> Picture:
    return encoded("JPEG", 30, 90)(written(0.1, "white", True)(picture, rng), rng)


READINGS: dict[str, Make] = {
    "jpeg 30": encoded("JPEG", 30, 30),
    "jpeg 60-90": encoded("JPEG", 60, 90),
    "webp 30-90": encoded("WEBP", 30, 90),
    "resize 50 %": resized(0.5, 0.5, *FILTERS),
    "resize 50 %, every second pixel": resized(0.5, 0.5, Resampling.NEAREST),
    "resize 50-100 %": resized(0.5, 1.0, *FILTERS),
    "resize 50-100 %, not antialiased": sampled(0.5, 1.0),
    "resize 50-200 %, nearest pixel": resized(0.5, 2.0, Resampling.NEAREST),
    "resize 200 %": resized(2.0, 2.0, *FILTERS),
    "crop to 90 % of the sides, centre": cropped(0.9, "centre"),
    "crop to 90 % of the sides, and back": cropped(0.9, "anywhere", back=True),
    "crop to 90 % of the area": cropped(0.9**0.5, "anywhere"),
    "crop to 90 % of the area, centre": cropped(0.9**0.5, "centre"),
    "crop to 90 % of one side": cropped(0.9, "one side"),
    "mirror, jpeg 75-95": mirrored_and_saved,
    "brightness x 0.9-1.1": factor,
    "brightness +-10 % of 255": shift,
    "contrast +-10 %": contrast,
    "channels +-5 %": channels,
    "border of 1 px, added": bordered("added", 0, 0),
    "border of 5 %, added": bordered("added", 0.05, 0.05),
    "border of any colour, added": bordered("added", 0.01, 0.05, coloured=True),
    "border of 1 px, drawn": bordered("drawn", 0, 0),
    "border of 1-5 %, drawn": bordered("drawn", 0.01, 0.05),
    "border of 1-5 %, shrunk": bordered("shrunk", 0.01, 0.05),
    "text, black, in a corner": written((0.06, 0.12), "black", False),
    "text, white, anywhere": written((0.06, 0.12), "white", True),
    "text, coloured, anywhere": written((0.06, 0.12), "coloured", True),
    "text of 12 %, white, in a corner": written(0.12, "white", False),
    "text, jpeg 30-90": written_and_saved,
}
