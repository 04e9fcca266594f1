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

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import normalize

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

Numbers = dict[str, float]  # what contenders are compared by

DIM, K = 128, 200
LONG_S = 20.0


def clusters(rows: int, classes: int, seed: int = 0) -> Embeddings:
    """Unit features around `classes` random centres, classes in turn."""
    generator = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, DIM, generator=generator)
    labels = torch.arange(rows) % classes
    noise = torch.randn(rows, DIM, generator=generator)
    return Embeddings(normalize(centres[labels] + noise), labels, torch.arange(rows))


def search_data(rows: int) -> tuple[Tensor, Tensor]:
    """A bank, and a sixth as many queries from the same clusters."""
    features = clusters(rows + rows // 6, 100).features
    return features[:rows], features[rows:]


def checksum(indices: Any) -> Numbers:
    """What two searches have in common where they found the same sets of rows."""
    actual = torch.as_tensor(indices).long()
    return {"sum of rows": float(actual.sum()), "sum of first rows": float(actual[:, 0].sum())}


def search_ours(data: tuple[Tensor, Tensor]) -> Numbers:
    return checksum(nearest(*data, K).indices)


def search_faiss(data: tuple[Tensor, Tensor]) -> Numbers:
    import faiss

    faiss.omp_set_num_threads(torch.get_num_threads())
    bank, queries = (normalize(rows).numpy() for rows in data)
    index = faiss.IndexFlatIP(DIM)
    index.add(bank)
    return checksum(index.search(queries, K)[1])


def search_sklearn(data: tuple[Tensor, Tensor]) -> Numbers:
    from sklearn.neighbors import NearestNeighbors

    bank, queries = (rows.numpy() for rows in data)
    model = NearestNeighbors(n_neighbors=K, metric="cosine", algorithm="brute", n_jobs=1)
    return checksum(model.fit(bank).kneighbors(queries)[1])


def retrieval_ours(rows: Embeddings) -> Numbers:
    every = retrieval_per_query(rows, rows, k=(1, 10), exclude_same_id=True)
    return {n: float(v) for n, v in zip(every.names, every.values.mean(axis=0), strict=True)}


def retrieval_pml(rows: Embeddings, k: int | None) -> Numbers:
    """k: None is as many as the largest class needs, by which no rank is found."""
    from pytorch_metric_learning.utils.accuracy_calculator import AccuracyCalculator

    names = {
        "precision_at_1": "Recall@1",
        "r_precision": "R-precision",
        "mean_average_precision_at_r": "MAP@R",
    }
    if k is not None:
        names |= {"mean_reciprocal_rank": "MRR"}
        k = min(k, int(rows.labels.max()) + 1)
    calculator = AccuracyCalculator(
        tuple(names), k=k or "max_bin_count", device=torch.device("cpu")
    )
    actual = calculator.get_accuracy(rows.features, rows.labels)
    return {ours: float(actual[theirs]) for theirs, ours in names.items()}


def probe_ours(rows: Embeddings) -> Numbers:
    (fitted,) = fit_logistic(rows.features, rows.labels, [1.0], 10, tolerance=1e-6)
    return {"norm of the weights": float(fitted.weight.norm())}


def probe_sklearn(rows: Embeddings) -> Numbers:
    from sklearn.linear_model import LogisticRegression

    model = LogisticRegression(C=1.0, tol=1e-6, max_iter=10_000)
    model.fit(rows.features.double().numpy(), rows.labels.numpy())
    return {"norm of the weights": float((model.coef_**2).sum() ** 0.5)}


DATA: dict[str, Callable[[float], Any]] = {
    "search": lambda size: search_data(int(60_000 * size)),
    "retrieval": lambda size: clusters(int(16_000 * size), int(8_000 * size)),
    "probe": lambda size: clusters(int(10_000 * size), 10),
}
PARTS: dict[str, dict[str, Callable[[Any], Numbers]]] = {
    "search": {"faiss": search_faiss, "ours": search_ours, "scikit-learn": search_sklearn},
    "retrieval": {
        "AccuracyCalculator, k=max_bin_count": partial(retrieval_pml, k=None),
        "AccuracyCalculator, k=1000": partial(retrieval_pml, k=1000),
        "ours": retrieval_ours,
    },
    "probe": {"scikit-learn": probe_sklearn, "ours": probe_ours},
}
NEEDS = {"AccuracyCalculator": "pytorch_metric_learning"}


def measure(part: str, contender: str, size: float, threads: int) -> dict[str, Any]:
    """One contender in this process."""
    torch.set_num_threads(threads)
    run = PARTS[part][contender]
    run(DATA[part](0.02))  # imports, thread pools, kernels chosen
    data = DATA[part](size)
    peak = Peak()
    times: list[tuple[float, float]] = []
    while len(times) < 2 and sum(wall for _, wall in times) < LONG_S:
        start, cpu = time.perf_counter(), time.process_time()
        values = run(data)
        times.append((time.process_time() - cpu, time.perf_counter() - start))
    cpu_s, wall_s = min(times)
    return {"cpu_s": cpu_s, "wall_s": wall_s, "extra_mb": peak.extra_mb(), "values": values}


def measure_part(part: str, size: float, threads: int, skipped: tuple[str, ...]) -> list[Any]:
    """Print and return what each contender takes; their numbers are compared with ours."""
    measured = {
        name: in_fresh_process(measure, part, name, size, threads)
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
    given = parse.parse_args()
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
