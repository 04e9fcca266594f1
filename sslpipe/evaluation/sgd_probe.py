"""SimCLR's linear evaluation: a linear layer trained by SGD, on frozen or on augmented features."""

import math
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
from sslpipe.evaluation.linear_probe import (
    at_edge,
    chosen_by,
    holdout_rows,
    holdout_top1,
    num_classes,
    probe_result,
)
from sslpipe.evaluation.logistic import Linear, predict
from sslpipe.evaluation.result import Result
from sslpipe.random import permutation

# Chen et al. 2020, appendix B.5 and B.6: random crop with resize, and flip
CROP_AREA, FLIP_PROB = (0.08, 1.0), 0.5
EPOCHS, MOMENTUM = 90, 0.9  # Chen et al. 2020, arXiv:2002.05709, appendix B.6
RATES = (0.1,)  # the same: 0.1 x batch size / 256

FeaturesOfEpoch = Callable[[int], Embeddings]


def sgd_probe(
    train: Embeddings,
    test: Embeddings,
    *,
    rates: Sequence[float] = RATES,
    epochs: int = EPOCHS,
    batch_size: int = 256,
    holdout: float = 0.15,
    seed: int = 0,
) -> list[Result]:
    """Score a linear layer trained by SimCLR's protocol on all of train by its top-1 on test.

    SGD with Nesterov's momentum, cosine decay to zero, no warm-up, no weight decay, raw features.
    Test is read once, after a rate was chosen.

    Args:
        train: Labelled rows.
        test: Labelled rows.
        rates: Learning rates for 256 rows, scaled by batch_size / 256. Several are trained together
            on the rows that are not held out, and the best on the held-out part, the smallest among
            equals, is trained again on all of train.
        epochs: Passes over train.
        batch_size: Rows of a step.
        holdout: Class-stratified share of train that chooses among several rates.
        seed: Of that share, and of the rows' order.

    Returns:
        details: as the logistic probe's, with `rate` for C.

    Source:
        Chen et al. 2020 (SimCLR), arXiv:2002.05709, appendix B.6.
    """
    return sgd_results(
        lambda epoch: train,
        train,
        test,
        rates=rates,
        epochs=epochs,
        batch_size=batch_size,
        holdout=holdout,
        seed=seed,
        name="frozen",
    )


def sgd_results(
    epoch_features: FeaturesOfEpoch,
    train: Embeddings,
    test: Embeddings,
    *,
    rates: Sequence[float],
    epochs: int,
    batch_size: int,
    holdout: float,
    seed: int,
    name: str,
) -> list[Result]:
    """Run `sgd_probe` on features that change with the epoch, as those of augmented images do.

    `epoch_features` gives the rows of `train` with other features, for epochs 0, 1, ... in order,
    once or, where a rate is chosen, twice; `name` is the features' in the protocol.
    """
    classes = num_classes(train, test)
    if not rates or min(rates) <= 0:
        raise DataError(f"rates = {tuple(rates)} must hold learning rates > 0")
    if epochs < 1 or batch_size < 1:
        raise DataError(f"epochs = {epochs} and batch_size = {batch_size} must be at least 1")

    # a rate, where there are several
    chosen, scores = rates[0], {}
    path = sorted(set(rates))
    options = {"epochs": epochs, "batch_size": batch_size, "classes": classes, "seed": seed}
    if len(path) > 1:
        held = holdout_rows(train, holdout, seed)
        check = train.rows(held)
        solutions = fit_sgd(epoch_features, (~held).nonzero()[:, 0], path, **options)
        scores = holdout_top1(path, solutions, check.features, check.labels)
        chosen = min(rate for rate, score in scores.items() if score == max(scores.values()))

    # all of train, then test once
    everything = torch.arange(len(train.ids), device=train.ids.device)
    (fitted,) = fit_sgd(epoch_features, everything, [chosen], **options)
    selection = f"rate-by-{chosen_by(holdout, path, seed)}" if scores else f"rate={chosen:g}/256"
    return [
        probe_result(
            f"linear-sgd {name} nesterov={MOMENTUM:g} cosine epochs={epochs} batch={batch_size} "
            f"{selection}",
            predict(fitted, test.features),
            test,
            classes,
            bank=len(train.ids),
            rate=chosen,
            rate_at_edge=at_edge(chosen, path),
            holdout_top1={f"{rate:g}": score for rate, score in scores.items()},
        )
    ]


def fit_sgd(
    epoch_features: FeaturesOfEpoch,
    rows: Tensor,
    rates: Sequence[float],
    *,
    epochs: int,
    batch_size: int,
    classes: int,
    seed: int,
) -> list[Linear]:
    """Train a linear layer for each rate, all together from zero on the same batches.

    Each row number in `rows` is used once an epoch, in an order that is a function of seed and
    epoch; the last batch may be smaller.
    """
    steps_per_epoch = -(-len(rows) // batch_size)
    device = rows.device
    base = torch.tensor(list(rates), device=device) * (batch_size / 256)  # (G,)
    weight = velocity = torch.empty(0)  # (F + 1, G, C): the last row is the bias
    for epoch in range(epochs):
        features, labels, _ = epoch_features(epoch)
        if epoch == 0:  # the width is known now
            weight = features.new_zeros(features.shape[1] + 1, len(rates), classes)
            velocity = torch.zeros_like(weight)
        order = torch.from_numpy(permutation(len(rows), seed, epoch)).to(device)
        for number, part in enumerate(torch.split(rows[order], batch_size)):
            done = (epoch * steps_per_epoch + number) / (epochs * steps_per_epoch)
            rate = base * (0.5 + 0.5 * math.cos(math.pi * done))
            x = torch.cat([features[part], features.new_ones(len(part), 1)], 1)  # (b, F + 1)
            scores = (x @ weight.flatten(1)).view(len(part), len(rates), classes)
            residual = scores.softmax(dim=2)
            residual.scatter_add_(
                2,
                labels[part][:, None, None].expand(-1, len(rates), 1),
                residual.new_full((), -1.0).expand(len(part), len(rates), 1),
            )
            gradient = (x.T @ residual.flatten(1) / len(part)).view_as(weight)
            velocity.mul_(MOMENTUM).add_(gradient)
            step = gradient.add_(velocity, alpha=MOMENTUM)  # Nesterov's, as torch.optim.SGD
            weight.sub_(step * rate[:, None])
    return [Linear(weight[:-1, g], weight[-1, g]) for g in range(len(rates))]


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
        if "views" in config:
            raise DataError(
                "augmented views are made at one size with one mean and std; the networks of this "
                "join have several: evaluate one of them"
            )
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
    TrainingView(view, seed=seed, epoch=0, crop_area=crop_area, flip_prob=flip_prob)  # may refuse
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
