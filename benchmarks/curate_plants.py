"""Duplicates that are known because they were made: seven kinds, from pictures of three sources."""

import gzip
import io
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

Picture = np.ndarray  # (h, w, 3) uint8
Random = np.random.Generator


def jpeg(picture: Picture, rng: Random) -> Picture:
    file = io.BytesIO()
    Image.fromarray(picture).save(file, "JPEG", quality=int(rng.integers(30, 91)))
    return np.asarray(Image.open(file).convert("RGB"))


def resize(picture: Picture, rng: Random) -> Picture:
    share = np.exp(rng.uniform(np.log(0.5), np.log(2.0)))
    height, width = (max(8, round(share * side)) for side in picture.shape[:2])
    filters = (Image.Resampling.BILINEAR, Image.Resampling.BICUBIC, Image.Resampling.LANCZOS)
    chosen = filters[rng.integers(len(filters))]
    return np.asarray(Image.fromarray(picture).resize((width, height), chosen))


def crop(picture: Picture, rng: Random) -> Picture:
    """90 % of either side, anywhere."""
    height, width = (round(0.9 * side) for side in picture.shape[:2])
    top = rng.integers(picture.shape[0] - height + 1)
    left = rng.integers(picture.shape[1] - width + 1)
    return picture[top : top + height, left : left + width]


def mirror(picture: Picture, rng: Random) -> Picture:
    return picture[:, ::-1]


def brightness(picture: Picture, rng: Random) -> Picture:
    factor = 1.1 if rng.random() < 0.5 else 0.9
    return np.rint(np.clip(picture * factor, 0, 255)).astype(np.uint8)


def border(picture: Picture, rng: Random) -> Picture:
    """2 to 6 % of the shorter side, all around: black, white or grey."""
    px = max(1, round(rng.uniform(0.02, 0.06) * min(picture.shape[:2])))
    level = (0, 255, 128)[rng.integers(3)]
    return np.pad(picture, ((px, px), (px, px), (0, 0)), constant_values=level)


def small_text(picture: Picture, rng: Random) -> Picture:
    """A word of a tenth of the height in one corner, black or white on what is there."""
    height, width = picture.shape[:2]
    scale = max(1, -(-200 // height))  # drawn large and reduced: no font has letters of 3 px
    font = ImageFont.load_default(size=max(6, round(0.1 * height * scale)))
    mask = Image.new("L", (width * scale, height * scale))
    word = ("photo", "2024", "(c) me", "draft")[rng.integers(4)]
    pen = ImageDraw.Draw(mask)
    left, top, right, bottom = pen.textbbox((0, 0), word, font=font)
    x = (2, width * scale - (right - left) - 2)[rng.integers(2)]
    y = (2, height * scale - (bottom - top) - 2)[rng.integers(2)]
    pen.text((x - left, y - top), word, fill=255, font=font)
    share = np.asarray(mask.resize((width, height), Image.Resampling.BOX))[..., None] / 255
    ink = 0.0 if picture.mean() > 127 else 255.0
    return np.rint(picture * (1 - share) + ink * share).astype(np.uint8)


KINDS: dict[str, Callable[[Picture, Random], Picture]] = {
    "jpeg": jpeg,
    "resize": resize,
    "crop": crop,
    "mirror": mirror,
    "brightness": brightness,
    "border": border,
    "text": small_text,
}


def fashion_mnist(file: Path, first: int, count: int) -> list[Picture]:
    """Images of an idx file, grey repeated."""
    with gzip.open(file) as content:
        content.read(16 + 784 * first)
        raw = np.frombuffer(content.read(784 * count), np.uint8).reshape(-1, 28, 28, 1)
    return list(np.repeat(raw, 3, 3))


def drawings(folder: Path, count: int, odd: bool, px: int = 256, skipped: int = 0) -> list[Picture]:
    """Every second PNG under a folder without the first ones, on white, longer side at most px.

    Without 1,375 rings that one program drew ("star_..pt..step"): at 100 px a series of them is
    one picture to people, too, and no one can say which pairs are wrong.
    """
    files = [file for file in sorted(folder.rglob("*.png")) if "star_" not in file.name]
    files = files[int(odd) :: 2]
    step = max(1, len(files) // count)
    found = []
    for file in files[skipped::step][:count]:
        image = Image.open(file).convert("RGBA")
        image.thumbnail((px, px))
        white = Image.new("RGBA", image.size, "white")
        found.append(np.asarray(Image.alpha_composite(white, image).convert("RGB")))
    return found


def photographs(folder: Path, count: int, odd: bool | None, px: int = 256) -> list[Picture]:
    """Squares cut from every second wallpaper, or from all (None), side by side, none twice."""
    pictures: dict[Path, Path] = {}  # one file of each picture: the first of its sizes
    for file in sorted(p for p in folder.rglob("*") if p.suffix.lower() in (".jpg", ".jpeg")):
        pictures.setdefault(file.parent if "contents" in file.parts else file, file)
    files = list(pictures.values())
    files = files if odd is None else files[int(odd) :: 2]
    found: list[Picture] = []
    for number, file in enumerate(files):
        image = Image.open(file)
        image.draft("RGB", (1600, 900))
        whole = np.asarray(image.convert("RGB"))
        whole = np.asarray(Image.fromarray(whole).resize((1536, 1024)))
        tiles = [
            whole[y : y + px, x : x + px]
            for y in range(0, whole.shape[0] - px + 1, px)
            for x in range(0, whole.shape[1] - px + 1, px)
        ]
        wanted = -(-(count - len(found)) // (len(files) - number))
        found += tiles[:: max(1, len(tiles) // wanted)][:wanted]
    return found[:count]
