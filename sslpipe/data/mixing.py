"""How well a plan mixes the classes: its batches' label entropy against a uniform shuffle's."""

import numpy as np
from numpy.typing import NDArray

from sslpipe.random import permutation

WELL_MIXED = 0.98  # below it, `sslpipe check` warns
_UNIFORM = 0x5F  # names the uniform shuffle's draw


def mixing_score(batches: list[NDArray[np.int64]], pool: NDArray[np.int64]) -> float | None:
    """Divide the batches' mean label entropy by that of as many uniform draws.

    Args:
        batches: Labels of each, (B,) int64, all of one length.
        pool: (N,) labels of all that can be drawn, N >= B; drawn without replacement.

    Returns:
        1: as mixed as a uniform shuffle; 0: each batch has one class. None where a label is missing
        (-1), or the pool has one class.
    """
    if (pool < 0).any() or (pool == pool[0]).all():
        return None
    rows = len(batches[0])
    uniform: list[NDArray[np.int64]] = []
    while len(uniform) < len(batches):
        shuffled = pool[permutation(len(pool), _UNIFORM, len(uniform))]
        uniform += list(shuffled[: len(pool) // rows * rows].reshape(-1, rows))
    return _mean_entropy(batches) / _mean_entropy(uniform[: len(batches)])


def _mean_entropy(batches: list[NDArray[np.int64]]) -> float:
    """In nats."""
    values = []
    for labels in batches:
        shares = np.bincount(labels) / len(labels)
        shares = shares[shares > 0]
        values.append(-(shares * np.log(shares)).sum())
    return float(np.mean(values))
