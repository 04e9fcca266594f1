"""kNN over a score, a panel for each data set and a dot for each checkpoint, as one SVG."""

from html import escape
from typing import Any

import numpy as np

from benchmarks.checkpoints.table import START

WIDTH, HEIGHT, LEFT, TOP, GAP = 250, 210, 54, 34, 48
EARLIER, LAST = "#8c959f", "#0969da"  # checkpoints


def plot(checkpoints: list[dict[str, Any]], by: str) -> str:
    """Draw rows with data, run, knn and the score `by`; lines are the random weights' kNN."""
    names = list(dict.fromkeys(row["data"] for row in checkpoints))
    total, high = LEFT + len(names) * (WIDTH + GAP), TOP + HEIGHT + 60
    legend = f"last checkpoints blue, earlier ones grey; dashed: random weights; x: {by}"
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {high}" '
        'font-family="sans-serif" font-size="11">',
        f'<rect width="{total}" height="{high}" fill="white"/>',
        f'<text x="{LEFT}" y="{high - 10}">{escape(legend)}</text>',
    ]
    for k, name in enumerate(names):
        lines += [f'<g transform="translate({LEFT + k * (WIDTH + GAP)} {TOP})">']
        lines += [f'<text y="-12" font-weight="bold">{escape(name)}: kNN, %</text>']
        lines += [*_panel([row for row in checkpoints if row["data"] == name], by), "</g>"]
    return "\n".join([*lines, "</svg>", ""])


def _panel(rows: list[dict[str, Any]], by: str) -> list[str]:
    starts = [100 * row["knn"] for row in rows if row["run"] == START]
    rows = [row for row in rows if row["run"] != START]
    last = {row["run"]: row["step"] for row in rows}  # the rows are in the order of the steps
    points = [(row[by], 100 * row["knn"], row["step"] == last[row["run"]]) for row in rows]
    x_low, x_high = _range([x for x, _, _ in points])
    y_low, y_high = _range([*(y for _, y, _ in points), *starts])

    def place(x: float, y: float) -> tuple[float, float]:
        return WIDTH * (x - x_low) / (x_high - x_low), HEIGHT * (y_high - y) / (y_high - y_low)

    def level(y: float, pen: str) -> str:
        at = place(x_low, y)[1]
        return f'<line x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}" {pen}/>'

    lines = []
    for y in _marks(y_low, y_high, 5):
        at = place(x_low, y)[1]
        lines += [level(y, 'stroke="#d0d7de"')]
        lines += [f'<text x="-6" y="{at + 4:.1f}" text-anchor="end">{y:g}</text>']
    for x in _marks(x_low, x_high, 4):
        at = place(x, y_low)[0]
        lines += [f'<text x="{at:.1f}" y="{HEIGHT + 18}" text-anchor="middle">{x:g}</text>']
    lines += [level(y, 'stroke="#57606a" stroke-dasharray="4 3"') for y in starts]
    for x, y, is_last in sorted(points, key=lambda point: point[2]):
        across, down = place(x, y)
        colour = LAST if is_last else EARLIER
        lines += [f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>']
    return lines


def _range(values: list[float]) -> tuple[float, float]:
    room = 0.05 * (max(values) - min(values)) or 1.0
    return min(values) - room, max(values) + room


def _marks(low: float, high: float, about: int) -> list[float]:
    """Choose about so many round numbers in [low, high]: steps of 1, 2 or 5 by a power of ten."""
    rough = (high - low) / about
    power = 10.0 ** np.floor(np.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * 0.999)
    return [float(k * step) for k in range(int(np.ceil(low / step)), int(high // step) + 1)]
