"""Measure how many planted duplicates `sslpipe curate duplicates` finds, and how many are wrong.

Plants are made of pictures that deviate from a linear ramp by at least 12 levels. Pairs that are
found before anything is planted are natural: their pictures get no plants, and a plant is not wrong
to be paired with what its source is paired with.

    apt-get download openclipart-png tuxpaint-stamps-default
    for file in *.deb; do dpkg -x $file debian; done
    python -m benchmarks.curate --drawings debian/usr/share --out docs/measured/curate.json
"""

import argparse
import gzip
import io
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from benchmarks.common import save
from sslpipe.curate.duplicates import find_duplicates
from sslpipe.curate.image_scan import scan_pictures
from sslpipe.evaluation.intervals import wilson95

Picture = NDArray[np.uint8]  # (h, w, 3) uint8
Random = np.random.Generator
FASHION_MNIST = Path("assets/fashion-mnist-10k/train-images-idx3-ubyte.gz")
LEAST_DEVIATION = 12.0


def jpeg(low: int, high: int) -> Callable[[Picture, Random], Picture]:
    def save(picture: Picture, rng: Random) -> Picture:
        file = io.BytesIO()
        Image.fromarray(picture).save(file, "JPEG", quality=int(rng.integers(low, high + 1)))
        return np.asarray(Image.open(file).convert("RGB"))

    return save


def half(picture: Picture, rng: Random) -> Picture:
    height, width = (max(8, round(side / 2)) for side in picture.shape[:2])
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


KINDS: dict[str, Callable[[Picture, Random], Picture]] = {
    "saved again, JPEG 60-95": jpeg(60, 95),
    "resized to half": half,
    "cropped to 90 %": crop,
    "mirrored": mirror,
}


def fashion_mnist(count: int) -> list[Picture]:
    with gzip.open(FASHION_MNIST) as content:
        raw = np.frombuffer(content.read(), np.uint8, offset=16).reshape(-1, 28, 28, 1)
    return list(np.repeat(raw[:count], 3, 3))


def drawings(folder: Path, count: int, px: int = 256) -> list[Picture]:
    """PNGs evenly among those under a folder, on white, longer side at most px.

    1,375 rings of one program ("star_*") are left out: people call a series of them one picture.
    """
    files = [file for file in sorted(folder.rglob("*.png")) if "star_" not in file.name]
    files = [file for file in files if file.stat().st_size < 2**20]
    found = []
    for file in files[:: max(1, len(files) // count)][:count]:
        image = Image.open(file).convert("RGBA")
        image.thumbnail((px, px))
        white = Image.new("RGBA", image.size, "white")
        found.append(np.asarray(Image.alpha_composite(white, image).convert("RGB")))
    return found


def detail(picture: Picture) -> float:
    """Deviation of the brightness from a linear ramp, in levels."""
    levels = picture @ np.array([0.299, 0.587, 0.114])
    down, right = np.meshgrid(*(np.linspace(-1, 1, side) for side in levels.shape), indexing="ij")
    levels = levels - levels.mean()
    for ramp in (down, right):
        levels = levels - ramp * (levels * ramp).sum() / max((ramp**2).sum(), 1e-9)
    return float(levels.std())


def found_pairs(pictures: list[Picture]) -> set[tuple[int, int]]:
    samples = scan_pictures(pictures)
    pairs = find_duplicates(samples).pairs
    return set(zip(pairs.first.tolist(), pairs.second.tolist(), strict=True))


def measure(pictures: list[Picture], plants: int, natural: set[tuple[int, int]]) -> dict[str, Any]:
    start, rng = time.process_time(), np.random.default_rng(0)
    known = {row for pair in natural for row in pair}
    fit = [
        row for row, p in enumerate(pictures) if row not in known and detail(p) >= LEAST_DEVIATION
    ]
    everything, sources, made = list(pictures), list(range(len(pictures))), [""] * len(pictures)
    for kind, make in KINDS.items():
        for row in rng.choice(fit, min(plants, len(fit)), replace=False).tolist():
            everything.append(make(pictures[row], rng))
            sources.append(row)
            made.append(kind)
    pairs, rows = found_pairs(everything), {}
    for kind in KINDS:
        planted = {row for row, each in enumerate(made) if each == kind}
        found = {row for row in planted if (sources[row], row) in pairs}
        wrong = {
            (a, b)
            for a, b in pairs
            if planted & {a, b}
            and sources[a] != sources[b]
            and tuple(sorted((sources[a], sources[b]))) not in natural
        }
        rows[kind] = {
            "planted": len(planted),
            "found": len(found),
            "recall_interval95": wilson95(len(found), len(planted)),
            "wrong": len(wrong),
        }
    cpu_s = round(time.process_time() - start, 1)
    return {"pictures": len(pictures), "natural": len(natural), "cpu_s": cpu_s, "kinds": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--drawings", type=Path, help="A folder of PNG files.")
    parser.add_argument("--out", type=Path, default=Path("docs/measured/curate.json"))
    parser.add_argument("--pictures", type=int, default=1000)
    parser.add_argument("--plants", type=int, default=200)
    options = parser.parse_args()
    sets = {"fashion_mnist": fashion_mnist(options.pictures)}
    if options.drawings:
        sets["drawings"] = drawings(options.drawings, options.pictures)
    results = {}
    for name, pictures in sets.items():
        results[name] = measure(pictures, options.plants, found_pairs(pictures))
        print(name, json.dumps(results[name], indent=1), flush=True)
    save(options.out, results)


if __name__ == "__main__":
    main()
