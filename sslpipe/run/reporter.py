"""What a run reports, and where: metrics.jsonl, the console, trackers.

Rank 0 writes. A tracker is a copy of the numbers, and can never stop a run.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from PIL import Image
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from sslpipe.data.reader import Quarantined
from sslpipe.errors import UserError
from sslpipe.files import append_lines, json_text, open_log, read_lines
from sslpipe.run.best import TITLES, best_score, measured
from sslpipe.run.console import SafeConsole
from sslpipe.run.health import Alarm
from sslpipe.run.log import StartedLine, clock, is_due, log_files, read_metrics
from sslpipe.run.trackers import Trackers

MOST_WAIT = 5.0  # per cent of the time that a run waits for data before the console says so
TIMED_S = 600.0  # past seconds that the remaining time is estimated from
LEAST_TIMED = 3  # steps that an estimate of the time needs
NOTHING: Mapping[str, Any] = MappingProxyType({})


class Reporter:
    """What a run reports to; this one, of ranks other than 0, writes nothing."""

    writes = False
    takes_pictures = False  # whether a tracker shows them

    def step_done(self, done: int) -> None:
        """Move the progress bar to `done` steps."""

    def train(self, step: int, values: Mapping[str, float]) -> None:
        """Write numbers of the steps since the last call, under the number of steps done."""

    def evals(self, step: int, values: Mapping[str, float]) -> None:
        """Write what an evaluation measured; nothing where it measured nothing."""

    def picture(self, step: int, name: str, draw: Callable[[], Image.Image]) -> None:
        """Show a picture in the trackers that take some; it is drawn for these alone."""

    def event(self, step: int, kind: str, values: Mapping[str, Any] = NOTHING) -> None:
        """Write that something happened: resumed, skipped a step, collapsed, stopped."""

    def alarms(self, step: int, changes: Sequence[Alarm]) -> None:
        """Warn, and write one line of kind "alarm": lists of names `raised` and `over`, values."""

    def quarantined(self, records: list[Quarantined]) -> None:
        """List bad samples in quarantine.jsonl."""

    def say(self, text: str, style: str | None = None) -> None:
        """Print a line on stderr."""

    def warn(self, text: str) -> None:
        """Print a warning on stderr."""

    def close(self) -> None:
        """End the bar, the file and the trackers."""


class RunLog(Reporter):
    """Writes a run's metrics: metrics.jsonl, quarantine.jsonl, the console, trackers; on rank 0.

    Args:
        run_dir: Of the run.
        name: The run's, for bars and trackers.
        config: The resolved recipe, for trackers; secrets are blanked.
        steps: Of the whole run.
        first_step: Where this start begins.
        trackers: Names of TRACKERS.
        evaluated_every: Steps between evaluations; 0: there are none.
        cheaper_steps: At the start of the run; their time says little of the others'.
    """

    writes = True

    def __init__(
        self,
        run_dir: Path,
        *,
        name: str,
        config: dict[str, Any],
        steps: int,
        first_step: int,
        trackers: tuple[str, ...] = (),
        evaluated_every: int = 0,
        cheaper_steps: int = 0,
    ) -> None:
        self._evaluated_every = evaluated_every
        self._cheaper_steps = cheaper_steps
        self.console = SafeConsole(stderr=True)
        self.path = run_dir / "metrics.jsonl"
        self._unwritten = b""
        self._quarantine = run_dir / "quarantine.jsonl"
        starts, _ = read_lines(self.path, StartedLine)
        self._restart = 1 + max((line.restart for line in starts), default=-1)
        for path, kind in log_files(run_dir).items():
            if path.is_dir():
                raise UserError(f"{path} is a folder, not a file; move it away")
            if count := read_lines(path, kind)[1]:
                self.warn(f"{path}: skipped {count} damaged lines")
        self._file = open_log(self.path)  # for the whole run
        self._trackers = Trackers(trackers, run_dir, name=name, config=config, warn=self.warn)
        self.takes_pictures = self._trackers.take_pictures
        self._not_drawn: set[str] = set()
        self._steps = steps
        self._timed_from = first_step
        self._logged_step = first_step
        self._loss = ""  # as they are shown
        self._speed = ""
        self._score = ""
        self._last_score = math.nan
        for line in read_metrics(run_dir, "eval"):  # of earlier starts
            if line["step"] <= first_step:
                self._read_score(line)
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
        now = time.monotonic()
        # a few steps at least, however long one takes
        self._progress.speed_estimate_period = max(TIMED_S, 5 * (now - self._stepped))
        self._stepped = now
        self._progress.update(self._task, completed=done)
        if done == self._cheaper_steps:  # the others are timed anew
            self._timed_from = done
            self._progress.reset(self._task, completed=done)

    def train(self, step: int, values: Mapping[str, float]) -> None:
        self._write(step, "train", values)
        self._logged_step = step
        self._loss = f"loss {values['loss']:.4f}"
        self._speed = f"{values['images_per_s']:.0f} images/s"
        if (wait := values["data_wait_percent"]) > MOST_WAIT:
            self._speed += f", waits for data {wait:.0f} % of the time"
        self._progress.update(self._task, status=self._status())
        # there is no bar in a log file; where an evaluation follows, the line comes after it
        if not self.console.is_terminal and not is_due(step, self._evaluated_every, self._steps):
            self._say_line(step, "")

    def evals(self, step: int, values: Mapping[str, float]) -> None:
        if values:
            self._write(step, "eval", values)
            self._read_score(values)
        if self._logged_step != step:  # the loss is of an earlier one
            self._loss = ""
        self._progress.update(self._task, status=self._status())
        self._say_line(step, self._score)

    def _read_score(self, values: Mapping[str, float | None]) -> None:
        """Take in what an evaluation is compared by, and how it differs from the one before."""
        score = best_score(values)
        change = 100 * (score - self._last_score)
        self._score = ""
        if not math.isnan(score):
            trend = "" if math.isnan(change) else f" ({change:+.1f})"
            self._score = f"{TITLES[measured(values)]} {100 * score:.1f} %{trend}"
            self._last_score = score

    def _status(self) -> str:
        """Return loss, the last held-out score and speed, as far as they are known."""
        return "  ".join(filter(None, (self._loss, self._score, self._speed)))

    def _say_line(self, step: int, score: str) -> None:
        """Print the line of a step: how far, how well there, how fast, how long still."""
        known = "  ".join(filter(None, (self._loss, score, self._speed)))
        line = f"step {step}/{self._steps}  {known}"
        steps_per_s = self._progress.tasks[0].speed  # the first one warms up
        timed = step - self._timed_from > LEAST_TIMED and step < self._steps
        if timed and steps_per_s:
            left = clock((self._steps - step) / steps_per_s)
            if step < self._cheaper_steps:  # later steps take longer
                left = f"at least {left}"
            line += f"  {left} left"
        self.say(line)

    def picture(self, step: int, name: str, draw: Callable[[], Image.Image]) -> None:
        """Show a picture in the trackers that take some; it is drawn for these alone.

        One that cannot be drawn is a warning, and the last of its name: it never stops a run.
        """
        if not self.takes_pictures or name in self._not_drawn:
            return
        try:
            with torch.random.fork_rng(devices=[]):
                image = draw()
        except Exception as error:  # whatever a sample, or a plug-in's views, may raise
            self._not_drawn.add(name)
            self.warn(f"the trackers show no {name}, which could not be drawn: {error}")
            return
        self._trackers.log_image(name, image, step)

    def event(self, step: int, kind: str, values: Mapping[str, Any] = NOTHING) -> None:
        self._line({"step": step, "kind": kind, **values})

    def alarms(self, step: int, changes: Sequence[Alarm]) -> None:
        if changes:
            values = {
                "raised": [change.name for change in changes if change.raised],
                "over": [change.name for change in changes if not change.raised],
                "value": {change.name: change.value for change in changes},
                "threshold": {change.name: change.threshold for change in changes},
            }
            self.event(step, "alarm", values)
        for change in changes:
            self.warn(f"step {step}: {change.text}")

    def quarantined(self, records: list[Quarantined]) -> None:
        if not records:
            return
        append_lines(self._quarantine, [record._asdict() for record in records])
        for record in records:
            self.warn(
                f"quarantined {record.shard}, key {record.key!r}: {record.reason}; "
                "replaced by another sample"
            )

    def say(self, text: str, style: str | None = None) -> None:
        self.console.print(text, style=style, highlight=False, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        self.say(f"warning: {text}", "yellow")

    def close(self) -> None:
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
