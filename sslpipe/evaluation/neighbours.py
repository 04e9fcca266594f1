"""Exact nearest neighbours by cosine, with ties in a fixed order, wherever they are searched.

Float32 products, of torch or faiss, whose error is bounded, propose rows; the similarities of these
are then computed exactly (`exact`), so that the neighbours do not depend on who proposes, on tile,
device or number of processes.
`exact.among_all`, which compares everything, is the oracle.
"""

from collections.abc import Callable
from typing import Any, Literal

import torch
from torch import Tensor

from sslpipe.distributed import Rank, all_gather_rows
from sslpipe.errors import DataError
from sslpipe.evaluation.exact import (
    Neighbours,
    among_all,
    best,
    fixed_point_units,
    float32_error,
)
from sslpipe.evaluation.result import check_known
from sslpipe.precision import full_float32

Search = Literal["torch", "faiss"]

CPU_NUMBERS = 2**23  # similarities of a tile on the CPU: 32 MiB
MOST_NUMBERS = 2**28  # on a GPU: 1 GiB
RANKED_NUMBERS = 2**17  # components of proposed rows at a time; 128 times as many on a GPU
PART_BYTES = 2**27  # of a bank on the CPU that is searched at a time: its unit rows are a copy
FAISS_MOST = 2048  # neighbours that faiss finds on a GPU
SPARE = 32  # rows proposed beyond k: most queries are then proved complete
# rows of a bank for each one proposed, up to which it costs less to compare all of them exactly
WHOLE = 32


def nearest(
    bank: Tensor,
    queries: Tensor,
    k: int,
    *,
    search: Search = "torch",
    bank_ids: Tensor | None = None,
    query_ids: Tensor | None = None,
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> Neighbours:
    """Find the k nearest rows of the bank for each query, the same bit for bit on all. Collective.

    Each process moves its share of the bank to where the queries are and searches it, on the CPU
    part by part; what the parts name as nearest is merged by exact similarities.

    Args:
        bank: (N, F) float32, any scale, on any device.
        queries: (Q, F) float32, any scale.
        k: At least 1; more than a query may find is a DataError.
        search: "torch" or "faiss"; both find the same neighbours.
        bank_ids: (N,) int64; with query_ids, a query never finds a row of its own id.
        query_ids: (Q,) int64.
        process: This process; the other arguments are the same on all.
    """
    check_known("search", search, ("faiss", "torch"))
    check_k(len(bank), k, bank_ids, query_ids)
    device, units, share = queries.device, fixed_point_units(queries), process.share(len(bank))
    found = None
    if len(share):  # else this process has no row
        own = slice(share.start, share.stop)
        ids = None if bank_ids is None else bank_ids[own], query_ids
        found = _by_parts(bank[own], units, k, *ids, search=search)
        found = found._replace(indices=found.indices + share.start)
    if process.world_size == 1:
        assert found is not None  # a bank of k rows or more
        return found
    # lists of one length: a short one ends with what none may find
    indices = torch.zeros(1, len(queries), k, dtype=torch.int64, device=device)
    similarities = torch.full((1, len(queries), k), -torch.inf, device=device)
    if found is not None:
        indices[0, :, : found.indices.shape[1]] = found.indices
        similarities[0, :, : found.indices.shape[1]] = found.similarities
    shares = all_gather_rows(indices), all_gather_rows(similarities)  # (processes, Q, k) each
    return _merged([Neighbours(*each) for each in zip(*shares, strict=True)], k)


def nearest_units(
    bank: Tensor,
    queries: Tensor,
    k: int,
    *,
    bank_ids: Tensor | None = None,
    query_ids: Tensor | None = None,
) -> Neighbours:
    """Do as `nearest` with rows as `exact.fixed_point_units` returns them; nothing is copied.

    Both are on one device, and queries may be the bank itself.
    """
    check_k(len(bank), k, bank_ids, query_ids)
    return _by_parts(bank, queries, k, bank_ids, query_ids, as_units=True)


def _by_parts(
    bank: Tensor,
    queries: Tensor,
    k: int,
    bank_ids: Tensor | None,
    query_ids: Tensor | None,
    *,
    search: Search = "torch",
    as_units: bool = False,
) -> Neighbours:
    """Search a bank where the queries are: on the CPU part by part, for many queries at a time.

    Only queries are units, unless `as_units`; with fewer than k columns where the bank has fewer.
    """
    device, propose = queries.device, _by_faiss if search == "faiss" else _by_torch
    rows = len(bank) if device.type == "cuda" else max(1, PART_BYTES // bank[:1].nbytes)
    found: Neighbours | None = None
    for start in range(0, len(bank), rows):
        part = slice(start, start + rows)
        units = bank[part] if as_units else fixed_point_units(bank[part].to(device))
        ids = None if bank_ids is None else bank_ids[part].to(device), query_ids
        near = _search(units, queries, k, *ids, propose)
        near = near._replace(indices=near.indices + start)
        found = near if found is None else _merged([found, near], k)
    assert found is not None  # the bank has a row
    return found


def check_k(rows: int, k: int, bank_ids: Tensor | None, query_ids: Tensor | None) -> None:
    """Raise DataError where k is more than some query may find."""
    own_rows = 0
    if bank_ids is not None and query_ids is not None:
        known, times = torch.unique(bank_ids, return_counts=True)
        shared = times[torch.isin(known, query_ids.to(known.device))]
        own_rows = int(shared.max()) if len(shared) else 0
    usable = rows - own_rows
    if not 1 <= k <= usable:
        raise DataError(f"k = {k} does not fit a bank of {usable} rows; use 1 <= k <= {usable}")


def _search(
    bank: Tensor,
    queries: Tensor,
    k: int,
    bank_ids: Tensor | None,
    query_ids: Tensor | None,
    propose: "Propose",
) -> Neighbours:
    """Rank what products propose; a query of which a nearer row may lack meets the whole bank.

    Of rows in fixed point; with k columns or one for each row of the bank. Where a query may find
    fewer, similarities are -inf. The host waits for a GPU once, however many the tiles.
    """
    margin = float32_error(bank.shape[1]) + 2.0**-23  # of a float32 product, both ways
    width, k = min(len(bank), k + SPARE), min(k, len(bank))
    if propose is _by_torch and bank.device.type == "cpu" and len(bank) <= WHOLE * width:
        return among_all(bank, queries, k, bank_ids, query_ids)
    parts, doubts = [], []
    tile = max(1, tile_numbers(bank.device) // len(bank))
    with full_float32():
        for part in torch.split(torch.arange(len(queries), device=queries.device), tile):
            some = queries[part]
            own = None
            if bank_ids is not None and query_ids is not None:
                own = bank_ids == query_ids[part, None]  # (q, N)
            products, rows = propose(bank, some, width, own)
            exact = exactly(bank, some, rows).masked_fill_(products == -torch.inf, -torch.inf)
            exact.nan_to_num_(torch.inf, torch.inf, -torch.inf)  # of damaged rows: seen, not last
            parts.append(best(exact, rows, k))
            # else no row that was not proposed is as near as the last of those found
            last = products[:, -1]
            doubts.append((parts[-1].similarities[:, -1] <= last + margin) & (last > -torch.inf))
    indices, similarities = (torch.cat(columns) for columns in zip(*parts, strict=True))
    if width < len(bank):
        doubtful = torch.cat(doubts).nonzero()[:, 0]  # the host waits here
        if len(doubtful):
            ids = None if query_ids is None else query_ids[doubtful]
            again = among_all(bank, queries[doubtful], k, bank_ids, ids)
            indices[doubtful], similarities[doubtful] = again
    return Neighbours(indices, similarities)


# (bank (N, F), queries (q, F), how many, who finds none of which rows (q, N)) -> products (q, n)
# float32, falling, and their rows of the bank (q, n); no other row's product is larger
Propose = Callable[[Tensor, Tensor, int, Tensor | None], tuple[Tensor, Tensor]]


def _by_torch(
    bank: Tensor, queries: Tensor, width: int, own: Tensor | None
) -> tuple[Tensor, Tensor]:
    products = torch.mm(queries, bank.T)  # (q, N)
    if own is not None:
        products.masked_fill_(own, -torch.inf)
    largest, rows = products.topk(width, dim=1)
    return largest, rows


def _by_faiss(
    bank: Tensor, queries: Tensor, width: int, own: Tensor | None
) -> tuple[Tensor, Tensor]:
    try:
        import faiss
    except ImportError as error:
        raise DataError(
            'search = "faiss" needs faiss (pip install faiss-gpu or faiss-cpu); '
            'search = "torch" gives the same neighbours without it'
        ) from error
    most = width if own is None else min(len(bank), width + int(own.sum(1).max()))
    inner: dict[str, Any] = {"metric": faiss.METRIC_INNER_PRODUCT}
    if bank.is_cuda:
        import faiss.contrib.torch_utils  # takes tensors where they lie

        if not hasattr(faiss, "StandardGpuResources") or most > FAISS_MOST:
            raise DataError(
                f'search = "faiss" on a GPU needs faiss-gpu and finds at most {FAISS_MOST} '
                f'neighbours, of {most} needed; search = "torch" gives the same neighbours'
            )
        inner["device"] = bank.device.index or 0
        products, rows = faiss.knn_gpu(faiss.StandardGpuResources(), queries, bank, most, **inner)
    else:
        near = faiss.knn(queries.numpy(), bank.numpy(), most, **inner)
        products, rows = map(torch.from_numpy, near)
    if own is None:
        return products, rows
    products = products.masked_fill(own.gather(1, rows), -torch.inf)
    largest, places = products.topk(width, dim=1)
    return largest, rows.gather(1, places)


def _merged(lists: list[Neighbours], k: int) -> Neighbours:
    """The k nearest of all lists, or all where there are fewer."""
    rows, similarities = (torch.cat(columns, dim=1) for columns in zip(*lists, strict=True))
    return best(similarities, rows, min(k, rows.shape[1]))


def tile_numbers(device: torch.device) -> int:
    """Choose how many similarities a tile has: on a GPU an eighth of the free memory at most."""
    if device.type != "cuda":
        return CPU_NUMBERS
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, min(MOST_NUMBERS, (free + unused) // (8 * 4)))


def exactly(bank: Tensor, queries: Tensor, rows: Tensor) -> Tensor:
    """(q, n) float32 similarities of each query with its own rows of the bank, (q, n) int64."""
    (count, near), width = rows.shape, bank.shape[1]
    step = max(1, RANKED_NUMBERS * (128 if bank.is_cuda else 1) // (near * width))
    found = bank.new_empty(count, near)
    # used again: small results between large pieces of memory that come and go make a heap grow
    narrow = bank.new_empty(min(step, count) * near, width)
    wide = torch.empty_like(narrow, dtype=torch.float64)
    for start in range(0, count, step):
        some = rows[start : start + step]
        own = slice(some.numel())
        wide[own].copy_(torch.index_select(bank, 0, some.flatten(), out=narrow[own]))
        asked = queries[start : start + step].double()[:, :, None]
        found[start : start + step] = torch.bmm(wide[own].view(*some.shape, width), asked)[:, :, 0]
    return found
