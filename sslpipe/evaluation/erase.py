"""Erasing columns: the least change after which no linear reader knows a column's value."""

from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.whiten import Whitening, principal_axes

# Of the largest variance; below, a direction holds the rounding of float32 features, no more.
NO_VARIANCE = 1e-12
NO_CORRELATION = 1e-8  # with the values: rounding


class Erasure(NamedTuple):
    """An affine map of features: x - left right^T (x - mean), all float64.

    `left` (F, R) are the directions taken away, `right` (F, R) reads how much of each there is.
    """

    mean: Tensor
    left: Tensor
    right: Tensor

    def __call__(self, rows: Embeddings) -> Embeddings:
        """Map the features of some rows."""
        return rows._replace(features=self.apply(rows.features))

    def apply(self, features: Tensor) -> Tensor:
        """Map features, (N, F) -> (N, F) float32."""
        mean, left, right = (each.to(features.device) for each in self)
        parts = (part.double() for part in torch.split(features, 16384))
        return torch.cat([(x - (x - mean) @ right @ left.T).float() for x in parts])

    def then(self, whitening: Whitening) -> Whitening:
        """Make one map of this one and of a whitening fitted on features that it has mapped.

        Their mean is mapped to itself, as all that is mapped already, so one centre serves both.
        """
        left, right, projection = self.left, self.right, whitening.projection
        return Whitening(whitening.mean, projection - right @ (left.T @ projection))


def fit_erasure(train: Embeddings, columns: Mapping[str, ArrayLike]) -> Erasure:
    """Fit the smallest change of `train`, in mean squares, after which all values have one mean.

    No linear probe that is fitted on these rows, by any convex loss, then tells the values apart
    better than a constant does. A reader that is not linear may, and on other rows a little stays.
    `columns` has (N,) integers by name, negative where the row has no value; all are erased.

    Raises:
        DataError: A column has other than N numbers or fewer than two values, or nothing is left.

    Source:
        Belrose et al. 2023, arXiv:2306.03819, theorem 4.3: x - W^+ P W (x - mean), where W is the
        inverse root of the features' covariance, and P the projection onto the columns of W times
        the cross-covariance of features and values.
    """
    mean, variances, axes = principal_axes(train.features)
    kept = variances > NO_VARIANCE * variances.max()
    spread, axes = variances[kept].sqrt(), axes[:, kept]  # (K,), (F, K)

    # where the values' means lie, in units of the spread: lengths are correlations, 1 at most
    between = [_between(train.features - mean, name, codes) for name, codes in columns.items()]
    means = torch.cat(between) @ axes / spread  # (C, K)
    _, lengths, directions = torch.linalg.svd(means, full_matrices=False)
    directions = directions[lengths > NO_CORRELATION].T  # (K, R), orthonormal
    if directions.shape[1] == len(spread):
        named, total = ", ".join(columns), sum(map(len, between))
        raise DataError(
            f"{named}: {total} values to erase, and the features have {len(spread)} directions; "
            "nothing would be left: erase a column of fewer values"
        )
    spread = spread[:, None]
    return Erasure(mean, axes @ (spread * directions), axes @ (directions / spread))


def _between(centred: Tensor, name: str, codes: ArrayLike) -> Tensor:
    """Each value's mean, less that of all rows with a value, by the root of its share. (C, F)."""
    numbers = torch.as_tensor(np.asarray(codes), device=centred.device)
    if numbers.shape != centred.shape[:1]:
        raise DataError(
            f"column {name!r} has {tuple(numbers.shape)} numbers, and there are {len(centred)} rows"
        )
    known = numbers >= 0
    _, index, counts = torch.unique(numbers[known], return_inverse=True, return_counts=True)
    if len(counts) < 2:
        raise DataError(
            f"column {name!r} has {len(counts)} values in these rows; there is nothing to erase"
        )
    rows = centred[known].double()
    sums = rows.new_zeros(len(counts), rows.shape[1]).index_add_(0, index, rows)
    shares = counts[:, None] / len(rows)
    between: Tensor = (sums / counts[:, None] - rows.mean(0)) * shares.sqrt()
    return between


def erase(
    fit_on: Embeddings, *others: Embeddings, columns: Mapping[str, ArrayLike]
) -> list[Embeddings]:
    """Erase columns from `fit_on` and the others, all with what was learned on `fit_on` alone."""
    erasure = fit_erasure(fit_on, columns)
    return [erasure(rows) for rows in (fit_on, *others)]
