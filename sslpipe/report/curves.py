"""Charts of one run or several: what training logged, and kNN over the labels per class."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain, product
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from sslpipe.evaluation.verdict import KNN
from sslpipe.report.charts import Series, line_chart
from sslpipe.report.page import number, render
from sslpipe.report.results import feature_colours, table_lines
from sslpipe.report.run import RunFiles, Tree
from sslpipe.run.best import EMA


class Chart(NamedTuple):
    """A chart of logged numbers."""

    title: str
    keys: dict[str, str]  # key in metrics.jsonl -> name of its line
    within: tuple[float, ...] = ()  # values that the y axis shows in any case
    kind: str = "train"  # of the lines of metrics.jsonl: "train" or "eval"


_SIMILARITY = {"positive_similarity": "positive", "negative_similarity": "negative"}
_RETRIEVAL = {"validation_recall_at_1": "Recall@1", "validation_map_at_r": "MAP@R"}
_HELD_OUT_RETRIEVAL = {"holdout_recall_at_1": "Recall@1", "holdout_map_at_r": "MAP@R"}
_LOSS = Chart("loss", {"loss": "loss"})
_RATE = Chart("learning rate", {"lr": "learning rate"}, (0.0,))
_GRADIENT = Chart("gradient norm", {"grad_norm": "norm"}, (0.0,))
_RANK = Chart("effective rank", {"effective_rank": "rank"}, (1.0,))
_COSINE = Chart("cosine", _SIMILARITY, (0.0, 1.0))
_RANKS = {"holdout_rankme": "RankMe", "holdout_lidar": "LiDAR"}
CHARTS = (
    _LOSS,
    Chart("held-out kNN top-1", {"holdout_knn": "top-1"}, kind="eval"),
    Chart("held-out retrieval", _HELD_OUT_RETRIEVAL, (0.0, 1.0), "eval"),
    Chart("held-out ranks, without labels", _RANKS, (1.0,), "eval"),
    Chart("held-out view recall, without labels", {"holdout_view_recall": "recall"}, kind="eval"),
    _RATE,
    _GRADIENT,
    Chart("alignment", {"alignment": "alignment"}, (0.0,)),
    Chart("uniformity", {"uniformity": "uniformity"}),
    _RANK,
    Chart("embedding std", {"embedding_std": "std"}, (0.0, 1.0)),
    _COSINE,
)
FINETUNE_CHARTS = (
    _LOSS,
    Chart("retrieval in held-out classes", _RETRIEVAL, (0.0, 1.0), "eval"),
    Chart("active pairs or triplets (their loss is not 0)", {"active": "active"}, (0.0,)),
    *(_RATE, _GRADIENT, _RANK, _COSINE),
)
SPEED_CHARTS = (
    Chart("images a second", {"images_per_s": "images/s"}, (0.0,)),
    Chart("waiting for data, % of the time", {"data_wait_percent": "wait"}, (0.0,)),
)


def charts(
    named: Mapping[str, RunFiles], wanted: Sequence[Chart], colours: Mapping[str, str] | None = None
) -> Markup:
    """Draw each chart that metrics.jsonl has numbers for.

    `colours` by name: a line for each run that has the numbers, a second number dashed. None: of a
    single run; charts that lack a number are named.
    """
    figures, absent = [], []
    for title, numbers, within, kind in wanted:
        lines = {name: run.train if kind == "train" else run.evals for name, run in named.items()}
        # beside each what was scored of the weights that optim.ema averages, where it was
        averaged = {f"{EMA}{key}": f"{what} of averaged weights" for key, what in numbers.items()}
        known = {key for line in chain(*lines.values()) for key in line}
        keys = numbers | {key: what for key, what in averaged.items() if key in known}
        series = []
        for name, (nth, (key, what)) in product(named, enumerate(keys.items())):
            there = [line for line in lines[name] if key in line]
            x, y = (np.array([line[k] for line in there], dtype=np.float64) for k in ("step", key))
            colour = f"var(--series-{nth + 1})" if colours is None else colours[name]
            if colours is not None:
                what = f"{name}, {what}" if len(keys) > 1 else name
            series.append(Series(what, x, y, colour, dashed=colours is not None and nth > 0))
        shown = [each for each in series if len(each.x)]
        if not shown or (colours is None and len(shown) < len(series)):
            absent.append(title)
        else:
            figures.append(line_chart(title, shown, within=within, last_values=colours is None))
    if not figures and colours is not None:
        return Markup("<p>No run has logged a step.</p>")
    if colours is None and not any(run.train for run in named.values()):
        return render("missing", text="No step of training is logged in metrics.jsonl.")
    shown_all = Markup("<div class='charts'>{}</div>").format(Markup().join(figures))
    if absent and colours is None:
        shown_all += render("missing", text=f"Not in metrics.jsonl: {', '.join(absent)}.")
    return shown_all


def few_shot_chart(
    evaluation: Tree,
    colours: Mapping[str, str] | None = None,
    *,
    whitened: bool = True,
    dashed: Collection[str] = (),
) -> Markup:
    """Draw the accuracy of kNN over the labels per class in eval.json; '' without few-shot kNN.

    `colours` of features replace the usual ones; lines of features in `dashed` are.
    """
    colours = {**feature_colours(evaluation["rows"]), **(colours or {})}
    rows = [row for row in evaluation["rows"] if whitened or not row["whitened"]]
    few = [(labels, row) for row in rows if (labels := _labels_per_class(row))]
    if not few:
        return Markup()
    # of all labels: their mean; the bank with the fewest labels per class has the most classes
    least, smallest = min(few, key=lambda each: each[0])
    most = [row for row in rows if row["column"] == KNN]
    mean = {id(row): row["bank"] / (smallest["bank"] // least) for row in most}
    points = sorted([*few, *((mean[id(row)], row) for row in most)], key=lambda each: each[0])
    ticks = {
        float(n): f"all ({number(round(n))})" if id(row) in mean else f"{n}" for n, row in points
    }
    series: list[Series] = []
    for line in table_lines(rows):
        own = [
            (n, row)
            for n, row in points
            if (row["features"], row["whitened"]) == (line.features, line.whitened)
        ]
        if len(own) < 2:
            continue
        y, low, high = 100 * np.array([(row["value"], *row["interval95"]) for _, row in own]).T
        # side by side, so that no interval hides another
        x = 10 ** (0.012 * (len(series) - 2.5)) * np.array([n for n, _ in own])
        is_dashed = line.whitened or line.features in dashed
        series.append(Series(line.title, x, y, colours[line.features], low, high, is_dashed))
    if not series:
        return Markup()
    return line_chart(
        "kNN top-1 in %",
        series,
        x_label="labelled train images per class",
        x_ticks=ticks,
        log=True,
        last_values=False,
    )


def _labels_per_class(row: Tree) -> int:
    """Read from a kNN's protocol how many labels it had per class; 0: all, or no kNN.

    Numbers of fewer than half of the classes are no point of a curve.
    """
    some = re.search(r" classes=(\d+)/(\d+)", row["protocol"])
    few = re.match(r"knn-weighted .* (\d+)/class ", row["protocol"])
    return int(few[1]) if few and (not some or 2 * int(some[1]) >= int(some[2])) else 0
