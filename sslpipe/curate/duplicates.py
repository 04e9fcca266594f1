"""Find the samples that are one picture: saved again, resized, mirrored, or cropped to 90 %.

Copies of equal pixels are found by their hash. For others, the nearest by 8 x 8 px of brightness
are the candidates, and `compare` scores each pair once: one picture from LEAST_SCORE on.
"""

from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch.nn.functional import avg_pool2d, normalize

from sslpipe.arguments import Advance, Progress, silent
from sslpipe.curate.grouping import Pairs, joined
from sslpipe.curate.image_scan import Samples
from sslpipe.curate.thumbnails import pictures, whole, whole_and_crops
from sslpipe.evaluation.neighbours import fixed_point_units, nearest

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]

LEAST_SCORE = 0.85  # of a pair that is one picture; chosen by `benchmarks/curate.py`
LEAST_DOUBTFUL = 0.5  # score of a refused pair that is worth a look
NEIGHBOURS = 5  # candidates of each picture, at most
LEAST_SIMILAR = 0.9  # correlation of a candidate at SEARCH_PX
# sides
SEARCH_PX = 8
COMPARE_PX = 16
SEARCHED = (0, 1, 5, 13, 21, 25)  # of `whole_and_crops`: the whole, crops at corners, the centre
WINDOW_PX = 4  # of COMPARE_PX
NOISE = 0.15  # share of a picture's variance that a window has at least
FAINT = 3.0  # deviation, in levels, below which a picture is nearly constant
ASPECT = 0.05  # most that the logarithms of two shapes differ
PART_PAIRS = 256  # compared at a time
PART_PICTURES = 4096  # resampled at a time


class Doubt(NamedTuple):
    """Pairs near LEAST_SCORE: those accepted, the lowest score first; then the refused."""

    pairs: Integers  # (D, 2) rows
    score: Floats  # (D,)
    accepted: NDArray[np.bool_]  # (D,), as one picture


class Found(NamedTuple):
    """All duplicates of some samples."""

    pairs: Pairs  # verified, each once
    doubt: Doubt


def find_duplicates(samples: Samples, *, progress: Progress = silent) -> Found:
    """Find exact and near duplicates, inside and across splits.

    Args:
        samples: As scanned.
        progress: Makes the progress bars of samples searched for and of pairs compared.
    """
    exact = exact_duplicates(samples)
    distinct = np.ones(len(samples), bool)
    distinct[exact.second] = False  # one of equal pixels is enough
    with progress("search", int(distinct.sum())) as advance:
        pairs = candidates(samples, np.flatnonzero(distinct), advance)
    with progress("compare", len(pairs)) as advance:
        score = compare(samples, pairs, advance)
    # each also with the centre of what it is connected to: copies have more than NEIGHBOURS
    known = set(map(tuple, pairs.tolist()))
    wanted = _to_centres(pairs[score >= LEAST_SCORE], len(samples)).tolist()
    more = np.array([each for each in wanted if tuple(each) not in known], np.int64).reshape(-1, 2)
    with progress("compare", len(more)) as advance:
        score = np.concatenate([score, compare(samples, more, advance)])
    pairs = np.concatenate([pairs, more])
    same = score >= LEAST_SCORE
    not_equal = np.zeros(int(same.sum()), bool)
    near = Pairs(pairs[same, 0], pairs[same, 1], not_equal, score[same])
    return Found(joined([exact, near]), _doubt(pairs, score))


def exact_duplicates(samples: Samples) -> Pairs:
    """Pair each sample with the first one of equal pixels."""
    hashes = np.ascontiguousarray(samples.pixels_sha256).view("V32").ravel()
    _, first, place = np.unique(hashes, return_index=True, return_inverse=True)
    first = first[place]
    second = np.flatnonzero(first != np.arange(len(hashes)))
    return Pairs(
        first[second], second, np.ones(len(second), bool), np.ones(len(second), np.float32)
    )


def candidates(samples: Samples, rows: Integers, advance: Advance = lambda count: None) -> Integers:
    """Pair each row with the NEIGHBOURS that are most like it, or like a crop or mirror image.

    Returns:
        (P, 2) int64 rows of samples, each pair once, the lower row first, in order.
    """
    if len(rows) < 2:
        return np.zeros((0, 2), np.int64)
    parts = []
    for start in range(0, len(rows), PART_PICTURES):
        luma = pictures(samples.thumbs[rows[start : start + PART_PICTURES]]).mean(1, keepdim=True)
        parts.append(whole_and_crops(luma, SEARCH_PX)[:, SEARCHED, 0])
    views = torch.cat(parts)  # (n, 6, px, px)
    views = torch.cat([views, views.flip(3)], 1)  # and their mirror images
    numbers = torch.arange(len(rows))
    k = min(NEIGHBOURS, len(rows) - 1)
    wholes = _search_rows(views[:, 0])
    lists = []
    for number in range(views.shape[1]):
        asked = _search_rows(views[:, number])
        lists.append(nearest(wholes, asked, k, units=True, hidden=(numbers, numbers)))
        done = len(rows) * (number + 1) // views.shape[1]
        advance(done - len(rows) * number // views.shape[1])
    similarities = torch.cat([each.similarities for each in lists], 1).numpy()
    neighbours = torch.cat([each.indices for each in lists], 1).numpy()
    order = np.argsort(-similarities, axis=1, kind="stable")
    pairs = set()
    for row in range(len(rows)):
        alike = order[row][similarities[row, order[row]] >= LEAST_SIMILAR]
        for other in list(dict.fromkeys(neighbours[row, alike].tolist()))[:k]:
            pairs.add((min(row, other), max(row, other)))
    return rows[np.array(sorted(pairs), np.int64).reshape(-1, 2)]


def compare(samples: Samples, pairs: Integers, advance: Advance = lambda count: None) -> Floats:
    """Score any number of pairs, (P, 2) rows -> (P,): 1 for one picture; 0 if shapes differ.

    The whole of one picture is laid over the whole and each crop of the other, mirrored or not, and
    where they correlate best, the score is 1 minus the unexplained share of the worst window: mean
    squared difference / (the window's variance + 15 % of the picture's). Two drawings that differ
    in a mouth or a digit differ completely in one window.
    """
    scores = [np.zeros(0, np.float32)]
    for start in range(0, len(pairs), PART_PAIRS):
        part = pairs[start : start + PART_PAIRS]
        one, other = (pictures(samples.thumbs[side]) for side in part.T)
        score = torch.maximum(_score(one, other), _score(other, one)).numpy()
        scores.append(np.where(_same_shape(samples.sizes[part]), score, 0).astype(np.float32))
        advance(len(part))
    return np.concatenate(scores)


def _score(cropped: Tensor, target: Tensor) -> Tensor:
    """Score the best of all views of `cropped` as `target`. (P, 3, 32, 32) each -> (P,)."""
    views = whole_and_crops(cropped, COMPARE_PX)  # (P, V, 3, px, px)
    wanted = whole(target, COMPARE_PX)
    every = torch.arange(len(wanted))

    def score(shown: Tensor) -> Tensor:
        alike = torch.einsum("pvd,pd->pv", _units(views.flatten(2)), _units(shown.flatten(1)))
        return _worst_window(views[every, alike.argmax(1)], shown)

    return torch.maximum(score(wanted), score(wanted.flip(3)))


def _worst_window(shown: Tensor, wanted: Tensor) -> Tensor:
    """1 minus the largest unexplained share of all windows. (P, 3, px, px) each -> (P,)."""
    error = _window_means((shown - wanted).square().sum(1, keepdim=True))
    centred = wanted - wanted.mean((2, 3), keepdim=True)
    variance = centred.square().sum(1).mean((1, 2))[:, None, None, None]
    variances = _window_means(centred.square().sum(1, keepdim=True))
    variances = variances - _window_means(centred).square().sum(1, keepdim=True)
    worst = (error / (variances + NOISE * variance + 1)).amax((1, 2, 3))
    return torch.where(variance.flatten() >= FAINT**2, 1 - worst, 0).clamp_min(0)


def _window_means(grid: Tensor) -> Tensor:
    return avg_pool2d(grid, WINDOW_PX, stride=1)


def _units(rows: Tensor) -> Tensor:
    """Rows of which products are correlations; zeros stay zeros."""
    return normalize(rows - rows.mean(-1, keepdim=True), dim=-1)


def _search_rows(views: Tensor) -> Tensor:
    """(n, px, px) -> (n, px px), as `nearest` compares them."""
    return fixed_point_units(_units(views.flatten(1)))


def _same_shape(sizes: Integers) -> NDArray[np.bool_]:
    """Return whether two pictures have one shape but for rounding. (P, 2, 2) px -> (P,)."""
    shapes = np.log(sizes[:, :, 1] / sizes[:, :, 0])
    apart = np.abs(shapes[:, 0] - shapes[:, 1])
    same: NDArray[np.bool_] = apart <= ASPECT + 1.5 / sizes.min((1, 2))
    return same


def _to_centres(matches: Integers, rows: int) -> Integers:
    """Pair each row with the most connected one of its connected component, (P, 2)."""
    graph = coo_array((np.ones(len(matches)), (matches[:, 0], matches[:, 1])), shape=(rows, rows))
    count, label = connected_components(graph, directed=False)
    degree = np.bincount(matches.ravel(), minlength=rows)
    order = np.lexsort((np.arange(rows), -degree, label))
    centre = order[np.searchsorted(label[order], np.arange(count))]
    members = np.flatnonzero(degree)
    wanted = np.sort(np.stack([members, centre[label[members]]], 1), axis=1)
    pairs: Integers = np.unique(wanted[wanted[:, 0] != wanted[:, 1]], axis=0)
    return pairs


def _doubt(pairs: Integers, score: Floats) -> Doubt:
    same = score >= LEAST_SCORE
    order = np.lexsort((np.where(same, score, -score), ~same))
    doubtful = np.where(same, score < (1 + LEAST_SCORE) / 2, score >= LEAST_DOUBTFUL)
    order = order[doubtful[order]]
    return Doubt(pairs[order], score[order], same[order])
