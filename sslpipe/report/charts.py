"""Charts as Vega-Lite specifications in the page's own colours, light or dark; see `page`."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from sslpipe.report.page import number, render

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
    several, spec, said, lasts = len(series) > 1, None, [], []
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
        spec = _spec(
            "lines",
            title=title,
            x_label=x_label,
            rows=rows,
            shown=shown,
            domain=[float(both.min()) - room, float(both.max()) + room],
            x_axis=x_axis,
            log=log,
            dots=max(len(each.x) for each in shown) <= MOST_DOTS,
        )
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
    spec = _spec("map", rows=rows, colours=colours, pictures=pictures, px=PICTURE_PX)
    return render("chart", title=title, last="", alt=alt, spec=spec, keys=[], kind="map")


def _spec(macro: str, **values: Any) -> Any:
    """Return a specification of charts.html."""
    return json.loads(render(f"charts.{macro}", **values))


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
