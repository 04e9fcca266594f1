"""Evaluations during a run: held-out samples are scored, the best is followed, a fall is reported.

Who is scored is the backbone, and with optim.ema its average, whose numbers begin with "ema_".
"""

from functools import partial

import torch
from PIL import Image
from torch import nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.reader import Reader
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.monitor import Look, Watched
from sslpipe.run.best import EMA, Best
from sslpipe.run.contract import PartsT, Plan
from sslpipe.run.directory import HeldDirectory
from sslpipe.run.health import StartAlarm
from sslpipe.run.log import read_metrics
from sslpipe.run.pictures import nearest_ids, neighbours_picture, shows_neighbours
from sslpipe.run.reporter import Reporter


class Monitor:
    """Evaluates a run's backbones on the held-out samples of its plan. All of it is collective.

    Args:
        plan: Says which samples are scored, and how.
        parts: On the device.
        view: Of the held-out samples.
        device: Where they are embedded.
        held: The run directory.
        reporter: Gets the numbers.
        best: Follows the evaluations.

    Attributes:
        best: The same.
        backbones: Those that are scored, by what their numbers' names begin with.
    """

    def __init__(
        self,
        plan: Plan[PartsT],
        parts: PartsT,
        view: EvalView,
        *,
        device: torch.device,
        held: HeldDirectory,
        reporter: Reporter,
        best: Best,
    ) -> None:
        self.best = best
        self._plan = plan
        self._view = view
        self._held = held
        self._reporter = reporter
        self.backbones: dict[str, nn.Module] = {}
        self._watched = Watched(
            split=plan.split,
            ids=plan.watched,
            bank=plan.bank,
            process=held.process,
            device=device,
            canvas_px=plan.recipe.data.canvas_px,
            num_workers=plan.recipe.run.num_workers,
            reader=Reader(plan.split),
        )
        if len(plan.watched):
            self.backbones[""] = parts.backbone
            if parts.ema is not None:
                self.backbones[EMA] = parts.ema
        # of an earlier start of this run, if it scored the weights that it started from
        lines = read_metrics(held.run_dir, "eval") if held.process.rank == 0 else []
        self._start_alarm = StartAlarm(lines[0] if lines and lines[0]["step"] == 0 else {})

    @property
    def is_on(self) -> bool:
        """Whether the run is evaluated at all."""
        return bool(self.backbones) and bool(self._plan.recipe.run.monitor_steps)

    def score_start(self) -> None:
        """Score the weights that a run starts from; with run.keep = "best" they are a candidate.

        A restored checkpoint of step 0 has the score already.
        """
        if self.best.entry.start is not None:
            return
        values = self._evaluate(0)
        self.best.read_start(values)
        self._start_alarm = StartAlarm(values)

    def evaluate(self, done: int) -> None:
        """Score what the run has after `done` steps; log it, follow the best, read the alarm."""
        values = self._evaluate(done)
        self.best.read(done, values)
        self._reporter.alarms(done, self._start_alarm.read(values))

    def _evaluate(self, done: int) -> dict[str, float]:
        self._held.watchdog(done, "evaluating")
        seen: list[tuple[Embeddings, Embeddings]] = []

        def look(queries: Embeddings, searched: Embeddings) -> None:
            seen.append((queries, searched))

        recipe = self._plan.recipe
        shown = self._reporter.takes_pictures and shows_neighbours(
            done, recipe.run.monitor_steps or 1, recipe.total_steps
        )
        values = self.measure(done, look if shown else None)
        self._reporter.evals(done, values)
        for queries, searched in seen[:1]:  # of the trained backbone
            draw = partial(self._draw_neighbours, queries, searched)
            self._reporter.picture(done, "neighbours", draw)
        return values

    def _draw_neighbours(self, queries: Embeddings, searched: Embeddings) -> Image.Image:
        canvas_px = self._plan.recipe.data.canvas_px
        ids = nearest_ids(queries, searched)
        return neighbours_picture(self._plan.split, self._watched.reader, ids, canvas_px)

    def measure(self, done: int, look: Look | None = None) -> dict[str, float]:
        """Embed on all ranks and score on rank 0; the others get no numbers."""
        watched = self._watched._replace(look=look)
        numbers: dict[str, float] = {}
        for prefix, backbone in self.backbones.items():
            scores = self._plan.score(backbone, self._view, watched)
            numbers |= {f"{prefix}{name}": value for name, value in scores.items()}
        return numbers
