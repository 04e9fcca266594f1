"""A linear classifier on frozen features: logistic regression, its C chosen inside train."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.few_shot import by_class, shuffled
from sslpipe.evaluation.knn import check_classes, check_pair
from sslpipe.evaluation.logistic import Linear, fit_logistic, predict
from sslpipe.evaluation.result import Result, accuracy

GRID = tuple(10.0 ** (half / 2) for half in range(-12, 8))  # 1e-6 to 3e3, 20 values
# in units that `fit_logistic` explains
SEARCH_TOLERANCE = 1e-3
FINAL_TOLERANCE = 1e-5
MOST_CLASSES = 65536
MOST_PARAMETERS = 2**26  # of a logistic fit: L-BFGS keeps some 50 float64 numbers for each
CONFUSION_CLASSES = 200  # of a confusion matrix in the details


def linear_probe(
    train: Embeddings,
    test: Embeddings,
    *,
    grid: Sequence[float] = GRID,
    holdout: float = 0.15,
    seed: int = 0,
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

    Returns:
        details: C, C_at_edge (the grid may be too narrow), converged (the last fit reached its
        tolerance), holdout_top1 for each C, per-class accuracy (null where test has none), the
        confusion matrix (rows: true class; null beyond 200 classes), classes_of_one (of train,
        where there are such: they are in the fits, and never in the held-out part).

    Raises:
        DataError: More than MOST_PARAMETERS parameters, no class of two rows, or none of test's.
    """
    check_pair(train, test)
    check_classes(train, test)
    path = sorted(set(grid))
    if not path or path[0] <= 0:
        raise DataError(f"grid = {tuple(grid)} must hold values of C > 0")
    classes = 1 + max(int(train.labels.max()), int(test.labels.max()))
    numbers: list[int] | None = None  # labels, by place in per_class and confusion
    if classes > MOST_CLASSES:  # numbers of products, perhaps: the classes that are there count
        distinct = torch.unique(torch.cat([train.labels, test.labels]))
        classes = len(distinct)
        numbers = distinct.tolist()
        train = train._replace(labels=torch.searchsorted(distinct, train.labels))
        test = test._replace(labels=torch.searchsorted(distinct, test.labels))
    _check_size(classes, train.features.shape[1])

    # the value that is best on a held-out part of train
    held = holdout_rows(train, holdout, seed)
    scores = _holdout_scores(train.rows(~held), train.rows(held), path, classes)
    best = [value for value, score in scores.items() if score == max(scores.values())]
    chosen = best[0]  # of equals the one that penalises most

    # all of train, then test once
    mean, scale = standardisation(train.features)
    (fitted,) = _fit((train.features - mean) / scale, train.labels, [chosen], classes)
    predicted = predict(fitted, (test.features - mean) / scale).cpu().numpy()
    labels = test.labels.cpu().numpy()
    totals = np.bincount(labels, minlength=classes).tolist()
    hits = np.bincount(labels[predicted == labels], minlength=classes).tolist()
    confusion = None
    if classes <= CONFUSION_CLASSES:
        pairs = np.bincount(labels * classes + predicted, minlength=classes**2)
        confusion = pairs.reshape(classes, classes).tolist()
    details: dict[str, Any] = {
        "C": chosen,
        "C_at_edge": len(grid) > 1 and chosen in (path[0], path[-1]),
        "holdout_top1": {f"{value:g}": score for value, score in scores.items()},
        "converged": fitted.converged,
        "per_class": [h / n if n else None for h, n in zip(hits, totals, strict=True)],
        "confusion": confusion,
    }
    counts = torch.bincount(train.labels)
    if alone := int((counts == 1).sum()):
        details["classes_of_one"] = alone
    if numbers is not None:
        details["numbers"] = numbers
    ends = f"{path[0]:g}..{path[-1]:g}/{len(path)}"
    protocol = f"linear-lbfgs standardised C-by-holdout={holdout:g} grid={ends} seed={seed}"
    result = accuracy(protocol, predicted, labels, bank=len(train.ids), details=details)
    return [result]


def _check_size(classes: int, width: int) -> None:
    """Raise DataError where a probe of so many classes and features would not fit into memory."""
    if classes > MOST_CLASSES:
        raise DataError(f"{classes} classes are above {MOST_CLASSES} of a linear probe; use kNN")
    parameters = (width + 1) * classes
    if parameters > MOST_PARAMETERS:
        raise DataError(
            f"{classes} classes of {width} features are {parameters} parameters, "
            f"above {MOST_PARAMETERS} of the logistic probe; use kNN"
        )


def _holdout_scores(
    fit: Embeddings, check: Embeddings, grid: Sequence[float], classes: int
) -> dict[float, float]:
    """Return the accuracy on `check` of a probe of each C, fitted on `fit`."""
    mean, scale = standardisation(fit.features)
    solutions = _fit((fit.features - mean) / scale, fit.labels, grid, classes, rough=True)
    asked = (check.features - mean) / scale
    return {
        value: float((predict(fitted, asked) == check.labels).double().mean())
        for value, fitted in zip(grid, solutions, strict=True)
    }


def _fit(
    x: Tensor, y: Tensor, grid: Sequence[float], classes: int, *, rough: bool = False
) -> list[Linear]:
    """Fit a classifier for each value; `rough` is enough to choose one."""
    tolerance = SEARCH_TOLERANCE if rough else FINAL_TOLERANCE
    dtype = torch.float32 if rough else torch.float64
    return fit_logistic(x, y, grid, classes, tolerance=tolerance, dtype=dtype)


def holdout_rows(train: Embeddings, fraction: float, seed: int) -> Tensor:
    """Choose the rows that are held out, (N,) bool: in each class a share, at least one row.

    The only row of a class is not held out. A function of ids and seed, so the same samples for
    every backbone.

    Raises:
        DataError: No class has two rows.
    """
    if not 0 < fraction < 1:
        raise DataError(f"holdout = {fraction} must lie between 0 and 1")
    labels = train.labels.cpu().numpy()
    members, places = by_class(shuffled(train, (seed,)), labels)
    known, counts = np.unique(labels, return_counts=True)
    if (counts < 2).all():
        raise DataError(
            f"each of the {len(known):,} classes of train has one row, so that none can be held "
            "out to choose C; score these features by kNN"
        )
    shares = np.minimum(counts - 1, np.maximum(1, (fraction * counts).astype(np.int64)))
    held = np.zeros(len(labels), bool)
    held[members[places < shares[np.searchsorted(known, labels[members])]]] = True
    return torch.from_numpy(held).to(train.features.device)


def standardisation(features: Tensor) -> tuple[Tensor, Tensor]:
    """Compute each column's mean and spread, (F,) float32; a constant column has spread 1."""
    spread, mean = torch.std_mean(features.double(), dim=0, correction=0)
    constant = spread <= 1e-7 * (mean.abs() + spread.max())  # of any scale: rounding of float32
    return mean.float(), torch.where(constant, torch.ones_like(spread), spread).float()
