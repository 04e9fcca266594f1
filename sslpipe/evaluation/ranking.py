"""At which ranks a query finds what has its label: exact, chunked, for any number of matches."""

from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple

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
from sslpipe.precision import full_float32

TILE_NUMBERS = 2**23  # similarities of a tile: 32 MiB of float32
COUNTED = 16  # up to so many matches, what precedes each is counted; beyond that the row is sorted

NEAR = 1e-6  # of the squared lengths: below it a squared distance is made of differences
PART_PAIRS = 4096  # of near rows at a time

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
) -> Iterator[Ranks]:
    """Rank all matches by their similarity, a tile of queries at a time.

    Equal similarities (in float32) rank by the lower row of the gallery.

    Args:
        gallery: Labelled rows.
        queries: Labelled rows.
        similarity: "cosine", "dot" (product) or "euclidean" (distance, the least first).
        removed: (P, 2) pairs of a query's id and a gallery id that it does not see at all.
        unlike: A query does not see the rows that have its own value of this column.
        cross: A query does not see those of its own label that have its own value of this column.
    """
    # the gallery sorted by label: a query's matches are neighbours there
    order = np.argsort(gallery.labels.cpu().numpy(), kind="stable")
    labels = gallery.labels.cpu().numpy()[order]
    features = gallery.features[torch.from_numpy(order).to(gallery.features.device)]
    wanted = queries.labels.cpu().numpy()
    first = np.searchsorted(labels, wanted, "left")
    last = np.searchsorted(labels, wanted, "right")
    pairs = _hidden(gallery.ids.cpu().numpy()[order], queries.ids.cpu().numpy(), removed)
    sides = _Sides(order, first, last, pairs, unlike, cross)

    # exact products rank many matches; of few, the doubtful ones are looked at again
    most = int((last - first).max(initial=0))
    by_counting = similarity == "cosine" and most <= COUNTED
    compare = SIMILARITIES[similarity] if not by_counting else sides.rough_cosines
    find = sides.counted if by_counting else sides.sorted
    step = max(1, TILE_NUMBERS // len(features))
    with full_float32():
        table = compare(features, min(step, len(wanted)))
        for start in range(0, len(wanted), step):
            part = queries.features[start : start + step]
            ranks = np.full((len(part), max(1, most)), np.inf)
            matches = np.zeros(len(part), np.int64)
            units = fixed_point_units(part).cpu().numpy() if by_counting else part.cpu().numpy()
            for at, (row, query) in enumerate(zip(table(part).cpu().numpy(), units, strict=True)):
                if first[start + at] < last[start + at]:
                    positions = find(row, query, start + at)
                    ranks[at, : len(positions)], matches[at] = positions, len(positions)
            yield Ranks(ranks, matches)


class _Sides:
    """The gallery in order of labels, and of each query what it looks for and what is hidden."""

    def __init__(
        self,
        order: Integers,
        first: Integers,
        last: Integers,
        pairs: dict[int, Integers],
        unlike: GroupCodes | None = None,
        cross: GroupCodes | None = None,
    ) -> None:
        self.order, self.first, self.last, self.pairs = order, first, last, pairs
        self.unlike = None if unlike is None else _PlacesByCode(unlike, order)
        self.cross = None if cross is None else (cross.bank[order], cross.queries)
        self.none = np.zeros(0, np.int64)

    def hidden(self, number: int) -> Integers:
        """Places of the gallery that a query does not see, in no order; some perhaps twice."""
        parts = [self.pairs[number]] if number in self.pairs else []
        if self.unlike is not None:
            parts.append(self.unlike(number))
        if self.cross is not None and self.cross[1][number] >= 0:
            first, last = self.first[number], self.last[number]
            own = self.cross[0][first:last] == self.cross[1][number]
            parts.append(first + np.flatnonzero(own))
        return parts[0] if len(parts) == 1 else np.concatenate([self.none, *parts])

    def rough_cosines(self, features: Tensor, most: int) -> Compare:
        """Compare by float32 products, for `counted`."""
        self.exactly = exact_similarities(fixed_point_units(features).cpu().numpy())
        # of a float32 product against the exact similarity, both ways
        self.margin = np.float32(float32_error(features.shape[1]) + 2.0**-23)
        return cosines(features, most, torch.float32)

    def matches(self, number: int) -> Integers:
        """Places of the matches of a query that it may see."""
        first, last = self.first[number], self.last[number]
        hidden = self.hidden(number)
        if not len(hidden):
            return np.arange(first, last)
        seen = np.ones(last - first, bool)
        seen[hidden[(hidden >= first) & (hidden < last)] - first] = False
        places: Integers = first + np.flatnonzero(seen)
        return places

    def counted(
        self, row: NDArray[np.float32], query: NDArray[np.float32], number: int
    ) -> NDArray[np.float64]:
        """Ranks from float32 products, looking again where one is too near to call."""
        matches = self.matches(number)
        similarities = self.exactly(matches, query)
        row[self.hidden(number)] = -np.inf
        row[self.first[number] : self.last[number]] = -np.inf  # what is left is no match
        nearest_first = np.argsort(-similarities, kind="stable")  # within a label, rows ascend
        ranks = np.empty(len(matches))
        for place, match in enumerate(nearest_first):
            similarity = similarities[match]
            above = np.count_nonzero(row > similarity + self.margin)
            near = row >= similarity - self.margin
            if np.count_nonzero(near) > above:
                close = np.flatnonzero(near & (row <= similarity + self.margin))
                exact = self.exactly(close, query)
                before = self.order[close] < self.order[matches[match]]
                above += np.count_nonzero((exact > similarity) | ((exact == similarity) & before))
            ranks[place] = 1 + place + above
        return ranks

    def sorted(
        self, row: NDArray[np.float32], query: NDArray[np.float32], number: int
    ) -> NDArray[np.float64]:
        """Ranks from exact similarities, all of a query's sorted."""
        keys = rank_keys(torch.from_numpy(row)[None], torch.from_numpy(self.order)).numpy()[0]
        matches = self.matches(number)
        others = np.ones(len(row), bool)
        others[self.first[number] : self.last[number]] = False
        others[self.hidden(number)] = False
        relevant = np.sort(keys[matches])[::-1]
        rest = np.sort(keys[others])
        above: Integers = len(rest) - np.searchsorted(rest, relevant)
        return np.asarray(1 + np.arange(len(relevant)) + above, np.float64)


class _PlacesByCode:
    """Places of the gallery (in the order of its labels) that share a query's code."""

    def __init__(self, codes: GroupCodes, order: Integers) -> None:
        bank = codes.bank[order]
        self.places = np.argsort(bank, kind="stable")
        starts = np.searchsorted(bank[self.places], np.arange(len(codes.values) + 1))
        self.starts, self.queries = starts, codes.queries

    def __call__(self, number: int) -> Integers:
        code = self.queries[number]
        if code < 0:  # a missing value excludes nothing
            return self.places[:0]
        return self.places[self.starts[code] : self.starts[code + 1]]


def _hidden(
    gallery_ids: Integers, query_ids: Integers, removed: Integers | None
) -> dict[int, Integers]:
    """Query number -> places of the gallery that it does not see."""
    if removed is None or len(removed) == 0:
        return {}
    by_query = removed[np.argsort(removed[:, 0], kind="stable")]
    by_id = np.argsort(gallery_ids, kind="stable")
    ids = gallery_ids[by_id]
    begin = np.searchsorted(by_query[:, 0], query_ids, "left")
    end = np.searchsorted(by_query[:, 0], query_ids, "right")
    low = np.searchsorted(ids, by_query[:, 1], "left")
    high = np.searchsorted(ids, by_query[:, 1], "right")
    hidden = {}
    for number in np.flatnonzero(begin < end).tolist():
        pairs = range(begin[number], end[number])
        places = [by_id[low[p] : high[p]] for p in pairs if low[p] < high[p]]
        if places:
            hidden[number] = places[0] if len(places) == 1 else np.concatenate(places)
    return hidden


# how near rows are, rounded to float32 from float64; what scales rows is a power of two, so that
# numbers of any size are compared without a change of digits


def cosines(gallery: Tensor, most: int, dtype: torch.dtype = torch.float64) -> Compare:
    """Compare by the cosine, of rows in fixed point: exact in float64, see `exact`.

    Args:
        gallery: (N, F) float32; so of the others.
        most: Queries of a call, at most; so of the others.
        dtype: Of the products.
    """
    bank = fixed_point_units(gallery).to(dtype)
    buffer = bank.new_empty(most, len(bank))  # used again: fresh memory is slow

    def compare(queries: Tensor) -> Tensor:
        units = fixed_point_units(queries).to(dtype)
        return torch.mm(units, bank.T, out=buffer[: len(units)]).float()

    return compare


def dot_products(gallery: Tensor, most: int) -> Compare:
    """Compare by the dot product; the gallery and each query are scaled, which ranks nothing."""
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
