"""The logs of a run, as they are read: metrics.jsonl, quarantine.jsonl, bad_steps.RANK.jsonl.

metrics.jsonl is the truth: one JSON object a line, with step, wall (seconds since the epoch) and
restart (how often the run was resumed); a number that is not finite is null. After a kill some
steps stand twice; the later line counts (`read_metrics`).
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, Self

from pydantic import ConfigDict, model_validator

from sslpipe.files import Finite, Int64, Stored, read_lines

TIMED_LINES = 20  # log lines that a step is timed by


class MetricLine(Stored):
    """A line of metrics.jsonl, of any kind."""

    model_config = ConfigDict(extra="allow")
    step: Int64
    kind: str


class StartedLine(MetricLine):
    """One that says how often the run had been resumed."""

    restart: Int64


class NumbersLine(MetricLine):
    """What training logged ("train"), or an evaluation ("eval"): numbers, null: not finite."""

    __pydantic_extra__: dict[str, Finite | None]


class AlarmLine(MetricLine):
    """Alarms that were raised and are over: value and threshold of each."""

    raised: list[str]
    over: list[str]
    value: dict[str, Finite | None]
    threshold: dict[str, Finite]

    @model_validator(mode="after")
    def _complete(self) -> Self:
        names = {*self.raised, *self.over}
        if not names <= self.value.keys() & self.threshold.keys():
            raise ValueError("an alarm has no value, or no threshold")
        return self


class QuarantineLine(Stored):
    """A line of quarantine.jsonl: a sample that could not be decoded."""

    id: Int64
    shard: str
    key: str
    reason: str


class SkippedLine(Stored):
    """A line of bad_steps.RANK.jsonl; also the ids and what was wrong."""

    step: Int64  # from 0


# kind -> what it holds
LINES: dict[str, type[MetricLine]] = {
    "train": NumbersLine,
    "eval": NumbersLine,
    "alarm": AlarmLine,
}


def clock(seconds: float) -> str:
    """Write a duration as 2:34 (minutes, seconds) or 1:02:34, with days where there are any."""
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0") if text.startswith("0:") else text


def is_due(done: int, interval: int, total: int) -> bool:
    """Return whether what happens every `interval` steps, and at the end, happens after `done`."""
    return interval > 0 and (done == total or done % interval == 0)


def read_metrics(
    run_dir: Path, kind: str = "train", wanted: type[MetricLine] | None = None
) -> list[dict[str, Any]]:
    """Read the lines of one kind by step; of a step that stands twice, the later line.

    Damaged lines are skipped (`unreadable_lines` counts them), and those that do not hold what is
    wanted: None, what LINES has for the kind, if it has.
    """
    lines, _ = read_lines(run_dir / "metrics.jsonl", wanted or LINES.get(kind, MetricLine))
    by_step = {line.step: line.model_dump() for line in lines if line.kind == kind}
    return [by_step[step] for step in sorted(by_step)]


def step_seconds(
    lines: Sequence[Mapping[str, Any]], average: Callable[[list[float]], float] = median
) -> float | None:
    """Average the seconds of a step over the last log lines of one start; None: too few."""
    lines = [line for line in lines[-TIMED_LINES:] if line.get("wall") is not None]
    lines = [line for line in lines if line.get("restart") == lines[-1].get("restart")]
    pairs = pairwise(lines)
    each = [(b["wall"] - a["wall"]) / (b["step"] - a["step"]) for a, b in pairs]
    return average(each) if each else None


def quarantined_ids(run_dir: Path) -> set[int]:
    """Read the ids of a run's quarantine.jsonl, of all its starts; empty where there is none."""
    return {line.id for line in read_lines(run_dir / "quarantine.jsonl", QuarantineLine)[0]}


def bad_step_files(run_dir: Path) -> list[Path]:
    """List the files that name the samples of skipped steps, one of each process that had any."""
    return sorted(run_dir.glob("bad_steps.*.jsonl"))


def read_skipped(paths: Iterable[Path]) -> set[int]:
    """Read the steps, from 0, in files bad_steps.RANK.jsonl, whenever a run skipped them."""
    return {line.step for path in paths for line in read_lines(path, SkippedLine)[0]}


def unreadable_lines(run_dir: Path) -> dict[str, int]:
    """Count the damaged lines of a run's logs: name of the file -> lines, where there are any."""
    counts = {path.name: read_lines(path, kind)[1] for path, kind in log_files(run_dir).items()}
    return {name: count for name, count in counts.items() if count}


def log_files(run_dir: Path) -> dict[Path, type[Stored]]:
    """Every log of a run, there or not, and what its lines must have."""
    return {
        run_dir / "metrics.jsonl": MetricLine,
        run_dir / "quarantine.jsonl": QuarantineLine,
        **dict.fromkeys(bad_step_files(run_dir), SkippedLine),
    }
