"""Re-ranking and mixing look at the whole gallery: add an image, and others' answers may change."""

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.errors import DataError
from sslpipe.evaluation.neighbours import PART_ROWS, fixed_point_units, nearest

MOST_RERANKED = 1000  # a query takes some tables of so many rows and columns: 8 MB each
ALPHA = 3.0  # power of the cosines that weigh neighbours
# the paper's for its data sets: neighbours that must be mutual, rows whose neighbourhoods are
# averaged (itself among them), share of the cosine distance beside the Jaccard distance
K1, K2, WEIGHT = 20, 6, 0.3
DIGITS = 12  # of a distance, so that rounding orders nothing


def check_reranked(rerank: int) -> None:
    """Raise DataError where a number of rows to re-rank is out of range; 0: none."""
    if rerank < 0 or rerank == 1 or rerank > MOST_RERANKED:
        raise DataError(f"rerank = {rerank} is not 0, for none, or in 2..{MOST_RERANKED}")


def k_reciprocal_order(query: Tensor, rows: Tensor) -> NDArray[np.int64]:
    """Order rows by k-reciprocal re-ranking, all in float64.

    Neighbours are looked up among the query and these rows alone, as if there were no others.

    Args:
        query: (F,), any scale.
        rows: (K, F), the nearest to the query first; of equal distances the first stays first.

    Returns:
        (K,) places in `rows`, nearest first.

    Source:
        Zhong, Zheng, Cao and Li 2017, "Re-ranking Person Re-identification with k-reciprocal
        Encoding", CVPR, arXiv:1701.08398, equations 2 to 5, 7, 10 to 12; neighbourhoods sum to 1,
        as in the authors' program.
    """
    units = fixed_point_units(torch.cat([query[None], rows])).double().cpu().numpy()  # (K + 1, F)
    distances = np.round(1 - units @ units.T, DIGITS)  # cosine
    # a row is its own first neighbour, whatever its copies are
    ranked = distances.copy()
    np.fill_diagonal(ranked, -1)
    order = np.argsort(ranked, axis=1, kind="stable")
    places = np.empty_like(order)
    np.put_along_axis(places, order, np.arange(len(units))[None], axis=1)
    # mutual neighbours, and those of candidates that share two thirds of theirs
    mutual, half = (
        (places <= k) & (places <= k).T for k in (K1, round(K1 / 2))
    )  # each with the row itself
    shared = mutual.astype(np.float64) @ half.T
    taken = mutual & (3 * shared >= 2 * half.sum(axis=1))
    expanded = mutual | (taken.astype(np.float64) @ half > 0)
    # weights of the neighbourhoods, averaged over the nearest rows
    weights = np.where(expanded, np.exp(-distances), 0)
    weights /= weights.sum(axis=1, keepdims=True)
    first = order[:, :K2]
    own = weights[first[0]].mean(axis=0)  # of the query
    smaller = np.array([np.minimum(own, weights[each].mean(axis=0)).sum() for each in first[1:]])
    jaccard = 1 - smaller / (2 - smaller)  # the larger ones sum to 2 less the smaller ones
    final = np.round((1 - WEIGHT) * jaccard + WEIGHT * distances[0, 1:], DIGITS)
    return np.argsort(final, kind="stable")


def augmented(features: Tensor, count: int) -> Tensor:
    """Replace each row by the sum of its nearest ones, weighted by cosine to the power ALPHA.

    Database-side augmentation; every row is compared with every other one.

    Args:
        features: (N, F), any scale.
        count: Rows of a sum, in 1..N; the first is the row itself, or a copy of it.

    Returns:
        (N, F) float32 of length 1; zeros stay zeros.

    Source:
        Arandjelovic and Zisserman 2012, "Three things everyone should know to improve object
        retrieval", CVPR, section 5; the weights: Radenovic et al. 2018, arXiv:1711.02512.
    """
    if not 1 <= count <= len(features):
        raise DataError(f"augment = {count} is not in 1..{len(features)}, the rows there are")
    units = fixed_point_units(features)
    near = nearest(units, units, count, units=True)
    weights = near.similarities.double().clamp_min(0) ** ALPHA  # (N, count)
    made = torch.empty_like(units)
    for start in range(0, len(units), PART_ROWS):
        part = slice(start, start + PART_ROWS)
        total = torch.zeros_like(units[part], dtype=torch.float64)
        for rank in range(count):
            total += weights[part, rank, None] * units[near.indices[part, rank]].double()
        made[part] = fixed_point_units(total)
    return made
