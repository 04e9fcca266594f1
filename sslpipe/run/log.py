"""The log of a run: metrics.jsonl always, a progress bar or plain lines, trackers when named.

metrics.jsonl is the truth: one JSON object a line, with step, wall (seconds since the epoch),
restart (how often the run was resumed) and, last, a checksum; a number that is not finite is null.
After a kill some steps stand twice; the later line counts (`read_metrics`). A tracker is a copy,
and can never stop a run.
"""

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, Self

from pydantic import ConfigDict, model_validator
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sslpipe.errors import UserError
from sslpipe.files import Finite, Int64, Stored, append_lines, json_text, open_log, read_lines
from sslpipe.run.console import SafeConsole
from sslpipe.run.trackers import Trackers

if TYPE_CHECKING:  # who only reads a log needs no torch
    from sslpipe.data.reader import Quarantined
    from sslpipe.run.health import Alarm

TIMED_S = 600.0  # past seconds that the remaining time is estimated from
TIMED_LINES = 20  # log lines that a step is timed by
LEAST_TIMED = 3  # steps that an estimate of the time needs


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


class RunLog:
    """Writes a run's metrics; on ranks other than 0 (`enabled=False`) every method does nothing.

    Args:
        run_dir: Of the run.
        name: The run's, for bars and trackers.
        config: The resolved recipe, for trackers; secrets are blanked.
        steps: Of the whole run.
        first_step: Where this start begins.
        trackers: Names of TRACKERS.
        enabled: Whether this process writes.
        cheaper_steps: At the start of the run; their time says little of the others'.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        name: str,
        config: dict[str, Any],
        steps: int,
        first_step: int,
        trackers: tuple[str, ...] = (),
        enabled: bool = True,
        cheaper_steps: int = 0,
    ) -> None:
        self.enabled = enabled
        self._cheaper_steps = cheaper_steps
        if not enabled:
            return
        self.console = SafeConsole(stderr=True)
        self.path = run_dir / "metrics.jsonl"
        self._unwritten = b""
        self._quarantine = run_dir / "quarantine.jsonl"
        starts, _ = read_lines(self.path, StartedLine)
        self._restart = 1 + max((line.restart for line in starts), default=-1)
        for path, kind in _logs(run_dir).items():
            if path.is_dir():
                raise UserError(f"{path} is a folder, not a file; move it away")
            if count := read_lines(path, kind)[1]:
                self.warn(f"{path}: skipped {count} damaged lines")
        self._file = open_log(self.path)  # for the whole run
        self._trackers = Trackers(trackers, run_dir, name=name, config=config, warn=self.warn)
        self._steps = steps
        self._timed_from = first_step
        self._said_speed = False
        self._progress = Progress(
            TextColumn("[bold]{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[status]}"),
            console=self.console,
            disable=not self.console.is_terminal,
            get_time=time.monotonic,
            speed_estimate_period=TIMED_S,
        )
        self._task = self._progress.add_task(name, total=steps, completed=first_step, status="")
        self._progress.start()
        self._stepped = time.monotonic()

    def step_done(self, done: int) -> None:
        """Move the progress bar to `done` steps."""
        if self.enabled:
            now = time.monotonic()
            # a few steps at least, however long one takes
            self._progress.speed_estimate_period = max(TIMED_S, 5 * (now - self._stepped))
            self._stepped = now
            self._progress.update(self._task, completed=done)
            if done == self._cheaper_steps:  # the others are timed anew
                self._timed_from = done
                self._progress.reset(self._task, completed=done)

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of the steps since the last call, under the number of steps done."""
        if not self.enabled:
            return
        self._write(step, "train", values)
        speed = values["images_per_s"]
        wait = values["data_wait_percent"]
        status = f"loss {values['loss']:.4f}  {speed:.0f} images/s  wait {wait:.0f}%"
        self._progress.update(self._task, status=status)
        steps_per_s = self._progress.tasks[0].speed  # the first one warms up
        known = step - self._timed_from > LEAST_TIMED and self._cheaper_steps <= step < self._steps
        left = (
            [f"{clock((self._steps - step) / steps_per_s)} left"] if known and steps_per_s else []
        )
        if not self.console.is_terminal:  # a log file: a line now and then, not a bar
            self.say("  ".join([f"step {step}/{self._steps}", status, *left]))
        if left and steps_per_s and not self._said_speed:
            self._said_speed = True
            self.say(f"{1 / steps_per_s:.2g} s/step, about {left[0]}")

    def evals(self, step: int, values: Mapping[str, float]) -> None:
        """Write what an evaluation measured; nothing where it measured nothing."""
        if self.enabled and values:
            self._write(step, "eval", values)
            numbers = "  ".join(f"{key} {value:.4f}" for key, value in values.items())
            self.say(f"step {step}/{self._steps}  {numbers}")

    def event(self, step: int, kind: str, **values: Any) -> None:
        """Write that something happened: resumed, skipped a step, collapsed, stopped."""
        if self.enabled:
            self._line({"step": step, "kind": kind, **values})

    def alarms(self, step: int, changes: Sequence["Alarm"]) -> None:
        """Warn, and write one line of kind "alarm": lists of names `raised` and `over`, values."""
        if changes:
            values = {
                "raised": [change.name for change in changes if change.raised],
                "over": [change.name for change in changes if not change.raised],
                "value": {change.name: change.value for change in changes},
                "threshold": {change.name: change.threshold for change in changes},
            }
            self.event(step, "alarm", **values)
        for change in changes:
            self.warn(f"step {step}: {change.text}")

    def quarantined(self, records: list["Quarantined"]) -> None:
        """List bad samples in quarantine.jsonl."""
        if not self.enabled or not records:
            return
        append_lines(self._quarantine, [record._asdict() for record in records])
        for record in records:
            self.warn(
                f"quarantined {record.shard}, key {record.key!r}: {record.reason}; "
                "replaced by another sample"
            )

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line on stderr."""
        if self.enabled:
            self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        """Print a warning on stderr."""
        self.say(f"warning: {text}", "yellow")

    def close(self) -> None:
        """End the bar, the file and the trackers."""
        if not self.enabled:
            return
        self._progress.stop()
        self._file.close()
        self._trackers.close()

    def _write(self, step: int, kind: str, values: Mapping[str, float]) -> None:
        self._line({"step": step, "kind": kind, **values})
        self._trackers.log(kind, values, step)

    def _line(self, record: dict[str, Any]) -> None:
        record = {**record, "wall": round(time.time(), 3), "restart": self._restart}
        self._unwritten += json_text(record, indent=None).encode()
        try:
            while self._unwritten:
                written = self._file.write(self._unwritten)
                self._unwritten = self._unwritten[written:]
        except OSError as error:  # a full disk: these lines come with the next one
            self.warn(f"cannot write metrics.jsonl ({error}); will retry at the next line")


def read_metrics(
    run_dir: Path, kind: str = "train", wanted: type[MetricLine] | None = None
) -> list[dict[str, Any]]:
    """Read the lines of one kind by step; of a step that stands twice, the later line.

    Damaged lines are skipped (`unreadable_lines` counts them), and those that do not hold what is
    wanted: None, what LINES has for the kind.
    """
    lines, _ = read_lines(run_dir / "metrics.jsonl", wanted or LINES[kind])
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
    counts = {path.name: read_lines(path, kind)[1] for path, kind in _logs(run_dir).items()}
    return {name: count for name, count in counts.items() if count}


def _logs(run_dir: Path) -> dict[Path, type[Stored]]:
    """Every log of a run, there or not, and what its lines must have."""
    return {
        run_dir / "metrics.jsonl": MetricLine,
        run_dir / "quarantine.jsonl": QuarantineLine,
        **dict.fromkeys(bad_step_files(run_dir), SkippedLine),
    }
