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
HEALTH = ("loss", "grad_norm", "embedding_std", "effective_rank", "skipped_steps", "quarantined")
EXPECTED_BEAT_S = 60  # an older sign of life is pointed out


def status(run_dir: Path) -> dict[str, Any]:
    """Plain values, None where unknown.

    state: running, done, preempted, failed, or lost (it ended without a word). eta_s: seconds to
    the end at the present speed, evaluations and saves included. ranks: see read_heartbeats.
    Raises: UserError where run_dir holds no run.
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
        "health": {key: last.get(key) for key in HEALTH},
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
    return "lost", "no process holds it and it left no marker; the same command goes on"


def render(found: dict[str, Any]) -> Group:
    """The status as a table for people."""
    table = Table.grid(padding=(0, 2))
    done = 100 * found["step"] / found["steps"]
    speed = [f"{found['images_per_s']:.0f} images/s"] if found["images_per_s"] else []
    if found["data_wait_percent"] is not None:
        speed.append(f"{found['data_wait_percent']:.0f} % of the time waiting for data")
    if found["eta_s"] is not None:
        speed.append(f"{timedelta(seconds=round(found['eta_s']))} to go")
    checkpoint = found["checkpoint"]
    rows = {
        "state": f"{found['state']}: {found['detail']}",
        "progress": f"step {found['step']} of {found['steps']} ({done:.1f} %), "
        f"restarted {found['restarts']} times",
        "speed": ", ".join(speed) or "nothing logged yet",
        "health": _numbers(found["health"]),
        "evaluation": _numbers(found["evals"]) or "none yet",
        "bad samples": f"{found['quarantined']} quarantined",
        "checkpoint": f"{checkpoint['name']}, {timedelta(seconds=round(checkpoint['age_s']))} old, "
        f"{checkpoint['bytes'] / 1e6:.1f} MB; {checkpoint['kept']} kept"
        if checkpoint
        else "none yet",
    }
    for name, text in rows.items():
        table.add_row(name, text)
    now_s = time.time()
    for beat in found["ranks"]:
        age_s = now_s - float(beat["wall"])
        old = found["state"] == "running" and age_s > EXPECTED_BEAT_S
        table.add_row(
            f"rank {beat['rank']}",
            f"step {beat['step']}, {beat['phase']} for {beat['since_s']:.0f} s, on {beat['host']}"
            + (f"; no sign of life for {age_s:.0f} s" if old else ""),
        )
    return Group(table)


def _numbers(values: dict[str, Any]) -> str:
    return ", ".join(f"{key} {value:.4g}" for key, value in values.items() if value is not None)
