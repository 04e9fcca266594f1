"""What tables of whole trainings share: arguments, runs, the seconds they took, features."""

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import torch

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings, embed, load_embeddings, save_embeddings
from sslpipe.export.load import FrozenBackbone

RECIPES = Path(__file__).parents[1] / "recipes"
QUIET = ("data.holdout=0", "run.monitor_steps=0", "run.num_workers=0")  # the time is for training
# glibc gives freed memory back, and faults it in again: 40 % of the time of small networks
KEEP_MEMORY = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(8 << 30))


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
    parser = argparse.ArgumentParser(description=(doc or "").partition("\n")[0])
    parser.add_argument("folder", type=Path, help="of the data sets; runs and features go there")
    parser.add_argument("--seeds", default="0,1,2", type=lambda text: [*map(int, text.split(","))])
    parser.add_argument("--split", default="test", choices=("val", "test"))
    parser.add_argument("--jobs", type=int, default=2, help="runs side by side, a thread each")
    parser.add_argument("--json", type=Path)
    for name, default in sources.items():
        parser.add_argument(f"--{name}", default=default)
    return parser.parse_args()


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
    canvas_px: int,
) -> Embeddings:
    """Embed the whole shorter side of a split's images, or read what is at `path`.

    `load` gives the network, with its own view's side, mean and std.
    """
    if path.exists():
        return load_embeddings(path)[0]
    model = load()
    crop_px, mean, std = (model.view.config()[key] for key in ("crop_px", "mean", "std"))
    backbone = model.backbone.to(memory_format=torch.channels_last)
    view = EvalView(crop_px, crop_px, mean, std)
    rows = embed(backbone, view, split, canvas_px=canvas_px, num_workers=0)
    save_embeddings(path, rows, facts)
    return rows


def cpu_seconds(folder: Path, rows: Sequence[str], seeds: Sequence[int]) -> dict[str, list[float]]:
    """Read the processor seconds of each trained row's runs."""
    found = {}
    for row in rows:
        paths = [Path(f"{run_folder(folder, row, seed)}.cpu.json") for seed in seeds]
        found[row] = [json.loads(path.read_text()) for path in paths if path.exists()]
    return {row: seconds for row, seconds in found.items() if seconds}
