"""Charts as Vega-Lite specifications in the page's own colours, light or dark; see `page`.

Below the two kinds, lines and maps, stand the charts of one run or several: what training logged,
and kNN over the labels per class.
"""

import json
import re
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from sslpipe.evaluation.verdict import KNN
from sslpipe.files import Tree
from sslpipe.report.page import number, render
from sslpipe.report.results import feature_colours, table_lines
from sslpipe.report.run import RunFiles

MOST_POINTS = 600  # of a line; more would not be seen on 300 px
MOST_DOTS = 30  # of a line whose points are marked
PICTURE_PX = 34
MAP_PX = np.array((1000, 420))  # width and height
MOST_NAMES = 20  # classes whose colours can be distinguished, with some effort
# Tableau 10, as in matplotlib's default cycle: seen on white and on black
TEN_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)

Numbers = NDArray[np.float64]


class Series(NamedTuple):
    """A line of a chart; all arrays are (n,)."""

    name: str  # for the legend
    x: Numbers
    y: Numbers  # NaN for "none"
    colour: str = "var(--series-1)"  # a CSS value
    low: Numbers | None = None  # ends of intervals, if they are drawn
    high: Numbers | None = None
    dashed: bool = False

    @property
    def dash(self) -> list[int]:
        """Lengths of dashes and gaps, in pixels."""
        return [5, 4] if self.dashed else [1, 0]

    @property
    def rows(self) -> list[dict[str, float | None]]:
        """The points; a gap has no y, and there are `low` and `high` where there are intervals."""
        gaps = [value if np.isfinite(value) else None for value in self.y.tolist()]
        columns = {"x": self.x.tolist(), "y": gaps}
        if self.low is not None and self.high is not None:
            columns |= {"low": self.low.tolist(), "high": self.high.tolist()}
        return [
            dict(zip(columns, each, strict=True)) for each in zip(*columns.values(), strict=True)
        ]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    x_ticks: Mapping[float, str] | None = None,
    log: bool = False,
    last_values: bool = True,
    within: tuple[float, ...] = (),
) -> Markup:
    """Draw a <figure>: caption with the last value, lines, and a legend where there are several.

    `x_ticks` are place -> text, instead of round numbers; with `log` the x axis is logarithmic; the
    y axis shows what is `within` in any case.
    """
    shown = [thinned(each) for each in series if np.isfinite(each.y).any()]
    several = len(series) > 1
    spec = None
    said = []
    lasts = []
    for each in shown:
        there = np.isfinite(each.y)
        (begin, end), (first, last) = (
            map(number, one[there][[0, -1]].tolist()) for one in each[1:3]
        )
        lasts.append(f"{each.name} " * several + last)
        said.append(f"{each.name} {first} at {begin}, {last} at {end}")
    if shown:
        rows = [
            {"s": s, "n": each.name, **row} for s, each in enumerate(shown) for row in each.rows
        ]
        ends = [row.get(key) for row in rows for key in ("y", "low", "high")]
        both = np.array([*(end for end in ends if end is not None), *within])
        room = 0.05 * float(np.ptp(both)) or 0.1 * abs(float(both[0])) or 1e-6
        x_axis: dict[str, Any] = {"grid": False, "tickCount": 5, "labelOverlap": True}
        if x_ticks is not None:
            texts = ",".join(f"{place!r}:{text!r}" for place, text in x_ticks.items())
            x_axis |= {"values": list(x_ticks), "labelExpr": f"({{{texts}}})[datum.value]"}
        lines = render(
            "charts.lines",
            title=title,
            x_label=x_label,
            rows=rows,
            shown=shown,
            domain=[float(both.min()) - room, float(both.max()) + room],
            x_axis=x_axis,
            log=log,
            dots=max(len(each.x) for each in shown) <= MOST_DOTS,
        )
        spec = json.loads(lines)
    return render(
        "chart",
        title=title,
        last=(", ".join(lasts) if last_values else "") if shown else "no finite value",
        alt=f"{title}: " + "; ".join(said),  # for those who do not see it
        spec=spec,
        keys=[(s.name, s.colour, "dash" if s.dashed else "") for s in series if several and shown],
        kind="chart",
    )


def scatter(
    title: str,
    alt: str,
    places: Numbers,
    labels: NDArray[np.int64],
    names: Sequence[str],
    hovered: Mapping[int, str],
    pictures: Mapping[int, str],
) -> Markup:
    """Draw a map of `places`, (n, 2), coloured by `labels`, (n,); hovering shows the class.

    `hovered` and `pictures` are row -> data URI: thumbnails when hovering, and on the map. `alt`
    says what it shows to those who do not see it; a label of -1 is grey.
    """
    rows = []
    for row, (label, (x, y)) in enumerate(zip(labels.tolist(), places.tolist(), strict=True)):
        point = {"l": label, "class": names[label] if label >= 0 else "no label"}
        point |= {"x": float(f"{x:.4g}"), "y": float(f"{y:.4g}")}
        uris = {"image": hovered.get(row), "shown": pictures.get(row)}
        rows.append(point | {key: uri for key, uri in uris.items() if uri})
    colours = [class_colour(label, len(names)) for label in range(len(names))]
    points = render("charts.map", rows=rows, colours=colours, pictures=pictures, px=PICTURE_PX)
    spec = json.loads(points)
    return render("chart", title=title, last="", alt=alt, spec=spec, keys=[], kind="map")


def thinned(series: Series) -> Series:
    """Keep MOST_POINTS points at most: of each stretch the lowest and highest, so spikes stay."""
    count = len(series.x)
    if count <= MOST_POINTS or series.low is not None:
        return series
    edges = np.linspace(0, count, MOST_POINTS // 2 + 1).astype(int)
    kept: set[int] = {0, count - 1}
    for begin, end in pairwise(edges.tolist()):
        stretch = series.y[begin:end]
        if np.isfinite(stretch).any():
            kept |= {int(begin + np.nanargmin(stretch)), int(begin + np.nanargmax(stretch))}
    rows = sorted(kept)
    return series._replace(x=series.x[rows], y=series.y[rows])


def apart(points: Numbers) -> list[int]:
    """Choose rows whose pictures do not overlap on a map of MAP_PX, taken in order."""
    span = np.maximum(np.ptp(points, axis=0), 1e-9)
    places = (points - points.min(axis=0)) / span * (MAP_PX - 40)
    kept: list[int] = []
    for row, place in enumerate(places):
        if not kept or np.abs(places[kept] - place).max(axis=1).min() > PICTURE_PX + 2:
            kept.append(row)
    return kept


def class_colour(label: int, classes: int) -> str:
    """Return the CSS colour of a label among so many classes."""
    if classes <= len(TEN_COLOURS):
        return TEN_COLOURS[label]
    return f"hsl({360 * label / classes:.0f} 65% {45 + 14 * (label % 2)}%)"


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
CHARTS = (
    _LOSS,
    Chart("held-out kNN top-1", {"holdout_knn": "top-1"}, kind="eval"),
    Chart("held-out retrieval", _HELD_OUT_RETRIEVAL, (0.0, 1.0), "eval"),
    Chart("held-out RankMe, without labels", {"holdout_rankme": "RankMe"}, (1.0,), "eval"),
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


def charts(run: RunFiles, wanted: Sequence[Chart]) -> Markup:
    """Draw each chart that metrics.jsonl has numbers for; those that lack one are named."""
    if not run.train:
        return render("missing", text="No step of training is logged in metrics.jsonl.")
    figures = []
    absent = []
    for title, numbers, within, kind in wanted:
        lines = run.train if kind == "train" else run.evals
        series = []
        for place, (key, what) in enumerate(numbers.items(), 1):
            there = [line for line in lines if key in line]
            x, y = (np.array([line[k] for line in there], dtype=np.float64) for k in ("step", key))
            series.append(Series(what, x, y, f"var(--series-{place})"))
        if all(len(each.x) for each in series):
            figures.append(line_chart(title, series, within=within))
        else:
            absent.append(title)
    shown = Markup("<div class='charts'>{}</div>").format(Markup().join(figures))
    if absent:
        shown += render("missing", text=f"Not in metrics.jsonl: {', '.join(absent)}.")
    return shown


def few_shot_chart(evaluation: Tree) -> Markup:
    """Draw the accuracy of kNN over the labels per class in eval.json; '' without few-shot kNN."""
    rows = evaluation["rows"]
    colours = feature_colours(rows)
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
        of_line = [
            (n, row)
            for n, row in points
            if (row["features"], row["whitened"]) == (line.features, line.whitened)
        ]
        if len(of_line) < 2:
            continue
        y, low, high = 100 * np.array([(row["value"], *row["interval95"]) for _, row in of_line]).T
        # side by side, so that no interval hides another
        x = 10 ** (0.012 * (len(series) - 2.5)) * np.array([n for n, _ in of_line])
        colour = colours[line.features]
        series.append(
            Series(
                name=line.title, x=x, y=y, colour=colour, low=low, high=high, dashed=line.whitened
            )
        )
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
