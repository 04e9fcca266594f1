"""What the planned order costs at scale, simulated on integers: no shard is read or written.

    python -m benchmarks.order_at_scale [--json FILE]

For 1.28 million and 1 billion samples in 1,281 and 10,000 shards, and 1 to 1,024 processes (one of
them measured, in a fresh process; all do the same amount of work), with windows of 256 samples:

plan     seconds and peak extra memory to plan an epoch: every window of the process's streams
serve    seconds to name every id that the process serves in the epoch (no planning left to do)
resume   seconds from nothing to the ids of a step in the middle of the epoch
again    samples read a second time by that resume: the served part of one open window a stream
reads    range requests of the process in an epoch, and the samples it reads over those it serves
mixing   label entropy of global batches over that of a full shuffle's, 1,000 classes: with shards
         written class by class, and with shards written shuffled (1.0 is a full shuffle)
"""

import argparse
import json
import time

import numpy as np
from numpy.typing import NDArray

from benchmarks.common import in_fresh_process, memory_mb, parser, print_table, save
from sslpipe.data.order import Order, mixing_score
from sslpipe.random import hash_integers

SIZES = {"1.28 M": (1_281_167, 1_281), "1 B": (1_000_000_000, 10_000)}
PROCESSES = (1, 8, 64, 1024)
CLASSES, WINDOW, BATCH = 1000, 256, 4096
TIMED_STEPS = 2000  # `serve` is measured on so many at most, and scaled up


def planned(samples: int, shards: int, num_streams: int) -> Order:
    starts = np.linspace(0, samples, shards + 1).astype(np.int64)
    return Order(starts, seed=0, batch_size=BATCH, num_streams=num_streams, window=WINDOW)


def measure(samples: int, shards: int, world: int) -> dict[str, float]:
    """Rank 0's costs among `world` processes."""
    num_streams = max(64, world)
    mine = range(num_streams // world)
    planned(10 * BATCH, 10, num_streams).ids(3, mine)  # warm: imports and first calls are not ours

    before, begin = memory_mb("VmHWM"), time.perf_counter()
    order = planned(samples, shards, num_streams)
    plan = order.epoch(0)
    windows = [plan.stream(number).windows for number in mine]
    result = {"plan_s": time.perf_counter() - begin, "plan_mb": memory_mb("VmHWM") - before}

    served = order.steps_per_epoch * BATCH // world
    steps = min(order.steps_per_epoch, TIMED_STEPS)
    begin = time.perf_counter()
    for step in range(steps):
        order.ids(step, mine)
    result["serve_s"] = (time.perf_counter() - begin) * order.steps_per_epoch / steps

    middle = order.steps_per_epoch // 2
    begin = time.perf_counter()
    fresh = planned(samples, shards, num_streams)
    fresh.ids(middle, mine)
    result["resume_s"] = time.perf_counter() - begin
    share, again = BATCH // num_streams, 0
    for number in mine:
        stream = fresh.epoch(0).stream(number)
        window = stream.window_at(middle * share)
        first, last = stream.windows[window, 1:].tolist()
        again += middle * share - (int(stream.ends[window]) - (last - first))
    result |= {"again": again, "requests": sum(map(len, windows))}
    result["read_over_served"] = sum(int((w[:, 2] - w[:, 1]).sum()) for w in windows) / served
    return result


def mixing(samples: int, shards: int) -> dict[str, float]:
    """Over 20 global batches of an epoch, shards written by class and shuffled."""
    order = planned(samples, shards, 64)
    steps = np.linspace(0, order.steps_per_epoch - 1, 20).astype(int).tolist()
    ids = [order.ids(step, range(64))[1] for step in steps]
    everyone = np.tile(np.arange(CLASSES), 300)  # balanced, and large beside a batch

    def shuffled(rows: NDArray[np.int64]) -> NDArray[np.int64]:
        return (hash_integers(1, rows) % np.uint64(CLASSES)).astype(np.int64)

    by_class = [rows * CLASSES // samples for rows in ids]
    return {
        "mixing_by_class": mixing_score(by_class, everyone) or 0.0,
        "mixing_shuffled": mixing_score([shuffled(rows) for rows in ids], everyone) or 0.0,
    }


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--one", nargs=3, type=int, help=argparse.SUPPRESS)
    given = parse.parse_args()
    if given.one:
        print(json.dumps(measure(*given.one)))
        return
    rows = []
    for samples, shards in SIZES.values():
        for world in PROCESSES:
            one = ("--one", samples, shards, world)
            row = in_fresh_process("benchmarks.order_at_scale", *one)
            rows.append({"samples": samples, "shards": shards, "processes": world, **row})
    cells = [
        [
            *(f"{row[key]:,}" for key in ("samples", "shards", "processes")),
            f"{row['plan_s']:.3f} s, {row['plan_mb']:.0f} MB",
            *(f"{row['serve_s']:.1f} s", f"{row['resume_s']:.3f} s", f"{row['again']:,}"),
            f"{row['requests']:,} ({row['read_over_served']:.4f})",
        ]
        for row in rows
    ]
    head = ["samples", "shards", "processes", "plan", "serve", "resume", "again", "requests"]
    print_table(head, cells)
    scores = {name: mixing(*size) for name, size in SIZES.items()}
    mixed = [[name, *(f"{each:.4f}" for each in score.values())] for name, score in scores.items()]
    print_table(["mixing", "shards written class by class", "shuffled"], mixed)
    save(given.json, {"rows": rows, "mixing": scores})


if __name__ == "__main__":
    main()
