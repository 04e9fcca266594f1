"""The whole loader against decoding alone, by the number of threads.

    python -m benchmarks.loader_threads [--workers 1 2 4] [--images 600] [--rounds 5] [--json FILE]

The loader reads shards, decodes with so many threads and makes batches on one canvas; beside it, as
many threads decode the same bytes and keep nothing. In turns of one process, so that what else the
machine does weighs on both; medians. By the clock, on all cores, and by the CPU time, which
says what the threads cost on a busy machine, too. The images are those of benchmarks.loader: JPEGs
of 500 x 375.
"""

import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import simplejpeg
import torch

from benchmarks.common import machine, parser, print_table, save
from benchmarks.loader import our_batches, raw_jpegs, write_data
from sslpipe.portable import keep_freed_memory
from sslpipe.recipe.base import RunConfig


class Stopwatch:
    """The clock and the process's CPU time from here on."""

    def __init__(self) -> None:
        self._clock, self._cpu = time.perf_counter(), time.process_time()

    def rates(self, images: int) -> tuple[float, float]:
        """Images a second by the clock, and a CPU second."""
        clock, cpu = time.perf_counter() - self._clock, time.process_time() - self._cpu
        return images / clock, images / cpu


def decoded_by(raws: list[bytes], threads: int) -> tuple[float, float]:
    """Rates of threads that decode and keep nothing."""
    with ThreadPoolExecutor(threads) as pool:
        watch = Stopwatch()
        for _ in pool.map(simplejpeg.decode_jpeg, raws):
            pass
        return watch.rates(len(raws))


def loaded_by(folder: Path, threads: int) -> tuple[float, float]:
    """Rates of the loader with so many decoding threads, in whole batches."""
    stream = our_batches(folder, num_workers=threads, epochs=2)
    for _, _ in zip(range(2 + RunConfig().prefetch), stream, strict=False):
        pass  # so many are ahead from here on; the stream goes on behind the last one, too
    watch, count = Stopwatch(), 0
    for images in stream:
        count += len(images)
    return watch.rates(count)


def measure_workers(folder: Path, workers: list[int], rounds: int) -> dict[str, dict[str, float]]:
    """By number of threads: rates of the loader and of decoding, medians, and their ratios."""
    keep_freed_memory()
    torch.set_num_threads(1)
    raws, rates = list(raw_jpegs(folder)), {}
    for threads in workers:
        turns = [(loaded_by(folder, threads), decoded_by(raws, threads)) for _ in range(rounds + 1)]
        turns = turns[1:]  # the first one warms up
        rates[str(threads)] = {
            f"{name}{by}": median(values)
            for by, which in (("", 0), ("_cpu", 1))
            for name, values in (
                ("loader", [loaded[which] for loaded, _ in turns]),
                ("decoding", [decoded[which] for _, decoded in turns]),
                ("ratio", [loaded[which] / decoded[which] for loaded, decoded in turns]),
            )
        }
    return rates


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parse.add_argument("--images", type=int, default=600)
    parse.add_argument("--rounds", type=int, default=5)
    given = parse.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name), given.images)
        rates = measure_workers(Path(name), given.workers, given.rounds)
    rows = [
        [
            *(threads, f"{row['loader']:,.0f}", f"{row['decoding']:,.0f}"),
            *(f"{row['ratio']:.2f}", f"{row['ratio_cpu']:.2f}"),
        ]
        for threads, row in rates.items()
    ]
    head = ["threads", "loader, images/s", "decoding alone", "ratio", "ratio of CPU time"]
    print_table(head, rows)
    save(given.json, {"machine": machine(1), "cores": os.cpu_count(), "by_threads": rates})


if __name__ == "__main__":
    main()
