"""Another vendor's drawing as the positive, against another crop of the same one, and labels.

    python -m benchmarks.pairs.table out/pairs [--split val] [--json docs/measured/pairs.json]
    python -m benchmarks.pairs.table out/pairs --rows "pairs, other theme, 32 px" \
        --json docs/measured/pairs_32px.json

`out/pairs` holds what `benchmarks.pairs.data` builds; runs and features go there, too. What is done
is not done again. All rows train recipes/my_images_small.toml, changed by SETTINGS, from scratch,
for 2 and 5 CPU minutes with three seeds:

two crops: no column. pairs: the second view is of another drawing of the same thing
(pairs.positive). pairs, other theme: of another theme (pairs.different). SupCon: two crops, and all
drawings of a thing in the batch are positives (pairs.label). pairs, other theme, 32 px: the same at
two thirds of the side, for 5 minutes alone. `--rows` names some rows.

The steps of a run were fixed beforehand from the processor seconds of one step on this machine; the
seconds it took, imports included, are recorded. Every network sees whole images.
Recall@1: each drawing searches all drawings of other themes; is the nearest one of the same thing?
Queries without such a drawing are counted and left out. Flattened: `sslpipe whiten` at power 1,
fitted on the train drawings.
Three sizes: one network sees each drawing at the side of its training and at 1.25 and 1.5 times
that. A difference of Recall@1 is of the means over the seeds, its interval over things. Settings
were chosen with `--split val`; "test" was read once, at the end.
"""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from benchmarks.common import machine, parser, print_table, save
from benchmarks.trainings import (
    QUIET,
    RECIPES,
    Floats,
    Found,
    Tree,
    embedded,
    paired,
    percent,
    search,
    side_by_side,
)
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split, load_index
from sslpipe.evaluation.embed import Embeddings, EmbedOptions
from sslpipe.evaluation.features import pixel_features
from sslpipe.evaluation.groups import group_codes
from sslpipe.evaluation.intervals import bootstrap_means95
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.load import load_backbone

PIXELS, CROPS, PAIRS, DIFFERENT = "pixels", "two crops", "pairs", "pairs, other theme"
SUPCON, SMALL = "SupCon", "pairs, other theme, 32 px"
FLATTENED, SIZES = ", flattened", ", three sizes, flattened"
SIDES = (1.0, 1.25, 1.5)  # of three sizes, as shares of the training's
CROP_PX, CANVAS_PX = 48, 96
SETTINGS = (
    "backbone.widths=[16, 32, 64, 128]",
    "projector.num_layers=1",
    "projector.out_dim=128",
    f"augment.crop_px={CROP_PX}",
    "data.batch_size=128",
    f"data.canvas_px={CANVAS_PX}",
    "optim.precision=bf16",
    *QUIET,
)
# what a row adds
SHORT_ROWS = {
    CROPS: (),
    PAIRS: ("pairs.positive=icon",),
    DIFFERENT: ("pairs.positive=icon", "pairs.different=theme"),
    SUPCON: ("pairs.label=icon", "loss.kind=sup_con"),
}
LONG_ROWS = {  # of 5 minutes alone; the steps are those of a core without bf16
    SMALL: (
        *SHORT_ROWS[DIFFERENT],
        *("augment.crop_px=32", "optim.precision=fp32", "steps=1400", "optim.warmup_steps=140"),
    )
}
ROWS = SHORT_ROWS | LONG_ROWS
# steps that fill the minutes, by processor seconds of a step on one core of an AMD EPYC
STEPS = {2: 650, 5: 1_650}
COMPARED = (
    *((PAIRS, CROPS), (DIFFERENT, CROPS), (DIFFERENT, PAIRS), (SUPCON, CROPS), (DIFFERENT, SUPCON)),
    *((kind + form, kind) for kind in (DIFFERENT, SMALL) for form in (FLATTENED, SIZES)),
    *((SMALL + form, DIFFERENT + form) for form in ("", FLATTENED, SIZES)),
)
FORMS = {DIFFERENT: (FLATTENED, SIZES), SMALL: (FLATTENED, SIZES)}
# glibc gives freed memory back, and faults it in again: 40 % of the time of small networks
KEEP_MEMORY = dict.fromkeys(("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_"), str(8 << 30))


class Training(NamedTuple):
    """A run of a row."""

    kind: str
    minutes: int
    seed: int

    @property
    def row(self) -> str:
        return row_name(self.kind, self.minutes)

    @property
    def overrides(self) -> tuple[str, ...]:
        steps = STEPS[self.minutes]
        return (f"steps={steps}", f"optim.warmup_steps={steps // 10}", *SETTINGS, *ROWS[self.kind])

    def folder(self, root: Path) -> Path:
        return root / "runs" / f"{self.row.replace(', ', '-').replace(' ', '_')}-{self.seed}"


def row_name(kind: str, minutes: int) -> str:
    return f"{kind}, {minutes} min"


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("folder", type=Path, help="of the data set; runs and features go there")
    parse.add_argument("--seeds", default="0,1,2", type=lambda text: [*map(int, text.split(","))])
    parse.add_argument("--split", default="test", choices=("val", "test"))
    parse.add_argument("--jobs", type=int, default=2, help="runs side by side, a thread each")
    parse.add_argument("--rows", default="; ".join(ROWS), help="names, joined by '; '")
    args = parse.parse_args()
    torch.set_num_threads(1)
    named = args.rows.split("; ")
    if unknown := {*named} - {*ROWS}:
        raise SystemExit(f"--rows: no row is called {min(unknown)!r}; join their names by '; '")
    runs = [
        Training(kind, minutes, seed)
        for minutes in STEPS
        for seed in args.seeds
        for kind in ROWS
        if kind in named and (kind in SHORT_ROWS or minutes == max(STEPS))
    ]
    with ThreadPoolExecutor(args.jobs) as pool:
        list(pool.map(lambda run: train(run, args.folder), runs))

    # features of every network, then scores of every query
    index = load_index(str(args.folder / "icons" / "dataset.json"))
    splits = (index.split("train"), index.split(args.split))
    view = EvalView(CROP_PX, CROP_PX)
    options = EmbedOptions(canvas_px=CANVAS_PX, num_workers=0)
    rows = pixel_features(splits, view, options)
    found: dict[str, dict[int, Found]] = {PIXELS: {0: score(splits[1], rows[1])}}
    for run in runs:
        run_dir = run.folder(args.folder)
        rows = features(run_dir, splits)
        found.setdefault(run.row, {})[run.seed] = score(splits[1], rows[1])
        for form in FORMS.get(run.kind, ()):
            _, changed = flattened(*(at_sizes(run_dir, splits) if form == SIZES else rows))
            row = row_name(run.kind + form, run.minutes)
            found.setdefault(row, {})[run.seed] = score(splits[1], changed)
        print(f"scored: {run_dir.name}", file=sys.stderr, flush=True)

    # the table
    seconds: dict[str, list[float]] = {}
    for run in runs:
        if (path := cpu_file(run, args.folder)).exists():
            seconds.setdefault(run.row, []).append(json.loads(path.read_text()))
    pairs = [(row_name(a, minutes), row_name(b, minutes)) for minutes in STEPS for a, b in COMPARED]
    result = {
        "machine": machine(1),
        "split": args.split,
        "images": {split.name: len(split) for split in splits},
        "settings": SETTINGS,
        "steps": STEPS,
        "added": {kind: LONG_ROWS[kind] for kind in named if kind in LONG_ROWS},
        "rows": [summary(row, scores, seconds.get(row, [])) for row, scores in found.items()],
        "differences": [difference(*pair, found) for pair in pairs if {*pair} <= {*found}],
    }
    save(args.json, result)
    show(result)


def train(run: Training, folder: Path) -> None:
    """Run `sslpipe train` in a process of one thread, unless it is done; record its seconds."""
    run_dir = run.folder(folder)
    if (run_dir / "DONE").exists():
        return
    words: list[Any] = ["train", RECIPES / "my_images_small.toml", "--run-dir", run_dir]
    words += ["--data", folder / "icons" / "dataset.json", f"seed={run.seed}", *run.overrides]
    run_dir.parent.mkdir(parents=True, exist_ok=True)
    with (
        open(f"{run_dir}.log", "a") as log,
        subprocess.Popen(
            [sys.executable, "-m", "sslpipe", *map(str, words)],
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
    path = cpu_file(run, folder)
    before = json.loads(path.read_text()) if path.exists() else 0.0
    path.write_text(json.dumps(before + usage.ru_utime + usage.ru_stime))


def cpu_file(run: Training, folder: Path) -> Path:
    return Path(f"{run.folder(folder)}.cpu.json")


def features(
    run_dir: Path, splits: Sequence[Split], side_px: int | None = None
) -> tuple[Embeddings, ...]:
    """Embed both splits by a run's backbone, or read what was embedded. None: its own side."""
    load, found = cache(partial(load_backbone, run_dir)), []
    for split in splits:
        name = f"{run_dir.name}{f'-{side_px}px' if side_px else ''}-{split.name}.safetensors"
        path = run_dir.parent.parent / "features" / name
        facts = {"run": run_dir.name, "split": split.name, "side_px": str(side_px or "its own")}
        found.append(embedded(path, split, load, facts, canvas_px=CANVAS_PX, side_px=side_px))
    return tuple(found)


def at_sizes(run_dir: Path, splits: Sequence[Split]) -> tuple[Embeddings, ...]:
    """Embed both splits at three sizes: the features of each with length 1, side by side."""
    own_px = load_backbone(run_dir).view.config()["crop_px"]
    sizes = [features(run_dir, splits, int(own_px * share)) for share in SIDES]
    return tuple(side_by_side(rows) for rows in zip(*sizes, strict=True))


def score(split: Split, rows: Embeddings) -> Found:
    """Search each row among those of other themes."""
    side = (split, rows.ids.numpy())
    return search(rows, exclude_same=group_codes("theme", side, side))


def hits_of(found: Found) -> Floats:
    """(Q,) whether the nearest row is a match."""
    return found.values["Recall@1"]


def flattened(train_rows: Embeddings, rows: Embeddings) -> tuple[Embeddings, Embeddings]:
    """Flatten the spectrum, as the train drawings show it, of both; no column is read."""
    whitening = fit_whitening(train_rows)
    return whitening(train_rows), whitening(rows)


def summary(row: str, runs: dict[int, Found], cpu_s: list[float]) -> Tree:
    """Average a row's scores over its seeds; the interval is over queries."""
    every = [*runs.values()]
    hits = np.mean([hits_of(run) for run in every], axis=0)
    return {
        "row": row,
        "seeds": list(runs),
        "cpu_s": cpu_s,
        "Recall@1": {
            "value": float(hits.mean()),
            "interval95": list(bootstrap_means95(hits[:, None])[0]),
            "queries": len(hits),
            "seeds": [float(hits_of(run).mean()) for run in every],
            "lone": every[0].lone,
        },
    }


def difference(ours: str, theirs: str, found: dict[str, dict[int, Found]]) -> Tree:
    """Compare two rows query by query, each averaged over its seeds."""
    runs = [[*found[row].values()] for row in (ours, theirs)]
    means = [np.mean([hits_of(run) for run in its], axis=0) for its in runs]
    pair = paired(means[0], means[1], runs[0][0].classes)
    return {
        "row": ours,
        "than": theirs,
        "seeds": list(found[ours]),
        "Recall@1": {**pair, "ratio": float(means[0].mean() / means[1].mean())},
    }


def show(result: Tree) -> None:
    """Print the table in percent, and the differences with their intervals."""
    rows = [
        [
            tree["row"],
            str(len(tree["seeds"])),
            percent(tree["Recall@1"]),
            f"{np.mean(tree['cpu_s'] or [0]):.0f}",
        ]
        for tree in result["rows"]
    ]
    print_table(["", "seeds", "Recall@1", "CPU s"], rows)
    rows = [
        [
            f"{tree['row']} - {tree['than']}",
            percent(tree["Recall@1"], "+"),
            f"{tree['Recall@1']['ratio']:.2f}",
        ]
        for tree in result["differences"]
    ]
    print_table(["difference", "Recall@1", "ratio"], rows)


if __name__ == "__main__":
    main()
