"""How a run stands, from its directory alone: nothing of the run itself is asked or touched."""

import json
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.table import Table

from sslpipe.errors import UserError
from sslpipe.run.checkpoint import checkpoint_names
from sslpipe.run.lock import holder_of
from sslpipe.run.log import quarantined_ids, read_metrics
from sslpipe.run.stop import MARKERS
from sslpipe.run.watchdog import read_heartbeats

SPEED_LINES = 20  # of metrics.jsonl, for the speed that the estimate uses
HEALTH_KEYS = (
    "loss",
    "grad_norm",
    "embedding_std",
    "effective_rank",
    "skipped_steps",
    "quarantined",
)
EXPECTED_BEAT_S = 60  # an older heartbeat is pointed out


def status(run_dir: Path) -> dict[str, Any]:
    """Summarise how a run stands, in plain values; None where unknown.

    Returns:
        state: running, done, preempted, failed, or lost (it ended without a marker). eta_s: seconds
        to the end at the present speed, evaluations and saves included. ranks: see
        `read_heartbeats`. The rest says what its keys say.

    Raises:
        UserError: run_dir holds no run.
    """
    path = run_dir / "recipe.json"
    if not path.is_file():
        raise UserError(f"{run_dir} holds no run: there is no recipe.json; has it begun?")
    steps = json.loads(path.read_text())["steps"]
    lines, evals = read_metrics(run_dir), read_metrics(run_dir, "eval")
    last = lines[-1] if lines else {}
    checkpoints = checkpoint_names(run_dir / "checkpoints")
    state, detail = _state(run_dir)
    recent = [line for line in lines[-SPEED_LINES:] if line["restart"] == last["restart"]]
    step_s = None
    if len(recent) > 1:
        step_s = (recent[-1]["wall"] - recent[0]["wall"]) / (recent[-1]["step"] - recent[0]["step"])
    step = last.get("step", 0)
    newest = run_dir / "checkpoints" / checkpoints[-1] if checkpoints else None
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
        "health": {key: last.get(key) for key in HEALTH_KEYS},
        "evals": {k: v for k, v in evals[-1].items() if k not in ("kind", "wall", "restart")}
        if evals
        else {},
        "restarts": last.get("restart", 0),
        "quarantined": len(quarantined_ids(run_dir / "quarantine.jsonl")),
        "checkpoint": {
            "name": newest.name,
            "age_s": round(time.time() - newest.stat().st_mtime, 1),
            "bytes": sum(file.stat().st_size for file in newest.iterdir()),
            "kept": len(checkpoints),
        }
        if newest
        else None,
        "ranks": list(read_heartbeats(run_dir).values()),
    }


def _state(run_dir: Path) -> tuple[str, str]:
    holder = holder_of(run_dir)
    if holder is not None:
        return "running", f"process {holder['pid']} on {holder['host']}"
    for marker in MARKERS:
        if (run_dir / marker).is_file():
            return marker.lower(), (run_dir / marker).read_text().strip()
    return "lost", "no process holds it and it left no marker; resume with the same command"


def render(summary: dict[str, Any]) -> Group:
    """Make a table for people of what `status` returns."""
    table = Table.grid(padding=(0, 2))
    done = 100 * summary["step"] / summary["steps"]
    speed = [f"{summary['images_per_s']:.0f} images/s"] if summary["images_per_s"] else []
    if summary["data_wait_percent"] is not None:
        speed.append(f"{summary['data_wait_percent']:.0f} % of the time waiting for data")
    if summary["eta_s"] is not None:
        speed.append(f"{timedelta(seconds=round(summary['eta_s']))} to go")
    checkpoint = summary["checkpoint"]
    rows = {
        "state": f"{summary['state']}: {summary['detail']}",
        "progress": f"step {summary['step']} of {summary['steps']} ({done:.1f} %), "
        f"restarted {summary['restarts']} times",
        "speed": ", ".join(speed) or "nothing logged yet",
        "health": _numbers(summary["health"]),
        "evaluation": _numbers(summary["evals"]) or "none yet",
        "bad samples": f"{summary['quarantined']} quarantined",
        "checkpoint": f"{checkpoint['name']}, {timedelta(seconds=round(checkpoint['age_s']))} old, "
        f"{checkpoint['bytes'] / 1e6:.1f} MB; {checkpoint['kept']} kept"
        if checkpoint
        else "none yet",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    now_s = time.time()
    for beat in summary["ranks"]:
        age_s = now_s - float(beat["wall"])
        old = summary["state"] == "running" and age_s > EXPECTED_BEAT_S
        table.add_row(
            f"rank {beat['rank']}",
            f"step {beat['step']}, {beat['phase']} for {beat['since_s']:.0f} s, on {beat['host']}"
            + (f"; no heartbeat for {age_s:.0f} s" if old else ""),
        )
    return Group(table)


def _numbers(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in values.items() if value is not None)
