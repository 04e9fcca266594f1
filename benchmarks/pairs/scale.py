"""What columns cost where an epoch is planned: [pairs] on 100 million samples with three columns.

    python -m benchmarks.pairs.scale out/columns [--samples 100000000] [--json FILE]

Writes the columns' files (28 bytes a sample, 2.8 GB of 100 million) under out/columns, measures in
a fresh process and deletes them. No shard is read or written. product: 4 samples each, scattered
over all shards, so that no page of a file is read twice in a row; vendor: 8 values; patient: of
samples side by side. `pairs.positive = "product"`, `different = "vendor"`, `never_negative =
["patient"]`; windows of 256 samples, 64 streams, batches of 4,096, one process.

order      processor seconds and peak extra memory to plan an epoch without columns: every window
columns    the same with the columns opened, too; sha256: seconds to compare their files, once a
           run
step       processor milliseconds of a global step's ids; and with its partners and groups
memory     extra memory after the steps: of the process alone, and of the files' pages in memory,
           which the system takes back when it needs them
"""

import argparse
import json
import shutil
import time
from hashlib import file_digest
from math import gcd
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import in_fresh_process, memory_mb, parser, save
from benchmarks.order_at_scale import BATCH, planned
from sslpipe.data.columns import Column, ColumnEntry, ColumnFile, SplitColumn
from sslpipe.data.index import Split
from sslpipe.data.order import Order
from sslpipe.data.pairing import Pairing
from sslpipe.data.pipeline import Batch
from sslpipe.recipe.pairs import Pairs

SAMPLES, SHARDS, STREAMS = 100_000_000, 10_000, 64
GROUP, VENDORS, OF_PATIENT = 4, 8, 100  # samples of a product; vendors; samples of a patient
STEPS = 200
CHUNK = 4_000_000
PAIRS = Pairs(positive=("product",), different=("vendor",), never_negative=("patient",))


def multiplier(samples: int) -> int:
    """Find a number whose multiples modulo `samples` visit all samples, far from each other."""
    number = int(samples * 0.6180339887)
    while gcd(number, samples) != 1:
        number += 1
    return number


def write_columns(folder: Path, samples: int) -> None:
    """Write the three columns part by part, in the form of `sslpipe.data.columns`."""
    step = multiplier(samples)
    back = pow(step, -1, samples)

    def product(ids: NDArray[np.int64]) -> NDArray[np.int64]:
        return ids * step % samples // GROUP

    def of_products(places: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.sort((places * back % samples).reshape(-1, GROUP), axis=1).ravel()

    def of_vendors(places: NDArray[np.int64]) -> NDArray[np.int64]:
        vendor, place = np.divmod(places, samples // VENDORS)
        return place * VENDORS + vendor

    columns = {
        "product": (product, of_products, np.arange(0, samples, GROUP)),
        "vendor": (lambda k: k % VENDORS, of_vendors, np.arange(0, samples, samples // VENDORS)),
        "patient": (lambda ids: ids // OF_PATIENT, lambda p: p, np.arange(0, samples, OF_PATIENT)),
    }
    entries = {}
    for name, (values, members, starts) in columns.items():
        files = {}
        for part, made in (("values", values), ("members", members)):
            path = folder / f"{name}.{part}.npy"
            array = np.lib.format.open_memmap(path, "w+", np.dtype("<i4"), (samples,))
            for first in range(0, samples, CHUNK):
                ids = np.arange(first, min(first + CHUNK, samples), dtype=np.int64)
                array[first : first + CHUNK] = made(ids)
            array.flush()
            files[part] = written(path)
        path = folder / f"{name}.groups.npy"
        np.save(path, np.stack([np.arange(len(starts)), starts]))
        split = SplitColumn(groups=written(path), **files)
        entries[name] = ColumnEntry(kind="text", splits={"train": split}).model_dump()
    (folder / "columns.json").write_text(json.dumps(entries))


def written(path: Path) -> ColumnFile:
    """Describe a file as dataset.json does."""
    with path.open("rb") as file:
        sha256 = file_digest(file, "sha256").hexdigest()
    return ColumnFile(file=path.name, bytes=path.stat().st_size, sha256=sha256)


def open_pairing(folder: Path, samples: int, order: Order, *, verify: bool) -> Pairing:
    """Open the columns of a split that has nothing else."""
    entries = json.loads((folder / "columns.json").read_text())

    def column(name: str) -> Column:
        entry = ColumnEntry(**entries[name])
        return Column(str(folder), "train", name, entry, samples, verify=verify)

    split = SimpleNamespace(column=column, labels_of=lambda ids: np.full(len(ids), -1))
    return Pairing(cast(Split, split), order, PAIRS)


def measure(folder: Path, samples: int) -> dict[str, float]:
    """Time planning and steps, without columns and with them."""

    def plan(order: Order) -> None:
        for number in range(STREAMS):
            _ = order.epoch(0).stream(number).windows

    planned(10 * BATCH, 10, STREAMS).ids(3, range(STREAMS))  # imports and first calls
    result: dict[str, float] = {"samples": samples}

    # an epoch's plan: the order alone, then with columns
    before, begin = memory_mb("VmHWM"), time.process_time()
    plan(planned(samples, SHARDS, STREAMS))
    result |= {"order_s": time.process_time() - begin, "order_mb": memory_mb("VmHWM") - before}
    before, begin = memory_mb("VmHWM"), time.process_time()
    order = planned(samples, SHARDS, STREAMS)
    pairing = open_pairing(folder, samples, order, verify=False)
    plan(order)
    result |= {"columns_s": time.process_time() - begin, "columns_mb": memory_mb("VmHWM") - before}

    # steps
    steps = np.linspace(0, order.steps_per_epoch - 1, STEPS).astype(int).tolist()
    begin = time.process_time()
    for step in steps:
        order.ids(step, range(STREAMS))
    result["step_ms"] = (time.process_time() - begin) / STEPS * 1000
    anonymous, mapped = memory_mb("RssAnon"), memory_mb("RssFile")
    begin = time.process_time()
    found = sum(serve(pairing, order, step) for step in steps)
    result["step_with_columns_ms"] = (time.process_time() - begin) / STEPS * 1000
    result["partners"] = found / STEPS / BATCH
    result["steps_mb"] = memory_mb("RssAnon") - anonymous
    result["mapped_mb"] = memory_mb("RssFile") - mapped

    # once a run
    begin = time.process_time()
    open_pairing(folder, samples, order, verify=True)
    result["sha256_s"] = time.process_time() - begin
    return result


def serve(pairing: Pairing, order: Order, step: int) -> int:
    """Draw a step's partners and look up its groups, as a loader does; count the partners."""
    _, ids = order.ids(step, range(STREAMS))
    drawn = pairing.drawn(step, range(STREAMS))
    assert drawn is not None
    own, none = torch.from_numpy(ids), cast(Any, None)
    batch = Batch(none, none, torch.full_like(own, -1), own, own, 0)
    pairing.describe(step, range(STREAMS), batch, drawn.ids)
    return int((drawn.ids != ids).sum())


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("folder", type=Path, help="where 2.8 GB are free")
    parse.add_argument("--samples", type=int, default=SAMPLES, help="a multiple of 800")
    parse.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    given = parse.parse_args()
    if given.one:
        print(json.dumps(measure(given.folder, given.samples)))
        return
    given.folder.mkdir(parents=True)
    try:
        write_columns(given.folder, given.samples)
        own = (given.folder, "--one", "--samples", given.samples)
        result = in_fresh_process("benchmarks.pairs.scale", *own)
    finally:
        shutil.rmtree(given.folder)
    for name, value in result.items():
        print(f"{name:>22}: {value:,.3f}")
    save(given.json, result)


if __name__ == "__main__":
    main()
