"""At which ranks a query finds what has its label: exact, chunked, for any number of matches."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.exact import (
    PART_ROWS,
    fixed_point_units,
    float32_error,
    rank_keys,
)
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.rerank import k_reciprocal_order
from sslpipe.precision import full_float32

TILE_NUMBERS = 2**23  # similarities of a tile: 32 MiB of float32
SORTED_NUMBERS = 2**21  # of a tile whose rows are sorted, with float64 products and integer keys
COUNTED = 16  # up to so many matches, what precedes each is counted; beyond that the row is sorted

Floats32 = NDArray[np.float32]
Integers = NDArray[np.int64]


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
    itself: bool = True,
    unlike: GroupCodes | None = None,
    cross: GroupCodes | None = None,
    rerank: int = 0,
) -> Iterator[Ranks]:
    """Rank all matches by their cosine, a tile of queries at a time.

    Equal cosines (in float32) rank by the lower row of the gallery. Unless `itself`, a query does
    not see the row of its own id. Nor does it see rows that have its own value of the column
    `unlike`, and those of its own label that have its own value of `cross`.
    The first `rerank` of what it sees are ordered by `k_reciprocal_order`.
    """
    # the gallery sorted by label: a query's matches are neighbours there
    order = np.argsort(gallery.labels.cpu().numpy(), kind="stable")
    labels = gallery.labels.cpu().numpy()[order]
    features = gallery.features[torch.from_numpy(order).to(gallery.features.device)]
    ids, query_ids = gallery.ids.cpu().numpy()[order], queries.ids.tolist()
    wanted = queries.labels.cpu().numpy()
    first, last = (np.searchsorted(labels, wanted, side) for side in ("left", "right"))
    columns = [(codes, codes.bank[order]) for codes in (unlike, cross) if codes is not None]

    def hidden(number: int, own: slice) -> Integers:
        """Places of the gallery that a query does not see, in no order; some perhaps twice."""
        places = [np.flatnonzero(ids == query_ids[number])[: 0 if itself else None]]
        for codes, bank in columns:
            if (code := codes.queries[number]) >= 0:  # a missing value excludes nothing
                side = slice(0, None) if codes is unlike else own
                places.append(side.start + np.flatnonzero(bank[side] == code))
        return places[0] if len(places) == 1 else np.concatenate(places)

    # exact products rank many matches; of few, the doubtful ones are looked at again
    most = int((last - first).max(initial=0))
    few = most <= COUNTED and not rerank
    step = max(1, (TILE_NUMBERS if few else SORTED_NUMBERS) // len(features))
    find = _by_counting(features, order) if few else None
    with full_float32():
        table = _cosines(features, min(step, len(wanted)), torch.float32 if few else torch.float64)
        for start in range(0, len(wanted), step):
            part = queries.features[start : start + step]
            ranks = np.full((len(part), max(1, most)), np.inf)
            matches = np.zeros(len(part), np.int64)
            similarities = table(part).cpu().numpy()
            seen: dict[int, Integers] = {}  # number of a query -> places of its matches
            for at, row in enumerate(similarities):
                own = slice(first[start + at], last[start + at])
                if own.start == own.stop:
                    continue
                unseen = hidden(start + at, own)
                row[unseen] = -np.inf
                if rerank:
                    _rerank(row, part[at], features, order, rerank)
                shown = np.ones(own.stop - own.start, bool)
                shown[unseen[(unseen >= own.start) & (unseen < own.stop)] - own.start] = False
                seen[at] = own.start + np.flatnonzero(shown)
                if find is not None:
                    row[own] = -np.inf  # what is left is no match
            if find is not None:
                units = fixed_point_units(part).cpu().numpy()
                found: Iterable[tuple[int, NDArray[np.float64]]] = (
                    (at, find(similarities[at], units[at], own)) for at, own in seen.items()
                )
            else:
                found = _by_sorting(similarities, order, seen)
            for at, positions in found:
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


# (row, query, places) -> the ranks of the matches at `places`; `row` are the similarities of all
# others, -inf where one is hidden
Find = Callable[[Floats32, Floats32, Integers], NDArray[np.float64]]


def _by_counting(features: Tensor, order: Integers) -> Find:
    """Rank by float32 products, looking again where one is too near to call."""
    units = fixed_point_units(features).cpu().numpy()
    # of a float32 product against the exact similarity, both ways
    margin = np.float32(float32_error(features.shape[1]) + 2.0**-23)

    def exactly(rows: Integers, query: Floats32) -> Floats32:
        parts = np.split(rows, range(PART_ROWS, len(rows), PART_ROWS))
        wide = [units[part].astype(np.float64) @ query.astype(np.float64) for part in parts]
        return np.concatenate(wide).astype(np.float32)

    def find(row: Floats32, query: Floats32, places: Integers) -> NDArray[np.float64]:
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


def _by_sorting(
    similarities: Floats32, order: Integers, seen: Mapping[int, Integers]
) -> Iterator[tuple[int, NDArray[np.float64]]]:
    """Rank by exact similarities (q, N), those of all queries sorted; -inf is behind all others."""
    keys: Integers = rank_keys(torch.from_numpy(similarities), torch.from_numpy(order)).numpy()
    every = np.sort(keys, axis=1)
    for at, places in seen.items():
        relevant = np.sort(keys[at, places])[::-1]
        yield at, (keys.shape[1] - np.searchsorted(every[at], relevant)).astype(np.float64)


def _cosines(gallery: Tensor, most: int, dtype: torch.dtype) -> Callable[[Tensor], Tensor]:
    """Compare rows (N, F) by the cosine, in fixed point: exact in float64, see `exact`.

    `most` are the queries of a call, at most.
    """
    bank = fixed_point_units(gallery).to(dtype)
    buffer = bank.new_empty(most, len(bank))  # used again: fresh memory is slow

    def compare(queries: Tensor) -> Tensor:
        units = fixed_point_units(queries).to(dtype)
        return torch.mm(units, bank.T, out=buffer[: len(units)]).float()

    return compare
