"""Which samples are one picture: exact ones by hashes, others by candidates and their pixels.

A pair is one picture where what its registered pixels leave unexplained (1 - score, see `verify`)
is below a limit, and is little beside what is left to the next candidate that is another picture:
among trousers that are all alike a small rest says less than among photographs (the ratio test of
Lowe 2004, IJCV 60, of lists in which several may be the same).
"""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from sslpipe.curate.candidates import (
    NEIGHBOURS,
    ByDescriptors,
    ByFeatures,
    Search,
    each_once,
)
from sslpipe.curate.groups import (
    BYTES,
    CROPPED,
    MIRRORED,
    NEAR,
    OVERLAID,
    PIXELS,
    Pairs,
    joined,
)
from sslpipe.curate.losses import compare_with_losses
from sslpipe.curate.scan import Pictures, Samples
from sslpipe.curate.threads import one_thread_an_operation
from sslpipe.curate.thumbnails import GRID_PX
from sslpipe.curate.verify import Verdicts, compare
from sslpipe.evaluation.features import Progress

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]

PART_PAIRS = 256  # compared by their pixels at a time, in a thread
CROWD = 0.4  # of a sample's candidates, that are surely copies and hide others
DOUBTFUL = (0.93, 0.997)  # scores with which pairs are compared once more, with losses in both
# and the least where one has fewer pixels than the grid, and than the other: it lost so much
DOUBTFUL_SMALL = 0.6
WIDENING, MOST_NEIGHBOURS = 4, 80  # more candidates at a time, and at most


class Limits(NamedTuple):
    """Which pairs are one picture; chosen by `benchmarks/curate.py`.

    Args:
        rest: Share of the variance that may be unexplained.
        overlay_rest: The same outside of a window that a small text may hide.
        contrast: Of the rest to that of the next candidate, of either sample, that is another
            picture, at most.
        safe: A rest that is small enough by itself; half of it beside a window.
    """

    rest: float = 0.0125
    overlay_rest: float = 0.004
    contrast: float = 0.5
    safe: float = 0.003


class Doubt(NamedTuple):
    """The pairs that were compared and are near to the limit, most doubtful first.

    Args:
        pairs: (D, 2) int64 rows.
        score: (D,) float32.
        accepted: (D,) whether they count as one picture.
        distance: (D,) float32, how far the rest is from its limit, as a factor's logarithm.
    """

    pairs: Integers
    score: Floats
    accepted: NDArray[np.bool_]
    distance: Floats


class Found(NamedTuple):
    """All duplicates of some samples.

    Args:
        pairs: Verified, each once.
        doubt: For people to look at.
    """

    pairs: Pairs
    doubt: Doubt


def find_duplicates(
    samples: Samples,
    features: torch.Tensor | None = None,
    *,
    limits: Limits = Limits(),  # noqa: B008 (immutable)
    num_workers: int = 2,
    progress: Progress | None = None,
) -> Found:
    """Find exact and near duplicates, inside and across splits.

    Args:
        samples: As scanned.
        features: (N, F) float32 of a backbone, by which candidates are searched, too, overwritten
            meanwhile (see `ByFeatures.of`); None: by descriptors alone, which need no training.
        limits: What counts as one picture.
        num_workers: Threads that compare pixels; 0: the caller does.
        progress: Makes the progress bars of samples searched for and of pairs compared.
    """
    exact = exact_duplicates(samples)
    first = np.ones(len(samples), bool)
    first[exact.second] = False  # of equal pixels one is enough
    rows = np.flatnonzero(first)
    # a network may not know a mirrored or recoloured picture again, if it was not trained to
    searches: list[Search] = [ByDescriptors.of(samples.pictures, first, num_workers=num_workers)]
    if features is not None:
        searches.append(ByFeatures.of(features, rows))

    def bar(title: str, total: int) -> AbstractContextManager[Callable[[int], None] | None]:
        return nullcontext() if progress is None else progress(title, total)

    def near(rows: Integers, k: int) -> Integers:
        found = []
        for search in searches:
            with bar("search", len(rows)) as advance:
                found.append(search.pairs(rows, k, advance))
        return each_once(found)

    def look(pairs: Integers) -> Verdicts:
        with bar("compare", len(pairs)) as advance:
            return compare_all(samples, pairs, num_workers=num_workers, progress=advance)

    # candidates; more of them where all may be the same picture, until one is certainly another
    k, pairs = NEIGHBOURS, near(rows, NEIGHBOURS)
    verdicts = look(pairs)
    waiting = _crowded_rows(pairs, verdicts, len(samples), limits, k)
    while waiting.any() and k < min(MOST_NEIGHBOURS, len(rows) - 1):
        k *= WIDENING
        more = _unknown(near(np.flatnonzero(waiting), k), pairs)
        pairs, verdicts = np.concatenate([pairs, more]), _concatenated([verdicts, look(more)])
        waiting &= _crowded_rows(pairs, verdicts, len(samples), limits, k)
    others = others_rests(pairs, verdicts, len(samples), limits, k)
    same = accepted_pairs(pairs, verdicts, others, limits)
    # pairs that the search did not name, to the centres of what hangs together
    more = _unknown(_to_centres(pairs[same], len(samples)), pairs)
    if len(more):
        pairs, verdicts = np.concatenate([pairs, more]), _concatenated([verdicts, look(more)])
        same = accepted_pairs(pairs, verdicts, others, limits)
    found = Pairs(
        pairs[same, 0], pairs[same, 1], _kinds(verdicts, same, limits), verdicts.best()[same]
    )
    return Found(joined([exact, found]), _doubt(pairs, verdicts, others, limits))


def exact_duplicates(samples: Samples) -> Pairs:
    """Pair the samples of equal bytes, and those of equal pixels, each with the first of them."""
    return joined([_paired(samples.bytes_sha256, BYTES), _paired(samples.pixels_sha256, PIXELS)])


def compare_all(
    samples: Samples,
    pairs: Integers,
    *,
    num_workers: int = 2,
    progress: Callable[[int], None] | None = None,
) -> Verdicts:
    """Compare any number of pairs by their pixels: of a framed sample, its inside, too."""

    def look(part: Integers) -> Verdicts:
        verdicts = _compare_pictures(part, samples.pictures)
        if progress is not None:
            progress(len(part))
        return verdicts

    parts = [pairs[at : at + PART_PAIRS] for at in range(0, max(1, len(pairs)), PART_PAIRS)]
    with one_thread_an_operation():
        if num_workers:
            with ThreadPoolExecutor(num_workers, "sslpipe-compare") as pool:
                looked = list(pool.map(look, parts))
        else:
            looked = [look(part) for part in parts]
    return _concatenated(looked)


def _compare_pictures(pairs: Integers, pictures: Pictures) -> Verdicts:
    """Compare pairs of samples by each of their pictures; the best counts.

    Where that leaves a doubt, they are compared once more with the losses of either in both.
    """
    first, counts = pictures.of(pairs)  # (P, 2) each
    verdicts = compare(first, pictures)
    for inside in ((0, 1), (1, 0), (1, 1)):
        rows = np.flatnonzero((counts > inside).all(1))
        if len(rows):
            found = compare(first[rows] + np.array(inside), pictures)
            found.cropped[:] |= sum(inside) == 1
            verdicts.take(found, rows)
    best, sizes = verdicts.best(), pictures.sizes[first]
    smaller = (sizes[:, 0] != sizes[:, 1]).any(1) & (sizes.max(2).min(1) < GRID_PX)
    rows = np.flatnonzero(
        (best >= np.where(smaller, DOUBTFUL_SMALL, DOUBTFUL[0])) & (best < DOUBTFUL[1])
    )
    mirrored = verdicts.mirrored.copy()
    if len(rows):
        found = compare_with_losses(first[rows], mirrored[rows], pictures)
        verdicts.take(found, rows)
    # what has lost most of its pixels may be more like its mirror image
    rows = rows[smaller[rows] & (verdicts.best()[rows] < DOUBTFUL[1])]
    if len(rows):
        found = compare_with_losses(first[rows], ~mirrored[rows], pictures)
        verdicts.take(found, rows)
    return verdicts


def _concatenated(parts: list[Verdicts]) -> Verdicts:
    return Verdicts(*(np.concatenate(column) for column in zip(*parts, strict=True)))


def _paired(hashes: NDArray[np.uint8], kind: int) -> Pairs:
    """Pair each row with the first one of an equal hash. hashes: (N, 32)."""
    whole = np.ascontiguousarray(hashes).view("V32").ravel()
    _, first, place = np.unique(whole, return_index=True, return_inverse=True)
    first = first[place.ravel()]
    second = np.flatnonzero(first != np.arange(len(hashes)))
    how = np.full(len(second), kind, np.int64)
    return Pairs(first[second], second, how, np.ones(len(second), np.float32))


def _rests(verdicts: Verdicts) -> Floats:
    """What is unexplained, of all and outside the window, (2, P)."""
    rests: Floats = 1 - np.stack([verdicts.score, verdicts.outside])
    return rests


def _sure(verdicts: Verdicts, limits: Limits) -> NDArray[np.bool_]:
    """Say which pairs are one picture whatever others are like, (P,)."""
    whole, outside = _rests(verdicts)
    sure: NDArray[np.bool_] = (whole <= limits.safe) | (outside <= limits.safe / 2)
    return sure


def _crowded_rows(
    pairs: Integers, verdicts: Verdicts, rows: int, limits: Limits, k: int
) -> NDArray[np.bool_]:
    """Say of which rows every candidate may be the same picture, or many surely are, (N,).

    Args:
        pairs: (P, 2) candidates.
        verdicts: Of them.
        rows: How many samples there are.
        limits: Which may be, and which are.
        k: Candidates that were searched for each row.
    """
    most = np.array([[limits.rest], [limits.overlay_rest]])
    rests = _rests(verdicts)
    crowded = np.zeros(rows, bool)
    crowded[pairs] = True
    crowded[pairs[(rests > most).all(0)]] = False
    # copies take the places of what should be looked at, and of what tells how far others are
    sure = pairs[_sure(verdicts, limits)]
    many: NDArray[np.bool_] = np.bincount(sure.ravel(), minlength=rows) >= CROWD * k
    return crowded | many


def others_rests(pairs: Integers, verdicts: Verdicts, rows: int, limits: Limits, k: int) -> Floats:
    """The least rest of each row's candidates that are other pictures, (2, N).

    Sorted by their rests, those before a gap may be the same picture, and the one behind it is
    another; of several gaps the last counts. 0 for a row without a gap. Of candidates that surely
    are one picture, each has the least of their rests, if the row has no sure copy itself: what
    was saved badly is a little farther from a copy of its source than from its source.

    Args:
        pairs: (P, 2) candidates.
        verdicts: Of them.
        rows: How many samples there are.
        limits: A gap is where `contrast` of the next rest is not less than this one.
        k: Candidates of a row; behind the last of fewer comes 1, for there are no others.
    """
    ends = np.concatenate([pairs[:, 0], pairs[:, 1]])
    starts = np.append(np.searchsorted(np.sort(ends), np.arange(rows)), len(ends))
    few = np.diff(starts) < k
    found = np.zeros((2, rows), np.float32)
    sure = pairs[_sure(verdicts, limits)]
    picture, lone = _components(sure, rows)[1], np.ones(rows, bool)
    lone[sure] = False
    of_one = np.concatenate([pairs[:, 1], pairs[:, 0]])
    of_one = np.where(lone[ends], picture[of_one] + rows, of_one)
    kinds, kind = np.unique(2 * ends * rows + of_one, return_inverse=True)
    for rest, most, of_row in zip(
        _rests(verdicts), (limits.rest, limits.overlay_rest), found, strict=True
    ):
        least = np.ones(len(kinds), np.float32)
        np.minimum.at(least, kind, np.tile(rest, 2))
        both = least[kind]
        order = np.lexsort((both, ends))
        row, sorted_rests = ends[order], both[order]
        behind, last = np.ones_like(sorted_rests), np.ones(len(row), bool)
        behind[:-1], last[:-1] = sorted_rests[1:], row[1:] != row[:-1]
        behind[last] = np.where(few[row[last]], 1, sorted_rests[last])
        gap = (sorted_rests <= limits.contrast * behind) & (sorted_rests <= most)
        np.maximum.at(of_row, row[gap], behind[gap])
    return found


def _limits(pairs: Integers, others: Floats, limits: Limits) -> Floats:
    """The largest rest with which each pair is one picture, (2, P)."""
    beside = limits.contrast * np.minimum(others[:, pairs[:, 0]], others[:, pairs[:, 1]])
    most = np.array([[limits.rest], [limits.overlay_rest]])
    safe = np.array([[limits.safe], [limits.safe / 2]])
    allowed: Floats = np.minimum(np.maximum(beside, safe), most).astype(np.float32)
    return allowed


def accepted_pairs(
    pairs: Integers, verdicts: Verdicts, others: Floats, limits: Limits
) -> NDArray[np.bool_]:
    """Say which pairs are one picture, (P,); others: see `others_rests`."""
    whole, outside = _rests(verdicts) <= _limits(pairs, others, limits)
    accepted: NDArray[np.bool_] = whole | outside
    return accepted


def _kinds(verdicts: Verdicts, rows: NDArray[np.bool_], limits: Limits) -> Integers:
    """What relates each of some pairs, of KINDS."""
    kinds = np.where(verdicts.mirrored[rows], MIRRORED, NEAR)
    kinds += verdicts.cropped[rows] * (CROPPED - NEAR)
    overlaid = 1 - verdicts.score[rows] > limits.rest
    return np.where(overlaid, OVERLAID, kinds).astype(np.int64)


def _components(pairs: Integers, rows: int) -> tuple[int, Integers]:
    """Count what hangs together by pairs, and number it, (N,)."""
    graph = coo_array((np.ones(len(pairs)), (pairs[:, 0], pairs[:, 1])), shape=(rows, rows))
    count, label = connected_components(graph, directed=False)
    return int(count), label.astype(np.int64)


def _to_centres(found: Integers, rows: int) -> Integers:
    """Pair each row with the most connected one that it hangs together with by pairs, (P, 2)."""
    count, label = _components(found, rows)
    degree = np.bincount(found.ravel(), minlength=rows)
    order = np.lexsort((np.arange(rows), -degree, label))
    centre = np.empty(count, np.int64)
    heads = np.unique(label[order], return_index=True)[1]
    centre[label[order][heads]] = order[heads]
    members = np.flatnonzero(degree)
    wanted = np.stack([members, centre[label[members]]], 1)
    return each_once([wanted[wanted[:, 0] != wanted[:, 1]]])


def _unknown(wanted: Integers, known: Integers) -> Integers:
    """Return the pairs that are not known yet, (P, 2), both with the lower row first."""
    have = set(map(tuple, known.tolist()))
    new = [pair for pair in wanted.tolist() if tuple(pair) not in have]
    return np.array(new, np.int64).reshape(-1, 2)


def _doubt(pairs: Integers, verdicts: Verdicts, others: Floats, limits: Limits) -> Doubt:
    """Sort the pairs by how near they are to their limit."""
    ratio = np.log(np.maximum(_rests(verdicts), 1e-6) / _limits(pairs, others, limits)).min(0)
    order = np.argsort(np.abs(ratio), kind="stable")
    distance = ratio[order].astype(np.float32)
    return Doubt(pairs[order], verdicts.best()[order], distance <= 0, distance)
