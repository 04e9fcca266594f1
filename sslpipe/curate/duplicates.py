"""Find the samples that are one picture: exact ones by hashes, near ones by their pixels.

Candidates are the nearest by low frequencies. Each pair is registered and scored once (see
`register`), and is one picture from a score of `LEAST_SCORE` on.
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from sslpipe.curate.candidates import NEIGHBOURS, ByDescriptors, each_once
from sslpipe.curate.groups import BYTES, CROPPED, MIRRORED, NEAR, PIXELS, Pairs, joined
from sslpipe.curate.register import Verdicts, compare
from sslpipe.curate.scan import Samples, one_thread_an_operation
from sslpipe.curate.thumbnails import THUMB_PX
from sslpipe.evaluation.features import Progress

Integers = NDArray[np.int64]
Flags = NDArray[np.bool_]

LEAST_SCORE = 0.85  # of a pair that is one picture; chosen by `benchmarks/curate.py`
PART_PAIRS = 128  # compared at a time, in a thread
CROWD = 0.4  # share of a sample's candidates that are copies, from which on more are searched
WIDENING, MOST_NEIGHBOURS = 4, 80  # more candidates at a time, and at most
APART = 0.93  # share of the whole that is explained of pictures that differ in one place only
ALIKE = 0.5  # share of the whole that is explained, from which on a refused pair is doubtful


class Doubt(NamedTuple):
    """Pairs to look at: those refused, the most similar as a whole first; then the accepted."""

    pairs: Integers  # (D, 2) rows
    score: NDArray[np.float32]  # (D,)
    accepted: Flags  # (D,), as one picture


class Found(NamedTuple):
    """All duplicates of some samples."""

    pairs: Pairs  # verified, each once
    apart: Integers  # (A, 2) rows of pictures that no common crop joins, see `groups.group`
    doubt: Doubt


def find_duplicates(
    samples: Samples, *, num_workers: int = 2, progress: Progress | None = None
) -> Found:
    """Find exact and near duplicates, inside and across splits.

    Args:
        samples: As scanned.
        num_workers: Threads that compare pixels; 0: the caller does.
        progress: Makes the progress bars of samples searched for and of pairs compared.
    """
    exact = exact_duplicates(samples)
    first = np.ones(len(samples), bool)
    first[exact.second] = False  # one of equal pixels is enough
    rows = np.flatnonzero(first)
    search = ByDescriptors(samples.descriptors, rows, num_workers=num_workers)
    bar: Progress = progress or (lambda title, total: nullcontext(lambda count: None))

    def near(rows: Integers, k: int) -> Integers:
        with bar("search", len(rows)) as advance:
            return search.pairs(rows, k, advance)

    def look_further(wanted: Integers) -> tuple[Integers, Verdicts]:
        """Add to the pairs and verdicts those of pairs that are not known yet."""
        known = set(map(tuple, pairs.tolist()))
        new = [pair for pair in wanted.tolist() if tuple(pair) not in known]
        if not new:
            return pairs, verdicts
        more = np.array(new, np.int64)
        with bar("compare", len(more)) as advance:
            found = compare_all(samples, more, num_workers=num_workers, progress=advance)
        return np.concatenate([pairs, more]), _concatenated([verdicts, found])

    # candidates; more of them for a sample whose candidates are mostly copies
    k = NEIGHBOURS
    pairs = np.zeros((0, 2), np.int64)
    verdicts = Verdicts(*np.zeros((2, 0), np.float32), *np.zeros((2, 0), bool))
    pairs, verdicts = look_further(near(rows, k))
    while k < min(MOST_NEIGHBOURS, len(rows) - 1):
        copies = np.bincount(pairs[accepted(verdicts)].ravel(), minlength=len(samples))
        crowded = np.flatnonzero(copies >= CROWD * k)
        if not len(crowded):
            break
        k *= WIDENING
        pairs, verdicts = look_further(near(crowded, k))
    # and each with the centre of what it is connected to
    pairs, verdicts = look_further(_to_centres(pairs[accepted(verdicts)], len(samples)))
    same = accepted(verdicts)
    kinds = NEAR + verdicts.mirrored * (MIRRORED - NEAR) + verdicts.cropped * (CROPPED - NEAR)
    found = Pairs(pairs[same, 0], pairs[same, 1], kinds[same], verdicts.score[same])
    # alike as a whole and different in one place: surely two pictures
    apart = ~same & (verdicts.whole >= APART) & (verdicts.score < LEAST_SCORE / 2)
    return Found(joined([exact, found]), pairs[apart & ~verdicts.cropped], _doubt(pairs, verdicts))


def exact_duplicates(samples: Samples) -> Pairs:
    """Pair the samples of equal bytes, and those of equal pixels, each with the first of them."""
    return joined([_paired(samples.bytes_sha256, BYTES), _paired(samples.pixels_sha256, PIXELS)])


def accepted(verdicts: Verdicts) -> Flags:
    """Say which pairs are one picture, (P,)."""
    same: Flags = verdicts.score >= LEAST_SCORE
    return same


def compare_all(
    samples: Samples,
    pairs: Integers,
    *,
    num_workers: int = 2,
    progress: Callable[[int], None] | None = None,
) -> Verdicts:
    """Compare any number of pairs, (P, 2) rows, by their pixels."""

    def look(part: Integers) -> Verdicts:
        thumbs = samples.thumbs.read(part.ravel()).reshape(len(part), 2, THUMB_PX, THUMB_PX, 3)
        verdicts = compare(thumbs, samples.descriptors[part], samples.sizes[part])
        if progress is not None:
            progress(len(part))
        return verdicts

    parts = [pairs[at : at + PART_PAIRS] for at in range(0, max(1, len(pairs)), PART_PAIRS)]
    with one_thread_an_operation(), ThreadPoolExecutor(max(1, num_workers)) as pool:
        return _concatenated(list((pool.map if num_workers else map)(look, parts)))


def _concatenated(parts: list[Verdicts]) -> Verdicts:
    return Verdicts(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _paired(hashes: NDArray[np.uint8], kind: int) -> Pairs:
    """Pair each row with the first one of an equal hash. hashes: (N, 32)."""
    whole = np.ascontiguousarray(hashes).view("V32").ravel()
    _, first, place = np.unique(whole, return_index=True, return_inverse=True)
    first = first[place]
    second = np.flatnonzero(first != np.arange(len(hashes)))
    how = np.full(len(second), kind, np.int64)
    return Pairs(first[second], second, how, np.ones(len(second), np.float32))


def _to_centres(found: Integers, rows: int) -> Integers:
    """Pair each row with the most connected one of its connected component, (P, 2)."""
    graph = coo_array((np.ones(len(found)), (found[:, 0], found[:, 1])), shape=(rows, rows))
    count, label = connected_components(graph, directed=False)
    degree = np.bincount(found.ravel(), minlength=rows)
    order = np.lexsort((np.arange(rows), -degree, label))
    centre = order[np.searchsorted(label[order], np.arange(count))]
    members = np.flatnonzero(degree)
    wanted = np.stack([members, centre[label[members]]], 1)
    return each_once([wanted[wanted[:, 0] != wanted[:, 1]]])


def _doubt(pairs: Integers, verdicts: Verdicts) -> Doubt:
    same = accepted(verdicts)
    order = np.lexsort((np.where(same, verdicts.score, -verdicts.whole), same))
    doubtful = np.where(same, verdicts.score < (1 + LEAST_SCORE) / 2, verdicts.whole >= ALIKE)
    order = order[doubtful[order]]
    return Doubt(pairs[order], verdicts.score[order], same[order])
