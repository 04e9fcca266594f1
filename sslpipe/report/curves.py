"""Charts of one run or several: what training logged, and kNN over the labels per class."""

import re
from collections.abc import Collection, Mapping, Sequence
from itertools import chain
from typing import NamedTuple

import numpy as np
from markupsafe import Markup

from sslpipe.evaluation.against import KNN
from sslpipe.report.charts import Series, line_chart
from sslpipe.report.page import number, render
from sslpipe.report.results import feature_colours, table_lines
from sslpipe.report.run import RunFiles, Tree
from sslpipe.run.best import EMA


class Chart(NamedTuple):
    """A chart of logged numbers."""

    title: str
    keys: dict[str, str]  # key in metrics.jsonl -> name of its line
    kind: str = "train"  # of the lines of metrics.jsonl: "train" or "eval"
    within: tuple[float, ...] = ()  # values that the y axis shows in any case


CHARTS = (
    Chart("loss", {"loss": "loss"}),
    Chart("held-out kNN top-1", {"holdout_knn": "top-1"}, "eval"),
    Chart(
        "held-out ranks, without labels",
        {"holdout_rankme": "RankMe", "holdout_lidar": "LiDAR"},
        "eval",
        (1.0,),
    ),
    Chart("held-out view recall, without labels", {"holdout_view_recall": "recall"}, "eval"),
    Chart("learning rate", {"lr": "learning rate"}, within=(0.0,)),
    Chart("gradient norm", {"grad_norm": "norm"}, within=(0.0,)),
    Chart("alignment", {"alignment": "alignment"}, within=(0.0,)),
    Chart("uniformity", {"uniformity": "uniformity"}),
    Chart("effective rank", {"effective_rank": "rank"}, within=(1.0,)),
    Chart("embedding std", {"embedding_std": "std"}, within=(0.0, 1.0)),
    Chart(
        "cosine",
        {"positive_similarity": "positive", "negative_similarity": "negative"},
        within=(0.0, 1.0),
    ),
)
_BY_TITLE = {chart.title: chart for chart in CHARTS}
FINETUNE_CHARTS = (
    _BY_TITLE["loss"],
    Chart(
        "retrieval in held-out classes",
        {"validation_recall_at_1": "Recall@1", "validation_map_at_r": "MAP@R"},
        "eval",
        (0.0, 1.0),
    ),
    Chart("active pairs or triplets (their loss is not 0)", {"active": "active"}, within=(0.0,)),
    *(_BY_TITLE[t] for t in ("learning rate", "gradient norm", "effective rank", "cosine")),
)
SPEED_CHARTS = (
    Chart("images a second", {"images_per_s": "images/s"}, within=(0.0,)),
    Chart("waiting for data, % of the time", {"data_wait_percent": "wait"}, within=(0.0,)),
)


def charts(
    named: Mapping[str, RunFiles], wanted: Sequence[Chart], colours: Mapping[str, str] | None = None
) -> Markup:
    """Draw each chart that metrics.jsonl has numbers for.

    Args:
        named: The runs by name.
        wanted: The charts.
        colours: CSS colours by name: a line for each run that has the numbers, a second number
            dashed. None: of a single run; charts that lack a number are named.
    """
    figures, absent = [], []
    for title, numbers, kind, within in wanted:
        lines = {name: run.train if kind == "train" else run.evals for name, run in named.items()}
        known = {key for line in chain(*lines.values()) for key in line}
        # beside each what was scored of the weights that optim.ema averages, where it was
        averaged = {f"{EMA}{key}": f"{what} of averaged weights" for key, what in numbers.items()}
        keys = numbers | {key: what for key, what in averaged.items() if key in known}
        series = []
        for name in named:
            for nth, (key, what) in enumerate(keys.items()):
                there = [line for line in lines[name] if key in line]
                x, y = (np.array([e[k] for e in there], dtype=np.float64) for k in ("step", key))
                if colours is None:
                    series.append(Series(what, x, y, f"var(--series-{nth + 1})"))
                else:
                    title_of = f"{name}, {what}" if len(keys) > 1 else name
                    series.append(Series(title_of, x, y, colours[name], dashed=nth > 0))
        shown = [each for each in series if len(each.x)]
        if not shown or (colours is None and len(shown) < len(series)):
            absent.append(title)
            continue
        figures.append(line_chart(title, shown, within=within, last_values=colours is None))
    if colours is not None:
        if not figures:
            return Markup("<p>No run has logged a step.</p>")
    elif not any(run.train for run in named.values()):
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
    """Draw the accuracy of kNN over the labels per class; '' without few-shot kNN.

    Args:
        evaluation: eval.json.
        colours: Of features, instead of the usual ones.
        whitened: Whether whitened features are shown, too.
        dashed: Features whose line is.
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
