"""Whether a training without labels ends below its start: recipes/adapt_mobile.toml on graded sets.

    python -m benchmarks.graded.adapt out/112 --sets mri --seeds 0 1 2 \
        [--json docs/measured/graded_adapt.json] [--set tune.backbone_lr=0.1] [--no-labels]

The recipe trains EfficientNet-Lite0 (out/112/lite0.pth) on the train classes; only its watch reads
their labels. Fashion's images fill no batch of 128: --set data.batch_size=64, beside the rate. With
--no-labels the train images are built anew without any, so that the recall of an image's other view
decides. What the run keeps then embeds the test classes, their whole shorter side at 96 px, and is
compared with the weights as they come, query by query, with intervals over classes. `cpu_s` is the
CPU time of the training with its watch, imports included. --json keeps the rows of earlier calls,
but those of the same set, seed and settings.
"""

import json
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from benchmarks.common import commit, machine, parser, print_table, save, sslpipe
from benchmarks.graded.chosen import children_s
from benchmarks.graded.data import CHARACTERS, NAMES
from benchmarks.graded.jobs import WEIGHTS_FILE, Place, embedded, weights
from benchmarks.graded.table import METRICS, SETS
from benchmarks.trainings import RECIPES, Found, Tree, paired, percent, search
from sslpipe.export.load import FrozenBackbone, load_run

PX = 96  # at which the recipe evaluates
SETTINGS = ("tune.backbone_lr=0.1",)
KEY = ("set", "seed", "settings", "labels")


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("folder", type=Path, help="what `benchmarks.graded.data` wrote, and weights")
    sets = (*SETS, CHARACTERS, NAMES)
    parse.add_argument("--sets", nargs="+", default=sets, choices=sets)
    parse.add_argument("--seeds", type=int, nargs="+", default=[0])
    parse.add_argument("--set", nargs="+", default=[*SETTINGS], help="settings, KEY=VALUE")
    parse.add_argument("--no-labels", action="store_true", help="the watch sees none, either")
    args = parse.parse_args()
    torch.set_num_threads(1)
    known = args.json is not None and args.json.exists()
    rows: list[Tree] = json.loads(args.json.read_text())["rows"] if known else []
    for name in args.sets:
        with TemporaryDirectory() as out:
            study = Study(args.folder, name, Path(out), args.no_labels)
            for seed in args.seeds:
                row = study.row(seed, args.set)
                rows = [old for old in rows if any(old[key] != row[key] for key in KEY)]
                rows.append(row)
                save(args.json, {"machine": machine(1), "rows": rows})
    shown = (*KEY, "kept_step", "cpu_s")
    cells = (
        [
            *(row[key] for key in shown),
            *(percent(row[metric]["more than its start"], "+") for metric in METRICS),
        ]
        for row in rows
    )
    print_table([*shown, *(f"{metric}, more than its start" for metric in METRICS)], cells)


class Study:
    """A set, its start's scores, and the trainings of several seeds.

    Args:
        folder: What `benchmarks.graded.data` wrote, and weights.
        name: Of the set.
        out: Where to write.
        without_labels: Train on a build of the same images that has none.
    """

    def __init__(self, folder: Path, name: str, out: Path, without_labels: bool) -> None:
        self.name, self.out, self.without_labels = name, out, without_labels
        self.place = Place(folder, "cpu", ())
        self.trained_on = folder / name / "dataset.json"
        if without_labels:
            listing = folder / f"{name}.csv"
            words = ["--source", "csv", "--csv", listing, "--split-column", "split", "--no-labels"]
            words += ["--background", "white", "--skip-bad", "--resize-px", 224]
            sslpipe("shards", "build", out / "data", *words)
            self.trained_on = out / "data" / "dataset.json"
        self.start = self.score(weights(folder))

    def score(self, model: FrozenBackbone) -> Found:
        """Search each test image among the others of test."""
        view = model.view.config()
        rows = embedded(self.place, self.name, "test", model.backbone, view, sides=(PX,))
        return search(rows)

    def row(self, seed: int, settings: list[str]) -> dict[str, Any]:
        """Train, and compare what the run keeps with the start."""
        run_dir = self.out / f"run_{seed}"
        init = f"timm/tf_efficientnet_lite0@{self.place.folder / WEIGHTS_FILE}"
        words = ["--init", init, "--data", self.trained_on, "--run-dir", run_dir]
        words += [f"seed={seed}", "run.device=cpu", *settings]
        before_s = children_s()
        sslpipe("train", RECIPES / "adapt_mobile.toml", *words)
        cpu_s = round(children_s() - before_s, 1)
        model = load_run(run_dir)
        kept = self.score(model)
        return {
            "set": self.name,
            "seed": seed,
            "settings": settings,
            "labels": not self.without_labels,
            "commit": commit(),
            "kept_step": model.config.facts["step"],
            "cpu_s": cpu_s,
            **{metric: compared(kept, self.start, metric) for metric in METRICS},
        }


def compared(kept: Found, start: Found, metric: str) -> Tree:
    now, before = kept.values[metric], start.values[metric]
    return {
        "value": round(float(now.mean()), 5),
        "start": round(float(before.mean()), 5),
        "more than its start": paired(now, before, kept.classes),
    }


if __name__ == "__main__":
    main()
