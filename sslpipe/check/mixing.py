"""How well an order mixes classes, or groups, inside its batches."""

import numpy as np
from numpy.typing import NDArray

from sslpipe.random import permutation

WELL_MIXED = 0.98  # mixing score below which there is a warning
_UNIFORM = 0x5F  # names the draw of a uniform shuffle


def mixing_score(batches: list[NDArray[np.int64]], pool: NDArray[np.int64]) -> float | None:
    """Divide the mean label entropy of batches by that of as many uniform shuffles'.

    Returns 1 for batches (B,) as mixed as a uniform shuffle of the pool (N,), 0 where each has one
    class; None where a label is missing (-1), or the pool has one class.
    """
    if (pool < 0).any() or (pool == pool[0]).all():
        return None
    rows = len(batches[0])
    uniform: list[NDArray[np.int64]] = []
    while len(uniform) < len(batches):
        shuffled = pool[permutation(len(pool), (_UNIFORM, len(uniform)))]
        uniform += list(shuffled[: len(pool) // rows * rows].reshape(-1, rows))
    return _mean_entropy(batches) / _mean_entropy(uniform[: len(batches)])


def _mean_entropy(batches: list[NDArray[np.int64]]) -> float:
    """In nats."""
    shares = [np.unique(labels, return_counts=True)[1] / len(labels) for labels in batches]
    return float(np.mean([-(each * np.log(each)).sum() for each in shares]))
