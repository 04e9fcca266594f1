"""Objectives at equal CPU seconds: kNN of a small set from scratch.

    sslpipe shards build out/demo/data --source idx --root assets/fashion-mnist-10k \
        --test-fraction 0.2 --scatter
    python -m benchmarks.objectives out/demo --seconds 300 --json docs/measured/objectives.json

Recipe `demo` (fp32, 128 images a batch, a quarter of its multiplications) with other objectives;
steps so many that each row takes --seconds of one core for them, by the seconds of a step on an AMD
EPYC. What each run took, imports included, stands in the table.
"""

import sys
from typing import Any

import torch

from benchmarks.common import machine, print_table, save
from benchmarks.trainings import (
    QUIET,
    RECIPES,
    Training,
    arguments,
    cpu_seconds,
    embedded,
    run_folder,
    train_all,
)
from sslpipe.data.index import load_index
from sslpipe.evaluation.knn import knn_accuracies
from sslpipe.export.load import load_run

SMALL = ("backbone.widths=[16,32,64]", "data.batch_size=128", "optim.peak_lr=0.3")
SMALL += ("optim.precision=fp32", "run.save_steps=9999")
QUEUE = ("loss.kind=moco", "loss.queue_rows=2048", "momentum.start=0.97")
# row -> seconds of a step, settings
ROWS: dict[str, tuple[float, tuple[str, ...]]] = {
    "NT-Xent": (0.105, ()),
    "DCL": (0.105, ("loss.kind=dcl",)),
    "queue (MoCo)": (0.08, QUEUE),
}


def training(row: str, seed: int, seconds: float) -> Training:
    """Return a row's run: its warm-up is a fifth, as the recipe's."""
    step_s, settings = ROWS[row]
    steps = round(seconds / step_s)
    lengths = (f"steps={steps}", f"optim.warmup_steps={steps // 5}")
    return Training(row, seed, RECIPES / "demo.toml", "data", (*lengths, *SMALL, *QUIET, *settings))


def main() -> None:
    args = arguments(__doc__, seconds="300")
    seconds = float(args.seconds)
    torch.set_num_threads(1)
    runs = [[training(row, seed, seconds)] for seed in args.seeds for row in ROWS]
    train_all(runs, args.folder, args.jobs)

    index = load_index(str(args.folder / "data" / "dataset.json"))
    splits = [index.split(name) for name in ("train", "test")]
    took = cpu_seconds(args.folder, list(ROWS), args.seeds)
    rows: list[dict[str, Any]] = []
    for row in ROWS:
        knn = []
        for seed in args.seeds:
            run_dir = run_folder(args.folder, row, seed)
            files = [run_dir / f"{split.name}.safetensors" for split in splits]
            load = lambda run_dir=run_dir: load_run(run_dir)  # noqa: E731
            bank, queries = (
                embedded(file, split, load, {}, canvas_px=28)
                for file, split in zip(files, splits, strict=True)
            )
            (value,) = knn_accuracies(bank, queries, k=(20,)).values()
            knn.append(value)
        print(f"scored: {row}", file=sys.stderr, flush=True)
        steps = training(row, 0, seconds).overrides[0].removeprefix("steps=")
        rows.append({"row": row, "steps": int(steps), "knn": knn, "cpu_s": took[row]})
    save(args.json, {"machine": machine(1), "seeds": args.seeds, "rows": rows})
    print_table(
        ("", "steps", "kNN (k = 20) of each seed", "CPU s"),
        [
            (
                row["row"],
                row["steps"],
                ", ".join(f"{100 * value:.1f}" for value in row["knn"]),
                ", ".join(f"{value:.0f}" for value in row["cpu_s"]),
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
