"""Random numbers as a pure function of integers: no generator, no state, nothing to save.

Each number is splitmix64's finaliser (Steele, Lea and Flood 2014, OOPSLA, fig. 19; constants of
variant 13) folded over the integers that name it. It depends on nothing else: not on the process,
the worker, the batch, the platform or a library's version.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


def _mix(x: NDArray[np.uint64]) -> NDArray[np.uint64]:
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


def hash_integers(words: Sequence[ArrayLike]) -> NDArray[np.uint64]:
    """Hash each tuple of integers to one uniform 64-bit word, uint64.

    words: integers or arrays of them, which broadcast. Order matters: (1, 2) and (2, 1) differ.
    """
    with np.errstate(over="ignore"):  # arithmetic modulo 2^64 is meant
        state = np.zeros((), np.uint64)
        for word in words:
            unsigned = np.asarray(word).astype(np.int64).astype(np.uint64)
            state = _mix((state ^ _mix(unsigned + _GOLDEN)) + _GOLDEN)
    return np.asarray(state)


def uniform(
    seed: int, epoch: int, ids: ArrayLike, view: int, lanes: int | NDArray[np.int64]
) -> NDArray[np.float64]:
    """Draw independent numbers in [0, 1) for one view of each sample.

    Args:
        seed: of the run.
        epoch: counts from 0.
        ids: (n,) integers, of the samples.
        view: 0 or 1.
        lanes: the lanes' numbers, or how many from 0 on.

    Returns:
        (n, lanes) float64, each a function of seed, epoch, its id, view and its lane's number.
    """
    rows = np.asarray(ids, dtype=np.int64)[:, None]
    numbers = np.arange(lanes) if isinstance(lanes, int) else lanes
    words = hash_integers((seed, epoch, rows, view, numbers[None, :]))  # (n, lanes)
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


def permutation(n: int, words: Sequence[int]) -> NDArray[np.int64]:
    """Permute range(n) as `words` say, by the order of hashes; return (n,) int64."""
    keys: Any = hash_integers((*words, np.arange(n)))
    return np.argsort(keys, kind="stable").astype(np.int64)
