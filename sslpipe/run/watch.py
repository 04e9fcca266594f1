"""Runs from the outside: the curves of one while it trains, and a list of all under a folder.

Nothing of a run is touched. No torch: it takes a second to import.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Group
from rich.table import Table

from sslpipe.errors import UserError
from sslpipe.run.log import read_metrics
from sslpipe.run.records import is_number, read_description
from sslpipe.run.status import newest_best, render, status

BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 50  # of a curve, in characters
FOLLOW_S = 2.0  # between two looks at a run
# of held-out images with labels, larger is better
SCORES = ("holdout_knn", "holdout_map_at_r", "validation_map_at_r")


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Draw numbers as blocks from the lowest to the highest; many are averaged, in order."""
    count = min(width, len(values))
    edges = [len(values) * at // count for at in range(count + 1)] if count else []
    means = [mean(values[first:last]) for first, last in pairwise(edges)]
    if not means:
        return ""
    low, high = min(means), max(means)
    step = (high - low) / (len(BLOCKS) - 1)
    return "".join(BLOCKS[round((value - low) / step) if step > 0 else 0] for value in means)


def curves(run_dir: Path) -> dict[str, list[float]]:
    """Read what is drawn of a run: the loss, steps/s, and what its evaluations have scored.

    Without labels the evaluations have no score, and all their numbers are there.
    """
    lines, evals = read_metrics(run_dir), read_metrics(run_dir, "eval")
    speeds = [
        (b["step"] - a["step"]) / (b["wall"] - a["wall"])
        for a, b in pairwise(lines)
        if a.get("restart") == b.get("restart") and _later(a, b)
    ]
    names = [k for k in dict.fromkeys(k for line in evals for k in line) if k not in _NO_SCORE]
    scores = [name for name in names if name.removeprefix("ema_") in SCORES]
    found = {"loss": _numbers(lines, "loss")}
    found |= {name: _numbers(evals, name) for name in scores or names}
    return {name: values for name, values in {**found, "steps/s": speeds}.items() if values}


_NO_SCORE = ("kind", "step", "wall", "restart")


def _numbers(lines: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [float(line[key]) for line in lines if is_number(line.get(key))]


def _later(a: dict[str, Any], b: dict[str, Any]) -> bool:
    first, last = a.get("wall"), b.get("wall")
    return is_number(first) and is_number(last) and bool(first < last)  # type: ignore[operator]


def picture(summary: dict[str, Any]) -> Group:
    """Draw a run's curves under what `render` shows of it."""
    table = Table.grid(padding=(0, 2))
    for name, values in curves(Path(summary["run"])).items():
        table.add_row(name, sparkline(values), f"{values[0]:.4g} to {values[-1]:.4g}")
    return Group(render(summary), "", table)


def follow(
    run_dir: Path, draw: Callable[[dict[str, Any]], None], pause_s: float = FOLLOW_S
) -> dict[str, Any]:
    """Call `draw` with what `status` says of a run, again and again until the run has ended.

    Returns:
        What `status` said last.
    """
    while True:
        summary = status(run_dir)
        draw(summary)
        if summary["state"] != "running":
            return summary
        time.sleep(pause_s)


def list_runs(folder: Path) -> list[dict[str, Any]]:
    """List the runs under a folder, by path.

    Returns:
        For each: run; recipe, its name; state, step and steps of `status`; best, the highest of
        SCORES among its evaluations, and best_of, its name, or None; bytes; deletable: path ->
        bytes, of checkpoints that neither a resume nor `--checkpoint best` would read. A run whose
        recipe.json is damaged has state "damaged" and a `detail`.

    Raises:
        UserError: There is no run.
    """
    found = [_entry(run_dir) for run_dir in _runs_under(folder)]
    if not found:
        raise UserError(f"{folder} holds no run: no recipe.json under it; check the path")
    return found


def _runs_under(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        folders.sort()
        if "recipe.json" in files:
            folders.clear()  # a run holds no other run
            yield Path(path)


def _entry(run_dir: Path) -> dict[str, Any]:
    empty = {"recipe": None, "step": None, "steps": None, "best": None, "best_of": None}
    entry: dict[str, Any] = {"run": str(run_dir), **empty}
    entry |= {"bytes": _bytes(run_dir), "deletable": {}}
    try:
        summary = status(run_dir)
        name = read_description(run_dir, "recipe.json").get("name")
    except UserError as error:
        return {**entry, "state": "damaged", "detail": str(error)}
    evals = read_metrics(run_dir, "eval")
    scored = [
        (value, key)
        for key in dict.fromkeys(key for line in evals for key in line)
        if key.removeprefix("ema_") in SCORES
        for value in _numbers(evals, key)
    ]
    best, best_of = max(scored, default=(None, None))
    shown = {key: summary[key] for key in ("state", "detail", "step", "steps")}
    deletable = {str(path): _bytes(path) for path in _not_needed(run_dir, summary)}
    return {
        **entry,
        **shown,
        "recipe": name,
        "best": best,
        "best_of": best_of,
        "deletable": deletable,
    }


def _not_needed(run_dir: Path, summary: dict[str, Any]) -> list[Path]:
    """Find checkpoints that nothing reads any more; none of a run that is running."""
    checkpoint = summary["checkpoint"]
    if summary["state"] == "running" or checkpoint is None:
        return []
    best = newest_best(run_dir)
    kept = {checkpoint["name"], best.name if best else ""}
    folders = sorted(run_dir.glob("checkpoints/*step-*"))
    return [path for path in folders if path.is_dir() and path.name not in kept]


def _bytes(folder: Path) -> int:
    """Sum the sizes of the files under a folder; a file that goes meanwhile counts nothing."""
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            try:
                total += os.lstat(os.path.join(path, file)).st_size
            except OSError:
                continue
    return total
