"""Time and memory over the number of rows, both axes logarithmic, as one SVG."""

import math
from typing import Any

LEAST = {"ms": 0.01, "extra_mb": 0.1}  # what is below has no place on a logarithmic axis
COLOURS = ("#9a6700", "#8250df", "#57606a", "#8c959f", "#0969da", "#1a7f37")
WIDTH, HEIGHT, LEFT, TOP, GAP = 330, 250, 60, 30, 90


def plot(records: list[dict[str, Any]]) -> str:
    """records: rows, contender, ms, extra_mb."""
    names = list(dict.fromkeys(record["contender"] for record in records))
    colours = dict(zip(names, COLOURS, strict=False))
    total = LEFT + 2 * WIDTH + GAP + 200
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {total} {HEIGHT + 80}" '
        'font-family="sans-serif" font-size="12">',
        f'<rect width="{total}" height="{HEIGHT + 80}" fill="white"/>',
        *_panel(records, "ms", "forward + backward, ms", colours, LEFT),
        *_panel(records, "extra_mb", "peak extra memory, MB", colours, LEFT + WIDTH + GAP),
    ]
    for k, name in enumerate(names):
        x, y = LEFT + 2 * WIDTH + GAP + 20, TOP + 14 + 22 * k
        parts.append(
            f'<line x1="{x}" x2="{x + 22}" y1="{y - 4}" y2="{y - 4}" {_pen(name, colours)}/>'
        )
        parts.append(f'<text x="{x + 28}" y="{y}">{name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _panel(
    records: list[dict[str, Any]], key: str, title: str, colours: dict[str, str], left: int
) -> list[str]:
    rows = sorted({record["rows"] for record in records})
    powers = [math.log10(max(record[key], LEAST[key])) for record in records]
    low, high = math.floor(min(powers)), math.ceil(max(powers))
    span = math.log(rows[-1] / rows[0]) or 1.0  # of a single size

    def x(count: float) -> float:
        return left + WIDTH * math.log(count / rows[0]) / span

    def y(value: float) -> float:
        return TOP + HEIGHT * (high - math.log10(max(value, LEAST[key]))) / (high - low)

    bottom = TOP + HEIGHT
    parts = [f'<text x="{left}" y="{TOP - 12}" font-weight="bold">{title}</text>']
    for power in range(low, high + 1):
        at = y(10**power)
        parts.append(
            f'<line x1="{left}" x2="{left + WIDTH}" y1="{at:.1f}" y2="{at:.1f}" stroke="#d0d7de"/>'
        )
        label = f"{10**power:,}" if power >= 0 else f"{10.0**power:g}"
        parts.append(f'<text x="{left - 6}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for count in rows:
        parts.append(
            f'<text x="{x(count):.1f}" y="{bottom + 18}" text-anchor="middle" font-size="11">'
            f"{count:,}</text>"
        )
    middle = left + WIDTH / 2
    parts.append(f'<text x="{middle}" y="{bottom + 38}" text-anchor="middle">rows 2N</text>')
    for name in colours:
        points = [(x(r["rows"]), y(r[key])) for r in records if r["contender"] == name]
        line = " ".join(f"{px:.1f},{py:.1f}" for px, py in points)
        parts.append(f'<polyline points="{line}" fill="none" {_pen(name, colours)}/>')
        parts += [
            f'<circle cx="{px:.1f}" cy="{py:.1f}" r="3" fill="{colours[name]}"/>'
            for px, py in points
        ]
    return parts


def _pen(name: str, colours: dict[str, str]) -> str:
    return f'stroke="{colours[name]}" stroke-width="{3 if name.startswith("ours") else 1.5}"'
