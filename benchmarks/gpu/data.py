"""The data sets of the measurements, written once: photographs, and Fashion-MNIST."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
from PIL import Image
from sklearn.datasets import load_sample_images

from sslpipe.sharding.build import build_dataset
from sslpipe.sharding.idx import parse_idx, write_idx
from sslpipe.sharding.sources import SourceOptions
from sslpipe.sharding.writer import Layout

ASSETS = Path(__file__).parents[2] / "assets" / "fashion-mnist-10k"
CLASSES, QUALITY = 10, 90


def photographs(folder: Path, images: int, width: int, height: int) -> Path:
    """dataset.json of JPEGs cut from scikit-learn's two sample photographs, in shards.

    The cuts are as wide as half to all of a photograph, so that files are as large as usual ones.
    """
    out = folder / f"photographs-{images}-{width}x{height}"
    if (out / "dataset.json").exists():
        return out / "dataset.json"
    samples = [Image.fromarray(array) for array in load_sample_images().images]
    sources = out / "images"
    for label in range(CLASSES):
        (sources / f"class{label}").mkdir(parents=True, exist_ok=True)

    def write(number: int) -> None:
        rng, whole = np.random.default_rng(number), samples[number % 2]
        wide = rng.uniform(0.5, 1.0) * whole.width
        size = int(wide), min(int(wide * height / width), whole.height)
        left, top = (
            rng.integers(whole.width - size[0] + 1),
            rng.integers(whole.height - size[1] + 1),
        )
        cut = whole.crop((left, top, left + size[0], top + size[1])).resize((width, height))
        cut.save(sources / f"class{number % CLASSES}" / f"{number:06d}.jpg", quality=QUALITY)

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(write, range(images)))
    layout = Layout(seed=0, samples_per_shard=256, max_shard_bytes=2**30, scatter=False)
    options = SourceOptions(root=sources, split="train")
    build_dataset(out, "folder", options, layout, workers=os.cpu_count() or 1)
    return out / "dataset.json"


def fashion_mnist(folder: Path, images: int = 10_000) -> Path:
    """dataset.json of the demo's data: the images that ship with the project, scattered."""
    out = folder / f"fashion-mnist-{images}"
    if (out / "dataset.json").exists():
        return out / "dataset.json"
    root = out / "idx"
    root.mkdir(parents=True, exist_ok=True)
    for name, dimensions in (("train-images-idx3-ubyte", 3), ("train-labels-idx1-ubyte", 1)):
        values = parse_idx(ASSETS / f"{name}.gz", dimensions)
        write_idx(root / f"{name}.gz", values[:images])
    layout = Layout(seed=0, samples_per_shard=1000, max_shard_bytes=2**28, scatter=True)
    options = SourceOptions(root=root, class_file=ASSETS / "classes.txt")
    build_dataset(out, "idx", options, layout, test_fraction=0.2, workers=os.cpu_count() or 1)
    return out / "dataset.json"
