"""Draw charts as inline SVG: they follow the page's colours, light or dark, without a library."""

import math
from collections.abc import Callable, Sequence
from html import escape
from itertools import pairwise
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

WIDTH, HEIGHT = 360, 214  # in SVG units: CSS pixels where the chart is shown at its own size
LEFT, RIGHT, TOP, BOTTOM = 46, 10, 8, 34
MOST_POINTS = 600  # of a line; more would not be seen on 300 px
MOST_DOTS = 30  # of a line whose points are marked
MAP_SIDE, MAP_MARGIN, PICTURE_PX = 560, 24, 34
MOST_NAMES = 20  # classes whose colours can be distinguished, with some effort
# Tableau 10, as in matplotlib's default cycle: seen on white and on black
TEN_COLOURS = (
    *("#1f77b4", "#ff7f0e", "#2ca02c", "#d62728", "#9467bd"),
    *("#8c564b", "#e377c2", "#7f7f7f", "#bcbd22", "#17becf"),
)

Numbers = NDArray[np.float64]


class Series(NamedTuple):
    """A line of a chart.

    Args:
        name: For the legend.
        x: (n,).
        y: (n,), NaN for "none".
        colour: A CSS value.
        low: (n,) lower ends of intervals; None: none are drawn.
        high: (n,) upper ends.
        dashed: Whether the line is.
    """

    name: str
    x: Numbers
    y: Numbers
    colour: str = "var(--series-1)"
    low: Numbers | None = None
    high: Numbers | None = None
    dashed: bool = False


class Marks(NamedTuple):
    """Ticks of an axis: their places, and the text beside each."""

    places: list[float]
    texts: list[str]


def line_chart(
    title: str,
    series: Sequence[Series],
    *,
    x_label: str = "step",
    x_marks: Marks | None = None,
    y_marks: Marks | None = None,
    last_values: bool = True,
    within: tuple[float, ...] = (),
) -> str:
    """Draw a <figure>: caption with the last value, lines, and a legend where there are several.

    Args:
        title: Above the chart.
        series: The lines.
        x_label: Below the x axis.
        x_marks: Instead of round numbers; the x axis then has room at both ends.
        y_marks: Instead of round numbers.
        last_values: Whether the caption says each line's last value.
        within: Values that the y axis shows in any case.
    """
    # caption
    series = [thinned(each) for each in series]
    shown = [each for each in series if np.isfinite(each.y).any()]
    last = ", ".join(_last(each, named=len(series) > 1) for each in shown) if last_values else ""
    head = f"<b>{escape(title)}</b> <span class='last'>{last}</span>"
    if not shown:
        return f"<figure class='chart'><figcaption>{head}no finite value</figcaption></figure>"
    # the ranges of both axes
    x_all = np.concatenate([each.x for each in shown])
    y_all = np.concatenate(
        [values for each in shown for values in (each.y, each.low, each.high) if values is not None]
    )
    x_low, x_high = _widened(x_all, 0.06 if x_marks else 0.0)
    y_low, y_high = _widened(np.append(y_all[np.isfinite(y_all)], within), 0.06)

    def place(x: Numbers, y: Numbers) -> tuple[Numbers, Numbers]:
        along = (x - x_low) / (x_high - x_low)
        up = (y - y_low) / (y_high - y_low)
        inner_w, inner_h = WIDTH - LEFT - RIGHT, HEIGHT - TOP - BOTTOM
        return LEFT + along * inner_w, TOP + (1 - up) * inner_h

    # axes, lines, and the same in words
    x_marks = x_marks or marks(x_low, x_high, 5)
    elements = _axes(place, x_marks, y_marks or marks(y_low, y_high, 5), (x_low, y_low), x_label)
    dots = max(len(each.x) for each in shown) <= MOST_DOTS
    for each in shown:
        elements += _line(each, place, dots=dots)
    alt = escape(f"{title}: " + "; ".join(_in_words(each) for each in shown), quote=True)
    legend = ""
    if len(series) > 1:
        keys = "".join(
            f"<li><i class='{'dash' if each.dashed else ''}' style='--c:{each.colour}'></i>"
            f"{escape(each.name)}</li>"
            for each in series
        )
        legend = f"<ul class='legend'>{keys}</ul>"
    box = f"viewBox='0 0 {WIDTH} {HEIGHT}'"
    svg = f"<svg {box} role='img' aria-label='{alt}'>{''.join(elements)}</svg>"
    return f"<figure class='chart'><figcaption>{head}</figcaption>{svg}{legend}</figure>"


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


def marks(low: float, high: float, about: int) -> Marks:
    """Choose about so many round numbers in [low, high]: steps of 1, 2 or 5 by a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    count = math.floor(high / step + 1e-9) - math.ceil(low / step - 1e-9) + 1
    first = math.ceil(low / step - 1e-9)
    places = [(first + k) * step for k in range(count)]
    return Marks(places, [number(place) for place in places])


def number(value: float | None) -> str:
    """Write a number with four digits at most: 12k, 0.05, 1e-05, 3.142; None as a dash."""
    if value is None:
        return "–"
    if not math.isfinite(value):
        return str(value)
    size = abs(value)
    if size >= 1e6:
        return f"{value / 1e6:.4g}M"
    if size >= 1e4:
        return f"{value / 1e3:.4g}k"
    return f"{0.0 if size < 1e-12 else value:.4g}".replace("-", "−")


def scatter(
    alt: str,
    points: Numbers,
    labels: NDArray[np.int64],
    names: Sequence[str],
    pictures: dict[int, str] | None = None,
    aspect: float = 1.0,
) -> str:
    """Draw a map of points: a dot each, coloured by label, class names at their medians.

    Args:
        alt: What the map shows, for those who do not see it.
        points: (n, 2).
        labels: (n,) int64.
        names: Of all classes, by label.
        pictures: Row -> data URI; shown at their points, over dots that are then fainter.
        aspect: Width to height of the map.
    """
    # a path of dots for each label
    places = _placed(points, aspect)
    dots = ""
    for label in np.unique(labels).tolist():
        path = "".join(f"M{x:.1f} {y:.1f}h0" for x, y in places[labels == label])
        dots += f"<path class='dots' stroke='{class_colour(label, len(names))}' d='{path}'/>"
    # over them pictures, or the names of the classes
    over = ""
    for row, uri in (pictures or {}).items():
        x, y = places[row] - PICTURE_PX / 2
        box = f"x='{x:.1f}' y='{y:.1f}' width='{PICTURE_PX}' height='{PICTURE_PX}'"
        colour = class_colour(int(labels[row]), len(names))
        over += f"<image {box} href='{uri}'/><rect {box} fill='none' stroke='{colour}'/>"
    if pictures:
        dots = f"<g opacity='.35'>{dots}</g>"
    elif len(names) <= MOST_NAMES:
        medians = {
            name: np.median(places[labels == label], axis=0)
            for label, name in enumerate(names)
            if (labels == label).any()
        }
        over = _names_apart(medians)
    kind = "map images" if pictures else "map"
    return (
        f"<svg class='{kind}' viewBox='0 0 {MAP_SIDE * aspect:.0f} {MAP_SIDE}' role='img' "
        f"aria-label='{escape(alt, quote=True)}'>{dots}{over}</svg>"
    )


def apart(points: Numbers, aspect: float = 1.0) -> list[int]:
    """Choose rows whose pictures do not overlap on the map, taken in order."""
    places = _placed(points, aspect)
    kept: list[int] = []
    for row, place in enumerate(places):
        gaps = np.abs(places[kept] - place).max(axis=1)
        if not kept or gaps.min() > PICTURE_PX + 2:
            kept.append(row)
    return kept


def _placed(points: Numbers, aspect: float) -> Numbers:
    """Scale points (n, 2) to SVG units: y upwards, room for half a picture around."""
    low, span = points.min(axis=0), np.maximum(np.ptp(points, axis=0), 1e-9)
    share = (points - low) / span
    share[:, 1] = 1 - share[:, 1]
    room = np.array([MAP_SIDE * aspect, MAP_SIDE]) - 2 * MAP_MARGIN
    placed: Numbers = MAP_MARGIN + share * room
    return placed


def _names_apart(medians: dict[str, Numbers]) -> str:
    """Write names at their places, moved down where they would cover one above."""
    texts, taken = "", list[tuple[float, float, float]]()
    for name, (x, y) in sorted(medians.items(), key=lambda item: float(item[1][1])):
        half = 4.2 * len(name)  # SVG units: about half the width of the text
        while any(abs(x - tx) < half + th and abs(y - ty) < 16 for tx, ty, th in taken):
            y += 4
        taken.append((x, y, half))
        texts += f"<text class='name' x='{x:.0f}' y='{y:.0f}'>{escape(name)}</text>"
    return texts


def class_colour(label: int, classes: int) -> str:
    """Return the CSS colour of a label among so many classes; grey for no label."""
    if label < 0:
        return "var(--faint)"
    if classes <= len(TEN_COLOURS):
        return TEN_COLOURS[label]
    return f"hsl({360 * label / classes:.0f} 65% {45 + 14 * (label % 2)}%)"


Place = Callable[[Numbers, Numbers], tuple[Numbers, Numbers]]


def _axes(
    place: Place, x_marks: Marks, y_marks: Marks, corner: tuple[float, float], x_label: str
) -> list[str]:
    """Draw grid lines, their numbers and the x axis' name; `corner`: the lowest x and y shown."""
    bottom, right = HEIGHT - BOTTOM, WIDTH - RIGHT
    elements = []
    _, heights = place(np.full(len(y_marks.places), corner[0]), np.array(y_marks.places))
    for y, text in zip(heights, y_marks.texts, strict=True):
        elements.append(f"<path class='grid' d='M{LEFT} {y:.1f}H{right}'/>")
        elements.append(f"<text class='y' x='{LEFT - 6}' y='{y + 4:.1f}'>{escape(text)}</text>")
    columns, _ = place(np.array(x_marks.places), np.full(len(x_marks.places), corner[1]))
    for x, text in zip(columns, x_marks.texts, strict=True):
        elements.append(f"<path class='grid' d='M{x:.1f} {bottom}v4'/>")
        elements.append(f"<text class='x' x='{x:.1f}' y='{bottom + 16}'>{escape(text)}</text>")
    elements.append(f"<path class='axis' d='M{LEFT} {bottom}H{right}'/>")
    middle = (LEFT + right) / 2
    return [*elements, f"<text class='x' x='{middle}' y='{HEIGHT - 4}'>{escape(x_label)}</text>"]


def _line(series: Series, place: Place, *, dots: bool) -> list[str]:
    """Draw the line, broken where there is no number; its intervals; dots at the points."""
    columns, heights = place(series.x, series.y)
    stroke = f"style='stroke:{series.colour}'"
    finite = np.isfinite(series.y)
    steps = [
        f"{'L' if k and finite[k - 1] else 'M'}{columns[k]:.1f} {heights[k]:.1f}"
        for k in np.flatnonzero(finite)
    ]
    dash = " stroke-dasharray='5 4'" if series.dashed else ""
    elements = [f"<path class='line' {stroke}{dash} d='{''.join(steps)}'/>"]
    if dots:
        points = "".join(f"M{columns[k]:.1f} {heights[k]:.1f}h0" for k in np.flatnonzero(finite))
        elements.append(f"<path class='points' {stroke} d='{points}'/>")
    if series.low is not None and series.high is not None:
        _, lows = place(series.x, series.low)
        _, highs = place(series.x, series.high)
        bars = "".join(
            f"M{x - 3:.1f} {low:.1f}h6M{x:.1f} {low:.1f}V{high:.1f}M{x - 3:.1f} {high:.1f}h6"
            for x, low, high in zip(columns, lows, highs, strict=True)
        )
        elements.append(f"<path class='bar' {stroke} d='{bars}'/>")
    return elements


def _widened(values: Numbers, share: float) -> tuple[float, float]:
    """Return the range of the values and a share more on both sides; never empty."""
    low, high = float(values.min()), float(values.max())
    room = (high - low) * share
    if high - low <= 1e-9 * max(abs(low), abs(high), 1e-9):
        room = max(abs(high) * 0.1, 1e-6)
    return low - room, high + room


def _last(series: Series, *, named: bool) -> str:
    text = number(float(series.y[np.isfinite(series.y)][-1]))
    return f"{escape(series.name)} {text}" if named else text


def _in_words(series: Series) -> str:
    """Describe a series for those who do not see it."""
    rows = np.flatnonzero(np.isfinite(series.y))
    first, last = (
        f"{number(float(series.y[row]))} at {number(float(series.x[row]))}"
        for row in (rows[0], rows[-1])
    )
    return f"{series.name} {first}, {last}"
