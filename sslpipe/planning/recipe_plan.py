"""What plans of all kinds do alike, once they are made."""

from abc import abstractmethod
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.augment.preview import PartnersOf, preview_grid
from sslpipe.augment.two_views import build_augment
from sslpipe.data.reader import Reader
from sslpipe.distributed import Rank
from sslpipe.evaluation.embed import EmbedOptions
from sslpipe.evaluation.monitor import HeldOutScores, Watched
from sslpipe.export.start import Start
from sslpipe.planning.memory import warn_of_memory
from sslpipe.planning.pictures import nearest_ids, neighbours_picture
from sslpipe.run.contract import PartsT, Plan, Scores


@dataclass(frozen=True, kw_only=True)
class RecipePlan(Plan[PartsT]):
    """A plan made from a recipe, whatever it trains."""

    start: Start

    @staticmethod
    @abstractmethod
    def measure(backbone: nn.Module, view: EvalView, watched: Watched) -> HeldOutScores:
        """Score a backbone on the held-out samples; see `sslpipe.evaluation.monitor`."""

    def warn_of_memory(self, parts: PartsT, process: Rank) -> None:
        warn_of_memory(self, parts, process)

    def view(self, parts: PartsT) -> EvalView:
        """Return the view of the run's evaluations."""
        return self.start.view(self.recipe, self.index, parts.augment.crop_px)

    def score(self, parts: PartsT, process: Rank, device: torch.device) -> Scores:
        """Score the backbone, as it is, by `measure`: embed on all ranks, score on rank 0."""
        options = EmbedOptions(
            process=process,
            device=device,
            canvas_px=self.recipe.data.canvas_px,
            num_workers=self.recipe.run.num_workers,
            reader=Reader(self.split),
        )
        watched = Watched(split=self.split, ids=self.watched, bank=self.bank, options=options)
        measured = self.measure(parts.backbone, self.view(parts), watched)
        rows = measured.rows
        searched = measured.searched
        if rows is None or searched is None:
            return Scores(measured.numbers)

        def draw() -> Image.Image:
            return neighbours_picture(watched, nearest_ids(rows, searched))

        return Scores(measured.numbers, draw, measured.by_sample)

    def draw_views(
        self, ids: NDArray[np.int64], *, epoch: int = 0, num_epochs: int = 1
    ) -> Image.Image:
        data = self.recipe.data
        return preview_grid(
            self.index,
            self.index.split(data.split),  # with the data's own classes
            build_augment(self.recipe, self.index),
            seed=self.recipe.seed,
            epoch=epoch,
            num_epochs=num_epochs,
            ids=ids,
            canvas_px=data.canvas_px,
            partners=self.drawn_partners,
            half_size_steps=self.recipe.half_size_steps,
        )

    @property
    def drawn_partners(self) -> PartnersOf | None:
        """What draws the samples that second views show; None: each image makes its own."""
        return None

    def metadata(self, parts: PartsT) -> dict[str, Any]:
        """Return what is stored beside each checkpoint: the start."""
        return self.start.metadata(self.view(parts))
