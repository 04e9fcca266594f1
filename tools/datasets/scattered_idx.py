"""Place each image of idx files once at random in its frame: the images of the demo.

Centred clothes of 28 px are too easy to tell apart by their raw pixels. Here each has 55 to 100 %
of its size, is shifted, rotated by up to 20 degrees and 50 to 100 % as bright, as in photographs.

    python -m tools.datasets.scattered_idx assets/fashion-mnist-10k out/scattered
    python -m tools.datasets.scattered_idx downloads out/scattered --download
"""

import argparse
import gzip
import io
import math
import shutil
import struct
import zlib
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from sslpipe.portable import write_atomically
from sslpipe.random import uniform
from sslpipe.sharding.idx import parse_idx

SMALLEST, LARGEST = 0.55, 1.0  # side of the placed image over its original side
MAX_DEGREES = 20.0
DARKEST = 0.5
OVERSAMPLE = 4  # bilinear samples a side of each output pixel, averaged: no aliasing at 0.55
_STEP = 2.0**-16


def main(arguments: list[str] | None = None) -> None:
    """Write the files of a folder anew."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("root", type=Path, help="folder of *images*idx3* and *labels*idx1* files")
    parser.add_argument("out", type=Path, help="folder of the new files")
    parser.add_argument("--per-class", type=int, help="only so many of each class, the first ones")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--download", action="store_true", help="Fashion-MNIST, 70,000 images")
    options = parser.parse_args(arguments)
    root = download(options.root) if options.download else options.root
    paths = {path.name.removesuffix(".gz"): path for path in sorted(root.glob("*images*idx3*"))}
    if not paths:
        parser.error(f"{root} has no *images*idx3* file")
    options.out.mkdir(parents=True, exist_ok=True)
    for name, path in paths.items():
        label_name = name.replace("images", "labels").replace("idx3", "idx1")
        pixels = parse_idx(path, 3)
        labels = parse_idx(path.with_name(path.name.replace(name, label_name)), 1)
        if options.per_class is not None:
            kept = first_of_each(labels, options.per_class)
            pixels = pixels[kept]
            labels = labels[kept]
        split = "test" if "t10k" in name or "test" in name else "train"
        write_idx(options.out / f"{name}.gz", scatter(pixels, options.seed, split))
        write_idx(options.out / f"{label_name}.gz", labels)
    if (root / "classes.txt").exists():
        shutil.copyfile(root / "classes.txt", options.out / "classes.txt")
    print(options.out)


def download(root: Path) -> Path:
    """Fetch Fashion-MNIST by torchvision; returns the folder of its files."""
    from torchvision.datasets import FashionMNIST

    for is_train in (True, False):
        FashionMNIST(str(root), train=is_train, download=True)
    folder = root / "FashionMNIST" / "raw"
    (folder / "classes.txt").write_text("\n".join(FashionMNIST.classes) + "\n")
    return folder


def first_of_each(labels: NDArray[np.uint8], per_class: int) -> NDArray[np.int64]:
    """Return the places of the first images of each class, in file order. Raises: ValueError."""
    classes, counts = np.unique(labels, return_counts=True)
    if counts.min() < per_class:
        raise ValueError(f"class {classes[counts.argmin()]} has {counts.min()}, not {per_class}")
    return np.sort(np.concatenate([np.flatnonzero(labels == k)[:per_class] for k in classes]))


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Write uint8 values as a gzip idx file without time or name in its header."""
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, compresslevel=9, mtime=0) as file:
        file.write(header + values.tobytes())
    write_atomically(path, packed.getvalue())


# --- the placement


class Placement(NamedTuple):
    """Where an image is placed in its frame, and how."""

    scale: float  # its side over what it was
    degrees: float  # counter-clockwise
    brightness: float  # by which its pixels are multiplied
    dx: float  # px to the right, of its centre
    dy: float  # px down


def scatter(pixels: NDArray[np.uint8], seed: int, split: str) -> NDArray[np.uint8]:
    """Place each of (n, h, w) images: the same shape; a function of its arguments."""
    placed = np.empty_like(pixels)
    for number, image in enumerate(pixels):
        placed[number] = place(image, draw_placement(image, seed, split, number))
    return placed


def draw_placement(pixels: NDArray[np.uint8], seed: int, split: str, number: int) -> Placement:
    """Draw the placement of one image: a function of (seed, split, number) and of its pixels.

    Angle, brightness and scale are uniform in their ranges, then the place is uniform among those
    that keep all that is not black inside the frame. Where the largest scale does not fit at its
    angle, the range of scales ends at the largest that does; only a picture too long for its frame
    at any scale in the range goes below 0.55.
    """
    numbers = uniform(seed, zlib.crc32(split.encode()), [number], 0, 5)[0]
    degrees = MAX_DEGREES * (2 * numbers[0] - 1)
    brightness = DARKEST + (1 - DARKEST) * numbers[1]
    height, width = pixels.shape
    left, right, top, bottom = _extent(pixels, degrees)  # at scale 1, from the centre
    fits = min(width / (right - left), height / (bottom - top), LARGEST)
    scale = min(SMALLEST, fits) + (fits - min(SMALLEST, fits)) * numbers[2]
    low_x, high_x = -width / 2 - scale * left, width / 2 - scale * right
    low_y, high_y = -height / 2 - scale * top, height / 2 - scale * bottom
    dx, dy = low_x + (high_x - low_x) * numbers[3], low_y + (high_y - low_y) * numbers[4]
    return Placement(scale, degrees, brightness, dx, dy)


def place(pixels: NDArray[np.uint8], placement: Placement) -> NDArray[np.uint8]:
    """Render an image, (h, w) uint8, at its placement on black."""
    height, width = pixels.shape
    cos, sin = (f(math.radians(placement.degrees)) for f in (math.cos, math.sin))
    # output (x, y), in samples, to input (x, y), in pixels: undo shift, rotation and scale
    a, b = cos / placement.scale, -sin / placement.scale
    d, e = sin / placement.scale, cos / placement.scale
    centre_x, centre_y = width / 2 + placement.dx, height / 2 + placement.dy
    c = width / 2 - a * centre_x - b * centre_y
    f = height / 2 - d * centre_x - e * centre_y
    n = OVERSAMPLE
    matrix = [round(v / _STEP) * _STEP for v in (a / n, b / n, c, d / n, e / n, f)]
    image = Image.fromarray(pixels)
    fine = image.transform(
        (width * n, height * n), Image.Transform.AFFINE, matrix, Image.Resampling.BILINEAR
    )
    level = round(placement.brightness * 256)
    placed = np.asarray(fine.reduce(n)).astype(np.int64)
    return ((placed * level + 128) >> 8).astype(np.uint8)  # (h, w)


def _extent(pixels: NDArray[np.uint8], degrees: float) -> tuple[float, float, float, float]:
    """Return left, right, top, bottom of what is not black, rotated, in px from the centre."""
    height, width = pixels.shape
    rows, columns = np.nonzero(pixels)
    if not len(rows):
        rows, columns = np.array([0, height - 1]), np.array([0, width - 1])
    # a pixel's square, and half a pixel that bilinear sampling spreads it, but not past the image
    xs = np.stack([np.maximum(columns - 0.5, 0), np.minimum(columns + 1.5, width)]) - width / 2
    ys = np.stack([np.maximum(rows - 0.5, 0), np.minimum(rows + 1.5, height)]) - height / 2
    cos, sin = (f(math.radians(degrees)) for f in (math.cos, math.sin))
    x = cos * xs[:, None] + sin * ys[None, :]  # (2, 2, n) corners, y down, counter-clockwise
    y = -sin * xs[:, None] + cos * ys[None, :]
    return float(x.min()), float(x.max()), float(y.min()), float(y.max())


if __name__ == "__main__":
    main()
