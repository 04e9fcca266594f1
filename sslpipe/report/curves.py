"""Charts of the numbers that a run logged, and what they mean."""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from sslpipe.recipe import is_finetune
from sslpipe.report.charts import Series, line_chart
from sslpipe.report.page import html, joined, missing, number
from sslpipe.report.run import RunFiles, Tree
from sslpipe.run.best import EMA


class Chart(NamedTuple):
    """A chart of logged numbers.

    Args:
        title: Above the chart.
        keys: Key in metrics.jsonl -> name of its line.
        kind: Of the lines of metrics.jsonl: "train" or "eval".
        within: Values that the y axis shows in any case.
    """

    title: str
    keys: dict[str, str]
    kind: str
    within: tuple[float, ...] = ()


CHARTS = (
    Chart("loss", {"loss": "loss"}, "train"),
    Chart("held-out kNN top-1", {"holdout_knn": "top-1"}, "eval"),
    Chart(
        "held-out ranks, without labels",
        {"holdout_rankme": "RankMe", "holdout_lidar": "LiDAR"},
        "eval",
        (1.0,),
    ),
    Chart("held-out view recall, without labels", {"holdout_view_recall": "recall"}, "eval"),
    Chart("learning rate", {"lr": "learning rate"}, "train", (0.0,)),
    Chart("gradient norm", {"grad_norm": "norm"}, "train", (0.0,)),
    Chart("alignment", {"alignment": "alignment"}, "train", (0.0,)),
    Chart("uniformity", {"uniformity": "uniformity"}, "train"),
    Chart("effective rank", {"effective_rank": "rank"}, "train", (1.0,)),
    Chart("embedding std", {"embedding_std": "std"}, "train", (0.0, 1.0)),
    Chart(
        "cosine",
        {"positive_similarity": "positive", "negative_similarity": "negative"},
        "train",
        (0.0, 1.0),
    ),
)
FINETUNE_CHARTS = (
    Chart("loss", {"loss": "loss"}, "train"),
    Chart(
        "retrieval in held-out classes",
        {"validation_recall_at_1": "Recall@1", "validation_map_at_r": "MAP@R"},
        "eval",
        (0.0, 1.0),
    ),
    Chart("active pairs or triplets (their loss is not 0)", {"active": "active"}, "train", (0.0,)),
    *(chart for chart in CHARTS if chart.title in ("learning rate", "gradient norm")),
    *(chart for chart in CHARTS if chart.title in ("effective rank", "cosine")),
)
SPEED_CHARTS = (
    Chart("images a second", {"images_per_s": "images/s"}, "train", (0.0,)),
    Chart("waiting for data, % of the time", {"data_wait_percent": "wait"}, "train", (0.0,)),
)
HEALTH = (
    "Alignment: mean squared distance of the two views of an image on the unit sphere (0: equal). "
    "Uniformity: 0 when all embeddings are one point, near −4 when spread over the sphere. "
    "Effective rank: dimensions in use, 1 when collapsed. Embedding std, times √D: 1 when spread, "
    "0 when collapsed. Cosine: of two views of one image (positive) and of two images (negative)."
)
FINETUNE_HEALTH = (
    "Effective rank: dimensions in use, 1 when collapsed. Cosine: of two images of one class "
    "(positive) and of two classes (negative)."
)


def charts(run: RunFiles, wanted: Sequence[Chart]) -> Markup:
    """Draw each chart that metrics.jsonl has numbers for; the others are named."""
    if not run.train:
        return missing("No step of training is logged in metrics.jsonl.")
    figures, missing_titles = [], []
    for title, numbers, kind, within in wanted:
        lines = run.train if kind == "train" else run.evals
        keys = with_average(numbers, lines)
        series = [
            logged(name, lines, key, f"var(--series-{place + 1})")
            for place, (key, name) in enumerate(keys.items())
        ]
        if all(len(each.x) for each in series):
            figures.append(line_chart(title, series, within=within))
        else:
            missing_titles.append(title)
    shown = html("<div class='charts'>{}</div>", joined(figures))
    if missing_titles:
        shown += missing(f"Not in metrics.jsonl: {', '.join(missing_titles)}.")
    return shown


def logged(
    name: str, lines: Iterable[Tree], key: str, colour: str, *, dashed: bool = False
) -> Series:
    """Return a number of metrics.jsonl over the steps."""
    there = [line for line in lines if key in line]
    steps, values = (np.array([line[k] for line in there], dtype=np.float64) for k in ("step", key))
    return Series(name, steps, values, colour, dashed=dashed)


def with_average(keys: Mapping[str, str], lines: Iterable[Tree]) -> dict[str, str]:
    """Add what was scored of the weights that optim.ema averages, where it was.

    Args:
        keys: Of a chart.
        lines: Of metrics.jsonl.
    """
    averaged = {f"{EMA}{key}": f"{what} of averaged weights" for key, what in keys.items()}
    logged = {key for line in lines for key in line}
    return {**keys, **{key: what for key, what in averaged.items() if key in logged}}


def steps_note(run: RunFiles) -> Markup:
    """Count steps that were skipped, and losses that are not finite."""
    if not run.train:
        return Markup()
    last = run.train[-1]
    not_finite = sum(line["loss"] is None for line in run.train)  # as null
    compared = {
        "negatives_per_anchor": "negatives an anchor",
        "active": "pairs or triplets still active",
        "partners": "of the second views show a partner",
    }
    said = [f"{number(last[key])} {name}" for key, name in compared.items() if key in last]
    said.append(f"{last['skipped_steps']} steps skipped as not finite")
    if not_finite:
        said.append(f"{not_finite} logged losses are not finite")
    health = FINETUNE_HEALTH if is_finetune(run.recipe) else HEALTH
    return html("<p class='note'>{}. {}</p>", "; ".join(said), health)
