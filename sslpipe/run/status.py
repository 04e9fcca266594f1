"""Runs from the outside: how one stands, its curves while it trains, and all under a folder.

All is read from the directory: nothing of a run is asked or touched. No torch, which takes a second
to import.
"""

import os
import re
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Group
from rich.table import Column, Table
from rich.text import Text

from sslpipe.arguments import checked
from sslpipe.errors import UserError
from sslpipe.evaluation.suite_file import read_suite
from sslpipe.portable import read_regular
from sslpipe.run.checkpoint_files import BestEntry, best_of, checkpoint_names, newest
from sslpipe.run.description import Outline, read_description
from sslpipe.run.lock import holder_of
from sslpipe.run.log import (
    bad_step_files,
    clock,
    quarantined_ids,
    read_metrics,
    read_skipped,
    step_seconds,
    unreadable_lines,
)
from sslpipe.run.recorded import check_run
from sslpipe.run.stop import MARKERS, MOST_MARKER_BYTES
from sslpipe.run.watchdog import read_heartbeats

HEALTH_KEYS = (
    *("loss", "grad_norm", "embedding_std", "effective_rank"),
    *("skipped_steps", "quarantined"),
)
EXPECTED_BEAT_S = 60  # an older heartbeat is pointed out
LONGEST_S = 100 * 365 * 86400  # of a time that is shown: clocks jump
BLOCKS = "▁▂▃▄▅▆▇█"
WIDTH = 50  # of a curve, in characters
FOLLOW_S = 2.0  # between two looks at a run
# of held-out images with labels, larger is better; first what a run watches, see `run.best`
SCORES = ("holdout_map_at_r", "validation_map_at_r", "holdout_knn")
NO_SCORE = ("kind", "step", "wall", "restart")  # entries of every line


@checked
def status(run_dir: str | Path) -> dict[str, Any]:
    """Summarise how a run stands, as `sslpipe status` does; None where unknown.

    Args:
        run_dir: Of a run that trains, or has ended; nothing of it is touched.

    Returns:
        state: running, done, stopped (from a keyboard), preempted (by another signal or the stop
        file), failed, or lost (it ended without a marker). eta_s: seconds to the end at the
        present speed, evaluations and saves included. ranks: see `read_heartbeats`. first_skipped,
        last_skipped: numbers of steps as the log counts them. damaged: name of a file -> what of
        it was not used. The rest says what its keys say.

    Raises:
        UserError: run_dir holds no run, or its recipe.json is damaged.
    """
    run_dir = Path(run_dir)
    check_run(run_dir)
    steps = read_description(run_dir, "recipe.json", Outline).steps
    lines = read_metrics(run_dir)
    evals = read_metrics(run_dir, "eval")
    last: dict[str, Any] = lines[-1] if lines else {}
    scores: dict[str, Any] = evals[-1] if evals else {}
    ranks = read_heartbeats(run_dir)
    checkpoint = _newest_checkpoint(run_dir)
    state, detail, damaged = _state(run_dir, checkpoint)
    for name, count in unreadable_lines(run_dir).items():
        damaged[name] = f"skipped {count} damaged lines"
    for path in sorted((run_dir / "heartbeat").glob("rank-*.json")):
        if path.name not in {f"rank-{rank}.json" for rank in ranks}:
            damaged[f"heartbeat/{path.name}"] = "cannot be read"
    step = max(last.get("step", 0), saved_step(run_dir))  # a line comes every run.log_steps
    step_s = step_seconds(lines, mean)  # with evaluations and saves
    timed = state == "running" and step_s is not None and 0 < step_s < LONGEST_S
    health = {key: last.get(key) for key in HEALTH_KEYS}
    # steps after the last line: a line comes every run.log_steps, and none at all where it failed
    skipped = read_skipped(bad_step_files(run_dir))
    if skipped:
        health["skipped_steps"] = max(len(skipped), health["skipped_steps"] or 0)
    return {
        "run": str(run_dir),
        "state": state,
        "detail": detail,
        "step": step,
        "steps": steps,
        **{key: last.get(key) for key in ("epoch", "images_per_s", "data_wait_percent")},
        "eta_s": step_s * (steps - step) if timed and step_s else None,
        "health": health,
        "first_skipped": min(skipped) + 1 if skipped else None,
        "last_skipped": max(skipped) + 1 if skipped else None,
        "evals": {k: v for k, v in scores.items() if k not in ("kind", "wall", "restart")},
        "restarts": last.get("restart", 0),
        "quarantined": len(quarantined_ids(run_dir)),
        "checkpoint": checkpoint,
        "ranks": [beat.model_dump() for beat in ranks.values()],
        "damaged": damaged,
    }


def saved_step(run_dir: Path) -> int:
    """Return the number of steps done at the newest checkpoint; 0 without one."""
    last = newest(run_dir)
    return int(last.name.removeprefix("step-")) if last else 0


def newest_best(run_dir: Path) -> BestEntry | None:
    """Return what the newest checkpoint says is the best one; None: none is kept."""
    last = newest(run_dir)
    return best_of(last) if last else None


def _newest_checkpoint(run_dir: Path) -> dict[str, Any] | None:
    last = newest(run_dir)
    size = 0
    saved_s = time.time()
    if last is None:
        return None
    with suppress(OSError):  # the run may be removing it
        saved_s = last.stat().st_mtime
        size = sum(file.stat().st_size for file in last.iterdir())
    summary: dict[str, Any] = {"name": last.name, "age_s": round(time.time() - saved_s, 1)}
    summary |= {"bytes": size, "kept": len(checkpoint_names(last.parent))}
    if (best := best_of(last)) is not None:
        summary["best"] = best.name
    return summary


def _state(run_dir: Path, checkpoint: dict[str, Any] | None) -> tuple[str, str, dict[str, str]]:
    """State, detail, and which marker is damaged.

    DONE and PREEMPTED name the step of the last save, and so does the newest checkpoint.
    """
    holder = holder_of(run_dir)
    if holder is not None:
        return "running", holder, {}
    damaged: dict[str, str] = {}
    for marker in MARKERS:
        path = run_dir / marker
        if not path.exists():
            continue
        text = ""
        with suppress(OSError):
            text = read_regular(path, MOST_MARKER_BYTES).decode(errors="replace").strip()
        saved = re.fullmatch(r"step-0*(\d+)", checkpoint["name"]) if checkpoint else None
        if marker != "FAILED" and saved and text != f"step {saved[1]}":
            damaged[marker] = "does not name the step of the last checkpoint"
            text = f"step {saved[1]}"
        return marker.lower(), text, damaged
    detail = "the process was killed or crashed; the same `sslpipe train` command resumes it"
    return "lost", detail, damaged


def render(summary: dict[str, Any]) -> Group:
    """Make a table for people of what `status` returns."""
    speed = [f"{summary['images_per_s']:.0f} images/s"] if summary["images_per_s"] else []
    if summary["data_wait_percent"] is not None:
        speed.append(f"{summary['data_wait_percent']:.0f} % waiting for data")
    if summary["eta_s"] is not None:
        speed.append(f"{clock(summary['eta_s'])} left")
    done = 100 * summary["step"] / summary["steps"]
    state = summary["state"]
    times = summary["restarts"]
    checkpoint = summary["checkpoint"]
    waits = state in ("stopped", "preempted")
    restarted = {0: "never restarted", 1: "restarted once"}.get(times, f"restarted {times} times")
    rows = {
        "state": f"{state}: {summary['detail']}"
        + ("; the same `sslpipe train` command resumes it" if waits else ""),
        "progress": f"step {summary['step']} of {summary['steps']} ({done:.1f} %)"
        + (f", {restarted}" if times or not waits else ""),
        "speed": ", ".join(speed) or "nothing logged yet",
        "health": _listed(summary["health"]),
        "evaluation": _listed(summary["evals"]) or "none yet",
        "bad samples": f"{summary['quarantined']} quarantined",
    }
    if summary["last_skipped"] is not None:
        count = summary["health"]["skipped_steps"]
        first = summary["first_skipped"]
        last = summary["last_skipped"]
        where = f'"step" {first - 1} to {last - 1} in {summary["run"]}/bad_steps.*.jsonl'  # from 0
        rows["skipped steps"] = f"{count:.0f}, steps {first} to {last}; their samples: {where}"
    rows["checkpoint"] = "none yet"
    if checkpoint:
        age = timedelta(seconds=round(checkpoint["age_s"]))
        rows["checkpoint"] = (
            f"{checkpoint['name']}, {age} old, {checkpoint['bytes'] / 1e6:.1f} MB; "
            f"{checkpoint['kept']} kept"
            + (f", best {checkpoint['best']}" if "best" in checkpoint else "")
        )
    rows |= {f"damaged: {name}": text for name, text in summary["damaged"].items()}
    rows |= {f"rank {beat['rank']}": _beat(beat, state) for beat in summary["ranks"]}
    table = Table.grid("", Column(overflow="fold"), padding=(0, 2))  # a long path is not cut
    for name, text in rows.items():
        table.add_row(name, Text(text))
    return Group(table)


def _beat(beat: dict[str, Any], state: str) -> str:
    """Return what a rank does and since when, or what it did last."""
    if state != "running":
        return f"last heartbeat: step {beat['step']}, {beat['phase']}, on {beat['host']}"
    age_s = time.time() - float(beat["wall"])
    old = f"; no heartbeat for {age_s:.0f} s" if age_s > EXPECTED_BEAT_S else ""
    since = f"{beat['since_s']:.0f} s since this step or phase began"
    return f"step {beat['step']}, {beat['phase']}, {since}, on {beat['host']}{old}"


def _listed(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in values.items() if value is not None)


# curves


def sparkline(values: Sequence[float], width: int = WIDTH) -> str:
    """Draw numbers as blocks from the lowest to the highest; many are averaged, in order."""
    count = min(width, len(values))
    edges = [len(values) * at // count for at in range(count + 1)] if count else []
    means = [mean(values[first:last]) for first, last in pairwise(edges)]
    if not means:
        return ""
    low = min(means)
    high = max(means)
    step = (high - low) / (len(BLOCKS) - 1)
    return "".join(BLOCKS[round((value - low) / step) if step > 0 else 0] for value in means)


def curves(run_dir: Path) -> dict[str, list[float]]:
    """Read what is drawn of a run: the loss, steps/s, and what its evaluations have scored.

    Without labels the evaluations have no score, and all their numbers are there.
    """
    lines = read_metrics(run_dir)
    evals = read_metrics(run_dir, "eval")
    timed = [line for line in lines if line.get("wall") is not None]
    speeds = [
        (b["step"] - a["step"]) / (b["wall"] - a["wall"])
        for a, b in pairwise(timed)
        if a.get("restart") == b.get("restart") and a["wall"] < b["wall"]
    ]
    names = [k for k in dict.fromkeys(k for line in evals for k in line) if k not in NO_SCORE]
    scores = [name for name in names if name in SCORES]
    series = {"loss": _numbers(lines, "loss")}
    series |= {name: _numbers(evals, name) for name in scores or names}
    return {name: values for name, values in {**series, "steps/s": speeds}.items() if values}


def _numbers(lines: Sequence[dict[str, Any]], key: str) -> list[float]:
    return [float(line[key]) for line in lines if line.get(key) is not None]


def picture(summary: dict[str, Any]) -> Group:
    """Draw a run's curves under what `render` shows of it."""
    table = Table.grid(padding=(0, 2))
    for name, values in curves(Path(summary["run"])).items():
        table.add_row(name, sparkline(values), f"{values[0]:.4g} to {values[-1]:.4g}")
    return Group(render(summary), "", table)


def follow(run_dir: Path, draw: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    """Call `draw` with the `status` of a run until the run has ended; return the last."""
    while True:
        summary = status(run_dir)
        draw(summary)
        if summary["state"] != "running":
            return summary
        time.sleep(FOLLOW_S)


# all runs under a folder


@checked
def list_runs(folder: str | Path) -> list[dict[str, Any]]:
    """List the runs under a folder, by path, as `sslpipe runs` does.

    >>> pandas.DataFrame(sslpipe.list_runs("runs"))

    Args:
        folder: With runs in it, at any depth.

    Returns:
        For each: run; recipe, its name; state, step and steps of `status`; best, the value of the
        best checkpoint, where one is kept, else the highest of what the run watches, and best_of,
        its name, or None; measure, value and interval95 of the first number of its eval.json, or
        None; bytes. A run whose recipe.json is damaged has state "damaged" and a `detail`.

    Raises:
        UserError: There is no run.
    """
    runs = [_entry(run_dir) for run_dir in _runs_under(Path(folder))]
    if not runs:
        raise UserError(f"{folder} holds no run: no recipe.json under it; check the path")
    return runs


def _runs_under(folder: Path) -> Iterator[Path]:
    for path, folders, files in os.walk(folder):
        folders.sort()
        if "recipe.json" in files:
            folders.clear()  # a run holds no other run
            yield Path(path)


def _entry(run_dir: Path) -> dict[str, Any]:
    names = ("recipe", "step", "steps", "best", "best_of", "measure", "value", "interval95")
    empty = dict.fromkeys(names)
    entry: dict[str, Any] = {"run": str(run_dir), **empty}
    entry["bytes"] = _bytes(run_dir)
    try:
        summary = status(run_dir)
        entry["recipe"] = read_description(run_dir, "recipe.json", Outline).name
    except UserError as error:
        return {**entry, "state": "damaged", "detail": str(error)}
    series = curves(run_dir)
    for measure in (*SCORES, "holdout_view_recall"):  # numbers of two measures do not compare
        if measure in series:
            entry |= {"best": max(series[measure]), "best_of": measure}
            break
    kept = newest_best(run_dir)
    if kept is not None:  # a higher value may not have been clearly so
        entry |= {"best": kept.value, "best_of": kept.measure}
    entry |= _first_number(run_dir)
    entry |= {key: summary[key] for key in ("state", "detail", "step", "steps")}
    return entry


def _first_number(run_dir: Path) -> dict[str, Any]:
    """Find what the run's eval.json begins with, of its own features as they are; {}: nothing."""
    path = run_dir / "eval.json"
    if not path.is_file():
        return {}
    try:
        suite = read_suite(path)
    except UserError:
        return {"measure": "eval.json is damaged"}
    for row in suite["rows"]:
        is_plain = row["features"] == "ssl" and not row["whitened"]
        if is_plain and row["column"] in suite["columns"]:
            numbers = {key: row[key] for key in ("value", "interval95")}
            return {"measure": row["column"], **numbers}
    return {}


def _bytes(folder: Path) -> int:
    """Sum the sizes of the files under a folder; a file that goes meanwhile counts nothing."""
    total = 0
    for path, _, files in os.walk(folder):
        for file in files:
            with suppress(OSError):
                total += os.lstat(os.path.join(path, file)).st_size
    return total
