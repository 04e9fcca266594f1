"""Which evaluation of a run was the best, and for how many since nothing was better."""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from sslpipe.distributed import broadcast_object
from sslpipe.recipe.sections import EVALUATIONS, RunConfig
from sslpipe.run.checkpoint_files import BestEntry

# what decides: the first that the first evaluation has
LABELLED = ("holdout_map_at_r", "validation_map_at_r")
UNLABELLED = "holdout_view_recall"
BESIDE = {  # a number -> another one, in which the best may not be below the start
    "holdout_map_at_r": "holdout_recall_at_1",
    "validation_map_at_r": "validation_recall_at_1",
}
TITLES = {  # what people read for what decides
    "holdout_map_at_r": "held-out MAP@R",
    "validation_map_at_r": "held-out MAP@R",
    "holdout_view_recall": "held-out view recall",
}

Values = Mapping[str, float]
BySample = Mapping[int, float]  # id -> MAP@R

NO_SAMPLES: BySample = {}


class Best:
    """Follows the evaluations of a run; the same on all ranks.

    Where the start is a candidate, every command takes the best checkpoint by default.

    Args:
        config: The recipe's [run].
        stored: What the checkpoint that the run resumes from says of the best one.
        half_size_steps: First steps whose views have half of the size that evaluations see: these
            say little of what the rest brings, so run.patience does not count them.
    """

    def __init__(
        self, config: RunConfig, stored: BestEntry | None = None, half_size_steps: int = 0
    ) -> None:
        self._keeps = config.keep == "best"
        self._patience = config.patience
        self._half_size_steps = half_size_steps
        self.entry = BestEntry()
        # without a name the best weights were not kept
        if stored is not None and (stored.name is not None or not self._keeps):
            self.entry = stored.model_copy(update={"name": None})
        self._before = self.entry
        self._is_new = False

    def read_start(self, values: Values, by_sample: BySample = NO_SAMPLES) -> None:
        """Make the weights that a run starts from a candidate, with run.keep = "best". Collective.

        Args:
            values: As in `read`; without a number to choose by the start is no candidate.
            by_sample: As in `read`.
        """
        if not self._keeps:
            return
        self.read(0, values)
        start = self.entry.value if self.entry.step == 0 else None
        floor = None if start is None else values.get(BESIDE.get(self.entry.measure, ""))
        has_samples = start is not None and len(by_sample) > 1
        self._update(
            since=0,
            start=start,
            floor=broadcast_object(floor),
            start_by_sample=broadcast_object(dict(by_sample) if has_samples else None),
        )

    def read(self, done: int, values: Values, by_sample: BySample = NO_SAMPLES) -> None:
        """Take in an evaluation after `done` steps; rank 0 has what it measured. Collective.

        Args:
            done: Steps.
            values: Its numbers.
            by_sample: MAP@R of each sample.
        """
        if not self._keeps and not self._patience:
            return
        measure = broadcast_object(self.entry.measure or measured(values))
        since = self.entry.since + (1 if done > self._half_size_steps else 0)
        self._update(measure=measure, since=since)
        self._before = self.entry
        score = broadcast_object(self._score(values, by_sample))
        self._is_new = False
        if score is not None and score > self.entry.value:
            self._update(step=done, value=score, since=0)
            self._is_new = True

    def _update(self, **changes: Any) -> None:
        self.entry = self.entry.model_copy(update=changes)

    def _score(self, values: Values, by_sample: BySample) -> float | None:
        """Return what an evaluation is compared by, larger is better; None: it is not the best."""
        measure = self.entry.measure
        floor = self.entry.floor
        if floor is not None and not values.get(BESIDE[measure], math.nan) >= floor:
            return None
        start = self.entry.start_by_sample
        if start is not None and not clearly_more(by_sample, start):
            return None
        value = values.get(measure, math.nan)
        return None if math.isnan(value) else value

    @property
    def wants_checkpoint(self) -> bool:
        """Whether the weights as they are must be saved to be kept."""
        return self._keeps and self._is_new

    @property
    def exhausted(self) -> bool:
        """Whether run.patience evaluations in a row were no better than the best."""
        return 0 < self._patience <= self.entry.since

    def saved(self, success: bool) -> None:
        """Take in whether the checkpoint was written: what was not is not the best one."""
        if self.wants_checkpoint and not success:
            now = self.entry
            self.entry = self._before
            self._update(start=now.start, floor=now.floor, start_by_sample=now.start_by_sample)
        self._is_new = False

    def state(self) -> dict[str, Any]:
        """Return what state.json says of it; {} where nothing is kept or waited for."""
        step = self.entry.step
        if step is None or not (self._keeps or self._patience):
            return {}
        entry = {key: value for key, value in self.entry if value is not None}
        name = {"name": f"step-{step:08d}"} if self._keeps else {}
        return {"best": {**entry, **name}}

    @property
    def choice(self) -> str:
        """Return which checkpoint commands take, and why; "" where it is the last one."""
        step = self.entry.step
        if step is None or not (self._keeps and self.entry.reason):
            return ""
        return f"commands take step-{step:08d}, {self.entry.reason}"

    def __str__(self) -> str:
        step = self.entry.step
        since = self.entry.since
        if step is None:
            return f"none of {since} evaluations had a number to choose by"
        better = "better" if self.entry.start_by_sample is None else "clearly better"
        return f"no evaluation since step {step} was {better} by {self.entry.measure}"


def clearly_more(current: BySample, earlier: BySample) -> bool:
    """Return whether the samples' mean rose by more than the best of ten evaluations does by luck.

    The interval of the paired difference is of 95 % for ten of them together, by Bonferroni.
    """
    from scipy.special import stdtrit  # here: the import takes 0.15 s

    both = sorted(current.keys() & earlier.keys())
    if len(both) < 2:
        return False
    differences = np.array([current[sample] - earlier[sample] for sample in both])
    error = differences.std(ddof=1) / math.sqrt(len(both))
    quantile = 1 - 0.025 / EVALUATIONS
    return float(differences.mean()) > float(stdtrit(len(both) - 1, quantile)) * float(error)


def measured(values: Mapping[str, float | None]) -> str:
    """Name what an evaluation is compared by: MAP@R, or without labels the other view's recall."""
    return next((name for name in (*LABELLED, UNLABELLED) if name in values), "")


def best_score(values: Mapping[str, float | None]) -> float:
    """Return what an evaluation is compared by; NaN where it has no such number."""
    score = values.get(measured(values))
    return math.nan if score is None else score
