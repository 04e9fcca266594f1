"""At which ranks a query finds what has its label: exact, chunked, for any number of matches."""

from collections.abc import Callable, Iterator
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.exact import (
    exact_similarities,
    fixed_point_units,
    float32_error,
    rank_keys,
)
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.rerank import k_reciprocal_order
from sslpipe.precision import full_float32

TILE_NUMBERS = 2**23  # similarities of a tile: 32 MiB of float32
COUNTED = 16  # up to so many matches, what precedes each is counted; beyond that the row is sorted

NEAR = 1e-6  # of the squared lengths: below it a squared distance is made of differences
PART_PAIRS = 4096  # of near rows at a time

Floats32 = NDArray[np.float32]
Integers = NDArray[np.int64]
Similarity = Literal["cosine", "dot", "euclidean"]
Compare = Callable[[Tensor], Tensor]  # queries -> (q, N) float32, larger is nearer


class Ranks(NamedTuple):
    """The ranks of some queries' matches: (q, most matches) ascending, 1 the nearest, then inf.

    `matches` (q,) counts the rows of the gallery with the query's label that it may see.
    """

    ranks: NDArray[np.float64]
    matches: Integers


def ranks_of_matches(
    gallery: Embeddings,
    queries: Embeddings,
    *,
    similarity: Similarity = "cosine",
    removed: Integers | None = None,
    unlike: GroupCodes | None = None,
    cross: GroupCodes | None = None,
    rerank: int = 0,
) -> Iterator[Ranks]:
    """Rank all matches by their similarity, a tile of queries at a time.

    Equal similarities (in float32) rank by the lower row of the gallery. `removed` (P, 2) are pairs
    of a query's id and a gallery id that it does not see. Nor does it see rows that have its own
    value of the column `unlike`, and those of its own label that have its own value of `cross`.
    The first `rerank` of what it sees are ordered by `k_reciprocal_order`; by the cosine only.
    """
    # the gallery sorted by label: a query's matches are neighbours there
    order = np.argsort(gallery.labels.cpu().numpy(), kind="stable")
    labels = gallery.labels.cpu().numpy()[order]
    features = gallery.features[torch.from_numpy(order).to(gallery.features.device)]
    wanted, query_ids = queries.labels.cpu().numpy(), queries.ids.tolist()
    first, last = (np.searchsorted(labels, wanted, side) for side in ("left", "right"))
    pairs = _removed_places(gallery.ids.cpu().numpy()[order], removed)
    columns = [(codes, codes.bank[order]) for codes in (unlike, cross) if codes is not None]

    def hidden(number: int, own: slice) -> Integers:
        """Places of the gallery that a query does not see, in no order; some perhaps twice."""
        places = [pairs.get(query_ids[number], np.zeros(0, np.int64))]
        for codes, bank in columns:
            if (code := codes.queries[number]) >= 0:  # a missing value excludes nothing
                side = slice(0, None) if codes is unlike else own
                places.append(side.start + np.flatnonzero(bank[side] == code))
        return places[0] if len(places) == 1 else np.concatenate(places)

    # exact products rank many matches; of few, the doubtful ones are looked at again
    most = int((last - first).max(initial=0))
    step = max(1, TILE_NUMBERS // len(features))
    few = similarity == "cosine" and most <= COUNTED and not rerank
    size = min(step, len(wanted))
    find = _by_counting(features, order) if few else _by_sorting(order)
    with full_float32():
        if few:
            table = cosines(features, size, torch.float32)
        else:
            table = SIMILARITIES[similarity](features, size)
        for start in range(0, len(wanted), step):
            part = queries.features[start : start + step]
            ranks = np.full((len(part), max(1, most)), np.inf)
            matches = np.zeros(len(part), np.int64)
            units = (fixed_point_units(part) if few else part).cpu().numpy()
            for at, (row, query) in enumerate(zip(table(part).cpu().numpy(), units, strict=True)):
                own = slice(first[start + at], last[start + at])
                if own.start == own.stop:
                    continue
                unseen = hidden(start + at, own)
                if rerank:
                    row[unseen] = -np.inf
                    _rerank(row, part[at], features, order, rerank)
                near = row[own].copy()
                row[unseen] = row[own] = -np.inf  # what is left is no match
                seen = np.ones(len(near), bool)
                seen[unseen[(unseen >= own.start) & (unseen < own.stop)] - own.start] = False
                positions = find(row, near[seen], query, own.start + np.flatnonzero(seen))
                ranks[at, : len(positions)], matches[at] = positions, len(positions)
            yield Ranks(ranks, matches)


def _rerank(row: Floats32, query: Tensor, bank: Tensor, order: Integers, count: int) -> None:
    """Replace the largest similarities of a row by larger ones, in the order of re-ranking."""
    count = min(count, int(np.isfinite(row).sum()))
    if count:
        keys = rank_keys(torch.from_numpy(row), torch.from_numpy(order))
        first = keys.topk(count).indices  # nearest first
        ranked = first.numpy()[k_reciprocal_order(query, bank[first.to(bank.device)])]
        row[ranked] = 1 + np.arange(count, 0, -1)  # a cosine is at most 1


def _removed_places(gallery_ids: Integers, removed: Integers | None) -> dict[int, Integers]:
    """Query id -> places of the gallery that it does not see."""
    pairs: dict[int, list[int]] = {}
    if removed is not None:
        places: dict[int, list[int]] = {}
        for place, number in enumerate(gallery_ids.tolist()):
            places.setdefault(number, []).append(place)
        for query, other in removed.tolist():
            pairs.setdefault(query, []).extend(places.get(other, ()))
    return {query: np.array(own, np.int64) for query, own in pairs.items()}


# (row, near, query, places) -> the ranks of the matches at `places`: `near` are their similarities,
# `row` those of all others, -inf where a row is hidden or a match
Find = Callable[[Floats32, Floats32, Floats32, Integers], NDArray[np.float64]]


def _by_counting(features: Tensor, order: Integers) -> Find:
    """Rank by float32 products, looking again where one is too near to call."""
    exactly = exact_similarities(fixed_point_units(features).cpu().numpy())
    # of a float32 product against the exact similarity, both ways
    margin = np.float32(float32_error(features.shape[1]) + 2.0**-23)

    def find(row: Floats32, near: Floats32, query: Floats32, places: Integers) -> Any:
        similarities = exactly(places, query)
        nearest_first = np.argsort(-similarities, kind="stable")  # within a label, rows ascend
        ranks = np.empty(len(places))
        for rank, match in enumerate(nearest_first):
            similarity = similarities[match]
            above = np.count_nonzero(row > similarity + margin)
            close = row >= similarity - margin
            if np.count_nonzero(close) > above:
                doubtful = np.flatnonzero(close & (row <= similarity + margin))
                exact = exactly(doubtful, query)
                before = order[doubtful] < order[places[match]]
                above += np.count_nonzero((exact > similarity) | ((exact == similarity) & before))
            ranks[rank] = 1 + rank + above
        return ranks

    return find


def _by_sorting(order: Integers) -> Find:
    """Rank by exact similarities, all of a query's sorted."""

    def keys(values: Floats32, rows: Integers) -> Integers:
        found: Integers = rank_keys(torch.from_numpy(values), torch.from_numpy(rows)).numpy()
        return np.sort(found)

    def find(row: Floats32, near: Floats32, query: Floats32, places: Integers) -> Any:
        relevant, rest = keys(near, order[places])[::-1], keys(row, order)
        above = len(rest) - np.searchsorted(rest, relevant)
        return np.asarray(1 + np.arange(len(relevant)) + above, np.float64)

    return find


# how near rows are, rounded to float32 from float64; what scales rows is a power of two, so that
# numbers of any size are compared without a change of digits


def cosines(gallery: Tensor, most: int, dtype: torch.dtype = torch.float64) -> Compare:
    """Compare rows (N, F) by the cosine, in fixed point: exact in float64, see `exact`.

    `most` are the queries of a call, at most; so of the others.
    """
    bank = fixed_point_units(gallery).to(dtype)
    buffer = bank.new_empty(most, len(bank))  # used again: fresh memory is slow

    def compare(queries: Tensor) -> Tensor:
        units = fixed_point_units(queries).to(dtype)
        return torch.mm(units, bank.T, out=buffer[: len(units)]).float()

    return compare


def dot_products(gallery: Tensor, most: int) -> Compare:
    """Compare by the dot product; each side is scaled, which ranks nothing."""
    bank = gallery.double() * _power_of_two(gallery.abs().max())
    buffer = bank.new_empty(most, len(bank))

    def compare(queries: Tensor) -> Tensor:
        wide = queries.double() * _power_of_two(queries.abs().amax(1, keepdim=True))
        return torch.mm(wide, bank.T, out=buffer[: len(wide)]).float()

    return compare


def negative_distances(gallery: Tensor, most: int) -> Compare:
    """Compare by the Euclidean distance, less than 0; both sides are taken from one centre."""
    scale = _power_of_two(gallery.abs().max())
    wide = gallery.double() * scale
    center = wide.mean(0)  # distances know no origin, rounding does
    bank = wide - center
    lengths = bank.square().sum(1)
    buffer = bank.new_empty(most, len(bank))

    def compare(queries: Tensor) -> Tensor:
        rows = queries.double() * scale - center
        sums = lengths + rows.square().sum(1, keepdim=True)
        squared = torch.addmm(sums, rows, bank.T, alpha=-2, out=buffer[: len(rows)])  # (q, N)
        # where they nearly vanish, products have lost digits: equal rows have distance 0
        near = (squared < NEAR * sums).nonzero()  # (pairs, 2)
        for a, b in (part.T for part in torch.split(near, PART_PAIRS)):
            squared[a, b] = (rows[a] - bank[b]).square().sum(1)
        return squared.sqrt_().div_(-scale).float()

    return compare


def _power_of_two(largest: Tensor) -> Tensor:
    """Bring a largest number to 1/2..1; 1 for 0."""
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float64), -torch.frexp(largest)[1])


SIMILARITIES: dict[str, Callable[[Tensor, int], Compare]] = {
    "cosine": cosines,
    "dot": dot_products,
    "euclidean": negative_distances,
}
