"""Time and memory of the search for candidates, by features or by descriptors, of many samples.

Features are made up: groups of rows around random directions, so that each row has near ones.

    python -m benchmarks.curate_scale --rows 200000 --out docs/measured/curate_scale.json
"""

import argparse
import json
import resource
import time
from pathlib import Path

import numpy as np
import torch

from sslpipe.curate.candidates import NEIGHBOURS, ByDescriptors, ByFeatures, Search
from sslpipe.curate.scan import Pictures
from sslpipe.curate.thumbnails import VIEWS, WIDTH, ThumbFile, rounded
from sslpipe.portable import write_atomically


def made_up(rows: int, width: int, seed: int = 0) -> torch.Tensor:
    """(rows, width) float32, some ten around each direction."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(max(1, rows // 10), width, generator=random)
    found = torch.empty(rows, width)
    for part in torch.split(torch.arange(rows), 2**14):
        found[part] = centres[part % len(centres)]
        found[part] += 0.7 * torch.randn(len(part), width, generator=random)
    return found


def by_descriptors(rows: int) -> Search:
    descriptors = np.empty((rows, VIEWS, WIDTH), np.int8)
    for first in range(0, rows, 2**14):
        part = descriptors[first : first + 2**14]
        part[:] = rounded(made_up(len(part), WIDTH, first).numpy())[:, None]
    places = np.arange(rows)
    pictures = Pictures(places, np.full((rows, 2), 64), descriptors, ThumbFile())
    return ByDescriptors.of(pictures)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=200_000)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--by", choices=("features", "descriptors"), default="features")
    parser.add_argument("--out", type=Path, default=Path("docs/measured/curate_scale.json"))
    options = parser.parse_args()
    places = np.arange(options.rows)
    if options.by == "features":
        search: Search = ByFeatures.of(made_up(options.rows, options.width), places)
    else:
        search = by_descriptors(options.rows)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    wall, cpu = time.perf_counter(), time.process_time()
    pairs = search.pairs(places, NEIGHBOURS)
    tree = json.loads(options.out.read_text()) if options.out.exists() else {}
    tree[f"{options.by}, {options.rows}"] = {
        "width": options.width if options.by == "features" else VIEWS * WIDTH,
        "pairs": len(pairs),
        "wall_s": round(time.perf_counter() - wall, 1),
        "cpu_s": round(time.process_time() - cpu, 1),
        "peak_mib_before": before // 1024,
        "peak_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024,
        "torch_threads": torch.get_num_threads(),
    }
    write_atomically(options.out, json.dumps(tree, indent=1) + "\n")
    print(json.dumps(tree, indent=1))


if __name__ == "__main__":
    main()
