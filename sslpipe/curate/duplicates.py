"""Which samples are one picture: exact duplicates by hashes."""

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.groups import KINDS, Pairs, joined
from sslpipe.curate.scan import Samples


def exact_duplicates(samples: Samples) -> Pairs:
    """Pair the samples of equal bytes, and those of equal pixels, each with the first of them."""
    return joined(
        [
            _paired(hashes, kind)
            for kind, hashes in enumerate((samples.bytes_sha256, samples.pixels_sha256))
        ]
    )


def _paired(hashes: NDArray[np.uint8], kind: int) -> Pairs:
    """Pair each row with the first one of an equal hash. hashes: (N, 32)."""
    whole = np.ascontiguousarray(hashes).view("V32").ravel()
    _, first, place = np.unique(whole, return_index=True, return_inverse=True)
    first = first[place.ravel()]
    second = np.flatnonzero(first != np.arange(len(hashes)))
    how = np.full(len(second), kind, np.int64)
    assert 0 <= kind < len(KINDS)
    return Pairs(first[second], second, how, np.ones(len(second), np.float32))
