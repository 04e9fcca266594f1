"""The chart of docs/performance.md as SVG: time and memory over the number of rows."""

import math
from collections.abc import Sequence
from html import escape
from typing import Any, NamedTuple

LEAST = {"ms": 0.01, "extra_mb": 0.1}  # what is below has no place on a logarithmic axis
COLOURS = ("#9a6700", "#8250df", "#57606a", "#8c959f", "#0969da", "#1a7f37")
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 250, 60, 30, 90
Point = tuple[float, float]


class Axis(NamedTuple):
    """Where an axis begins and ends, and what stands at it."""

    low: float
    high: float
    marks: Sequence[float]

    def share(self, value: float) -> float:
        """Place a value between the ends, 0 and 1, on a logarithmic scale."""
        low, high, at = map(math.log, (self.low, self.high, value))
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
        x = Axis(rows[0], rows[-1], rows)
        y = Axis(10.0 ** powers[0], 10.0 ** powers[-1], [10.0**k for k in powers])
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


def place(point: Point, x: Axis, y: Axis) -> Point:
    return WIDTH * x.share(point[0]), HEIGHT * (1 - y.share(point[1]))


def dot(point: Point, x: Axis, y: Axis, colour: str) -> str:
    across, down = place(point, x, y)
    return f'<circle cx="{across:.1f}" cy="{down:.1f}" r="3" fill="{colour}"/>'


def frame(title: str, x: Axis, y: Axis) -> list[str]:
    """Draw the title, a line a mark of y, and the marks' numbers."""
    lines = [f'<text y="-12" font-weight="bold">{escape(title)}</text>']
    for value in y.marks:
        at = HEIGHT * (1 - y.share(value))
        lines += [f'<line x2="{WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#d0d7de"/>']
        lines += [f'<text x="-6" y="{at + 4:.1f}" text-anchor="end">{value:,.10g}</text>']
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
