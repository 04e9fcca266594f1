"""The evaluation of held-out samples that a run repeats, and the start that it is compared with."""

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split
from sslpipe.data.loader import open_reader
from sslpipe.distributed import Rank
from sslpipe.recipe.base import RunConfig
from sslpipe.run.best import EMA
from sslpipe.run.fsdp import gathered
from sslpipe.run.health import Alarm, StartAlarm
from sslpipe.run.log import read_metrics

Score = Callable[..., dict[str, float]]


class HeldOut(NamedTuple):
    """Samples that a run scores and never trains on.

    Args:
        view: Makes their images.
        split: Where they are.
        ids: (n,) the samples; none: nothing is scored.
        canvas_px: As in training.
    """

    view: EvalView
    split: Split
    ids: NDArray[np.int64]
    canvas_px: int


class Monitor:
    """Scores a run's held-out samples; call it for the numbers. Collective.

    Args:
        score: One of `evaluation.monitor`.
        backbone: Images (B, 3, S, S) -> (B, F).
        held_out: At least one sample.
        process: This process.
        config: The recipe's [run]: how shards are read.
        device: Where the backbone is.
        ema: An average of the backbone, scored likewise: its numbers begin with "ema_".
    """

    def __init__(
        self,
        score: Score,
        backbone: nn.Module,
        held_out: HeldOut,
        process: Rank,
        config: RunConfig,
        device: torch.device,
        *,
        ema: nn.Module | None = None,
    ) -> None:
        view, split, ids, canvas_px = held_out
        self._score, self._samples = score, (view, split, ids, process)
        self._options = {
            "canvas_px": canvas_px,
            "device": device,
            "num_workers": config.num_workers,
            "reader": open_reader(split, config),
        }
        self._backbones = {"": backbone} if ema is None else {"": backbone, EMA: ema}
        self._start_alarm: StartAlarm | None = None

    def __call__(self) -> dict[str, float]:
        """Embed on all ranks, score on rank 0; the others get no numbers."""
        numbers: dict[str, float] = {}
        for prefix, backbone in self._backbones.items():
            with gathered(backbone):
                scores = self._score(backbone, *self._samples, **self._options)
            numbers |= {f"{prefix}{name}": value for name, value in scores.items()}
        return numbers

    def compare_with_start(self, run_dir: Path) -> None:
        """Have `alarms` compare with what a run from weights scored before its first step."""
        lines = read_metrics(run_dir, "eval")
        if lines and lines[0]["step"] == 0:
            self._start_alarm = StartAlarm(lines[0])

    def alarms(self, values: dict[str, float]) -> list[Alarm]:
        """Take in the numbers of an evaluation. Returns what changes; mostly nothing."""
        return [] if self._start_alarm is None else self._start_alarm.read(values)
