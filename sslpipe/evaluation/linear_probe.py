"""A linear classifier on frozen features: logistic regression, C chosen inside train."""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.knn import check_pair
from sslpipe.evaluation.result import Result, accuracy
from sslpipe.stateless import permutation

C_GRID = (1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0, 10.0)
SEARCH_TOLERANCE, FINAL_TOLERANCE = 1e-3, 1e-5  # in units that `fit_logistic` explains
MAX_ITERATIONS = 1000


class Linear(NamedTuple):
    """Scores of standardised features x: x @ weight + bias. weight: (F, C), bias: (C,)."""

    weight: Tensor
    bias: Tensor


def linear_probe(
    train: Embeddings,
    test: Embeddings,
    *,
    grid: Sequence[float] = C_GRID,
    holdout: float = 0.15,
    seed: int = 0,
    num_classes: int | None = None,
) -> list[Result]:
    """Top-1 accuracy on test of logistic regression fitted on all of train.

    grid: values of C, the inverse strength of the L2 penalty (scikit-learn's); the one with the
    best accuracy on a class-stratified share `holdout` of train is taken, the smallest among
    equals; the search goes from strong to weak and ends when it is worse twice running. Test is
    read once, after that. Features are standardised with train's mean and spread.
    details: C, C_at_edge (the grid may be too narrow), holdout_top1 for each C tried, per-class
    accuracy (null where test has none) and the confusion matrix (rows: true class).
    """
    check_pair(train, test)
    classes = num_classes or 1 + max(int(train.labels.max()), int(test.labels.max()))
    chosen, scores = choose_c(train, grid=grid, holdout=holdout, seed=seed, num_classes=classes)
    mean, scale = standardisation(train.features)
    train_x = (train.features - mean) / scale
    (fitted,) = fit_logistic(train_x, train.labels, [chosen], classes, tolerance=FINAL_TOLERANCE)
    predicted = predict(fitted, (test.features - mean) / scale)

    confusion = torch.zeros(classes, classes, dtype=torch.int64, device=predicted.device)
    confusion.index_put_((test.labels, predicted), torch.ones_like(predicted), accumulate=True)
    totals = confusion.sum(dim=1).tolist()
    hits = confusion.diagonal().tolist()
    return [
        accuracy(
            f"linear-lbfgs standardised C-by-holdout={holdout:g} "
            f"grid={min(grid):g}..{max(grid):g}/{len(grid)} seed={seed}",
            predicted.cpu().numpy(),
            test.labels.cpu().numpy(),
            bank=len(train.ids),
            C=chosen,
            C_at_edge=len(grid) > 1 and chosen in (min(grid), max(grid)),
            holdout_top1={f"{c:g}": score for c, score in scores.items()},
            per_class=[h / n if n else None for h, n in zip(hits, totals, strict=True)],
            confusion=confusion.tolist(),
        )
    ]


def choose_c(
    train: Embeddings, *, grid: Sequence[float], holdout: float, seed: int, num_classes: int
) -> tuple[float, dict[float, float]]:
    """The best C of the grid on a held-out part of train, and the accuracy of each."""
    if not grid or min(grid) <= 0:
        raise DataError(f"grid = {tuple(grid)} must hold values of C > 0")
    held = holdout_rows(train, holdout, seed)
    fit, check = train.rows(~held), train.rows(held)
    mean, scale = standardisation(fit.features)
    fit_x, check_x = (fit.features - mean) / scale, (check.features - mean) / scale
    path = sorted(grid)  # from strong to weak penalty
    solutions = fit_logistic(fit_x, fit.labels, path, num_classes, tolerance=SEARCH_TOLERANCE)
    scores: dict[float, float] = {}
    for c, fitted in zip(path, solutions, strict=False):
        scores[c] = float((predict(fitted, check_x) == check.labels).double().mean())
        if len(scores) > 2 and max(list(scores.values())[-2:]) < max(scores.values()):
            break  # worse twice running: weaker penalties only cost time
    best = max(scores.values())
    return min(c for c, score in scores.items() if score == best), scores


def holdout_rows(train: Embeddings, fraction: float, seed: int) -> Tensor:
    """(N,) bool: which rows are held out; in each class the share `fraction`, at least one row.

    A function of ids and seed, so the same samples for every backbone.
    Raises: DataError where a class has a single row.
    """
    if not 0 < fraction < 1:
        raise DataError(f"holdout = {fraction} must lie between 0 and 1")
    order = torch.argsort(train.ids).cpu().numpy()
    shuffled = order[permutation(len(order), seed)]
    labels = train.labels.cpu().numpy()
    held = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = shuffled[labels[shuffled] == label]
        if len(members) < 2:
            raise DataError(f"class {label} has one train row; a hold-out needs at least two")
        held[members[: max(1, int(fraction * len(members)))]] = True
    return torch.from_numpy(held).to(train.features.device)


def standardisation(features: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and spread of each column, (F,) float32; a constant column has spread 1."""
    spread, mean = torch.std_mean(features.double(), dim=0, correction=0)
    constant = spread <= 1e-7 * (mean.abs() + 1)
    return mean.float(), torch.where(constant, torch.ones_like(spread), spread).float()


def predict(fitted: Linear, features: Tensor) -> Tensor:
    """The class of each row, (N,) int64. features: standardised as in fitting."""
    scores = features.to(fitted.weight.dtype) @ fitted.weight + fitted.bias  # (N, C)
    return scores.argmax(dim=1)


def fit_logistic(
    features: Tensor, labels: Tensor, grid: Sequence[float], num_classes: int, *, tolerance: float
) -> Iterator[Linear]:
    """For each C the minimiser of sum of cross entropies + |weight|^2 / (2 C); the bias is free.

    The objective of scikit-learn's LogisticRegression(C=C). features: standardised, (N, F).
    L-BFGS with strong-Wolfe line search, in float64, each C from the solution before it. The
    weight is sought as P v, P = (h covariance + I / (C N))^-1/2, h the mean curvature p (1 - p) at
    the start: the Hessian in v is then near the identity, and what is left to gain when it stops,
    no entry of the mean loss's gradient in v above `tolerance`, is about half that gradient's
    square.
    """
    x = features.double()
    rows = torch.arange(len(x), device=x.device)
    variances, axes = torch.linalg.eigh(x.T @ x / len(x))
    start = Linear(x.new_zeros(x.shape[1], num_classes), x.new_zeros(num_classes))
    for c in grid:
        ridge = 1 / (c * len(x))
        p = torch.softmax(x @ start.weight + start.bias, dim=1)  # (N, K)
        curvature = float((p * (1 - p)).mean().clamp_min(1e-3))
        roots = (curvature * variances.clamp_min(0) + ridge).sqrt()  # (F,)
        v = torch.cat(
            [(axes.T @ start.weight) * roots[:, None], start.bias[None] * curvature**0.5]
        ).requires_grad_()  # (F + 1, K), in the coordinates of the principal axes
        optimizer = torch.optim.LBFGS(
            [v],
            max_iter=MAX_ITERATIONS,
            max_eval=2 * MAX_ITERATIONS,
            history_size=20,
            tolerance_grad=tolerance,
            tolerance_change=0.0,
            line_search_fn="strong_wolfe",
        )

        def solution(v: Tensor = v, roots: Tensor = roots, curvature: float = curvature) -> Linear:
            inner = v.detach()
            return Linear(axes @ (inner[:-1] / roots[:, None]), inner[-1] / curvature**0.5)

        def mean_loss_and_gradient(
            v: Tensor = v, roots: Tensor = roots, curvature: float = curvature, ridge: float = ridge
        ) -> Tensor:
            # in closed form: autograd keeps three more (N, K) tensors
            weight, bias = solution(v, roots, curvature)
            log_p = torch.log_softmax(x @ weight + bias, dim=1)  # (N, K)
            loss = -log_p[rows, labels].mean() + ridge / 2 * weight.square().sum()
            residual = log_p.exp_()
            residual[rows, labels] -= 1
            residual /= len(x)
            gradient = axes.T @ (x.T @ residual + ridge * weight) / roots[:, None]  # (F, K)
            v.grad = torch.cat([gradient, residual.sum(dim=0, keepdim=True) / curvature**0.5])
            return loss

        optimizer.step(mean_loss_and_gradient)  # type: ignore[no-untyped-call]
        start = solution()
        yield start
