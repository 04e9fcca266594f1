"""Multinomial logistic regression for a whole grid of penalties at once, by L-BFGS."""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

MAX_ITERATIONS = 1000
PAIRS = 12  # steps and changes of gradient that L-BFGS remembers
SUFFICIENT = 1e-4  # Armijo's constant
PART_ROWS = 4096  # rows scored at a time: the scores of a grid stay in the cache
PART_SCORES = 2**24  # of rows and classes that are predicted at a time
GRID_PARAMETERS = 2**20  # of all C that are solved together; L-BFGS keeps 40 numbers for each


class Linear(NamedTuple):
    """A linear classifier: standardised features x have scores x @ weight + bias, (F, C) and (C,).

    `converged`: the minimiser was reached, where it was sought step by step.
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
    All C are solved together, each by its own L-BFGS with backtracking: one matrix product scores
    the rows for every C that is not done. The weight is sought as P v in principal axes, P = (h
    covariance + I / (C N))^-1/2, h the mean curvature p (1 - p) at zero: the Hessian in v is then
    near the identity, and what is left to gain when no entry of the gradient in v is above
    `tolerance` is about half its square. `dtype` is that of scores, gradients and steps; losses are
    summed in float64.
    """
    # principal axes, in which the problem is well conditioned
    curvature = max((num_classes - 1) / num_classes**2, 1e-3)
    wide = features.double()
    variances, axes = axes_with_variance(wide)
    ones = wide.new_ones(1, len(wide))
    columns = torch.cat([axes.T @ wide.T, ones]).to(dtype)  # (F + 1, N), in principal axes
    together = max(1, GRID_PARAMETERS // (len(columns) * num_classes))
    fitted: list[Linear] = []
    for first in range(0, len(grid), together):
        some = grid[first : first + together]
        ridges = wide.new_tensor([1 / (c * len(wide)) for c in some])  # (G,)
        roots = (curvature * variances.clamp_min(0) + ridges[:, None]).sqrt()  # (G, F)
        of_bias = roots.new_full((len(some), 1), curvature**-0.5)
        fitted += _fit_together(
            columns,
            labels,
            num_classes,
            scale=torch.cat([1 / roots, of_bias], 1)[:, :, None],
            penalty=torch.cat([ridges[:, None].expand_as(roots), 0 * of_bias], 1),
            tolerance=tolerance,
        )
    return [Linear(axes @ one.weight, one.bias, one.converged) for one in fitted]


def axes_with_variance(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Compute variances (F,) around 0, ascending, and axes (F, F) in columns, of (N, F) float64.

    Of fewer rows than features, by the products of rows with each other, without the axes of no
    variance, on which no penalised fit has a weight.
    """
    if len(rows) >= rows.shape[1]:
        variances, axes = torch.linalg.eigh(rows.T @ rows / len(rows))
        return variances, axes
    variances, sides = torch.linalg.eigh(rows @ rows.T / len(rows))
    some = variances > 1e-12 * variances[-1]
    variances = variances[some]
    return variances, rows.T @ sides[:, some] / (len(rows) * variances).sqrt()


def _fit_together(
    columns: Tensor,
    labels: Tensor,
    num_classes: int,
    *,
    scale: Tensor,
    penalty: Tensor,
    tolerance: float,
) -> list[Linear]:
    """Solve for some C at once, in principal axes. scale: (G, F + 1, 1); penalty: (G, F + 1)."""
    dtype = columns.dtype

    def losses(v: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        """(g, F + 1, K) -> mean losses (g,) and their gradients in v, for the problems `which`."""
        weights = v * scale[which]
        values, gradients = _cross_entropy(columns, labels, weights)
        penalties = penalty[which][:, :, None]
        values = values + (penalties * weights.square()).sum((1, 2), dtype=torch.float64) / 2
        return values, ((gradients + penalties * weights) * scale[which]).to(dtype)

    start = columns.new_zeros(len(scale), len(columns), num_classes)
    scale = scale.to(dtype)
    penalty = penalty.to(dtype)
    noise = 10 * torch.finfo(dtype).eps
    points, converged = _minimise(losses, start, tolerance, noise)
    return [
        Linear(weight[:-1].double(), weight[-1].double(), has_converged)
        for weight, has_converged in zip(points * scale, converged, strict=True)
    ]


def _cross_entropy(columns: Tensor, labels: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Mean loss (g,) and its gradient (g, F, K) for each weight (g, F, K); float64 sums.

    columns (F, N): with few classes, products and softmax are faster with the long side last.
    """
    problems, width, classes = weights.shape
    flat = weights.permute(2, 0, 1).reshape(-1, width)  # (K g, F)
    value = columns.new_zeros(problems, dtype=torch.float64)
    gradient = columns.new_zeros(classes * problems, width, dtype=torch.float64)
    parts = torch.split(columns, PART_ROWS, dim=1)
    for x, y in zip(parts, torch.split(labels, PART_ROWS), strict=True):
        log_p = torch.log_softmax((flat @ x).view(classes, problems, -1), dim=0)  # (K, g, n)
        of_label = y.expand(1, problems, -1)
        value -= log_p.gather(0, of_label).sum(dim=(0, 2), dtype=torch.float64)
        residual = log_p.exp_()
        residual.scatter_add_(0, of_label, residual.new_full((), -1.0).expand(of_label.shape))
        gradient += residual.view(-1, x.shape[1]) @ x.T
    means = gradient.view(classes, problems, width).permute(1, 2, 0) / columns.shape[1]
    return value / columns.shape[1], means


Losses = Callable[[Tensor, Tensor], tuple[Tensor, Tensor]]


def _minimise(
    losses: Losses, start: Tensor, tolerance: float, noise: float
) -> tuple[Tensor, list[bool]]:
    """Minimisers of convex problems that are evaluated together, and whether each was reached.

    start: (G, ...). noise: relative error of a loss; a step may raise it by that much.
    """
    shape = start.shape
    points = start.flatten(1).clone()  # (g, P) of those that are not done, as all that follows
    active = torch.arange(len(points), device=points.device)
    solutions = points.clone()
    reached = [False] * len(points)

    def at(v: Tensor, which: Tensor) -> tuple[Tensor, Tensor]:
        values, gradients = losses(v.view(-1, *shape[1:]), which)
        return values, gradients.flatten(1)

    values, gradients = at(points, active)
    pairs: list[tuple[Tensor, Tensor, Tensor]] = []  # step, change of gradient, 1 / their product
    steps = torch.ones_like(values)
    for iteration in range(MAX_ITERATIONS + 1):
        far = ~(gradients.abs().amax(1) <= tolerance)  # NaN is far, too
        going = far & (steps > 1e-9) & (iteration < MAX_ITERATIONS)
        if not going.all():
            solutions[active[~going]] = points[~going]
            for problem, short in zip(active[~going].tolist(), far[~going].tolist(), strict=True):
                reached[problem] = not short
            active = active[going]
            points = points[going]
            values = values[going]
            gradients = gradients[going]
            pairs = [(s[going], y[going], r[going]) for s, y, r in pairs]
        if len(active) == 0:
            break
        direction = -_two_loops(gradients, pairs)
        slope = _dots(direction, gradients)
        steps = torch.ones_like(slope)
        new_points = points + direction
        new_values, new_gradients = at(new_points, active)
        allowed = noise * values.abs()
        while True:  # halve the steps that do not lower their loss enough
            short = new_values > values + SUFFICIENT * steps * slope + allowed
            short &= steps > 1e-9  # then the loss is as low as its rounding lets it be seen
            if not short.any():
                break
            steps[short] /= 2
            new_points[short] = points[short] + steps[short, None] * direction[short]
            new_values[short], new_gradients[short] = at(new_points[short], active[short])
        step = new_points - points
        change = new_gradients - gradients
        product = _dots(step, change)
        squares = _dots(change, change)
        enough = product > 1e-12 * squares  # else the pair is rounding: skipped
        inverse = torch.where(enough, 1 / product.where(enough, 1), 0)
        pairs = [*pairs[-(PAIRS - 1) :], (step, change, inverse)]
        points = new_points
        values = new_values
        gradients = new_gradients
    return solutions.view(shape), reached


def _dots(a: Tensor, b: Tensor) -> Tensor:
    """Products of rows, (g, P) and (g, P) -> (g,)."""
    return torch.bmm(a[:, None], b[:, :, None])[:, 0, 0]


def _two_loops(gradient: Tensor, pairs: list[tuple[Tensor, Tensor, Tensor]]) -> Tensor:
    """L-BFGS's inverse Hessian times the gradient (g, P). Nocedal and Wright 2006, alg. 7.4."""
    q = gradient.clone()
    factors = []
    for step, change, inverse in reversed(pairs):
        factors.append(inverse * _dots(step, q))
        q.addcmul_(factors[-1][:, None], change, value=-1)
    if pairs:
        _, change, inverse = pairs[-1]
        known = inverse > 0
        scale = 1 / (inverse * _dots(change, change)).where(known, 1)
        q *= scale[:, None]
    for (step, change, inverse), factor in zip(pairs, reversed(factors), strict=True):
        q.addcmul_((factor - inverse * _dots(change, q))[:, None], step)
    return q
