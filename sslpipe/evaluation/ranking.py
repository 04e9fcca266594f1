"""At which ranks a query finds what has its label: exact, chunked, for any number of matches."""

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.groups import GroupCodes
from sslpipe.evaluation.neighbours import exact_cosines, fixed_point_units, float32_error, rank_keys
from sslpipe.evaluation.rerank import k_reciprocal_order
from sslpipe.precision import full_float32

TILE_NUMBERS = 2**23  # similarities of a tile: 32 MiB of float32
SORTED_NUMBERS = 2**20  # of a tile whose rows are sorted, with float64 products and integer keys
_NONE = torch.iinfo(torch.int64).min  # a key behind all others
COUNTED = 16  # up to so many matches, what precedes each is counted; beyond that the row is sorted


class Ranks(NamedTuple):
    """The ranks of some queries' matches: (q, most matches) ascending, 1 the nearest, then inf.

    `matches` (q,) counts the rows of the gallery with the query's label that it may see.
    """

    ranks: NDArray[np.float64]
    matches: NDArray[np.int64]


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
    ids, labels, wanted = gallery.ids.cpu(), gallery.labels.cpu(), queries.labels.cpu()
    known, counts = torch.unique(labels, return_counts=True)
    most = max([1, *counts[torch.isin(known, wanted)].tolist()])
    columns = [
        (codes is cross, torch.from_numpy(codes.bank), torch.from_numpy(codes.queries))
        for codes in (unlike, cross)
        if codes is not None
    ]
    # exact products rank many matches; of few, the doubtful ones are looked at again
    few = most <= COUNTED and not rerank
    step = max(1, (TILE_NUMBERS if few else SORTED_NUMBERS) // len(ids))
    units = fixed_point_units(gallery.features)
    bank = units if few else units.double()
    buffer = bank.new_empty(min(step, len(wanted)), len(bank))  # used again: fresh memory is slow
    for start in range(0, len(wanted), step):
        part = slice(start, start + step)
        asked = fixed_point_units(queries.features[part])
        with full_float32():
            product = torch.mm(asked.to(bank.dtype), bank.T, out=buffer[: len(asked)])
        similarities = product.float().cpu()
        # what a query sees, and what of it has its label
        same = labels == wanted[part, None]  # (q, N)
        hidden = torch.zeros_like(same) if itself else ids == queries.ids.cpu()[part, None]
        for of_own_label, codes, own in columns:
            own = own[part, None]  # a missing value excludes nothing
            excluded = (codes == own) & (own >= 0)
            hidden |= excluded & same if of_own_label else excluded
        similarities.masked_fill_(hidden, -torch.inf)
        if rerank:
            for at in same.any(1).nonzero()[:, 0].tolist():
                query = queries.features[start + at]
                _rerank(similarities[at], query, gallery.features, rerank)
        matches = same & ~hidden
        if few:
            similarities.masked_fill_(same, -torch.inf)  # what is left is no match
            ranks = _by_counting(similarities, matches, most, units.cpu(), asked.cpu())
        else:
            ranks = _by_sorting(similarities, matches, most)
        yield Ranks(ranks.numpy(), matches.sum(1).numpy())


def _rerank(row: Tensor, query: Tensor, bank: Tensor, count: int) -> None:
    """Replace the largest similarities of a row by larger ones, in the order of re-ranking."""
    if count := min(count, int(row.isfinite().sum())):
        first = rank_keys(row, torch.arange(len(row))).topk(count).indices  # nearest first
        ranked = first[torch.from_numpy(k_reciprocal_order(query, bank[first.to(bank.device)]))]
        row[ranked] = 1 + torch.arange(count, 0, -1.0)  # a cosine is at most 1


def _by_counting(
    others: Tensor, matches: Tensor, most: int, bank: Tensor, queries: Tensor
) -> Tensor:
    """Rank by float32 products with all that is no match, exactly where one is too near to call."""
    # of a float32 product against the exact similarity, both ways
    margin = float32_error(bank.shape[1]) + 2.0**-23
    asked, rows = matches.nonzero(as_tuple=True)
    there = torch.arange(most) < matches.sum(1, keepdim=True)
    exact = exact_cosines(bank, rows, queries, asked)
    keys, similarities = torch.full(there.shape, _NONE), torch.zeros(there.shape)
    keys[there], similarities[there] = rank_keys(exact, rows), exact
    keys, order = keys.sort(1, descending=True)
    similarities = similarities.gather(1, order)
    ranks = torch.full(there.shape, torch.inf, dtype=torch.float64)
    for number in range(most):
        some = there[:, number].nonzero()[:, 0]
        row, similarity, key = others[some], similarities[some, number, None], keys[some, number]
        near, above = row >= similarity - margin, (row > similarity + margin).sum(1)
        doubtful = (near.sum(1) > above).nonzero()[:, 0]
        close = near[doubtful] & (row[doubtful] <= similarity[doubtful] + margin)
        which, place = close.nonzero(as_tuple=True)
        which = doubtful[which]
        before = rank_keys(exact_cosines(bank, place, queries, some[which]), place) > key[which]
        above.index_add_(0, which, before.long())
        ranks[some, number] = (1 + number + above).double()
    return ranks


def _by_sorting(similarities: Tensor, matches: Tensor, most: int) -> Tensor:
    """Rank by exact similarities (q, N), those of all queries sorted; -inf is behind all others."""
    keys = rank_keys(similarities, torch.arange(similarities.shape[1]))
    every = torch.from_numpy(np.sort(keys.numpy(), axis=1))  # several times as fast as torch's
    there = torch.arange(most) < matches.sum(1, keepdim=True)
    own = torch.full(there.shape, _NONE)
    own[there] = keys[matches]
    ranks = (keys.shape[1] - torch.searchsorted(every, own)).double()
    return ranks.masked_fill_(~there, torch.inf).sort(1).values
