"""What a suite finds of leaks that are planted, by kind, and what share of its time the search is.

Duplicates of train samples are made into a test split; features are those of a run.

    python -m benchmarks.curate_leaks RUN DATA --plants 200 --out docs/measured/curate_leaks.json
"""

import argparse
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image

from benchmarks.curate import LEAST_DEVIATION, detail
from benchmarks.curate_plants import KINDS
from sslpipe.cli import suite as command
from sslpipe.curate.leaks import find_leaks
from sslpipe.data.decode import MAX_PIXELS, decode
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.data.reader import Reader
from sslpipe.evaluation.difference import wilson95
from sslpipe.evaluation.embed import embed
from sslpipe.evaluation.features import pixel_features
from sslpipe.export.load import load_backbone
from sslpipe.portable import write_atomically
from sslpipe.sharding.build import build_dataset
from sslpipe.sharding.sources import SourceOptions
from sslpipe.sharding.writer import Layout


def planted(split: Split, each: int, folder: Path) -> DatasetIndex:
    """Make a data set of duplicates of samples, whose classes are the kinds."""
    reader, random = Reader(split, window_bytes=2**26), np.random.default_rng(0)
    for kind, make in KINDS.items():
        (folder / "images" / kind).mkdir(parents=True)
        left = each
        for sample in random.permutation(len(split)).tolist():
            picture = decode(reader.one(sample).image, MAX_PIXELS).transpose(1, 2, 0)
            if left and detail(picture) >= LEAST_DEVIATION:
                made = Image.fromarray(np.ascontiguousarray(make(picture, random)))
                made.save(folder / "images" / kind / f"{sample:07d}.png")
                left -= 1
            if not left:
                break
    layout = Layout(seed=0, samples_per_shard=1000, max_shard_bytes=2**28, scatter=False)
    options = SourceOptions(root=folder / "images", split="test")
    build_dataset(folder / "data", "folder", options, layout)
    return load_index(folder / "data")


def recall(run: Path, data: str, each: int) -> dict[str, Any]:
    """Search planted leaks by the features of a run; kind -> how many were found."""
    backbone, train = load_backbone(run), load_index(data).split("train")
    with tempfile.TemporaryDirectory() as folder:
        index = planted(train, each, Path(folder))
        splits = train, index.split("test")
        canvas_px = backbone.view.canvas_px
        rows = [embed(backbone.backbone, backbone.view, s, canvas_px=canvas_px) for s in splits]
        pixels = pixel_features(*splits, view=backbone.view, canvas_px=canvas_px)
        leaks = find_leaks(splits, (rows[0], rows[1]), lambda: (pixels[0], pixels[1]))
        labels, names = splits[1].labels, index.manifest.classes
    found = {}
    for label, kind in enumerate(names):
        total, hits = int((labels == label).sum()), int((labels[leaks.ids] == label).sum())
        found[kind] = {"planted": total, "found": hits, "interval95": wilson95(hits, total)}
    return found


def share(run: Path, data: str) -> dict[str, Any]:
    """Run a suite and take the CPU time of the search and of all of it."""
    spent: dict[str, Any] = {}

    def timed(*given: Any, **options: Any) -> Any:
        start = time.process_time(), time.perf_counter()
        leaks = find_leaks(*given, **options)
        spent["found"] = len(leaks.ids)
        spent["search_cpu_s"] = round(time.process_time() - start[0] - spent["pixels"][0], 2)
        spent["search_wall_s"] = round(time.perf_counter() - start[1] - spent.pop("pixels")[1], 2)
        return leaks

    def embed_pixels(**options: Any) -> Any:
        start = time.process_time(), time.perf_counter()
        made = original(**options)
        # the baseline needs them, too
        spent["pixels"] = time.process_time() - start[0], time.perf_counter() - start[1]
        return made

    original = command.embed_pixels
    command.find_leaks, command.embed_pixels = timed, embed_pixels
    start = time.process_time(), time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        command.suite(str(run), data, Path(folder) / "eval.json", device="cpu")
    spent["suite_cpu_s"] = round(time.process_time() - start[0], 2)
    spent["suite_wall_s"] = round(time.perf_counter() - start[1], 2)
    spent["share_of_cpu"] = round(spent["search_cpu_s"] / spent["suite_cpu_s"], 4)
    spent["torch_threads"] = torch.get_num_threads()
    return spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run", type=Path)
    parser.add_argument("data")
    parser.add_argument("--plants", type=int, default=200, help="Of each kind; 0: only the time.")
    parser.add_argument("--out", type=Path, default=Path("docs/measured/curate_leaks.json"))
    options = parser.parse_args()
    tree = json.loads(options.out.read_text()) if options.out.exists() else {}
    index = load_index(options.data)
    sizes = {name: len(index.split(name)) for name in index.manifest.splits}
    own: dict[str, Any] = {"samples": sizes, "cost": share(options.run, options.data)}
    if options.plants:
        own["planted"] = recall(options.run, options.data, options.plants)
    tree[index.manifest.name] = own
    write_atomically(options.out, json.dumps(tree, indent=1) + "\n")
    print(json.dumps(own, indent=1))


if __name__ == "__main__":
    main()
