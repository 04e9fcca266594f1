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
from sslpipe.report.results import Line, feature_colours, table_lines
from sslpipe.report.run import RunFiles, Tree
from sslpipe.run.best import EMA

_FEW_PROTOCOL = re.compile(r"knn-weighted .* (\d+)/class ")
_FEW = re.compile(rf"{KNN}, (\d+)/class")


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
    """Draw the accuracy of the kNN columns over the labels per class; '' of a single column.

    Args:
        evaluation: eval.json.
        colours: Of features, instead of the usual ones.
        whitened: Whether whitened features are shown, too.
        dashed: Features whose line is.
    """
    colours = {**feature_colours(evaluation["rows"]), **(colours or {})}
    classes = _classes(evaluation)
    series: list[Series] = []
    counts: dict[float, str] = {}  # labels per class -> text of the tick
    # rows of more labels per class than the table shows are taken in by their protocol
    rows = [
        {**row, "column": f"{KNN}, {few.group(1)}/class"}
        if row["column"] is None
        and (few := _FEW_PROTOCOL.match(row["protocol"]))
        and _of_most_classes(row["protocol"])
        else row
        for row in evaluation["rows"]
    ]
    # a line for each kind of features
    for line in table_lines(rows):
        points = _labels_a_class(line, classes)
        if len(points) < 2 or (line.whitened and not whitened):
            continue
        counts |= {count: text for count, text, _ in points}
        cells = [cell for *_, cell in points]
        y, low, high = 100 * np.array([(c["value"], *c["interval95"]) for c in cells]).T
        # side by side, so that no interval hides another
        x = 10 ** (0.012 * (len(series) - 2.5)) * np.array([count for count, *_ in points])
        is_dashed = line.whitened or line.features in dashed
        series.append(Series(line.title, x, y, colours[line.features], low, high, is_dashed))
    if not series:
        return Markup()
    return line_chart(
        "kNN top-1 in %",
        series,
        x_label="labelled train images per class",
        x_ticks=dict(sorted(counts.items())),
        log="x",
        last_values=False,
    )


def _of_most_classes(protocol: str) -> bool:
    """Say whether a number is of at least half of the classes."""
    some = re.search(r" classes=(\d+)/(\d+)", protocol)
    return not some or 2 * int(some[1]) >= int(some[2])


def _classes(evaluation: Tree) -> int:
    """Count the classes in the bank: few-shot banks hold n labels of each, or of the larger ones.

    The bank with the fewest labels per class has the most classes.
    """
    banks = {
        int(few.group(1)): int(row["bank"])
        for row in evaluation["rows"]
        if (few := _FEW_PROTOCOL.match(row["protocol"]) or _FEW.fullmatch(row["column"] or ""))
    }
    return banks[min(banks)] // min(banks) if banks else 0


def _labels_a_class(line: Line, classes: int) -> list[tuple[float, str, Tree]]:
    """(labels per class, text of its tick, result) of each kNN column; of all: the mean."""
    found = []
    for column, cell in line.cells.items():
        if few := _FEW.fullmatch(column):
            found.append((float(few.group(1)), few.group(1), cell))
        elif column == KNN and classes:
            mean = cell["bank"] / classes
            found.append((mean, f"all ({number(round(mean))})", cell))
    return sorted(found, key=lambda point: point[:2])
