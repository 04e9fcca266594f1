"""How far the answer of `sslpipe choose` is from the best, on each of the graded sets.

    python -m benchmarks.graded.choice out/graded [--json docs/measured/graded_choice.json]

The candidates of `benchmarks.graded.table` and their joins are ranked on the train classes, with
labels and without, as the command does; then every row is measured on the test classes, its
spectrum learned on train. A regret is what the best row there has more than the chosen one, in
points. For comparison: EfficientNet-Lite0 at 128 px as it is, and the join of its sizes at power
0.25 without any choice. The two tuning sets chose the rules; the others were read once.
"""

from pathlib import Path

import torch

from benchmarks.common import print_table
from benchmarks.graded.data import TUNING
from benchmarks.graded.table import (
    BASE,
    CANDIDATES,
    JOINS,
    METRICS,
    joined,
    measure,
    network,
    score,
)
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import load_index
from sslpipe.evaluation.choose import (
    POWERS,
    CornerViews,
    rank_with_labels,
    rank_without_labels,
)
from sslpipe.evaluation.embed import Embeddings, embed, load_embeddings, save_embeddings

ROWS = [*((name,) for name in CANDIDATES), *JOINS]
ALWAYS = (("lite0@96", "lite0@160"), 0.25)
Row = tuple[tuple[str, ...], float | None]


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
    chosen: dict[str, Row] = {
        "with labels": rank_with_labels(features, ROWS)[0][:2],
        "without labels": rank_without_labels(features, corners, ROWS)[0][:2],
        "always two sizes, power 0.25": ALWAYS,
        f"{BASE}, as it is": ((BASE,), None),
    }
    found: dict[Row, dict[str, float]] = {}
    for parts in ROWS:
        train, test = (joined(folder, name, split, "+".join(parts)) for split in ("train", "test"))
        for power in (None, *POWERS):
            scores = score(train, test, power)
            found[parts, power] = {m: float(scores.values[m].mean()) for m in METRICS}
    best = {metric: max(row[metric] for row in found.values()) for metric in METRICS}
    return {
        how: {metric: 100 * (best[metric] - found[row][metric]) for metric in METRICS}
        for how, row in chosen.items()
    }


def corner_features(folder: Path, name: str, candidate: str) -> Embeddings:
    """Embed both corners of each train image, or read them: (N, 2 F)."""
    path = folder / "features" / f"{name}-train-{candidate}-corners.safetensors"
    if not path.exists():
        model = network(candidate)
        px, mean, std = (model.view.config()[key] for key in ("crop_px", "mean", "std"))
        backbone = model.backbone.to(memory_format=torch.channels_last)
        split = load_index(str(folder / name / "dataset.json")).split("train")
        view = CornerViews(EvalView(px, px, mean, std))
        save_embeddings(path, embed(backbone, view, split, canvas_px=320, num_workers=0), {})
    return load_embeddings(path)[0]


if __name__ == "__main__":
    main()
