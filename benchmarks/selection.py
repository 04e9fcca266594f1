"""Which images to label first: a choice by coverage against a random one of as many.

    python -m benchmarks.selection TRAIN TEST [--draws 20] [--json FILE]

TRAIN and TEST are files of embeddings of two splits, `make demo`'s by default; samples without a
label are left out. In each draw a random half of TRAIN is the pool. From it each way chooses ten
samples for every class that there is, without looking at a label or at how many of each class it
takes; then the labels of the chosen are shown, and TEST is classified: by the 10 nearest and the
single nearest of the chosen (weighted vote, T = 0.07), and by logistic regression at C = 0.01 on
features standardised over the pool. Both ways have the same pools. Intervals (95 %) resample draws
and test samples. random: uniform. coverage: `sslpipe.curate.labelling`.
"""

from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import parser, print_table, save
from sslpipe.curate.labelling import by_coverage
from sslpipe.evaluation.difference import bootstrap95
from sslpipe.evaluation.embed import Embeddings, check_comparable, load_embeddings
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.linear_probe import standardisation
from sslpipe.evaluation.logistic import fit_logistic, predict
from sslpipe.random import permutation

DEMO = Path("out/demo/run/features")
A_CLASS = 10  # labels
MEASURES = ("kNN k=10", "kNN k=1", "linear")

Rows = NDArray[np.int64]
Way = Callable[[Embeddings, int, int], Rows]  # pool, count, draw -> chosen


def by_chance(pool: Embeddings, count: int, draw: int) -> Rows:
    return permutation(len(pool.ids), 2, draw)[:count]


def ours(pool: Embeddings, count: int, draw: int) -> Rows:
    return np.array([one.row for one in by_coverage(pool, count, seed=draw)])


WAYS: dict[str, Way] = {"random": by_chance, "coverage": ours}


def right(pool: Embeddings, chosen: Rows, test: Embeddings) -> NDArray[np.bool_]:
    """(measures, Q) which test samples are classified right."""
    few = pool.rows(torch.from_numpy(chosen))
    of_1, of_10 = (np.asarray(one.scores) for one in knn_results(few, test, k=(1, 10)))
    mean, scale = standardisation(pool.features)
    classes = 1 + int(test.labels.max())
    few_x = (few.features - mean) / scale
    (fitted,) = fit_logistic(few_x, few.labels, [0.01], classes, tolerance=1e-5)
    linear = predict(fitted, (test.features - mean) / scale).numpy()
    return np.stack([of_10, of_1, linear == test.labels.numpy()])


def labelled(rows: Embeddings) -> Embeddings:
    """Leave out what has no label: whether it is classified right is not known."""
    return rows.rows((rows.labels >= 0).nonzero()[:, 0])


def measure(train: Embeddings, test: Embeddings, draws: int) -> dict[str, NDArray[np.bool_]]:
    """Way -> (draws, measures, Q)."""
    classes = len(torch.unique(train.labels))
    count = A_CLASS * classes
    hits: dict[str, list[NDArray[np.bool_]]] = {name: [] for name in WAYS}
    for draw in range(draws):
        half = permutation(len(train.ids), 1, draw)[: len(train.ids) // 2]
        pool = train.rows(torch.from_numpy(np.sort(half)))
        for name, way in WAYS.items():
            hits[name].append(right(pool, way(pool, count, draw), test))
        print(f"draw {draw + 1} of {draws}", flush=True)
    return {name: np.stack(parts) for name, parts in hits.items()}


def percent(hits: NDArray[np.generic]) -> dict[str, float]:
    """Mean and interval in percent. hits: (draws, Q)."""
    low, high = bootstrap95(hits)
    return {
        name: round(100 * float(v), 2)
        for name, v in (("mean", hits.mean()), ("low", low), ("high", high))
    }


def table(hits: dict[str, NDArray[np.bool_]]) -> dict[str, dict[str, object]]:
    """Way -> measure -> accuracy, and its difference from that of the first way."""
    plain = next(iter(hits.values())).astype(np.int8)
    return {
        name: {
            what: {
                "accuracy": percent(each[:, k]),
                "more than random": percent(each[:, k].astype(np.int8) - plain[:, k]),
            }
            for k, what in enumerate(MEASURES)
        }
        for name, each in hits.items()
    }


def show(title: str, rows: dict[str, dict[str, object]]) -> None:
    cells = []
    for name, row in rows.items():
        cells.append([name])
        for what in MEASURES:
            more = row[what]["more than random"]
            ends = f"[{more['low']:+.1f}, {more['high']:+.1f}]"
            cells[-1].append(f"{row[what]['accuracy']['mean']:.1f} {more['mean']:+.1f} {ends}")
    print_table([title, *MEASURES], cells)


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("features", nargs="*", type=Path, metavar="TRAIN TEST")
    parse.add_argument("--draws", type=int, default=20)
    args = parse.parse_args()
    paths = args.features or [DEMO / "train.safetensors", DEMO / "test.safetensors"]
    if len(paths) != 2:
        parse.error("give two files of embeddings, TRAIN and TEST")
    (train, facts), (test, test_facts) = map(load_embeddings, paths)
    check_comparable(facts, test_facts, itself=False)
    train, test = labelled(train), labelled(test)
    hits = measure(train, test, args.draws)
    rows = table(hits)
    count = A_CLASS * len(torch.unique(train.labels))
    show(f"{count} labels: accuracy in %, difference from random", rows)
    words = [*args.features, "--json", args.json]
    tree = {
        "command": f"python -m benchmarks.selection {' '.join(map(str, words))}",
        "versions": {name: version(name) for name in ("torch", "numpy", "scikit-learn")},
        **{key: facts.get(key) for key in ("data", "backbone", "backbone_sha256")},
        **{"pool": len(train.ids) // 2, "test": len(test.ids), "draws": args.draws},
        **{"labels": count, "first": rows},
    }
    save(args.json, tree)


if __name__ == "__main__":
    main()
