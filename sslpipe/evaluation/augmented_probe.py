"""SimCLR's linear evaluation on augmented images: the backbone frozen, a new view every epoch."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.augment.params import draws
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.index import Split
from sslpipe.data.pipeline import Batch
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings, embed
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.sgd_probe import EPOCHS, RATES, sgd_results

# Chen et al. 2020, arXiv:2002.05709, appendix B.5 and B.6: random crop with resize, and flip
CROP_AREA, FLIP_PROB = (0.08, 1.0), 0.5


class TrainingView(nn.Module):
    """Random resized crop and flip, twice an image: what `embed` needs of a view.

    The draws are a function of seed, epoch and id; features are those of both views, (B, 2 F).
    """

    def __init__(
        self,
        view: EvalView,
        *,
        seed: int,
        epoch: int,
        crop_area: tuple[float, float] = CROP_AREA,
        flip_prob: float = FLIP_PROB,
    ) -> None:
        super().__init__()
        self.seed, self.epoch = seed, epoch
        config = view.config()
        try:
            self.views = FusedViews(
                "simclr",
                crop_px=view.crop_px,
                mean=config["mean"],
                std=config["std"],
                jitter_strength=0.0,
                grayscale_prob=0.0,
                blur_prob=0.0,
                crop_area=list(crop_area),
                flip_prob=flip_prob,
            )
        except ValueError as error:  # of its last two
            raise DataError(str(error)) from error

    def make_views(self, batch: Batch) -> Tensor:
        """Make both augmented views of each image, (2B, 3, S, S)."""
        params = draws(self.seed, self.epoch, batch.ids, batch.sizes, self.views.specs)
        images: Tensor = self.views(batch, params)  # (2B, 3, S, S)
        return images

    def reduced(self, features: Tensor) -> Tensor:
        """Put the features of both views side by side: (2B, F) -> (B, 2 F)."""
        return torch.cat(features.chunk(2), dim=1)  # (B, 2 F)


def augmented_sgd_probe(
    backbone: nn.Module,
    view: EvalView,
    train: Split,
    test: Split,
    *,
    rates: Sequence[float] = RATES,
    epochs: int = EPOCHS,
    batch_size: int = 256,
    holdout: float = 0.15,
    seed: int = 0,
    crop_area: tuple[float, float] = CROP_AREA,
    flip_prob: float = FLIP_PROB,
    say: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> list[Result]:
    """Run `sgd_probe` on features of augmented train images; test on the evaluation view.

    The backbone is frozen, so an epoch's features are computed at once, two epochs in one pass over
    the images, and its hash is compared after each. options: those of `embed`. Collective.
    """
    plain = embed(backbone, view, train, **options)
    held_test = embed(backbone, view, test, **options)
    latest: dict[int, Embeddings] = {}  # the pass of two epochs that was made last

    def epoch_features(epoch: int) -> Embeddings:
        number, half = divmod(epoch, 2)
        if number not in latest:
            second = f" and {epoch + 2}" if epoch + 1 < epochs else ""
            say(f"augmented images, epoch {epoch + 1}{second} of {epochs}")
            augmented = TrainingView(
                view, seed=seed, epoch=number, crop_area=crop_area, flip_prob=flip_prob
            )
            latest.clear()
            latest[number] = embed(backbone, augmented, train, **options)
        both = latest[number]
        return both._replace(features=both.features.chunk(2, dim=1)[half])

    area = f"{crop_area[0]:g}..{crop_area[1]:g}"
    return sgd_results(
        epoch_features,
        plain,
        held_test,
        rates=rates,
        epochs=epochs,
        batch_size=batch_size,
        holdout=holdout,
        seed=seed,
        name=f"augmented crop={area} flip={flip_prob:g}",
    )
