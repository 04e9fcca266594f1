"""The whole loader against decoding alone, by the number of threads.

    python -m benchmarks.loader_threads [--workers 1 2 4] [--images 600] [--rounds 5] [--json FILE]

The loader reads shards, decodes with so many threads and makes batches on one canvas; beside it, as
many threads decode the same bytes and keep nothing. Both by the clock, on all cores, in turns of
one process, so that what else the machine does weighs on both; medians. The images are those of
benchmarks.loader: JPEGs of 500 x 375.
"""

import argparse
import json
import os
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from statistics import median

import simplejpeg
import torch
from rich.console import Console
from rich.table import Table

from benchmarks.loader import our_batches, raw_jpegs, write_data
from benchmarks.nt_xent import machine
from sslpipe.recipe.base import RunConfig
from sslpipe.run.allocator import keep_freed_memory


def decoded_by(raws: list[bytes], threads: int) -> float:
    """Images/s of threads that decode and keep nothing."""
    with ThreadPoolExecutor(threads) as pool:
        start = time.perf_counter()
        for _ in pool.map(simplejpeg.decode_jpeg, raws):
            pass
        return len(raws) / (time.perf_counter() - start)


def loaded_by(folder: Path, threads: int) -> float:
    """Images/s of the loader with so many decoding threads, in whole batches."""
    stream = our_batches(folder, num_workers=threads, epochs=2)
    for _, _ in zip(range(2 + RunConfig().prefetch), stream, strict=False):  # those made ahead
        pass
    start, count = time.perf_counter(), 0
    for images in stream:
        count += len(images)
    return count / (time.perf_counter() - start)


def measure_workers(folder: Path, workers: list[int], rounds: int) -> dict[str, dict[str, float]]:
    """By number of threads: images/s of the loader and of decoding, medians, and their ratio."""
    keep_freed_memory()
    torch.set_num_threads(1)
    raws, rates = list(raw_jpegs(folder)), {}
    for threads in workers:
        turns = [(loaded_by(folder, threads), decoded_by(raws, threads)) for _ in range(rounds + 1)]
        turns = turns[1:]  # the first one warms up
        rates[str(threads)] = {
            "loader": median(loaded for loaded, _ in turns),
            "decoding": median(decoded for _, decoded in turns),
            "ratio": median(loaded / decoded for loaded, decoded in turns),
        }
    return rates


def show_workers(rates: dict[str, dict[str, float]]) -> None:
    """Print the table of `measure_workers`."""
    table = Table("threads", "loader, images/s", "decoding alone", "ratio")
    for threads, row in rates.items():
        table.add_row(
            threads, f"{row['loader']:,.0f}", f"{row['decoding']:,.0f}", f"{row['ratio']:.2f}"
        )
    Console().print(table)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4])
    parser.add_argument("--images", type=int, default=600)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        write_data(Path(name), arguments.images)
        rates = measure_workers(Path(name), arguments.workers, arguments.rounds)
    show_workers(rates)
    if arguments.json:
        facts = {"machine": machine(threads=1), "cores": os.cpu_count(), "by_threads": rates}
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")


if __name__ == "__main__":
    main()
