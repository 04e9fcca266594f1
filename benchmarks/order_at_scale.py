"""What the planned order costs at scale, simulated on integers: no shard is read or written.

    python -m benchmarks.order_at_scale [--json FILE]

For 1.28 million and 1 billion samples in 1,281 and 10,000 shards, and 1 to 1,024 processes (one of
them measured, in a fresh process; all do the same amount of work), with windows of 256 samples:

plan     seconds and peak extra memory to plan an epoch: every window of the process's streams
serve    seconds to name every id that the process serves in the epoch (no planning left to do)
resume   seconds from nothing to the ids of a step in the middle of the epoch
again    samples read a second time by that resume: the served part of one open window a stream
reads    range requests of the process in an epoch, and the samples it reads over those it serves
"""

import time

import numpy as np

from benchmarks.common import in_fresh_process, memory_mb, parser, print_table, save
from sslpipe.data.order import Order

SIZES = ((1_281_167, 1_281), (1_000_000_000, 10_000))  # samples, shards
PROCESSES = (1, 8, 64, 1024)
WINDOW, BATCH = 256, 4096
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
        window, _ = next(stream.pieces(middle * share, (middle + 1) * share))
        first, last = stream.windows[window, 1:].tolist()
        again += middle * share - (int(stream.ends[window]) - (last - first))
    result |= {"again": again, "requests": sum(map(len, windows))}
    result["read_over_served"] = sum(int((w[:, 2] - w[:, 1]).sum()) for w in windows) / served
    return result


def main() -> None:
    given = parser(__doc__).parse_args()
    rows = []
    for samples, shards in SIZES:
        for world in PROCESSES:
            row = in_fresh_process(measure, samples, shards, world)
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
    save(given.json, {"rows": rows})


if __name__ == "__main__":
    main()
