"""What scores the held-out samples of a run, whatever is trained: made by its plan."""

from collections.abc import Callable
from functools import partial

import torch
from PIL import Image
from torch import nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.reader import Reader
from sslpipe.distributed import Rank
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.monitor import HeldOutScores, Watched
from sslpipe.planning.pictures import nearest_ids, neighbours_picture
from sslpipe.run.contract import PartsT, Plan, Scores

Measure = Callable[[nn.Module, EvalView, Watched], HeldOutScores]  # see evaluation.monitor


class HeldOutEvaluator:
    """Scores backbones on the samples that a plan holds out.

    Args:
        plan: Says which samples are scored.
        view: As evaluation sees them.
        measure: How backbones are scored.
        process: This process among all.
        device: Where the backbones are.
    """

    def __init__(
        self,
        plan: Plan[PartsT],
        view: EvalView,
        measure: Measure,
        *,
        process: Rank,
        device: torch.device,
    ) -> None:
        self._view = view
        self._measure = measure
        self._watched = Watched(
            split=plan.split,
            ids=plan.watched,
            bank=plan.bank,
            process=process,
            device=device,
            canvas_px=plan.recipe.data.canvas_px,
            num_workers=plan.recipe.run.num_workers,
            reader=Reader(plan.split),
        )

    def score(self, backbone: nn.Module) -> Scores:
        """Score a backbone as it is: embed on all ranks, score on rank 0. Collective."""
        measured = self._measure(backbone, self._view, self._watched)
        if measured.rows is None or measured.searched is None:
            return Scores(measured.numbers)
        draw = partial(self._draw_neighbours, measured.rows, measured.searched)
        return Scores(measured.numbers, draw, measured.by_sample)

    def _draw_neighbours(self, queries: Embeddings, searched: Embeddings) -> Image.Image:
        watched = self._watched
        ids = nearest_ids(queries, searched)
        return neighbours_picture(watched.split, watched.reader, ids, watched.canvas_px)
