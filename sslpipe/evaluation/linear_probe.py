"""A linear classifier on frozen features: logistic regression or ridge, chosen inside train."""

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.errors import DataError
from sslpipe.evaluation.difference import bootstrap95
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.groups import GroupCodes, by_value, fit_unlike
from sslpipe.evaluation.knn import check_pair
from sslpipe.evaluation.logistic import Linear, axes_with_variance, fit_logistic, predict
from sslpipe.evaluation.result import Result, accuracy
from sslpipe.random import permutation

C_GRID = tuple(10.0 ** (half / 2) for half in range(-12, 8))  # 1e-6 to 3e3, 20 values
PENALTY_GRID = tuple(10.0 ** (half / 2) for half in range(-12, 8))  # 1e-6 to 3e3 variances
SEARCH_TOLERANCE, FINAL_TOLERANCE = 1e-3, 1e-5  # in units that `fit_logistic` explains
MOST_CLASSES = 65536
MOST_PARAMETERS = 2**26  # of a logistic fit: L-BFGS keeps some 50 float64 numbers for each
ONE_HOT_NUMBERS = 2**24  # of rows and classes at a time: 128 MiB
CONFUSION_CLASSES = 200  # of a confusion matrix in the details


def linear_probe(
    train: Embeddings,
    test: Embeddings,
    *,
    grid: Sequence[float] = C_GRID,
    holdout: float = 0.15,
    seed: int = 0,
    exclude_same: GroupCodes | None = None,
    by: GroupCodes | None = None,
) -> list[Result]:
    """Score logistic regression fitted on all of train by its top-1 accuracy on test.

    Features are standardised with train's mean and spread. Test is read once, after C was chosen.

    Args:
        train: Labelled rows.
        test: Labelled rows.
        grid: Values of C, the inverse strength of the L2 penalty (scikit-learn's), all solved
            together; the one with the best accuracy on the held-out part is taken, the smallest
            among equals.
        holdout: Class-stratified share of train that chooses C.
        seed: Of that share.
        exclude_same: A column (camera, say): each test row is predicted from train rows of other
            values than its own; see `groups.fit_unlike`.
        by: A column: the accuracy of its worst value beside it; see `groups.worst_value`.

    Returns:
        details: C, C_at_edge (the grid may be too narrow), converged (the last fit reached its
        tolerance), holdout_top1 for each C, per-class accuracy (null where test has none), the
        confusion matrix (rows: true class; null beyond 200 classes), a bootstrap interval.

    Raises:
        DataError: There are more than MOST_PARAMETERS parameters, or a class has a single row.
    """
    if exclude_same is not None:
        probe = partial(linear_probe, grid=grid, holdout=holdout, seed=seed)
        return by_value(fit_unlike(probe, train, test, exclude_same), by)
    classes = num_classes(train, test)
    parameters = (train.features.shape[1] + 1) * classes
    if parameters > MOST_PARAMETERS:
        raise DataError(
            f"{classes} classes of {train.features.shape[1]} features are {parameters} parameters, "
            f"above {MOST_PARAMETERS} of the logistic probe; use kNN or `sgd`"
        )
    chosen, scores = choose_c(train, grid=grid, holdout=holdout, seed=seed, num_classes=classes)
    mean, scale = standardisation(train.features)
    train_x = (train.features - mean) / scale
    (fitted,) = fit_logistic(train_x, train.labels, [chosen], classes, tolerance=FINAL_TOLERANCE)
    results = [
        probe_result(
            f"linear-lbfgs standardised C-by-{chosen_by(holdout, grid, seed)}",
            predict(fitted, (test.features - mean) / scale),
            test,
            classes,
            bank=len(train.ids),
            C=chosen,
            C_at_edge=at_edge(chosen, grid),
            converged=fitted.converged,
            holdout_top1={f"{c:g}": score for c, score in scores.items()},
        )
    ]
    return by_value(results, by)


def choose_c(
    train: Embeddings, *, grid: Sequence[float], holdout: float, seed: int, num_classes: int
) -> tuple[float, dict[float, float]]:
    """Find the best C of the grid on a held-out part of train. Returns it and each accuracy."""
    if not grid or min(grid) <= 0:
        raise DataError(f"grid = {tuple(grid)} must hold values of C > 0")
    fit, check = split_train(train, holdout, seed)
    mean, scale = standardisation(fit.features)
    fit_x, check_x = (fit.features - mean) / scale, (check.features - mean) / scale
    path = sorted(set(grid))
    solutions = fit_logistic(
        fit_x, fit.labels, path, num_classes, tolerance=SEARCH_TOLERANCE, dtype=torch.float32
    )
    scores = holdout_top1(path, solutions, check_x, check.labels)
    return min(c for c, score in scores.items() if score == max(scores.values())), scores


def ridge_probe(
    train: Embeddings,
    test: Embeddings,
    *,
    grid: Sequence[float] = PENALTY_GRID,
    holdout: float = 0.15,
    seed: int = 0,
    exclude_same: GroupCodes | None = None,
    by: GroupCodes | None = None,
) -> list[Result]:
    """Score ridge regression onto one-hot labels, fitted on all of train, by top-1 on test.

    All penalties come from one eigendecomposition; a second one, of all of train, gives the fit
    that meets test.

    Args:
        train: Labelled rows.
        test: Labelled rows.
        grid: Penalties, in units of the features' mean variance (1, as they are standardised);
            chosen as in the logistic probe, the largest among equals.
        holdout: Class-stratified share of train that chooses the penalty.
        seed: Of that share.
        exclude_same: A column (camera, say): each test row is predicted from train rows of other
            values than its own; see `groups.fit_unlike`.
        by: A column: the accuracy of its worst value beside it; see `groups.worst_value`.

    Returns:
        details: as the logistic probe's, with `penalty` for C.
    """
    if exclude_same is not None:
        probe = partial(ridge_probe, grid=grid, holdout=holdout, seed=seed)
        return by_value(fit_unlike(probe, train, test, exclude_same), by)
    classes = num_classes(train, test)
    if not grid or min(grid) <= 0:
        raise DataError(f"grid = {tuple(grid)} must hold penalties > 0")
    fit, check = split_train(train, holdout, seed)
    mean, scale = standardisation(fit.features)
    path = sorted(set(grid))
    solutions = fit_ridge((fit.features - mean) / scale, fit.labels, path, classes)
    scores = holdout_top1(path, solutions, (check.features - mean) / scale, check.labels)
    chosen = max(penalty for penalty, score in scores.items() if score == max(scores.values()))
    mean, scale = standardisation(train.features)
    (fitted,) = fit_ridge((train.features - mean) / scale, train.labels, [chosen], classes)
    results = [
        probe_result(
            f"linear-ridge standardised penalty-by-{chosen_by(holdout, grid, seed)}",
            predict(fitted, (test.features - mean) / scale),
            test,
            classes,
            bank=len(train.ids),
            penalty=chosen,
            penalty_at_edge=at_edge(chosen, grid),
            holdout_top1={f"{penalty:g}": score for penalty, score in scores.items()},
        )
    ]
    return by_value(results, by)


def fit_ridge(
    features: Tensor, labels: Tensor, grid: Sequence[float], num_classes: int
) -> list[Linear]:
    """Find each penalty's minimiser of mean |x W + b - onehot|^2 + penalty |W|^2; b is free.

    It is scikit-learn's Ridge(alpha=penalty * N), in float64.

    Args:
        features: (N, F), standardised.
        labels: (N,) int64, below num_classes.
        grid: Penalties > 0.
        num_classes: C, the columns of W.
    """
    x = features.double()
    mean = x.mean(dim=0)
    centred = x - mean
    variances, axes = axes_with_variance(centred)
    known = torch.arange(num_classes, device=x.device)
    of_part: list[tuple[Tensor, Tensor]] = []  # shares (k,) and sums (F, k)
    for some in torch.split(known, max(1, ONE_HOT_NUMBERS // len(x))):
        targets = (labels[:, None] == some).double()  # (N, k) one-hot, of a part of the classes
        of_part.append((targets.mean(dim=0), centred.T @ targets))
    shares, sums = (torch.cat(parts, -1) for parts in zip(*of_part, strict=True))
    projected = axes.T @ sums / len(x)  # (F, K); the centre of the targets drops out
    solutions = []
    for penalty in grid:
        weight = axes @ (projected / (variances.clamp_min(0) + penalty)[:, None])
        solutions.append(Linear(weight, shares - mean @ weight))
    return solutions


def num_classes(train: Embeddings, test: Embeddings) -> int:
    """Count the classes: one more than the largest label of both; both sides are checked."""
    check_pair(train, test)
    classes = 1 + max(int(train.labels.max()), int(test.labels.max()))
    if classes > MOST_CLASSES:
        raise DataError(
            f"there is a label {classes - 1}; a linear probe needs labels 0, 1, ... below "
            f"{MOST_CLASSES}: number the classes"
        )
    return classes


def probe_result(
    protocol: str,
    predicted: Tensor,
    test: Embeddings,
    classes: int,
    *,
    bank: int,
    **details: Any,
) -> Result:
    """Make a Result with the details that every linear probe gives. predicted: (Q,) int64."""
    labels: NDArray[np.int64] = test.labels.cpu().numpy()
    rows: NDArray[np.int64] = predicted.cpu().numpy()
    totals = np.bincount(labels, minlength=classes).tolist()
    hits = np.bincount(labels[rows == labels], minlength=classes).tolist()
    confusion = None
    if classes <= CONFUSION_CLASSES:
        pairs = np.bincount(labels * classes + rows, minlength=classes**2)
        confusion = pairs.reshape(classes, classes).tolist()
    return accuracy(
        protocol,
        rows,
        labels,
        bank=bank,
        **details,
        bootstrap95=bootstrap95((rows == labels)[None]),
        per_class=[h / n if n else None for h, n in zip(hits, totals, strict=True)],
        confusion=confusion,
    )


def holdout_top1(
    grid: Sequence[float], solutions: Sequence[Linear], features: Tensor, labels: Tensor
) -> dict[float, float]:
    """Score the solution of each value of a grid on rows that are held out: value -> top-1."""
    return {
        value: float((predict(fitted, features) == labels).double().mean())
        for value, fitted in zip(grid, solutions, strict=True)
    }


def chosen_by(holdout: float, grid: Sequence[float], seed: int) -> str:
    """Name the rule by which a value of the grid was chosen, for the protocol."""
    return f"holdout={holdout:g} grid={min(grid):g}..{max(grid):g}/{len(set(grid))} seed={seed}"


def at_edge(chosen: float, grid: Sequence[float]) -> bool:
    """Say whether the value chosen is an end of a grid of several: it may be too narrow."""
    return len(grid) > 1 and chosen in (min(grid), max(grid))


def split_train(train: Embeddings, fraction: float, seed: int) -> tuple[Embeddings, Embeddings]:
    """Split train into what is fitted on and what is held out."""
    held = holdout_rows(train, fraction, seed)
    return train.rows(~held), train.rows(held)


def holdout_rows(train: Embeddings, fraction: float, seed: int) -> Tensor:
    """Choose the rows that are held out, (N,) bool: in each class a share, at least one row.

    A function of ids and seed, so the same samples for every backbone.

    Args:
        train: Labelled rows.
        fraction: The share, in (0, 1).
        seed: Of the choice.

    Raises:
        DataError: A class has a single row.
    """
    if not 0 < fraction < 1:
        raise DataError(f"holdout = {fraction} must lie between 0 and 1")
    order = torch.argsort(train.ids).cpu().numpy()
    shuffled = order[permutation(len(order), seed)]
    labels = train.labels.cpu().numpy()
    members, places = by_class(shuffled, labels)
    known, counts = np.unique(labels, return_counts=True)
    if (counts < 2).any():
        label = known[np.argmax(counts < 2)]
        raise DataError(f"class {label} has one train row; a hold-out needs at least two")
    shares = np.maximum(1, (fraction * counts).astype(np.int64))
    held = np.zeros(len(labels), bool)
    held[members[places < shares[np.searchsorted(known, labels[members])]]] = True
    return torch.from_numpy(held).to(train.features.device)


def by_class(
    rows: NDArray[np.int64], labels: NDArray[np.int64]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Sort row numbers by their labels, in each class as they come; with each one's place there."""
    members = rows[np.argsort(labels[rows], kind="stable")]
    own = labels[members]
    return members, np.arange(len(members)) - np.searchsorted(own, own)


def standardisation(features: Tensor) -> tuple[Tensor, Tensor]:
    """Compute each column's mean and spread, (F,) float32; a constant column has spread 1."""
    spread, mean = torch.std_mean(features.double(), dim=0, correction=0)
    constant = spread <= 1e-7 * (mean.abs() + 1)
    return mean.float(), torch.where(constant, torch.ones_like(spread), spread).float()
