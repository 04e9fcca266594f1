"""Charts as Vega-Lite specifications in the page's own colours, light or dark; see `page`."""

import json
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
from markupsafe import Markup
from numpy.typing import NDArray

from sslpipe.report.page import number, packaged, render

MOST_POINTS = 600  # of a line; more would not be seen on 300 px
MOST_DOTS = 30  # of a line whose points are marked
PICTURE_PX = 34
MOST_NAMES = 20  # classes whose colours can be distinguished, with some effort
# Tableau 10, as in matplotlib's default cycle: seen on white and on black
TEN_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)
# drag to move, pinch or Ctrl + wheel to zoom, double click to reset: a wheel alone scrolls the page
ZOOM = {
    "name": "zoom",
    "bind": "scales",
    "select": {
        "type": "interval",
        "zoom": "wheel![event.ctrlKey || event.metaKey]",
        "translate": "[pointerdown[event.pointerType == 'mouse'], window:pointerup] "
        "> window:pointermove!",
    },
}
NEAR = {
    "name": "near",
    "select": {"type": "point", "nearest": True, "on": "pointermove", "clear": "pointerout"},
}

Numbers = NDArray[np.float64]
Spec = dict[str, Any]


class Series(NamedTuple):
    """A line of a chart; all arrays are (n,)."""

    name: str  # for the legend
    x: Numbers
    y: Numbers  # NaN for "none"
    colour: str = "var(--series-1)"  # a CSS value
    low: Numbers | None = None  # ends of intervals, if they are drawn
    high: Numbers | None = None
    dashed: bool = False


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

    Args:
        title: Above the chart.
        series: The lines.
        x_label: Below the axis.
        x_ticks: Place -> text, instead of round numbers.
        log: Whether the x axis is logarithmic.
        last_values: Whether the caption says each line's last value.
        within: Values that the y axis shows in any case.
    """
    shown = [thinned(each) for each in series if np.isfinite(each.y).any()]
    ends = [[number(float(each.y[np.isfinite(each.y)][k])) for k in (0, -1)] for each in shown]
    several = len(series) > 1
    alt = []  # for those who do not see it
    for each, (first, last) in zip(shown, ends, strict=True):
        begin, end = each.x[np.isfinite(each.y)][[0, -1]].tolist()
        alt.append(f"{each.name} {first} at {number(begin)}, {last} at {number(end)}")
    lasts = [f"{s.name} " * several + last for s, (_, last) in zip(shown, ends, strict=True)]
    spec = None
    if shown:
        x_axis: Spec = {"grid": False, "tickCount": 5, "labelOverlap": True}
        if x_ticks is not None:
            texts = ",".join(f"{place!r}:{text!r}" for place, text in x_ticks.items())
            x_axis |= {"values": list(x_ticks), "labelExpr": f"({{{texts}}})[datum.value]"}
        spec = _line_spec(title, shown, x_label, x_axis, log, within)
    return render(
        "chart",
        title=title,
        last=(", ".join(lasts) if last_values else "") if shown else "no finite value",
        alt=f"{title}: " + "; ".join(alt),
        spec=spec,
        keys=[(s.name, s.colour, "dash" if s.dashed else "") for s in series if several and shown],
        kind="chart",
    )


def _line_spec(
    title: str,
    shown: Sequence[Series],
    x_label: str,
    x_axis: Spec,
    log: bool,
    within: tuple[float, ...],
) -> Spec:
    """Return the specification of lines, their intervals, and what hovering shows."""
    rows: list[Spec] = []
    for place, each in enumerate(shown):
        for k, (x, y) in enumerate(zip(each.x.tolist(), each.y.tolist(), strict=True)):
            row = {"s": place, "n": each.name, "x": x, "y": y if np.isfinite(y) else None}
            if each.low is not None and each.high is not None:
                row |= {"low": float(each.low[k]), "high": float(each.high[k])}
            rows.append(row)
    ends = [row.get(key) for row in rows for key in ("y", "low", "high")]
    both = np.array([*(end for end in ends if end is not None), *within])
    room = 0.05 * float(np.ptp(both)) or 0.1 * abs(float(both[0])) or 1e-6
    domain = [float(both.min()) - room, float(both.max()) + room]
    y_axis = {"tickCount": 5, "domain": False}
    y = _place("y", scale={"nice": False, "domain": domain}, axis=y_axis, title=None)
    x_scale: Spec = {"nice": False, **({"type": "log"} if log else {"zero": False})}
    order = list(range(len(shown)))
    hover = [
        *([{"field": "n", "title": " "}] if len(shown) > 1 else []),
        {"field": "x", "title": x_label},
        {"field": "y", "title": title, "format": ".4~g"},
    ]
    seen = 0.9 if max(len(each.x) for each in shown) <= MOST_DOTS else 0
    dot = {"condition": {"param": "near", "empty": False, "value": 1}, "value": seen}
    dashes = _nominal("s", order, [[5, 4] if each.dashed else [1, 0] for each in shown])
    layers: list[Spec] = [
        {
            "params": [ZOOM],
            "mark": {"type": "line", "strokeWidth": 1.8, "clip": True},
            "encoding": {"strokeDash": dashes},
        },
        {
            "params": [NEAR],
            "mark": {"type": "point", "filled": True, "size": 28, "clip": True},
            "encoding": {"opacity": dot, "tooltip": hover},
        },
    ]
    if any("low" in row for row in rows):
        interval = {"y": {**y, "field": "low"}, "y2": {"field": "high"}}
        layers.insert(0, {"mark": {"type": "rule", "clip": True}, "encoding": interval})
    encoding = {
        "x": _place("x", scale=x_scale, axis=x_axis, title=x_label),
        "y": y,
        "color": _nominal("s", order, [each.colour for each in shown]),
    }
    return _spec(rows, 190, encoding, layers)


def scatter(
    title: str,
    alt: str,
    places: Numbers,
    labels: NDArray[np.int64],
    names: Sequence[str],
    hovered: Mapping[int, str],
    pictures: Mapping[int, str],
) -> Markup:
    """Draw a map of points, coloured by label; hovering shows a point's class and thumbnail.

    Args:
        title: Above the map.
        alt: What it shows, for those who do not see it.
        places: (n, 2) on the map.
        labels: (n,) int64; -1 is grey.
        names: Classes by label.
        hovered: Row -> data URI of the thumbnail that hovering shows.
        pictures: Row -> data URI of the picture on the map.
    """
    rows = []
    for row, label in enumerate(labels.tolist()):
        tree: Spec = {"l": label, "class": names[label] if label >= 0 else "no label"}
        tree |= {axis: float(f"{at:.4g}") for axis, at in zip("xy", places[row], strict=True)}
        for key, uris in (("image", hovered), ("shown", pictures)):
            if row in uris:
                tree[key] = uris[row]
        rows.append(tree)
    scale = {"zero": False, "nice": False, "padding": 24}
    axes = {axis: _place(axis, scale=scale, axis=None) for axis in "xy"}
    colours = [class_colour(label, len(names)) for label in range(len(names))]
    colour = _nominal("l", [-1, *range(len(names))], ["var(--faint)", *colours])
    tooltip = [{"field": "class"}, {"field": "image"}]
    dots = {"type": "point", "filled": True, "size": 34, "opacity": 0.4 if pictures else 0.8}
    image = {"type": "image", "width": PICTURE_PX, "height": PICTURE_PX}
    frame = {"type": "square", "filled": False, "size": PICTURE_PX**2, "strokeWidth": 2}
    seen = [{"filter": "isValid(datum.shown)"}]
    on_map: Spec = {"url": {"field": "shown"}, "tooltip": tooltip}
    layers: list[Spec] = [
        {"params": [ZOOM], "mark": dots, "encoding": {"color": colour, "tooltip": tooltip}},
        {"transform": seen, "mark": image, "encoding": on_map},
        {"transform": seen, "mark": {**frame, "tooltip": None}, "encoding": {"color": colour}},
    ]
    spec = _spec(rows, 420, axes, layers)
    return render("chart", title=title, last="", alt=alt, spec=spec, keys=[], kind="map")


def _spec(rows: list[Spec], height: int, encoding: Spec, layers: list[Spec]) -> Spec:
    """Return a whole specification, in the page's style."""
    base: Spec = json.loads(packaged("templates/base.json"))
    data = {"values": rows}
    return base | {"data": data, "height": height, "encoding": encoding, "layer": layers}


def _place(field: str, **options: Any) -> Spec:
    return {"field": field, "type": "quantitative", **options}


def _nominal(field: str, domain: Sequence[int], values: Sequence[Any]) -> Spec:
    """Encode a nominal field by these values, without Vega's own legend: the page has one."""
    scale = {"domain": list(domain), "range": list(values)}
    return {"field": field, "type": "nominal", "scale": scale, "legend": None}


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


def apart(points: Numbers, width: float = 1000, height: float = 420) -> list[int]:
    """Choose rows whose pictures do not overlap on a map of this many pixels, taken in order."""
    span = np.maximum(np.ptp(points, axis=0), 1e-9)
    places = (points - points.min(axis=0)) / span * (width - 40, height - 40)
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
