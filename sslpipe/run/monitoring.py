"""Evaluations during a run: on held-out samples; the best is followed, a fall is reported."""

from dataclasses import dataclass
from typing import Generic

import torch

from sslpipe.run.best import Best
from sslpipe.run.contract import PartsT, Plan, Scores
from sslpipe.run.directory import HeldDirectory
from sslpipe.run.health import StartAlarm
from sslpipe.run.log import read_metrics
from sslpipe.run.reporter import Reporter

MOST_SHEETS = 20  # pictures of neighbours in a run, evenly spread over its evaluations


@dataclass(kw_only=True, eq=False, repr=False)
class Monitor(Generic[PartsT]):
    """Evaluates a run's backbone on the held-out samples of its plan. All of it is collective."""

    plan: Plan[PartsT]  # says whether samples are held out, and when they are scored
    parts: PartsT  # on the device
    device: torch.device
    held: HeldDirectory
    reporter: Reporter  # gets the numbers
    best: Best  # follows the evaluations

    def __post_init__(self) -> None:
        """Read what an earlier start of this run scored of the weights that it started from."""
        lines = read_metrics(self.held.run_dir, "eval") if self.held.process.rank == 0 else []
        self._start_alarm = StartAlarm(lines[0] if lines and lines[0]["step"] == 0 else {})

    @property
    def is_on(self) -> bool:
        """Whether the run is evaluated at all."""
        return len(self.plan.watched) > 0 and bool(self.plan.recipe.run.monitor_steps)

    def score_start(self) -> None:
        """Score the weights that a run starts from; with run.keep = "best" they are a candidate.

        A restored checkpoint of step 0 has the score already.
        """
        if self.best.entry.start is not None:
            return
        scores = self._evaluate(0)
        self.best.read_start(scores.numbers, scores.by_sample)
        self._start_alarm = StartAlarm(scores.numbers)

    def evaluate(self, done: int) -> None:
        """Score what the run has after `done` steps; log it, follow the best, read the alarm."""
        scores = self._evaluate(done)
        self.best.read(done, scores.numbers, scores.by_sample)
        self.reporter.alarms(done, self._start_alarm.read(scores.numbers))

    def _evaluate(self, done: int) -> Scores:
        scores = self.measure(done)
        self.reporter.evals(done, scores.numbers)
        recipe = self.plan.recipe
        shown = shows_neighbours(done, recipe.run.monitor_steps or 1, recipe.total_steps)
        if shown and scores.draw is not None:
            self.reporter.picture(done, "neighbours", scores.draw)
        return scores

    def measure(self, done: int) -> Scores:
        """Score the backbone after `done` steps."""
        self.held.watchdog(done, "evaluating")
        return self.plan.score(self.parts, self.held.process, self.device)


def shows_neighbours(done: int, monitor_steps: int, total_steps: int) -> bool:
    """Return whether the evaluation after `done` steps has a picture: MOST_SHEETS of a run have."""
    evaluations = -(-total_steps // monitor_steps)
    every = -(-evaluations // MOST_SHEETS) * monitor_steps
    return done % every == 0 or done == total_steps
