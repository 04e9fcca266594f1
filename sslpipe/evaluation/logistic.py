"""Multinomial logistic regression for a grid of penalties, by scipy's L-BFGS."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

MAX_ITERATIONS = 1000
PAIRS = 12  # steps and changes of gradient that L-BFGS remembers
PART_ROWS = 4096  # rows scored at a time: their scores stay in the cache
PART_SCORES = 2**24  # of rows and classes that are predicted at a time


class Linear(NamedTuple):
    """A linear classifier: standardised features x have scores x @ weight + bias, (F, C) and (C,).

    `converged` says whether the minimiser was reached, where it was sought step by step.
    """

    weight: Tensor
    bias: Tensor
    converged: bool = True


def predict(fitted: Linear, features: Tensor) -> Tensor:
    """Predict the class of each row, (N,) int64. features: standardised as in fitting."""
    parts = torch.split(features, max(1, PART_SCORES // len(fitted.bias)))
    scores = (rows.to(fitted.weight.dtype) @ fitted.weight + fitted.bias for rows in parts)
    return torch.cat([part.argmax(dim=1) for part in scores])  # of (n, C) each


def fit_logistic(
    features: Tensor,
    labels: Tensor,
    grid: Sequence[float],
    num_classes: int,
    *,
    tolerance: float,
    dtype: torch.dtype = torch.float64,
) -> list[Linear]:
    """Find each C's minimiser of sum of cross entropies + |weight|^2 / (2 C); the bias is free.

    It is the objective of scikit-learn's LogisticRegression(C=C), of standardised features (N, F).
    Each C starts from the minimiser of the one before. The weight is sought as P v in principal
    axes, P = (h covariance + I / (C N))^-1/2, h the mean curvature p (1 - p) at zero: the Hessian
    in v is then near the identity, and what is left to gain when a C is done, no entry of the mean
    loss's gradient in v above `tolerance`, is about half that gradient's square. `dtype` is that of
    scores, gradients and steps; losses are summed in float64.
    """
    # principal axes, in which the problem is well conditioned
    curvature = max((num_classes - 1) / num_classes**2, 1e-3)
    wide = features.double()
    variances, axes = axes_with_variance(wide)
    ones = wide.new_ones(1, len(wide))
    columns = torch.cat([axes.T @ wide.T, ones]).to(dtype)  # (F + 1, N), in principal axes
    fitted: list[Linear] = []
    weight = columns.new_zeros(len(columns), num_classes)
    for c in grid:
        ridge = 1 / (c * len(wide))
        scale = (curvature * variances.clamp_min(0) + ridge).rsqrt()
        scale = torch.cat([scale, scale.new_tensor([curvature**-0.5])])[:, None].to(dtype)
        penalty = torch.full_like(scale, ridge)
        penalty[-1] = 0  # the bias
        weight, converged = _minimise(columns, labels, weight, scale, penalty, tolerance)
        wide_weight = weight.double()
        fitted.append(Linear(axes @ wide_weight[:-1], wide_weight[-1], converged))
    return fitted


def axes_with_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute variances (F,) around 0, ascending, and axes (F, F) in columns, of (N, F) float64.

    Of fewer rows than features, by the products of rows with each other; the axes of no variance,
    on which no penalised fit has a weight, are left out.
    """
    if len(rows) >= rows.shape[1]:
        variances, axes = torch.linalg.eigh(rows.T @ rows / len(rows))
        return variances, axes
    variances, sides = torch.linalg.eigh(rows @ rows.T / len(rows))
    some = variances > 1e-12 * variances[-1]
    variances = variances[some]
    return variances, rows.T @ sides[:, some] / (len(rows) * variances).sqrt()


def _minimise(
    columns: Tensor,
    labels: Tensor,
    start: Tensor,
    scale: Tensor,
    penalty: Tensor,
    tolerance: float,
) -> tuple[Tensor, bool]:
    """Minimise over v = weight / scale, from `start`; the weight (F, K), and whether it is reached.

    columns: (F, N), a column for each row of features; scale, penalty: (F, 1) of each weight.
    """
    from scipy.optimize import minimize  # here: the import takes 0.2 s

    def weight_at(v: NDArray[np.float64]) -> Tensor:
        return torch.from_numpy(v).to(columns).view_as(start) * scale

    def loss(v: NDArray[np.float64]) -> tuple[float, NDArray[np.float64]]:
        weight = weight_at(v)
        value, gradient = _cross_entropy(columns, labels, weight)
        value += (penalty * weight.square()).sum(dtype=torch.float64) / 2
        return float(value), ((gradient + penalty * weight) * scale).flatten().cpu().numpy()

    options = {"maxiter": MAX_ITERATIONS, "maxcor": PAIRS, "gtol": tolerance, "ftol": 0}
    first = (start / scale).double().flatten().cpu().numpy()
    found = minimize(loss, first, jac=True, method="L-BFGS-B", options=options)
    return weight_at(found.x), bool(np.abs(found.jac).max() <= tolerance)


def _cross_entropy(columns: Tensor, labels: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss () and its gradient (F, K) for a weight (F, K); float64 sums.

    columns: (F, N), a column for each row of features. Products with few classes are up to four
    times as fast with the long side last, and so is a softmax across rows.
    """
    value = columns.new_zeros((), dtype=torch.float64)
    gradient = torch.zeros_like(weight.T, dtype=torch.float64)  # (K, F)
    parts = torch.split(columns, PART_ROWS, dim=1), torch.split(labels, PART_ROWS)
    for x, y in zip(*parts, strict=True):
        log_p = torch.log_softmax(weight.T @ x, dim=0)  # (K, n)
        value -= log_p.gather(0, y[None]).sum(dtype=torch.float64)
        residual = log_p.exp_()
        residual.scatter_add_(0, y[None], residual.new_full((1, len(y)), -1.0))
        gradient += residual @ x.T
    return value / columns.shape[1], gradient.T / columns.shape[1]
