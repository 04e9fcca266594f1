"""Exact nearest neighbours by cosine, with ties in a fixed order, wherever they are searched.

An engine (torch or faiss) names candidates by float32 products, whose error is bounded; their
similarities are then computed exactly (`exact`), so that the neighbours do not depend on engine,
tile, device or number of processes. `exact.among_all`, which compares everything, is the oracle.
"""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.distributed import Rank, all_gather_rows
from sslpipe.errors import DataError
from sslpipe.evaluation.exact import (
    Neighbours,
    among_all,
    best,
    exact_similarities,
    fixed_point_units,
    float32_error,
)
from sslpipe.evaluation.result import check_known
from sslpipe.precision import full_float32

Search = Literal["torch", "faiss"]

TILE_NUMBERS = 2**24  # similarities of a tile on the CPU, in one of two buffers of 64 MiB
TILE_ROWS = 512  # queries of a tile there, at most; with fewer than 100, products are slower
PROGRESS_ROWS = 1024  # queries that are reported at a time
PART_BYTES = 2**27  # of a bank on the CPU that is searched at a time: its unit rows are a copy
SMALL_BANK = 2048  # rows: compared as a whole, many queries at a time
CROWDED = 1 / 32  # of the bank with one id: then it is searched without these rows
MOST_NUMBERS = 2**28  # similarities of a tile on a GPU: 1 GiB
RANKED_NUMBERS = 2**24  # float64 components of candidates at a time: 128 MiB, and copies
SPARE = 32  # rows proposed beyond k: most queries are then proved complete
FAISS_MOST = 2048  # neighbours that faiss finds on a GPU


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

    Of several processes, each moves its share of the bank to where the queries are and searches it;
    one process searches a large bank on the CPU part by part. What the shares or parts name as
    nearest is merged by exact similarities.

    Args:
        bank: (N, F) float32, any scale, on any device.
        queries: (Q, F) float32, any scale.
        k: At least 1; more than a query may find is a DataError.
        search: "torch" or "faiss"; both find the same neighbours.
        bank_ids: (N,) int64; with query_ids, a query never finds a row of its own id.
        query_ids: (Q,) int64.
        process: This process; the other arguments are the same on all.
    """
    device = queries.device
    if bank_ids is not None and query_ids is not None:
        known, times = torch.unique(bank_ids, return_counts=True)
        crowded = known[times > CROWDED * len(bank_ids)]
        crowded = crowded[torch.isin(crowded, query_ids.to(crowded.device))]
        if len(bank_ids) > SMALL_BANK and len(crowded):
            ids = bank_ids, query_ids
            return _group_by_group(bank, queries, k, crowded.tolist(), *ids, search, process)
    own_rows = check_k(len(bank), k, bank_ids, query_ids)
    whole = device.type == "cuda" or own_rows > SPARE  # the parts' lists would be long
    parts = 1 if whole else -(-bank.nbytes // PART_BYTES)
    if process.world_size == parts == 1:
        units = fixed_point_units(bank.to(device)), fixed_point_units(queries)
        ids_there = None if bank_ids is None else bank_ids.to(device)
        return nearest_units(*units, k, search=search, bank_ids=ids_there, query_ids=query_ids)
    # each share's nearest, a query's own rows among them; short lists end with what none may find
    ranks = [process] if process.world_size > 1 else [Rank(part, parts) for part in range(parts)]
    total = ranks[0].world_size
    width = min(k + own_rows, -(-len(bank) // total))
    indices = torch.zeros(len(ranks), len(queries), width, dtype=torch.int64, device=device)
    similarities = torch.full(indices.shape, -torch.inf, device=device)
    for at, rank in enumerate(ranks):
        share = rank.share(len(bank))
        found = min(width, share.stop - share.start)
        if found:
            near = nearest(bank[share.start : share.stop], queries, found, search=search)
            indices[at, :, :found] = near.indices + share.start
            similarities[at, :, :found] = near.similarities
    # the shares' lists side by side
    if process.world_size > 1:
        indices, similarities = all_gather_rows(indices), all_gather_rows(similarities)
    lists = indices.transpose(0, 1), similarities.transpose(0, 1)  # (Q, total, width)
    rows, values = (each.flatten(1) for each in lists)  # (Q, total * width)
    if bank_ids is not None and query_ids is not None:
        own = bank_ids.to(device)[rows] == query_ids[:, None]
        values = values.masked_fill(own, -torch.inf)
    return best(values, rows, k)


def nearest_units(
    bank: Tensor,
    queries: Tensor,
    k: int,
    *,
    search: Search = "torch",
    bank_ids: Tensor | None = None,
    query_ids: Tensor | None = None,
    progress: Callable[[int], None] | None = None,
) -> Neighbours:
    """Do as `nearest` with rows as `exact.fixed_point_units` returns them; nothing is copied.

    Both are on one device, and queries may be the bank itself; `progress` is called with the number
    of each part that is done.
    """
    check_known("search", search, ENGINES)
    own_rows = check_k(len(bank), k, bank_ids, query_ids)
    if len(bank) <= SMALL_BANK and search == "torch":
        found = among_all(bank, queries, k, bank_ids, query_ids)
    elif bank.is_cuda:
        with full_float32():
            propose = PROPOSALS[search](bank)
            found = search_on_device(bank, queries, k, own_rows, bank_ids, query_ids, propose)
    else:
        with full_float32():
            candidates = ENGINES[search](bank, queries, k + own_rows)
            return _search_on_cpu(bank, queries, k, bank_ids, query_ids, candidates, progress)
    if progress is not None:
        progress(len(queries))
    return found


def check_k(rows: int, k: int, bank_ids: Tensor | None, query_ids: Tensor | None) -> int:
    """Return how many rows have a query's own id, at most; too large a k is a DataError."""
    own_rows = 0
    if bank_ids is not None and query_ids is not None:
        known, times = torch.unique(bank_ids, return_counts=True)
        shared = times[torch.isin(known, query_ids.to(known.device))]
        own_rows = int(shared.max()) if len(shared) else 0
    usable = rows - own_rows
    if not 1 <= k <= usable:
        raise DataError(f"k = {k} does not fit a bank of {usable} rows; use 1 <= k <= {usable}")
    return own_rows


def _group_by_group(
    bank: Tensor,
    queries: Tensor,
    k: int,
    large: list[int],
    bank_ids: Tensor,
    query_ids: Tensor,
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
        some = bank[rows.to(bank.device)], queries[own]
        near = nearest(*some, k, search=search, process=process)
        indices[own] = rows.to(indices.device)[near.indices]  # in the bank's order: so are ties
        similarities[own] = near.similarities
        rest &= ~own
    if bool(rest.any()):
        ids = {"bank_ids": bank_ids, "query_ids": query_ids[rest]}
        near = nearest(bank, queries[rest], k, search=search, process=process, **ids)
        indices[rest], similarities[rest] = near
    return Neighbours(indices, similarities)


# on the CPU: for each query, ascending, all rows that may be among its k nearest

Candidates = Iterator[NDArray[np.int64]]


def _search_on_cpu(
    bank: Tensor,
    queries: Tensor,
    k: int,
    bank_ids: Tensor | None,
    query_ids: Tensor | None,
    named: Candidates,
    progress: Callable[[int], None] | None,
) -> Neighbours:
    """Rank each query's candidates by their exact similarities."""
    values = queries.numpy()
    ids = None
    if bank_ids is not None and query_ids is not None:
        ids = bank_ids.numpy(), query_ids.numpy()
    indices = np.empty((len(values), k), np.int64)
    similarities = np.empty((len(values), k), np.float32)
    exactly = exact_similarities(bank.numpy())
    for query, candidates in enumerate(named):
        if ids is not None:
            candidates = candidates[ids[0][candidates] != ids[1][query]]
        far = -exactly(candidates, values[query])
        near = np.flatnonzero(far <= np.partition(far, k - 1)[k - 1])  # k, or more by ties
        first = near[np.argsort(far[near], kind="stable")[:k]]  # candidates ascend: ties by row
        indices[query], similarities[query] = candidates[first], -far[first]
        if progress is not None and (query + 1) % PROGRESS_ROWS == 0:
            progress(PROGRESS_ROWS)
    if progress is not None:
        progress(len(values) % PROGRESS_ROWS)
    return Neighbours(torch.from_numpy(indices), torch.from_numpy(similarities))


def _torch_candidates(bank: Tensor, queries: Tensor, k: int) -> Candidates:
    # at least k rows have a product of `floor` or more; other rows are less similar than those
    margin = np.float32(2 * float32_error(bank.shape[1]) + 2.0**-23)
    parts = torch.split(queries, max(1, min(TILE_ROWS, TILE_NUMBERS // len(bank))))
    buffers = [bank.new_empty(len(parts[0]), len(bank)) for _ in parts[:2]]

    @torch.no_grad()
    def multiply(number: int) -> Tensor:
        part = parts[number]
        return torch.mm(part, bank.T, out=buffers[number % 2][: len(part)])

    # a tile is multiplied while rows are chosen from the one before
    with ThreadPoolExecutor(1, "sslpipe-products") as pool:
        ahead = pool.submit(multiply, 0)
        for number in range(len(parts)):
            tile = ahead.result().numpy()
            if number + 1 < len(parts):
                ahead = pool.submit(multiply, number + 1)
            for row in tile:
                yield np.flatnonzero(row >= _floor(row, k) - margin)


def _floor(row: NDArray[np.float32], k: int) -> np.float32:
    """Find a number that at least k of the row are not below, and not many more. Half a pass."""
    while len(row) >= 16 * k:  # maxima of pairs: few of the k largest are in one pair
        half = len(row) // 2
        row = np.maximum(row[:half], row[half : 2 * half])
    floor: np.float32 = np.partition(row, len(row) - k)[len(row) - k]
    return floor


def _faiss() -> Any:
    try:
        import faiss
    except ImportError as error:
        raise DataError(
            'search = "faiss" needs faiss (pip install faiss-gpu or faiss-cpu); '
            'search = "torch" gives the same neighbours without it'
        ) from error
    return faiss


def _faiss_candidates(bank: Tensor, queries: Tensor, k: int) -> Candidates:
    index = _faiss().IndexFlatIP(bank.shape[1])
    index.add(bank.numpy())
    width = min(len(bank), k + SPARE)
    margin = 2 * float32_error(bank.shape[1]) + 2.0**-23
    for part in torch.split(queries, 1024):
        values, rows = index.search(part.numpy(), width)
        complete = (values[:, k - 1] - margin > values[:, -1]) | (width == len(bank))
        # of many nearly equal rows, more may belong to the k nearest than were requested of faiss
        doubtful = torch.from_numpy(np.flatnonzero(~complete))
        again = _torch_candidates(bank, part[doubtful], k)
        for row, whole in zip(np.sort(rows, axis=1), complete, strict=True):
            yield row if whole else next(again)


ENGINES: dict[str, Callable[[Tensor, Tensor, int], Candidates]] = {
    "faiss": _faiss_candidates,
    "torch": _torch_candidates,
}


# on a GPU: the host waits for the device a few times a search, however many the tiles

# (queries (q, F), how many) -> products (q, n) float32, falling, and their rows of the bank (q, n)
Propose = Callable[[Tensor, int], tuple[Tensor, Tensor]]


def search_on_device(
    bank: Tensor,
    queries: Tensor,
    k: int,
    own_rows: int,
    bank_ids: Tensor | None,
    query_ids: Tensor | None,
    propose: Propose,
) -> Neighbours:
    """Rank what an engine proposes; a query of which a nearer row may lack meets the whole bank.

    Arguments are those of `nearest_units`; own_rows: see `check_k`.
    """
    margin = float32_error(bank.shape[1]) + 2.0**-23  # of a float32 product, both ways
    width = min(len(bank), k + own_rows + SPARE)
    parts, complete = [], []
    step = max(1, tile_numbers(bank.device) // len(bank))
    for part in torch.split(torch.arange(len(queries), device=queries.device), step):
        some = queries[part]
        products, rows = propose(some, width)
        exact = _exactly(bank, some, rows)
        if bank_ids is not None and query_ids is not None:
            exact.masked_fill_(bank_ids[rows] == query_ids[part, None], -torch.inf)
        parts.append(best(exact, rows, k))
        # no row that was not proposed is as near as the last of those found
        complete.append(parts[-1].similarities[:, -1] > products[:, -1] + margin)
    if not len(queries):
        return among_all(bank, queries, k, bank_ids, query_ids)
    indices, similarities = (torch.cat(columns) for columns in zip(*parts, strict=True))
    if width < len(bank):
        doubtful = (~torch.cat(complete)).nonzero()[:, 0]  # the host waits here
        if len(doubtful):
            ids = None if query_ids is None else query_ids[doubtful]
            again = among_all(bank, queries[doubtful], k, bank_ids, ids)
            indices[doubtful], similarities[doubtful] = again
    return Neighbours(indices, similarities)


def tile_numbers(device: torch.device) -> int:
    """Choose how many similarities a tile has: an eighth of the free memory, at most 1 GiB."""
    if device.type != "cuda":
        return MOST_NUMBERS
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, min(MOST_NUMBERS, (free + unused) // (8 * 4)))


def torch_proposals(bank: Tensor) -> Propose:
    """Propose by products of torch."""

    def propose(queries: Tensor, width: int) -> tuple[Tensor, Tensor]:
        products, rows = torch.mm(queries, bank.T).topk(width, dim=1)
        return products, rows

    return propose


def faiss_proposals(bank: Tensor) -> Propose:
    """Propose by faiss's search on the GPU, over the bank as it lies there: no second copy."""
    _faiss()
    import faiss
    import faiss.contrib.torch_utils

    if not hasattr(faiss, "StandardGpuResources"):
        raise DataError(
            'search = "faiss" on a GPU needs faiss-gpu, and this is faiss-cpu; search = "torch" '
            "gives the same neighbours"
        )
    resources = faiss.StandardGpuResources()

    def propose(queries: Tensor, width: int) -> tuple[Tensor, Tensor]:
        if width > FAISS_MOST:
            raise DataError(
                f'search = "faiss" finds at most {FAISS_MOST - SPARE} neighbours on a GPU, and '
                f'{width - SPARE} are needed; search = "torch" finds as many as wanted'
            )
        options: dict[str, Any] = {
            "metric": faiss.METRIC_INNER_PRODUCT,
            "device": queries.device.index or 0,
        }
        products, rows = faiss.knn_gpu(resources, queries, bank, width, **options)
        return products, rows

    return propose


def _exactly(bank: Tensor, queries: Tensor, rows: Tensor) -> Tensor:
    """(q, n) float32 similarities of each query with its own rows of the bank, (q, n) int64."""
    step = max(1, RANKED_NUMBERS // (rows.shape[1] * bank.shape[1]))
    parts = [
        torch.bmm(bank[some].double(), part.double()[:, :, None])[:, :, 0].float()
        for part, some in zip(torch.split(queries, step), torch.split(rows, step), strict=True)
    ]
    return torch.cat(parts)


PROPOSALS: dict[str, Callable[[Tensor], Propose]] = {
    "faiss": faiss_proposals,
    "torch": torch_proposals,
}
