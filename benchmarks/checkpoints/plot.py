"""kNN over a score, a panel for each data set and a dot for each checkpoint, as one SVG."""

import math
from html import escape
from typing import Any

from benchmarks.checkpoints.table import START
from sslpipe.report.page import number

WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 210, 54, 34, 48
EARLIER, LAST = "#8c959f", "#0969da"  # checkpoints


def plot(checkpoints: list[dict[str, Any]], by: str) -> str:
    """Draw rows with data, run, knn and the score `by`; lines are the random weights' kNN."""
    names = list(dict.fromkeys(row["data"] for row in checkpoints))
    total, high = LEFT + len(names) * (WIDTH + GAP), TOP + HEIGHT + 60
    panels = [
        line
        for k, name in enumerate(names)
        for line in _panel([row for row in checkpoints if row["data"] == name], name, by, k)
    ]
    legend = f"last checkpoints blue, earlier ones grey; dashed: random weights; x: {by}"
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {high}"'
    lines = [
        f'{head} font-family="sans-serif" font-size="11">',
        f'<rect width="{total}" height="{high}" fill="white"/>',
        *panels,
        f'<text x="{LEFT}" y="{high - 10}">{escape(legend)}</text>',
        "</svg>",
    ]
    return "\n".join([*lines, ""])


def _panel(rows: list[dict[str, Any]], name: str, by: str, number: int) -> list[str]:
    start = next((100 * row["knn"] for row in rows if row["run"] == START), None)
    rows = [row for row in rows if row["run"] != START]
    last = {row["run"]: row["step"] for row in rows}  # the rows are in the order of the steps
    points = [(row[by], 100 * row["knn"], row["step"] == last[row["run"]]) for row in rows]
    x_low, x_high = _range([x for x, _, _ in points])
    y_low, y_high = _range([y for _, y, _ in points] + ([start] if start is not None else []))
    left, bottom = LEFT + number * (WIDTH + GAP), TOP + HEIGHT

    def place(x: float, y: float) -> tuple[float, float]:
        across, up = (x - x_low) / (x_high - x_low), (y - y_low) / (y_high - y_low)
        return left + WIDTH * across, bottom - HEIGHT * up

    lines = [f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{escape(name)}: kNN, %</text>']
    wide = f'x1="{left}" x2="{left + WIDTH}"'
    for y, text in zip(*_marks(y_low, y_high, 5), strict=True):
        at = place(x_low, y)[1]
        lines.append(f'<line {wide} y1="{at:.1f}" y2="{at:.1f}" stroke="#d0d7de"/>')
        lines.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{text}</text>')
    for x, text in zip(*_marks(x_low, x_high, 4), strict=True):
        at = place(x, y_low)[0]
        lines.append(f'<text x="{at:.1f}" y="{bottom + 18}" text-anchor="middle">{text}</text>')
    if start is not None:
        at = place(x_low, start)[1]
        dashed = 'stroke="#57606a" stroke-dasharray="4 3"'
        lines.append(f'<line {wide} y1="{at:.1f}" y2="{at:.1f}" {dashed}/>')
    for x, y, is_last in sorted(points, key=lambda point: point[2]):
        across, down = place(x, y)
        colour = LAST if is_last else EARLIER
        lines.append(f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>')
    return lines


def _range(values: list[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    room = 0.05 * (high - low) or 1.0
    return low - room, high + room


def _marks(low: float, high: float, about: int) -> tuple[list[float], list[str]]:
    """Choose about so many round numbers in [low, high]: steps of 1, 2 or 5 by a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    places = [k * step for k in range(first, last + 1)]
    return places, [number(place) for place in places]
