"""Charts of the pages as SVG: time and memory over the number of rows; kNN over a score."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

LEAST = {"ms": 0.01, "extra_mb": 0.1}  # what is below has no place on a logarithmic axis
COLOURS = ("#9a6700", "#8250df", "#57606a", "#8c959f", "#0969da", "#1a7f37")
EARLIER, LAST = "#8c959f", "#0969da"  # checkpoints
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 250, 60, 30, 90
START = "random weights"  # the row of a network that was not trained
Point = tuple[float, float]


class Axis(NamedTuple):
    """Where an axis begins and ends, and what stands at it."""

    low: float
    high: float
    marks: Sequence[float]
    log: bool = False

    def share(self, value: float) -> float:
        """Place a value between the ends, 0 and 1."""
        low, high, at = (math.log(v) if self.log else v for v in (self.low, self.high, value))
        return (at - low) / ((high - low) or 1.0)


def lines_over_rows(records: list[dict[str, Any]]) -> str:
    """Draw a line a contender. records: rows, contender, ms, extra_mb."""
    names = list(dict.fromkeys(record["contender"] for record in records))
    rows = sorted({record["rows"] for record in records})
    pens = {
        name: f'stroke="{colour}" stroke-width="{3 if name.startswith("ours") else 1.5}"'
        for name, colour in zip(names, COLOURS, strict=False)
    }
    panels = []
    for key, title in (("ms", "forward + backward, ms"), ("extra_mb", "peak extra memory, MB")):
        values = [max(record[key], LEAST[key]) for record in records]
        powers = range(math.floor(math.log10(min(values))), math.ceil(math.log10(max(values))) + 1)
        x = Axis(rows[0], rows[-1], rows, log=True)
        y = Axis(10.0 ** powers[0], 10.0 ** powers[-1], [10.0**k for k in powers], log=True)
        lines = frame(title, x, y)
        for name, colour in zip(names, COLOURS, strict=False):
            points = [
                (r["rows"], max(r[key], LEAST[key])) for r in records if r["contender"] == name
            ]
            path = " ".join("{:.1f},{:.1f}".format(*place(point, x, y)) for point in points)
            lines += [f'<polyline points="{path}" fill="none" {pens[name]}/>']
            lines += [dot(point, x, y, colour) for point in points]
        panels.append(lines)
    legend = []
    for k, name in enumerate(names):
        at = 14 + 22 * k
        legend += [f'<line x2="22" y1="{at - 4}" y2="{at - 4}" {pens[name]}/>']
        legend += [f'<text x="28" y="{at}">{escape(name)}</text>']
    return drawing([*panels, legend], "x: rows 2N")


def dots_over_score(checkpoints: list[dict[str, Any]], by: str) -> str:
    """Draw a dot a checkpoint and a panel a data set. Rows: data, run, step, knn and `by`."""
    panels = []
    for data in dict.fromkeys(row["data"] for row in checkpoints):
        rows = [row for row in checkpoints if row["data"] == data]
        starts = [100 * row["knn"] for row in rows if row["run"] == START]
        rows = [row for row in rows if row["run"] != START]
        last = {row["run"]: row["step"] for row in rows}  # the rows are in the order of the steps
        points = [(row["step"] == last[row["run"]], (row[by], 100 * row["knn"])) for row in rows]
        x = round_axis([at for _, (at, _) in points])
        y = round_axis([*(at for _, (_, at) in points), *starts])
        lines = frame(f"{data}: kNN, %", x, y)
        lines += [level(y, at, 'stroke="#57606a" stroke-dasharray="4 3"') for at in starts]
        lines += [dot(at, x, y, LAST if is_last else EARLIER) for is_last, at in sorted(points)]
        panels.append(lines)
    legend = f"last checkpoints blue, earlier ones grey; dashed: random weights; x: {by}"
    return drawing(panels, legend)


def round_axis(values: list[float]) -> Axis:
    """Make an axis with about five marks: steps of 1, 2 or 5 by a power of ten."""
    room = 0.05 * (max(values) - min(values)) or 1.0
    low, high = min(values) - room, max(values) + room
    power = 10.0 ** math.floor(math.log10((high - low) / 5))
    step = next(k * power for k in (1, 2, 5, 10) if k * power >= (high - low) / 5 * 0.999)
    marks = [k * step for k in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return Axis(low, high, marks)


def place(point: Point, x: Axis, y: Axis) -> Point:
    return WIDTH * x.share(point[0]), HEIGHT * (1 - y.share(point[1]))


def dot(point: Point, x: Axis, y: Axis, colour: str) -> str:
    across, down = place(point, x, y)
    return f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>'


def level(y: Axis, value: float, pen: str) -> str:
    at = HEIGHT * (1 - y.share(value))
    return f'<line x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}" {pen}/>'


def frame(title: str, x: Axis, y: Axis) -> list[str]:
    """Draw the title, a line a mark of y, and the marks' numbers."""
    lines = [f'<text y="-12" font-weight="bold">{escape(title)}</text>']
    for value in y.marks:
        at = HEIGHT * (1 - y.share(value)) + 4
        lines += [level(y, value, 'stroke="#d0d7de"')]
        lines += [f'<text x="-6" y="{at:.1f}" text-anchor="end">{value:,.10g}</text>']
    for value in x.marks:
        at = f'x="{WIDTH * x.share(value):.1f}" y="{HEIGHT + 18}"'
        lines += [f'<text {at} text-anchor="middle">{value:,.10g}</text>']
    return lines


def drawing(panels: Sequence[Sequence[str]], legend: str) -> str:
    """Put panels side by side, and a line of text below."""
    wide, high = LEFT + len(panels) * (WIDTH + GAP), TOP + HEIGHT + 60
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide} {high}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{wide}" height="{high}" fill="white"/>',
        f'<text x="{LEFT}" y="{high - 10}">{escape(legend)}</text>',
    ]
    for k, panel in enumerate(panels):
        lines += [f'<g transform="translate({LEFT + k * (WIDTH + GAP)} {TOP})">', *panel, "</g>"]
    return "\n".join([*lines, "</svg>", ""])
