"""Nearest neighbours over several processes, each of which searches a part of the bank."""

import torch
from torch import Tensor

from sslpipe.distributed import Rank, all_gather_rows
from sslpipe.evaluation.exact import Neighbours, best
from sslpipe.evaluation.neighbours import CROWDED, SMALL_BANK, Search, check_k, nearest


def nearest_shared(
    bank: Tensor,
    queries: Tensor,
    k: int,
    *,
    search: Search = "torch",
    bank_ids: Tensor | None = None,
    query_ids: Tensor | None = None,
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> Neighbours:
    """Find what `nearest` finds in one process, bit for bit, on every process. Collective.

    Each process moves its share of the bank's rows to where the queries are and searches it; the
    shares' nearest rows are merged by their exact similarities.

    The arguments are those of `nearest`, the same on all processes. Only the queries' device need
    have room for a share; the bank may be on any.
    """
    device = queries.device
    if bank_ids is not None and query_ids is not None:
        large = _large_groups(bank_ids, query_ids)
        if large:
            return _group_by_group(
                bank, queries, k, large, bank_ids, query_ids, search=search, process=process
            )
    if process.world_size == 1:
        ids = None if bank_ids is None else bank_ids.to(device)
        return nearest(
            bank.to(device), queries, k, search=search, bank_ids=ids, query_ids=query_ids
        )
    own_rows = check_k(len(bank), k, bank_ids, query_ids)
    # this share's nearest, a query's own rows among them; short lists end with what none may find
    share = process.share(len(bank))
    local = bank[share.start : share.stop].to(device)
    width = min(k + own_rows, -(-len(bank) // process.world_size))
    indices = torch.zeros(len(queries), width, dtype=torch.int64, device=device)
    similarities = torch.full((len(queries), width), -torch.inf, device=device)
    found = min(width, len(local))
    if found:
        near = nearest(local, queries, found, search=search)
        indices[:, :found], similarities[:, :found] = near.indices + share.start, near.similarities
    # the shares' lists side by side
    lists = (
        all_gather_rows(part).view(process.world_size, len(queries), width).transpose(0, 1)
        for part in (indices, similarities)
    )
    rows, values = (each.flatten(1) for each in lists)  # (Q, world_size * width)
    if bank_ids is not None and query_ids is not None:
        own = bank_ids.to(device)[rows] == query_ids[:, None]
        values = values.masked_fill(own, -torch.inf)
    return best(values, rows, k)


def _large_groups(bank_ids: Tensor, query_ids: Tensor) -> list[int]:
    """List the ids that so many rows of the bank share that finding them first would be slow."""
    if len(bank_ids) <= SMALL_BANK:
        return []
    known, times = torch.unique(bank_ids, return_counts=True)
    large = known[times > CROWDED * len(bank_ids)]
    numbers: list[int] = large[torch.isin(large, query_ids.to(large.device))].tolist()
    return numbers


def _group_by_group(
    bank: Tensor,
    queries: Tensor,
    k: int,
    large: list[int],
    bank_ids: Tensor,
    query_ids: Tensor,
    *,
    search: Search,
    process: Rank,
) -> Neighbours:
    """Search for the queries of each large group in a bank without its rows; then the others."""
    indices = torch.empty(len(queries), k, dtype=torch.int64, device=queries.device)
    similarities = torch.empty(len(queries), k, device=queries.device)
    rest = torch.ones_like(query_ids, dtype=torch.bool)
    for number in large:
        own = query_ids == number
        rows = (bank_ids != number).nonzero()[:, 0]
        found = nearest_shared(
            bank[rows.to(bank.device)], queries[own], k, search=search, process=process
        )
        indices[own] = rows.to(indices.device)[found.indices]  # in the bank's order: so are ties
        similarities[own] = found.similarities
        rest &= ~own
    if bool(rest.any()):
        indices[rest], similarities[rest] = nearest_shared(
            bank,
            queries[rest],
            k,
            search=search,
            bank_ids=bank_ids,
            query_ids=query_ids[rest],
            process=process,
        )
    return Neighbours(indices, similarities)
