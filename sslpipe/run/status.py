"""How a run stands, from its directory alone: nothing of the run itself is asked or touched."""

import re
import time
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from statistics import mean
from typing import Any

from rich.console import Group
from rich.table import Table

from sslpipe.errors import UserError
from sslpipe.portable import read_regular
from sslpipe.run.checkpoint_files import BestOf, best_of, checkpoint_names
from sslpipe.run.lock import holder_of, lock_damage
from sslpipe.run.log import (
    bad_step_files,
    clock,
    quarantined_ids,
    read_metrics,
    read_skipped,
    step_seconds,
    unreadable_lines,
)
from sslpipe.run.records import read_description
from sslpipe.run.stop import MARKERS, MOST_MARKER_BYTES
from sslpipe.run.watchdog import read_heartbeats

HEALTH_KEYS = (
    *("loss", "grad_norm", "embedding_std", "effective_rank"),
    *("skipped_steps", "quarantined"),
)
EXPECTED_BEAT_S = 60  # an older heartbeat is pointed out
LONGEST_S = 100 * 365 * 86400  # of a time that is shown: clocks jump


def status(run_dir: Path) -> dict[str, Any]:
    """Summarise how a run stands, in plain values; None where unknown.

    Returns:
        state: running, done, stopped (from a keyboard), preempted (by another signal or the stop
        file), failed, or lost (it ended without a marker). eta_s: seconds to the end at the
        present speed, evaluations and saves included. ranks: see `read_heartbeats`. first_skipped,
        last_skipped: numbers of steps as the log counts them. damaged: name of a file -> what of
        it was not used. The rest says what its keys say.

    Raises:
        UserError: run_dir holds no run, or its recipe.json is damaged.
    """
    path = run_dir / "recipe.json"
    if not path.is_file():
        raise UserError(f"{run_dir} holds no run: no recipe.json; check the path")
    steps = read_description(run_dir, "recipe.json").get("steps")
    if not isinstance(steps, int) or steps < 1:
        raise UserError(f"{path} is damaged: steps = {steps!r:.40}; restore a copy")
    lines, evals = read_metrics(run_dir), read_metrics(run_dir, "eval")
    last = lines[-1] if lines else {}
    ranks = read_heartbeats(run_dir)
    checkpoint = _newest_checkpoint(run_dir / "checkpoints")
    state, detail, damaged = _state(run_dir, checkpoint)
    damaged |= {
        name: f"skipped {count} damaged lines" for name, count in unreadable_lines(run_dir).items()
    }
    for path in sorted((run_dir / "heartbeat").glob("rank-*.json")):
        if path.name not in {f"rank-{rank}.json" for rank in ranks}:
            damaged[f"heartbeat/{path.name}"] = "cannot be read"
    step = max(last.get("step", 0), saved_step(run_dir))  # a line comes every run.log_steps
    step_s = step_seconds(lines, mean)  # with evaluations and saves
    if step_s is not None and not 0 < step_s < LONGEST_S:
        step_s = None
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
        "epoch": last.get("epoch"),
        "images_per_s": last.get("images_per_s"),
        "data_wait_percent": last.get("data_wait_percent"),
        "eta_s": step_s * (steps - step) if step_s and state == "running" else None,
        "health": health,
        "first_skipped": min(skipped) + 1 if skipped else None,
        "last_skipped": max(skipped) + 1 if skipped else None,
        "evals": {k: v for k, v in evals[-1].items() if k not in ("kind", "wall", "restart")}
        if evals
        else {},
        "restarts": last.get("restart", 0),
        "quarantined": len(quarantined_ids(run_dir / "quarantine.jsonl")),
        "checkpoint": checkpoint,
        "ranks": list(ranks.values()),
        "damaged": damaged,
    }


def _newest(run_dir: Path) -> Path | None:
    folder = run_dir / "checkpoints"
    names = checkpoint_names(folder) if folder.is_dir() else []
    return folder / names[-1] if names else None


def saved_step(run_dir: Path) -> int:
    """Return the number of steps done at the newest checkpoint; 0 without one."""
    newest = _newest(run_dir)
    return int(newest.name.removeprefix("step-")) if newest else 0


def newest_best(run_dir: Path) -> BestOf | None:
    """Return what the newest checkpoint says is the best one; None: none is kept."""
    newest = _newest(run_dir)
    return best_of(newest) if newest else None


def _newest_checkpoint(folder: Path) -> dict[str, Any] | None:
    names = checkpoint_names(folder)
    if not names:
        return None
    newest, size = folder / names[-1], 0
    with suppress(OSError):  # the run may be removing it
        size = sum(file.stat().st_size for file in newest.iterdir())
    age_s = time.time() - (newest.stat().st_mtime if newest.exists() else time.time())
    summary = {"name": newest.name, "age_s": round(age_s, 1), "bytes": size, "kept": len(names)}
    best = best_of(newest)
    if best is not None:
        summary["best"] = best.name
        if best.weights != "trained":
            summary["best_weights"] = best.weights
    return summary


def _state(run_dir: Path, checkpoint: dict[str, Any] | None) -> tuple[str, str, dict[str, str]]:
    """State, detail, and which file of the two is damaged.

    DONE and PREEMPTED name the step of the last save, and so does the newest checkpoint.
    """
    holder = holder_of(run_dir)
    if holder is not None:
        return "running", f"process {holder['pid']} on {holder['host']}", {}
    damage = lock_damage(run_dir / "lock")
    damaged = {} if damage is None else {"lock": damage}
    for marker in MARKERS:
        path = run_dir / marker
        if not path.exists():
            continue
        try:
            raw = read_regular(path, MOST_MARKER_BYTES)
            text = raw.decode(errors="replace").strip()
        except OSError:
            text = ""
        saved = re.fullmatch(r"step-0*(\d+)", checkpoint["name"]) if checkpoint else None
        if marker != "FAILED" and saved and text != f"step {saved[1]}":
            damaged[marker] = "does not name the step of the last checkpoint"
            text = f"step {saved[1]}"
        return marker.lower(), text, damaged
    detail = "the process was killed or crashed; the same `sslpipe train` command resumes it"
    return "lost", detail, damaged


def render(summary: dict[str, Any]) -> Group:
    """Make a table for people of what `status` returns."""
    table = Table.grid(padding=(0, 2))
    done = 100 * summary["step"] / summary["steps"]
    speed = [f"{summary['images_per_s']:.0f} images/s"] if summary["images_per_s"] else []
    if summary["data_wait_percent"] is not None:
        speed.append(f"{summary['data_wait_percent']:.0f} % waiting for data")
    if summary["eta_s"] is not None:
        speed.append(f"{clock(summary['eta_s'])} left")
    checkpoint = summary["checkpoint"]
    waits, times = summary["state"] in ("stopped", "preempted"), summary["restarts"]
    restarted = {0: "never restarted", 1: "restarted once"}.get(times, f"restarted {times} times")
    rows = {
        "state": f"{summary['state']}: {summary['detail']}"
        + ("; the same `sslpipe train` command resumes it" if waits else ""),
        "progress": f"step {summary['step']} of {summary['steps']} ({done:.1f} %)"
        + (f", {restarted}" if times or not waits else ""),
        "speed": ", ".join(speed) or "nothing logged yet",
        "health": _numbers(summary["health"]),
        "evaluation": _numbers(summary["evals"]) or "none yet",
        "bad samples": f"{summary['quarantined']} quarantined",
        **_skipped(summary),
        "checkpoint": f"{checkpoint['name']}, {timedelta(seconds=round(checkpoint['age_s']))} old, "
        f"{checkpoint['bytes'] / 1e6:.1f} MB; {checkpoint['kept']} kept"
        + (f", best {checkpoint['best']}" if "best" in checkpoint else "")
        + (" (averaged weights)" if "best_weights" in checkpoint else "")
        if checkpoint
        else "none yet",
    }
    rows |= {f"damaged: {name}": text for name, text in summary["damaged"].items()}
    for name, text in rows.items():
        table.add_row(name, text)
    now_s = time.time()
    for beat in summary["ranks"]:
        age_s = now_s - float(beat["wall"])
        old = summary["state"] == "running" and age_s > EXPECTED_BEAT_S
        table.add_row(
            f"rank {beat['rank']}",
            _beat(beat, summary["state"]) + (f"; no heartbeat for {age_s:.0f} s" if old else ""),
        )
    return Group(table)


def _beat(beat: dict[str, Any], state: str) -> str:
    """Say what a rank does and since when, or what it did last."""
    if state != "running":
        return f"last heartbeat: step {beat['step']}, {beat['phase']}, on {beat['host']}"
    since = f"{beat['since_s']:.0f} s since this step or phase began"
    return f"step {beat['step']}, {beat['phase']}, {since}, on {beat['host']}"


def _skipped(summary: dict[str, Any]) -> dict[str, str]:
    """Say how many steps were skipped and where to look, where any were."""
    if summary["last_skipped"] is None:
        return {}
    count = summary["health"]["skipped_steps"]
    first, last = summary["first_skipped"], summary["last_skipped"]
    where = f'"step" {first - 1} to {last - 1} in {summary["run"]}/bad_steps.*.jsonl'  # from 0
    return {"skipped steps": f"{count:.0f}, steps {first} to {last}; their samples: {where}"}


def _numbers(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in values.items() if value is not None)
