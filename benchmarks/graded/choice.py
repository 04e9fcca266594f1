"""How far the answer of `sslpipe choose` is from the best, on each of the graded sets.

    python -m benchmarks.graded.choice out/graded [--json docs/measured/graded_choice.json]

The candidates of `benchmarks.graded.table` and their joins are ranked on the train classes, with
labels, with those of two images of each class (the mean of DRAWS draws; all other images have
none), and without, as the command does; then every row is measured on the test classes, its
spectrum learned on train. A regret is what the best row there has more than the chosen one, in
points. For comparison: EfficientNet-Lite0 at 128 px as it is, and the join of its sizes at power
0.25 without any choice. The two tuning sets chose the rules; the others were read once.
"""

from pathlib import Path
from statistics import fmean
from typing import Any

import torch

from benchmarks.common import print_table
from benchmarks.graded.data import TUNING
from benchmarks.graded.table import (
    BASE,
    BATCH_SIZE,
    CANDIDATES,
    JOINS,
    LABELS,
    METRICS,
    flattened,
    joined,
    measure,
    network,
)
from benchmarks.trainings import embedded, search
from sslpipe.data.index import load_index
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.few_shot import few_rows
from sslpipe.evaluation.flatten import POWERS
from sslpipe.search.ranking import CornerViews, rank_with_labels, rank_without_labels

ROWS = [*((name,) for name in CANDIDATES), *JOINS]
ALWAYS = (("lite0@96", "lite0@160"), 0.25)
Row = tuple[tuple[str, ...], float | None]
DRAWS = 3


def main() -> None:
    sets = measure(__doc__, {"tuning": list(TUNING)}, regrets)
    for metric in METRICS:
        lines = [
            [how, *(f"{tree[how][metric]:.1f}" for tree in sets.values())]
            for how in next(iter(sets.values()))
        ]
        print_table([f"{metric}, regret", *sets], lines)


def regrets(folder: Path, name: str) -> dict[str, dict[str, float]]:
    """Choose on the classes of train; return how -> metric -> regret on those of test."""
    features = {each: joined(folder, name, "train", each) for each in CANDIDATES}
    corners = {each: corner_features(folder, name, each) for each in CANDIDATES}
    few = [with_few_labels(features, draw) for draw in range(DRAWS)]
    chosen: dict[str, list[Row]] = {
        "with labels": [rank_with_labels(features, ROWS)[0][:2]],
        f"with labels of {LABELS} images a class": [rank_with_labels(f, ROWS)[0][:2] for f in few],
        "without labels": [rank_without_labels(features, corners, ROWS)[0][:2]],
        "always two sizes, power 0.25": [ALWAYS],
        f"{BASE}, as it is": [((BASE,), None)],
    }
    found: dict[Row, dict[str, float]] = {}
    for parts in ROWS:
        train, test = (joined(folder, name, split, "+".join(parts)) for split in ("train", "test"))
        for power, rows in flattened(train, test, POWERS).items():
            scores = search(rows)
            found[parts, power] = {m: float(scores.values[m].mean()) for m in METRICS}
    best = {metric: max(row[metric] for row in found.values()) for metric in METRICS}
    return {
        how: {m: 100 * fmean(best[m] - found[row][m] for row in rows) for m in METRICS}
        for how, rows in chosen.items()
    }


def with_few_labels(features: dict[str, Embeddings], draw: int) -> dict[str, Embeddings]:
    """Keep the labels of LABELS drawn images of each class; all others become unlabelled, -1."""
    first = next(iter(features.values()))
    labels = torch.full_like(first.labels, -1)
    known = few_rows(first, LABELS, 0, draw)
    labels[known] = first.labels[known]
    return {name: rows._replace(labels=labels) for name, rows in features.items()}


def corner_features(folder: Path, name: str, candidate: str) -> Embeddings:
    """Embed both corners of each train image, or read them: (N, 2 F)."""
    path = folder / "features" / f"{name}-train-{candidate}-corners.safetensors"
    split = load_index(str(folder / name / "dataset.json")).split("train")
    options: dict[str, Any] = {"canvas_px": 320, "batch_size": BATCH_SIZE}
    return embedded(path, split, lambda: network(candidate), {}, view_of=CornerViews, **options)


if __name__ == "__main__":
    main()
