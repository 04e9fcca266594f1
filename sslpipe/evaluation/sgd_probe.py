"""SimCLR's linear evaluation: a linear layer trained by SGD on frozen features."""

import math
from collections.abc import Sequence

import torch

from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.linear_probe import (
    best_value,
    chosen_by,
    details_of,
    holdout_rows,
    num_classes,
    probe_result,
)
from sslpipe.evaluation.logistic import Linear, predict
from sslpipe.evaluation.result import Result
from sslpipe.random import permutation

EPOCHS, MOMENTUM = 90, 0.9  # Chen et al. 2020, arXiv:2002.05709, appendix B.6
RATES = (0.1,)  # the same: 0.1 x batch size / 256


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
    classes = num_classes(train, test)
    if not rates or min(rates) <= 0:
        raise DataError(f"rates = {tuple(rates)} must hold learning rates > 0")
    if epochs < 1 or batch_size < 1:
        raise DataError(f"epochs = {epochs} and batch_size = {batch_size} must be at least 1")

    # a rate, where there are several
    chosen, scores, path = rates[0], dict[float, float](), sorted(set(rates))
    options = {"epochs": epochs, "batch_size": batch_size, "classes": classes, "seed": seed}
    selection = f"rate={chosen:g}/256"
    if len(path) > 1:
        held = holdout_rows(train, holdout, seed)
        solutions = fit_sgd(train.rows(~held), path, **options)
        chosen, scores = best_value(path, solutions, train.rows(held), min)
        selection = f"rate-by-{chosen_by(path, holdout, seed)}"

    # all of train, then test once
    (fitted,) = fit_sgd(train, [chosen], **options)
    protocol = f"linear-sgd frozen nesterov={MOMENTUM:g} cosine epochs={epochs} batch={batch_size}"
    details = details_of("rate", chosen, path, scores)
    predicted = predict(fitted, test.features)
    bank = len(train.ids)
    return [probe_result(f"{protocol} {selection}", predicted, test, classes, bank, details)]


def fit_sgd(
    train: Embeddings,
    rates: Sequence[float],
    *,
    epochs: int,
    batch_size: int,
    classes: int,
    seed: int,
) -> list[Linear]:
    """Train a linear layer for each rate, all together from zero on the same batches.

    Each row is used once an epoch, in an order that is a function of seed and epoch; the last batch
    may be smaller.
    """
    features, labels, _ = train
    steps_per_epoch = -(-len(labels) // batch_size)
    base = torch.tensor(list(rates), device=labels.device) * (batch_size / 256)  # (G,)
    # the last row is the bias
    weight = features.new_zeros(features.shape[1] + 1, len(rates), classes)
    velocity = torch.zeros_like(weight)
    for epoch in range(epochs):
        order = torch.from_numpy(permutation(len(labels), seed, epoch)).to(labels.device)
        for number, part in enumerate(torch.split(order, batch_size)):
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
