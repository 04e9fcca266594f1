"""Learning curves of the graded sets: Recall@1 over CPU seconds, a small plot for each set, as SVG.

    python -m benchmarks.graded.curves docs/measured/graded_training.json docs/pictures/curves.svg

Of what `benchmarks.graded.training` wrote: each point is runs of their own, whose learning rate
ended there, the mean over seeds; the first is random weights. CPU seconds are steps times those of
a step, so that runs counted by a GPU's seconds stand where a CPU would be after as many steps.
"""

import argparse
import json
from pathlib import Path

from benchmarks.graded.jobs import RANDOM
from benchmarks.graded.table import SETS
from benchmarks.graded.training import LINE
from benchmarks.trainings import Tree

COLOURS = {LINE: "#888888", "DIET": "#1f77b4", "queue (MoCo)": "#ff7f0e", "DCL": "#2ca02c"}
WIDTH, HEIGHT, GAP, COLUMNS = 150, 96, 34, 5  # of a plot, in pixels
Points = list[tuple[float, float]]  # CPU seconds, Recall@1 in percent


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("measured", type=Path)
    parser.add_argument("out", type=Path)
    args = parser.parse_args()
    args.out.write_text(picture(curves(json.loads(args.measured.read_text()))))


def curves(report: Tree) -> dict[str, dict[str, Points]]:
    """Set -> method -> points, in the order of their seconds."""
    found: dict[str, dict[str, Points]] = {}
    earlier = report.get("earlier", {"rows": {}, "methods": {}})
    starts = report["rows"][RANDOM]
    for name in (name for name in SETS if name in starts):
        for method in COLOURS:
            points = [(0.0, _percent(starts[name]))]
            for row, cells in report["rows"].items():
                if row.startswith(f"{method}, ") and name in cells:
                    seconds = float(row.rpartition(", ")[2].removesuffix(" s"))
                    points.append((seconds, _percent(cells[name])))
            if name in earlier["rows"].get(method, {}):
                steps, step_s = earlier["methods"][method]["steps"], report["methods"][method]
                points.append((steps * step_s["step_s"], _percent(earlier["rows"][method][name])))
            found.setdefault(name, {})[method] = sorted(points)
    return found


def _percent(cell: Tree) -> float:
    return 100 * float(cell["as it is, Recall@1"]["value"])


def picture(sets: dict[str, dict[str, Points]]) -> str:
    """Draw the plots in rows of COLUMNS; readable on white and on black."""
    most = max(x for of in sets.values() for points in of.values() for x, _ in points)
    rows = -(-len(sets) // COLUMNS)
    size = COLUMNS * (WIDTH + GAP) + GAP, rows * (HEIGHT + 2 * GAP) + GAP
    style = "font-family='sans-serif' font-size='11' fill='#777'"
    lines = [f"<svg xmlns='http://www.w3.org/2000/svg' viewBox='0 0 {size[0]} {size[1]}' {style}>"]
    for place, (name, of) in enumerate(sets.items()):
        left = GAP + place % COLUMNS * (WIDTH + GAP)
        top = GAP + place // COLUMNS * (HEIGHT + 2 * GAP)
        values = [y for points in of.values() for _, y in points]
        low, high = min(values), max(values)
        lines.append(f"<text x='{left}' y='{top - 8}' font-weight='bold'>{name}</text>")
        frame = f"M{left} {top}v{HEIGHT}h{WIDTH}"
        lines.append(f"<path d='{frame}' fill='none' stroke='#aaa'/>")
        for value, y in ((high, top + 8), (low, top + HEIGHT)):
            lines.append(f"<text x='{left - 4}' y='{y}' text-anchor='end'>{value:.0f}</text>")
        lines.append(f"<text x='{left}' y='{top + HEIGHT + 14}'>0</text>")
        end = f"x='{left + WIDTH}' y='{top + HEIGHT + 14}' text-anchor='end'"
        lines.append(f"<text {end}>{most:,.0f} s</text>")
        for method, points in of.items():
            path = " ".join(
                f"{left + WIDTH * x / most:.1f},{top + HEIGHT * (high - y) / (high - low):.1f}"
                for x, y in points
            )
            drawn = f"fill='none' stroke='{COLOURS[method]}' stroke-width='2'"
            lines.append(f"<polyline points='{path}' {drawn}/>")
    for place, (method, colour) in enumerate(COLOURS.items()):
        x, y = GAP + place * (WIDTH + GAP), size[1] - 10
        lines.append(f"<path d='M{x} {y - 4}h20' stroke='{colour}' stroke-width='2'/>")
        lines.append(f"<text x='{x + 26}' y='{y}'>{method}</text>")
    return "\n".join([*lines, "</svg>", ""])


if __name__ == "__main__":
    main()
