"""The data sets of the measurements, written once: photographs, and Fashion-MNIST."""

import os
from pathlib import Path

from benchmarks.photographs import write_photographs
from sslpipe.sharding.build import build_dataset
from sslpipe.sharding.idx import parse_idx, write_idx
from sslpipe.sharding.sources import SourceOptions
from sslpipe.sharding.writer import Layout

ASSETS = Path(__file__).parents[2] / "assets" / "fashion-mnist-10k"


def photographs(folder: Path, images: int, width: int, height: int) -> Path:
    """dataset.json of `write_photographs`, in shards."""
    out = folder / f"photographs-{images}-{width}x{height}"
    if (out / "dataset.json").exists():
        return out / "dataset.json"
    sources = out / "images"
    write_photographs(sources, images, width, height)
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
