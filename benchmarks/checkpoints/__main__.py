"""Runs, their checkpoints' label-free scores and kNN, and how far the scores find the better ones.

    python -m benchmarks.checkpoints out/checkpoints [--jobs 2] \
        [--json docs/measured/checkpoints.json]

`out/checkpoints` holds what `benchmarks.checkpoints.data` builds; numbers go there, too. What is
done is not done again, so a stopped command is repeated.

Every run of RUNS on each data set keeps its checkpoints (every 80 of 320 steps). The scores
of a checkpoint are of the 500 images that the run holds out, as its monitor takes them. What they
are to predict is kNN (k = 20, weighted by similarity) of up to 3,000 test images in up to 2,000
labelled training images, neither of which a score sees. `holdout_knn` is no score without labels:
it is the kNN of the held-out images, and says what is lost by their small number alone.
Spearman: over all checkpoints of a data set, over the last ones, and within each run (mean).
* marks a score that reaches the goal on a data set.
Regret, in points of kNN: what the checkpoint with the highest score has less than the best one;
among the last checkpoints of all runs (which recipe), among all checkpoints, and within each run
(which step: mean and largest). A checkpoint that is no better than the random weights at the start
counts as failed, a run whose last one is better as healthy; "failed" beside what a score picks
says that its choice among runs is one.
"""

import json
import shutil
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.checkpoints.table import START, WITH_LABELS, show, table
from benchmarks.common import machine, parser, save
from sslpipe.augment.eval_view import eval_view_for
from sslpipe.augment.probe_view import ProbeViews, by_view
from sslpipe.build import build_model
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.data.plan import holdout_ids
from sslpipe.evaluation.embed import embed
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.label_free import SCORES, label_free_numbers
from sslpipe.export.load import Weights, load_run
from sslpipe.models.backbones import Backbone
from sslpipe.portable import write_atomically
from sslpipe.recipe import load_recipe
from sslpipe.run.checkpoint_files import checkpoint_names
from sslpipe.train import train

BASE = Path(__file__).with_name("base.toml")

_CONSTANT = ("optim.peak_lr=1e-2", "optim.schedule=constant")
_AVERAGE = "optim.ema=0.95"  # over the last 1 / (1 - 0.95) = 20 steps

# name -> overrides: temperatures, objectives, rates, views, collapses (of the projection and of the
# weights), averages; no kind is last, so that a table that is stopped early has some of each
RUNS: dict[str, tuple[str, ...]] = {
    "base": (),
    "temperature 0.05": ("loss.temperature=0.05",),
    "temperature 1": ("loss.temperature=1.0",),
    "rate / 20": ("optim.peak_lr=1e-4",),
    "strong views": ("augment.crop_area=[0.02,0.3]", "augment.jitter_strength=1.0"),
    "weights decay": (
        "optim.weight_decay=20.0",
        "optim.decay_one_dim=true",
        "optim.schedule=constant",
    ),
    "weak views": ("augment.crop_area=[0.9,1.0]", "augment.jitter_prob=0.0"),
    "moco": ("loss.kind=moco", "loss.queue_rows=1024", "momentum.start=0.99"),
    "projection of 2": ("projector.out_dim=2",),
    "rate x 10": ("optim.peak_lr=2e-2", "optim.warmup_steps=0"),
    "dcl": ("loss.kind=dcl",),
    "colour alone": ("augment.crop_area=[0.9,1.0]", "augment.jitter_strength=1.0"),
    "constant rate x 5": _CONSTANT,
    "constant rate x 5, averaged": (*_CONSTANT, _AVERAGE),
    "hard negatives": ("loss.kind=hard_negatives",),
    "averaged": (_AVERAGE,),
    "temperature 0.5": ("loss.temperature=0.5",),
    "seed 1": ("seed=1",),
}

DATA_SETS = ("clothes", "drawings", "letters")
# these are gray and upright; nothing else differs between the data sets
GRAY = ("augment.preset=grayscale",)
OVERRIDES = {"clothes": GRAY, "letters": GRAY}
TEST_IMAGES, BANK_IMAGES, K = 3000, 2000, 20

CROP_PX, CANVAS_PX = 24, 40  # base.toml's

Tree = dict[str, Any]
Floats = NDArray[np.float64]


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("folder", type=Path, help="what benchmarks.checkpoints.data built")
    parse.add_argument("--jobs", type=int, default=1, help="runs side by side, a thread each")
    args = parse.parse_args()
    todo = [(args.folder, data, run) for run in (START, *RUNS) for data in DATA_SETS]
    left = [each for each in todo if not numbers_file(*each).exists()]
    one_thread = {"initializer": torch.set_num_threads, "initargs": (1,)}
    with ProcessPoolExecutor(args.jobs, **one_thread) as pool:
        for done in pool.map(measure, *zip(*left, strict=True)) if left else ():
            print(done, file=sys.stderr, flush=True)
    checkpoints = [row for where in todo for row in scored(*where)]
    tables = {data: table(checkpoints, data) for data in DATA_SETS}
    result = {"machine": machine(1), "tables": tables, "checkpoints": checkpoints}
    # an infinite score has no number in JSON
    save(args.json, json.loads(json.dumps(result), parse_constant=lambda _: None))
    show(tables)


def measure(folder: Path, data: str, run: str) -> str:
    """Train a run and keep the numbers of its checkpoints."""
    target = numbers_file(folder, data, run)
    index = load_index(str(folder / data / "dataset.json"))
    recipe = load_recipe(BASE, (*OVERRIDES.get(data, ()), *RUNS.get(run, ())))
    ids = holdout_ids(recipe, index.split("train"))
    if run == START:
        rows = {"step-00000000": measured(build_model(recipe, CROP_PX).backbone, index, ids)}
    else:
        run_dir = target.with_suffix("")
        train(recipe, index, run_dir)
        weights: Weights = "trained" if recipe.optim.ema is None else "ema"
        rows = {}
        for name in checkpoint_names(run_dir / "checkpoints"):
            backbone = load_run(run_dir, checkpoint=name, weights=weights).backbone
            rows[name] = measured(backbone, index, ids)
        shutil.rmtree(run_dir)
    write_atomically(target, json.dumps(rows, indent=1))
    return f"{data}, {run}: {[round(100 * row['knn'], 1) for row in rows.values()]}"


def numbers_file(folder: Path, data: str, run: str) -> Path:
    name = f"{data}-{run.replace(' ', '_').replace('/', 'over')}.json"
    (folder / "runs").mkdir(exist_ok=True)
    return folder / "runs" / name


def measured(backbone: Backbone, index: DatasetIndex, ids: NDArray[np.int64]) -> dict[str, float]:
    """Label-free numbers of the held-out images, and kNN of test images in other train images."""
    mean, std = index.manifest.mean, index.manifest.std
    view, probe = eval_view_for(CROP_PX, mean, std), ProbeViews(CROP_PX, mean, std)
    options: dict[str, Any] = {"canvas_px": CANVAS_PX, "num_workers": 0}
    split, test = index.split("train"), index.split("test")
    held_out = embed(backbone, view, split, ids=ids, **options)
    views = embed(backbone, probe, split, ids=ids, **options).features
    bank_ids = np.setdiff1d(np.flatnonzero(split.labels >= 0), ids)
    queries, bank = (
        embed(backbone, view, part, ids=evenly(chosen, most), **options)
        for part, chosen, most in (
            (test, np.arange(len(test)), TEST_IMAGES),
            (split, bank_ids, BANK_IMAGES),
        )
    )
    (knn,) = knn_results(bank, queries, k=(K,))
    (holdout_knn,) = knn_results(held_out, held_out, k=(K,), exclude_same_id=True)
    free = label_free_numbers(held_out.features, by_view(views))
    return {"knn": knn.value, WITH_LABELS: holdout_knn.value, **free}


def evenly(ids: NDArray[np.int64], most: int) -> NDArray[np.int64]:
    """Evenly spaced ones of sorted ids, `most` at most."""
    return ids if len(ids) <= most else ids[np.arange(most) * len(ids) // most]


def scored(folder: Path, data: str, run: str) -> list[Tree]:
    """Read a run's checkpoints with every score; none where it is not measured yet."""
    path = numbers_file(folder, data, run)
    if not path.exists():
        return []
    found = []
    for name, numbers in json.loads(path.read_text()).items():
        scores = {key: score(numbers) for key, score in SCORES.items()}
        scores[WITH_LABELS] = numbers[WITH_LABELS]
        step = int(name.removeprefix("step-"))
        found.append({"data": data, "run": run, "step": step, "knn": numbers["knn"], **scores})
    return found


if __name__ == "__main__":
    main()
