"""Metric-learning losses and miners, ours against pytorch-metric-learning's: time and memory.

    python -m benchmarks.metric_losses [--rows 256,512,1024,4096] [--only triplet,lifted]
        [--limit-s 60] [--limit-gb 8] [--seconds 1] [--json FILE] [--markdown FILE]

Rows of length 1, 128 features, 4 of each class, float32, one thread; a loss is called forward and
backward, a miner from rows and labels to what it selects. Both sides follow the same conventions
where both can; `differs` is the relative difference of the two values (for miners: of the number
of pairs or triplets selected), and a note says why where it is not 0.
Each call runs in a fresh process, forked from one that has imported everything and computed
nothing. time: median of the calls that fit into --seconds (at least 1 after the first). memory:
peak resident memory of the first call over that before it. A side that needs more than --limit-s
for its first call or more than --limit-gb of memory is ended and reported so.
--json and --markdown keep what the file has of other sizes and names. Needs the extra `bench`.
"""

import json
import multiprocessing
import os
import platform
import resource
import statistics
import time
from argparse import Namespace
from collections.abc import Callable
from importlib.metadata import version
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pytorch_metric_learning import distances, losses, miners
from torch import Tensor

from benchmarks.common import Peak, commit, machine, markdown_table, memory_mb, parser, save
from sslpipe.metric_learning import METRIC_LOSSES, MINERS
from sslpipe.metric_learning.losses.pairwise import compare

DIM, PER_CLASS = 128, 4


class Contest(NamedTuple):
    ours: Any
    peer: Any
    note: str = ""


def mined(loss: Any, miner: Any) -> Callable[[Tensor, Tensor], Tensor]:
    return lambda x, labels: loss(x, labels, miner(x, labels))


def squared() -> Any:
    return distances.LpDistance(power=2)


CONTESTS = {
    "triplet": Contest(
        METRIC_LOSSES["triplet"](reduction="mean_active"),
        losses.TripletMarginLoss(margin=0.2, distance=squared()),
    ),
    "triplet semi-hard": Contest(
        METRIC_LOSSES["triplet"](triplets="semi_hard"),
        mined(
            losses.TripletMarginLoss(margin=0.2, distance=squared()),
            miners.TripletMarginMiner(0.2, "semihard", distance=squared()),
        ),
    ),
    "batch hard": Contest(
        METRIC_LOSSES["batch_hard"](normalize=True, reduction="mean_active"),
        mined(losses.TripletMarginLoss(margin=0.2), miners.BatchHardMiner()),
    ),
    "contrastive": Contest(
        METRIC_LOSSES["contrastive"](
            normalize=True, squared=False, half=False, sides="apart", reduction="mean_active"
        ),
        losses.ContrastiveLoss(),
    ),
    "margin": Contest(
        METRIC_LOSSES["margin"](reduction="mean_active"),
        losses.MarginLoss(),
        "the peer counts a pair once for each triplet it is in",
    ),
    "NT-Xent over pairs": Contest(METRIC_LOSSES["info_nce"](), losses.NTXentLoss()),
    "SupCon": Contest(METRIC_LOSSES["sup_con"](), losses.SupConLoss()),
    "NCA": Contest(METRIC_LOSSES["nca"](normalize=True), losses.NCALoss()),
    "N-pair": Contest(METRIC_LOSSES["n_pair"](normalize=True, l2_weight=0.0), losses.NPairsLoss()),
    "lifted": Contest(METRIC_LOSSES["lifted"](normalize=True), losses.LiftedStructureLoss()),
    "multi-similarity": Contest(
        METRIC_LOSSES["multi_similarity"](base=0.5), losses.MultiSimilarityLoss()
    ),
    "circle": Contest(METRIC_LOSSES["circle"](), losses.CircleLoss()),
    "angular": Contest(METRIC_LOSSES["angular"](angle_deg=40.0), losses.AngularLoss()),
    "tuplet margin": Contest(
        METRIC_LOSSES["tuplet_margin"](margin=0.1, variance_weight=0.0),
        losses.TupletMarginLoss(margin=5.729577951308232),
    ),
    "miner: semi-hard": Contest(
        MINERS["triplets"](), miners.TripletMarginMiner(0.2, "semihard", distance=squared())
    ),
    "miner: batch hard": Contest(
        MINERS["batch_hard"](),
        miners.BatchHardMiner(),
        "the peer counts triplets, ours pairs: twice as many",
    ),
    "miner: multi-similarity": Contest(MINERS["multi_similarity"](), miners.MultiSimilarityMiner()),
    "miner: pair margin": Contest(
        MINERS["pair_margin"](positive=0.2, negative=1.4), miners.PairMarginMiner(0.2, 1.4)
    ),
    "miner: angular": Contest(MINERS["angular"](), miners.AngularMiner()),
    "miner: distance weighted": Contest(
        MINERS["distance_weighted"](),
        miners.DistanceWeightedMiner(),
        "the peer draws none where no negative is nearer than 1.4",
    ),
    "miner: hardest half": Contest(MINERS["hardest_share"](), miners.HDCMiner(0.5)),
}


def call(name: str, side: str, x: Tensor, labels: Tensor) -> float:
    """A loss forward and backward, its value; or a miner, the number of what it selects."""
    contender = getattr(CONTESTS[name], side)
    if not name.startswith("miner: "):
        x = x.detach().requires_grad_()
        loss = contender(x, labels)
        loss.backward()
        assert x.grad is not None
        return float(loss.detach())
    if side == "peer":
        actual = contender(x, labels)
        return float(len(actual[0]) + (len(actual[2]) if len(actual) == 4 else 0))
    pairs = contender(*compare(x, labels, None, None))
    if pairs.triplets is not None:
        return float(pairs.triplets.sum())
    return float(pairs.positive.sum() + pairs.negative.sum())


def embeddings(rows: int) -> tuple[Tensor, Tensor]:
    """Classes that overlap: a centre and noise of the same size."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.arange(rows) // PER_CLASS
    centers = torch.randn(rows // PER_CLASS, DIM, generator=generator)
    x = centers[labels] + 1.5 * torch.randn(rows, DIM, generator=generator)
    return torch.nn.functional.normalize(x, dim=1), labels


def measure(pipe: Connection, contender: tuple[str, str], rows: int, given: Namespace) -> None:
    """In the child: what one side needs at one size."""
    torch.set_num_threads(1)
    call(*contender, *embeddings(64))  # kernels chosen, caches of the allocator filled
    x, labels = embeddings(rows)
    limit = memory_mb("VmData") * 2**20 + given.limit_gb * 2**30
    resource.setrlimit(resource.RLIMIT_DATA, (int(limit), resource.RLIM_INFINITY))
    peak = Peak()
    begin = time.perf_counter()
    try:
        value = call(*contender, x, labels)
    except (RuntimeError, MemoryError) as error:
        over = "memory" in str(error).lower()
        pipe.send({"failed": f"> {given.limit_gb:g} GB" if over else str(error)})
        return
    first = time.perf_counter() - begin
    extra_mb = peak.extra_mb()
    times: list[float] = []
    while first < 10 * given.seconds and (not times or sum(times) < given.seconds):
        begin = time.perf_counter()
        call(*contender, x, labels)
        times.append(time.perf_counter() - begin)
    pipe.send({"ms": statistics.median(times or [first]) * 1e3, "mb": extra_mb, "value": value})


def in_child(contender: tuple[str, str], rows: int, given: Namespace) -> dict[str, Any]:
    """Measure one side in a process that may be ended."""
    context = multiprocessing.get_context("fork")
    ours, theirs = context.Pipe(duplex=False)
    child = context.Process(target=measure, args=(theirs, contender, rows, given))
    child.start()
    theirs.close()
    try:
        if not ours.poll(given.limit_s):
            return {"failed": f"> {given.limit_s:g} s"}
        result: dict[str, Any] = ours.recv()
        return result
    except EOFError:
        return {"failed": "ended by the system"}
    finally:
        child.kill()
        child.join()


def contest(name: str, rows: int, given: Namespace) -> dict[str, Any]:
    record: dict[str, Any] = {"rows": rows, "name": name, "note": CONTESTS[name].note}
    record["commit"] = commit()
    ours, peer = (in_child((name, side), rows, given) for side in ("ours", "peer"))
    record |= {"ours": ours, "peer": peer}
    if "ms" in ours and "ms" in peer:
        record["times_faster"] = peer["ms"] / ours["ms"]
        record["times_lighter"] = peer["mb"] / max(ours["mb"], 1.0)
        largest = max(abs(ours["value"]), abs(peer["value"]), 1e-30)
        record["differs"] = abs(ours["value"] - peer["value"]) / largest
    return record


def line(record: dict[str, Any]) -> list[str]:
    cells = [str(record["rows"]), record["name"]]
    for side in ("ours", "peer"):
        result = record[side]
        cells += (
            [result["failed"], ""]
            if "failed" in result
            else [f"{result['ms']:.1f}", f"{result['mb']:.0f}"]
        )
    if "times_faster" in record:
        cells += [f"{record['times_faster']:.1f}", f"{record['times_lighter']:.1f}"]
        cells += [f"{record['differs']:.0e}" if record["differs"] > 5e-5 else "0"]
    else:
        cells += ["", "", ""]
    return [*cells, record["note"]]


HEADER = ["M", "what", "ours ms", "ours MB", "PML ms", "PML MB", "faster", "less memory"]
HEADER += ["differs", ""]


def table(result: dict[str, Any]) -> str:
    """docs/metric_losses.md."""
    commits = ", ".join(sorted({record["commit"] for record in result["records"]}))
    return f"""# Metric-learning losses and miners against pytorch-metric-learning

By `python -m benchmarks.metric_losses`; its docstring says what is measured. {result["machine"]}; \
one thread. Commits: {commits}.

{markdown_table(HEADER, map(line, result["records"]))}
"""


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--rows", default="256,512,1024,4096")
    parse.add_argument("--only", help="names, separated by commas; default: all")
    parse.add_argument("--limit-s", type=float, default=60.0)
    parse.add_argument("--limit-gb", type=float, default=8.0)
    parse.add_argument("--seconds", type=float, default=1.0)
    parse.add_argument("--markdown", type=Path)
    given = parse.parse_args()
    only = [name.strip() for name in given.only.split(",")] if given.only else [*CONTESTS]
    torch.set_num_threads(1)

    records: dict[tuple[int, str], dict[str, Any]] = {}
    if given.json and given.json.exists():
        for record in json.loads(given.json.read_text())["records"]:
            records[record["rows"], record["name"]] = record
    print(" ".join(f"{cell:>12}" for cell in HEADER), flush=True)
    for rows in map(int, given.rows.split(",")):
        for name in (name for name in CONTESTS if name in only):
            record = records[rows, name] = contest(name, rows, given)
            print(" ".join(f"{cell:>12}" for cell in line(record)), flush=True)
    ordered = sorted(records.values(), key=lambda r: (r["rows"], [*CONTESTS].index(r["name"])))
    where = f"{machine(1)['cpu']}, {os.cpu_count()} cores, {platform.system()}"
    peer = version("pytorch-metric-learning")
    versions = f"torch {torch.__version__.split('+')[0]}, pytorch-metric-learning {peer}"
    result = {"machine": f"{where}, {versions}", "records": ordered}
    save(given.json, result)
    if given.markdown:
        given.markdown.write_text(table(result))


if __name__ == "__main__":
    main()
