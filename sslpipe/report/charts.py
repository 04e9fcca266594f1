"""Charts as Vega-Lite specifications in the page's own colours, light or dark; see `page`.

Below the two kinds, lines and maps, stand the charts of what training logged.
"""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from sslpipe.report.page import number, render
from sslpipe.report.run_files import RunFiles

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

    @property
    def finite(self) -> "Series":
        """Without its gaps."""
        is_finite = np.isfinite(self.y)
        return self._replace(x=self.x[is_finite], y=self.y[is_finite])

    @property
    def rows(self) -> list[dict[str, float | None]]:
        """The points; a gap has no y."""
        points = zip(self.x.tolist(), self.y.tolist(), strict=True)
        return [{"x": x, "y": y if np.isfinite(y) else None} for x, y in points]


def line_chart(title: str, series: Sequence[Series], *, within: tuple[float, ...] = ()) -> Markup:
    """Draw a <figure> over steps: caption with the last value, lines, a legend of several.

    The y axis shows what is `within` in any case.
    """
    shown = [thinned(each) for each in series if np.isfinite(each.y).any()]
    several = len(series) > 1
    texts = []
    lasts = []
    for each in shown:
        x = each.finite.x.tolist()
        y = each.finite.y.tolist()
        last = number(y[-1])
        lasts.append(f"{each.name} {last}" if several else last)
        texts.append(f"{each.name} {number(y[0])} at {number(x[0])}, {last} at {number(x[-1])}")
    return render(
        "chart",
        title=title,
        last=", ".join(lasts) if shown else "no finite value",
        alt=f"{title}: " + "; ".join(texts),  # for those who do not see it
        spec=_lines(title, shown, within) if shown else None,
        keys=[(s.name, s.colour, "") for s in series if several and shown],
        kind="chart",
    )


def _lines(title: str, shown: Sequence[Series], within: tuple[float, ...]) -> object:
    """Specify lines of which each has a finite number."""
    rows = [{"s": s, "n": each.name, **row} for s, each in enumerate(shown) for row in each.rows]
    both = np.array([*(row["y"] for row in rows if row["y"] is not None), *within])
    room = 0.05 * float(np.ptp(both)) or 0.1 * abs(float(both[0])) or 1e-6
    lines = render(
        "charts.lines",
        title=title,
        rows=rows,
        shown=shown,
        domain=[float(both.min()) - room, float(both.max()) + room],
        dots=max(len(each.x) for each in shown) <= MOST_DOTS,
    )
    return json.loads(lines)


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
    if count <= MOST_POINTS:
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
CHARTS = (
    Chart("loss", {"loss": "loss"}),
    Chart("held-out kNN top-1", {"holdout_knn": "top-1"}, kind="eval"),
    Chart("held-out retrieval", _HELD_OUT_RETRIEVAL, (0.0, 1.0), "eval"),
    Chart("held-out RankMe, without labels", {"holdout_rankme": "RankMe"}, (1.0,), "eval"),
    Chart("held-out view recall, without labels", {"holdout_view_recall": "recall"}, kind="eval"),
    Chart("retrieval of held-out images", _RETRIEVAL, (0.0, 1.0), "eval"),
    Chart("active pairs or triplets (their loss is not 0)", {"active": "active"}, (0.0,)),
    Chart("learning rate", {"lr": "learning rate"}, (0.0,)),
    Chart("gradient norm", {"grad_norm": "norm"}, (0.0,)),
    Chart("alignment", {"alignment": "alignment"}, (0.0,)),
    Chart("uniformity", {"uniformity": "uniformity"}),
    Chart("effective rank", {"effective_rank": "rank"}, (1.0,)),
    Chart("embedding std", {"embedding_std": "std"}, (0.0, 1.0)),
    Chart("cosine", _SIMILARITY, (0.0, 1.0)),
)
SPEED_CHARTS = (
    Chart("images a second", {"images_per_s": "images/s"}, (0.0,)),
    Chart("waiting for data, % of the time", {"data_wait_percent": "wait"}, (0.0,)),
)


def charts(run: RunFiles, wanted: Sequence[Chart]) -> Markup:
    """Draw each chart that metrics.jsonl has all numbers for: which ones, the kind of run says."""
    if not run.train:
        return render("missing", text="No step of training is logged in metrics.jsonl.")
    figures = []
    for title, numbers, within, kind in wanted:
        lines = run.train if kind == "train" else run.evals
        series = []
        for place, (key, what) in enumerate(numbers.items(), 1):
            known = [line for line in lines if key in line]
            x, y = (np.array([line[k] for line in known], dtype=np.float64) for k in ("step", key))
            series.append(Series(what, x, y, f"var(--series-{place})"))
        if all(len(each.x) for each in series):
            figures.append(line_chart(title, series, within=within))
    return Markup("<div class='charts'>{}</div>").format(Markup().join(figures))
