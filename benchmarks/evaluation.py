"""Exact search, retrieval metrics and linear probes: time and memory, ours against the peers.

    python -m benchmarks.evaluation [--part search,retrieval,probe] [--json FILE]

Each contender runs in a fresh process on the same seeded features, D = 128. cpu: processor
seconds of the faster of two calls (one where a call takes more than 20 s), which other jobs on the
machine change little; wall: its seconds by the clock. memory: peak resident memory over that before
the call, in MB. Where the conventions of two contenders agree, their numbers are compared and the
largest difference is printed; where they do not, the line says so.

search: 60,000 rows, 10,000 queries, k = 200, against faiss's flat index and scikit-learn.
retrieval: 16,000 rows of 8,000 classes, leave one out, against pytorch-metric-learning's
AccuracyCalculator (k = max_bin_count: three metrics; k = 1000: the mean reciprocal rank, too, which
is cut off there).
probe: logistic regression at one C, 10,000 rows of 10 classes, against scikit-learn.
Peers that are not installed (extra `bench`) are named as skipped. Linux only (reads /proc).
"""

import argparse
import json
import time
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.common import (
    Peak,
    absent,
    compare,
    in_fresh_process,
    machine,
    parser,
    print_table,
    save,
)
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.logistic import fit_logistic
from sslpipe.evaluation.neighbours import nearest
from sslpipe.evaluation.retrieval import retrieval_per_query

Run = Callable[[], dict[str, float]]

DIM, K = 128, 200
LONG_S = 20.0


def clusters(rows: int, classes: int, seed: int = 0) -> Embeddings:
    """Unit features around `classes` random centres, classes in turn."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, DIM, generator=generator)
    labels = torch.arange(rows) % classes
    noise = torch.randn(rows, DIM, generator=generator)
    features = torch.nn.functional.normalize(centres[labels] + noise)
    return Embeddings(features, labels, torch.arange(rows))


def search_data(rows: int) -> tuple[torch.Tensor, torch.Tensor]:
    """A bank, and a sixth as many queries from the same clusters."""
    features = clusters(rows + rows // 6, 100).features
    return features[:rows], features[rows:]


def checksum(indices: Any) -> dict[str, float]:
    """What two searches have in common where they found the same sets of rows."""
    actual = torch.as_tensor(indices).long()
    return {"sum of rows": float(actual.sum()), "sum of first rows": float(actual[:, 0].sum())}


def search_ours(bank: torch.Tensor, queries: torch.Tensor) -> Run:
    return lambda: checksum(nearest(bank, queries, K).indices)


def search_faiss(bank: torch.Tensor, queries: torch.Tensor) -> Run:
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    unit = torch.nn.functional.normalize

    def run() -> dict[str, float]:
        index = faiss.IndexFlatIP(DIM)
        index.add(unit(bank).numpy())
        return checksum(index.search(unit(queries).numpy(), K)[1])

    return run


def search_sklearn(bank: torch.Tensor, queries: torch.Tensor) -> Run:
    from sklearn.neighbors import NearestNeighbors

    def run() -> dict[str, float]:
        model = NearestNeighbors(n_neighbors=K, metric="cosine", algorithm="brute", n_jobs=1)
        return checksum(model.fit(bank.numpy()).kneighbors(queries.numpy())[1])

    return run


def retrieval_ours(rows: Embeddings) -> Run:
    def run() -> dict[str, float]:
        every = retrieval_per_query(rows, rows, k=(1, 10), exclude_same_id=True)
        means: dict[str, float] = dict(
            zip(every.names, every.values.mean(axis=0).tolist(), strict=True)
        )
        return means

    return run


def retrieval_pml(rows: Embeddings, k: str | int) -> Run:
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    names = {
        "precision_at_1": "Recall@1",
        "r_precision": "r_precision",
        "mean_average_precision_at_r": "map_at_r",
    }
    if k != "max_bin_count":
        names |= {"mean_reciprocal_rank": "mrr"}
    calculator = AccuracyCalculator(include=tuple(names), k=k, device=torch.device("cpu"))

    def run() -> dict[str, float]:
        actual = calculator.get_accuracy(rows.features, rows.labels)
        return {ours: float(actual[theirs]) for theirs, ours in names.items()}

    return run


def probe_ours(rows: Embeddings) -> Run:
    def run() -> dict[str, float]:
        (fitted,) = fit_logistic(rows.features, rows.labels, [1.0], 10, tolerance=1e-6)
        return {"norm of the weights": float(fitted.weight.norm())}

    return run


def probe_sklearn(rows: Embeddings) -> Run:
    from sklearn.linear_model import LogisticRegression

    def run() -> dict[str, float]:
        model = LogisticRegression(C=1.0, tol=1e-6, max_iter=10_000)
        model.fit(rows.features.double().numpy(), rows.labels.numpy())
        return {"norm of the weights": float((model.coef_**2).sum() ** 0.5)}

    return run


def retrieval_data(size: float) -> Embeddings:
    return clusters(int(16_000 * size), int(8_000 * size))


PARTS: dict[str, dict[str, Callable[[float], Run]]] = {
    "search": {
        "faiss": lambda size: search_faiss(*search_data(int(60_000 * size))),
        "ours": lambda size: search_ours(*search_data(int(60_000 * size))),
        "scikit-learn": lambda size: search_sklearn(*search_data(int(60_000 * size))),
    },
    "retrieval": {
        "AccuracyCalculator, k=max_bin_count": lambda size: retrieval_pml(
            retrieval_data(size), "max_bin_count"
        ),
        "AccuracyCalculator, k=1000": lambda size: retrieval_pml(
            retrieval_data(size), min(1000, int(8_000 * size))
        ),
        "ours": lambda size: retrieval_ours(retrieval_data(size)),
    },
    "probe": {
        "scikit-learn": lambda size: probe_sklearn(clusters(int(10_000 * size), 10)),
        "ours": lambda size: probe_ours(clusters(int(10_000 * size), 10)),
    },
}
NEEDS = {"AccuracyCalculator": "pytorch_metric_learning"}


def measure(part: str, contender: str, size: float, threads: int) -> dict[str, Any]:
    """One contender in this process."""
    torch.set_num_threads(threads)
    PARTS[part][contender](0.02)()  # imports, thread pools, kernels chosen
    run = PARTS[part][contender](size)
    peak = Peak()
    times: list[tuple[float, float]] = []
    while len(times) < 2 and sum(wall for _, wall in times) < LONG_S:
        start, cpu = time.perf_counter(), time.process_time()
        values = run()
        times.append((time.process_time() - cpu, time.perf_counter() - start))
    cpu_s, wall_s = min(times)
    return {"cpu_s": cpu_s, "wall_s": wall_s, "extra_mb": peak.extra_mb(), "values": values}


def measure_part(part: str, size: float, threads: int, skipped: tuple[str, ...]) -> list[Any]:
    """Print and return what each contender takes; their numbers are compared with ours."""
    own = ("--part", part, "--size", size, "--threads", threads)
    measured = {
        name: in_fresh_process("benchmarks.evaluation", "--one", name, *own)
        for name in PARTS[part]
        if not name.startswith(skipped or ("\0",))
    }
    ours, rows = measured["ours"], []
    for name, result in measured.items():
        common = sorted({*ours["values"]} & {*result["values"]})
        apart = [abs(ours["values"][key] / result["values"][key] - 1) for key in common]
        speed = ours["cpu_s"] / result["cpu_s"]
        memory = result["extra_mb"] / max(ours["extra_mb"], 1.0)
        cells = [name, f"{result['cpu_s']:.2f}", f"{result['wall_s']:.2f}", f"{speed:.2f}x"]
        cells += [f"{result['extra_mb']:.0f}", f"{memory:.2f}x"]
        rows.append([*cells, f"{max(apart):.1e} in {len(common)} numbers"])
    print_table([part, "cpu s", "wall s", "speed", "MB", "memory", "differs by"], rows)
    return [
        {"part": part, "contender": name, "size": size, **result}
        for name, result in measured.items()
    ]


def ratios(report: dict[str, Any]) -> dict[str, float]:
    """Times as fast as each peer, by CPU time."""
    took = {(r["part"], r["contender"]): r["cpu_s"] for r in report["records"]}
    return {
        f"{part}: {name}": cpu_s / took[part, "ours"]
        for (part, name), cpu_s in took.items()
        if (part, "ours") in took and not name.startswith("ours")
    }


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--part", default=",".join(PARTS))
    parse.add_argument("--without", default="", help="contenders to skip, by a name's start")
    parse.add_argument("--size", type=float, default=1.0, help="share of the rows")
    parse.add_argument("--threads", type=int, default=1)
    parse.add_argument("--one", help=argparse.SUPPRESS)
    given = parse.parse_args()
    if given.one:
        print(json.dumps(measure(given.part, given.one, given.size, given.threads)))
        return

    skipped = (*absent(NEEDS), *(name for name in given.without.split(";") if name))
    records: list[dict[str, Any]] = []
    for part in given.part.split(","):
        records += measure_part(part, given.size, given.threads, skipped)
    print("\nspeed: by cpu, of each against ours, above 1 is faster; memory: times ours")
    if given.size == 1:
        compare("evaluation.json", {"records": records}, ratios)
    save(given.json, {"machine": machine(given.threads), "records": records})


if __name__ == "__main__":
    main()
