"""Shards -> batches with [pairs] against the same without, and how well groups are mixed.

    python -m benchmarks.pairs.loader [--images 1500] [--rounds 7] [--json FILE]

The images are the 500 x 375 JPEGs of `benchmarks.loader`, in groups of 2 to 6, written by
`sslpipe shards build --group-by`. Both contenders read the same shards in the same order, in one
process on one core, whole epochs in turn; images/s of the processor time, each epoch's rows counted
once. The ratio is the median over the rounds of with / without, which a machine's other work
changes less than either. Partners: of those drawn in an epoch, the share in the window being read.
Mixing: label entropy of batches of 256 groups' samples against a uniform shuffle's, computed from
the plan alone (131,072 samples, shards of 4,096), for several numbers of streams and windows.
"""

import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import machine, parser, print_table, save
from benchmarks.loader import write_data
from sslpipe.data.index import Split, load_index
from sslpipe.data.loader import batches
from sslpipe.data.order import Order, mixing_score
from sslpipe.data.pairing import Pairing, plan_pairs
from sslpipe.distributed import Rank
from sslpipe.portable import keep_freed_memory
from sslpipe.recipe.base import RunConfig
from sslpipe.recipe.pairs import Pairs
from sslpipe.recipe.pretrain import Data

LEAST, MOST = 2, 6  # images of a group
DATA = Data(batch_size=64, num_streams=8, shuffle_window=128, canvas_px=256)
MIXED, SHARD, BATCH = 131_072, 4_096, 256
PLANS = [(64, 256), (64, 128), (32, 256), (16, 512), (16, 256), (16, 128), (8, 1024), (8, 256)]


def group_sizes(count: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Draw the sizes of so many groups."""
    return np.random.default_rng(0).integers(LEAST, MOST + 1, count)


def write_groups(folder: Path, images: int) -> Split:
    """Write JPEGs named GROUP-NUMBER.jpg, and shards of them in which groups lie together."""
    write_data(folder, images)
    groups = np.repeat(np.arange(images), group_sizes(images))[:images].tolist()
    flat = folder / "flat"
    flat.mkdir()
    paths = sorted((folder / "images").rglob("*.jpg"))
    for number, (path, group) in enumerate(zip(paths, groups, strict=True)):
        path.rename(flat / f"{group}-{number:06d}.jpg")
    command = [sys.executable, "-m", "sslpipe", "shards", "build", str(folder / "grouped")]
    command += ["--root", str(flat), "--no-labels", "--samples-per-shard", "250"]
    command += ["--name-pattern", r"(?P<group>\d+)-\d+[.]jpg", "--group-by", "group"]
    subprocess.run(command, check=True, capture_output=True)
    return load_index(folder / "grouped").split("train")


def epoch_rate(split: Split, order: Order, pairing: Pairing | None) -> float:
    """Read one epoch: rows a second of the processor's time."""
    stream = batches(
        split, order, DATA, RunConfig(num_workers=0), Rank(), on_bad=print, pairing=pairing
    )
    start = time.process_time()
    for _, _ in zip(range(order.steps_per_epoch), stream, strict=False):
        pass
    return order.steps_per_epoch * DATA.batch_size / (time.process_time() - start)


def mixing(streams: int, window: int) -> float:
    """Score the batches of every tenth step of a plan of groups side by side."""
    sizes = np.resize(group_sizes(1000), MIXED)
    groups = np.repeat(np.arange(len(sizes)), sizes)[:MIXED]
    starts = np.arange(0, MIXED + 1, SHARD)
    order = Order(starts, seed=1, batch_size=BATCH, num_streams=streams, window=window)
    steps = range(0, order.steps_per_epoch, 10)
    score = mixing_score([groups[order.ids(step, range(streams))[1]] for step in steps], groups)
    assert score is not None
    return score


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--images", type=int, default=1500)
    parse.add_argument("--rounds", type=int, default=7)
    args = parse.parse_args()
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    torch.set_num_threads(1)
    keep_freed_memory()  # as every run does

    with tempfile.TemporaryDirectory() as name:
        split = write_groups(Path(name), args.images)
        sizes = {"batch_size": DATA.batch_size, "num_streams": DATA.num_streams}
        order = Order(split.starts, seed=0, window=DATA.shuffle_window, **sizes)
        pairing = plan_pairs(Pairs(positive=("group",)), split, order)
        assert pairing is not None
        for contender in (None, pairing):
            epoch_rate(split, order, contender)  # imports, memory
        rates = []
        for number in range(args.rounds):
            turn = [None, pairing] if number % 2 else [pairing, None]
            speed = {each: epoch_rate(split, order, each) for each in turn}
            rates.append((speed[None], speed[pairing]))
        found = pairing.survey(range(order.steps_per_epoch))
    without, paired = np.median(rates, axis=0).tolist()
    ratios = sorted(pair / alone for alone, pair in rates)

    mixed = [[streams, window, mixing(streams, window)] for streams, window in PLANS]
    result = {
        "machine": machine(threads=1),
        "images_per_s": {"without [pairs]": without, "with": paired},
        "ratio": float(np.median(ratios)),
        "ratios": ratios,
        "partners": {
            "samples": found.samples,
            "with a partner": found.partners,
            "in the window": 1 - found.outside / found.partners,
        },
        "mixing": mixed,
    }
    print(
        f"without [pairs] {without:,.0f} images/s, with {paired:,.0f}: ratio {result['ratio']:.3f} "
        f"({ratios[0]:.3f} to {ratios[-1]:.3f}); {found.partners / found.samples:.1%} of the "
        f"samples have a partner, {1 - found.outside / found.partners:.1%} of these in the window"
    )
    rows = [[streams, window, f"{score:.4f}"] for streams, window, score in mixed]
    print_table(["streams", "window", "mixing score"], rows)
    save(args.json, result)


if __name__ == "__main__":
    main()
