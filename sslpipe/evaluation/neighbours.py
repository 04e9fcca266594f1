"""Exact nearest neighbours by cosine, with ties in a fixed order, by torch or faiss: see `exact`.

The engines only name candidates, by float32 or bfloat16 products of which the error is bounded;
every row that may belong to the k nearest is one. A bank of few rows is compared as a whole.
The search is on the CPU or, for rows on a GPU, there (`device_search`).
"""

import time
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.errors import DataError
from sslpipe.evaluation.device_search import PROPOSALS, SPARE, search_on_device
from sslpipe.evaluation.exact import (
    PART_ROWS,
    Neighbours,
    among_all,
    exact_similarities,
    fixed_point_units,
    float32_error,
)
from sslpipe.precision import full_float32

Search = Literal["torch", "faiss"]
Number = TypeVar("Number", np.float32, np.int16)

TILE_NUMBERS = 2**24  # similarities of a tile, in one of two buffers: 32 MiB of bfloat16
TILE_ROWS = 512  # queries of a tile, at most; with fewer than 100, products are slower
PROGRESS_ROWS = 1024  # queries that are reported at a time
SMALL_BANK = 2048  # rows: compared as a whole, many queries at a time
FEW_PRODUCTS = 2**26  # below, nothing is gained by bfloat16
CROWDED = 1 / 32  # of the bank, beyond k candidates: then float32 products are faster


def nearest(
    bank: Tensor,
    queries: Tensor,
    k: int,
    *,
    search: Search = "torch",
    bank_ids: Tensor | None = None,
    query_ids: Tensor | None = None,
) -> Neighbours:
    """Find the k nearest rows of the bank for each query.

    Args:
        bank: (N, F) float32, any scale.
        queries: (Q, F) float32, any scale, on the bank's device.
        k: At least 1.
        search: "torch" or "faiss"; both find the same neighbours.
        bank_ids: (N,) int64; with query_ids, a query never finds a row of its own id.
        query_ids: (Q,) int64.

    Raises:
        DataError: As `check_k`.
    """
    bank, queries = fixed_point_units(bank), fixed_point_units(queries)
    return nearest_units(bank, queries, k, search=search, bank_ids=bank_ids, query_ids=query_ids)


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

    Queries may be the bank itself; `progress` is called with the number of each part that is done.
    """
    if search not in ENGINES:
        raise DataError(f"search = {search!r} is unknown; known: {', '.join(ENGINES)}")
    own_rows = check_k(len(bank), k, bank_ids, query_ids)
    # candidates by an engine, then their exact similarities
    device = bank.device
    if len(bank) <= SMALL_BANK and search == "torch":
        found = among_all(bank, queries, k, bank_ids, query_ids)
        if progress is not None:
            progress(len(queries))
        return found
    if bank.is_cuda:
        if search == "faiss":
            _faiss()
        with full_float32():
            propose = PROPOSALS[search](bank)
            found = search_on_device(bank, queries, k, own_rows, bank_ids, query_ids, propose)
        if progress is not None:
            progress(len(queries))
        return found
    rows, values = bank.cpu().numpy(), queries.cpu().numpy()
    own = None if bank_ids is None or query_ids is None else bank_ids.cpu().numpy()
    own_of = np.empty(0) if query_ids is None else query_ids.cpu().numpy()
    indices = np.empty((len(values), k), np.int64)
    similarities = np.empty((len(values), k), np.float32)
    exactly = exact_similarities(rows)
    with full_float32():
        for query, candidates in enumerate(ENGINES[search](bank, queries, k + own_rows)):
            if own is not None:
                candidates = candidates[own[candidates] != own_of[query]]
            far = -exactly(candidates, values[query])
            near = np.flatnonzero(far <= np.partition(far, k - 1)[k - 1])  # k, or more by ties
            best = near[np.argsort(far[near], kind="stable")[:k]]  # candidates ascend: ties by row
            indices[query], similarities[query] = candidates[best], -far[best]
            if progress is not None and (query + 1) % PROGRESS_ROWS == 0:
                progress(PROGRESS_ROWS)
    if progress is not None:
        progress(len(values) % PROGRESS_ROWS)
    return Neighbours(
        torch.from_numpy(indices).to(device), torch.from_numpy(similarities).to(device)
    )


def check_k(rows: int, k: int, bank_ids: Tensor | None, query_ids: Tensor | None) -> int:
    """Return how many rows of the bank have a query's own id, at most.

    Raises:
        DataError: k is larger than the number of rows a query may find.
    """
    own_rows = 0
    if bank_ids is not None and query_ids is not None:
        known, times = torch.unique(bank_ids, return_counts=True)
        shared = times[torch.isin(known, query_ids.to(known.device))]
        own_rows = int(shared.max()) if len(shared) else 0
    usable = rows - own_rows
    if not 1 <= k <= usable:
        raise DataError(f"k = {k} does not fit a bank of {usable} rows; use 1 <= k <= {usable}")
    return own_rows


Candidates = Iterator[NDArray[np.int64]]


def _torch_candidates(bank: Tensor, queries: Tensor, k: int) -> Candidates:
    """For each query, ascending, all rows that may be among its k nearest."""
    # at least k rows have a product of `floor` or more; other rows are less similar than those
    margin = 2 * float32_error(bank.shape[1]) + 2.0**-23
    coarse = _rounded(bank) if _bfloat16_pays(bank, queries) else None
    parts = torch.split(queries, max(1, min(TILE_ROWS, TILE_NUMBERS // len(bank))))
    buffers: dict[int, Tensor] = {}

    @torch.no_grad()
    def multiply(number: int, rounded: _Rounded | None) -> tuple[Tensor, Tensor | None]:
        """Products (q, N) of a part, and how far off each row of them is in bfloat16, (q,)."""
        left, right, errors = parts[number], bank, None
        if rounded is not None:
            left, own = _rounded(left)
            right, errors = rounded.rows, own + (1 + own) * rounded.errors.max()
        out = buffers.get(number % 2)
        if out is None or out.dtype != left.dtype:
            out = buffers[number % 2] = left.new_empty(len(parts[0]), len(bank))
        return torch.mm(left, right.T, out=out[: len(left)]), errors

    # a tile is multiplied while rows are chosen from the one before
    with ThreadPoolExecutor(1, "sslpipe-products") as pool:
        ahead = pool.submit(multiply, 0, coarse)
        for number, part in enumerate(parts):
            tile, errors = ahead.result()
            if number + 1 < len(parts):
                ahead = pool.submit(multiply, number + 1, coarse)
            rows: NDArray[Any]
            least: Iterable[np.generic]
            if errors is None:
                rows = tile.numpy()
                least = (_floor(row, k) - np.float32(margin) for row in rows)
            else:
                rows = tile.view(torch.int16).numpy()
                least = _least_by_bfloat16(rows, errors, k, margin)
            named = 0
            for row, threshold in zip(rows, least, strict=True):
                candidates = np.flatnonzero(row >= threshold)
                named += len(candidates)
                yield candidates
            if named > len(part) * (k + CROWDED * len(bank)):  # bfloat16 tells too little apart
                coarse = None


class _Rounded(NamedTuple):
    """rows: (N, F) bfloat16; errors: (N,) float32, the lengths of what rounding took away."""

    rows: Tensor
    errors: Tensor


def _rounded(units: Tensor) -> _Rounded:
    rows = units.bfloat16()
    parts = zip(torch.split(units, PART_ROWS), torch.split(rows, PART_ROWS), strict=True)
    return _Rounded(rows, torch.cat([(wide - narrow).norm(dim=1) for wide, narrow in parts]))


def _least_by_bfloat16(
    bits: NDArray[np.int16], errors: Tensor, k: int, margin: float
) -> NDArray[np.int16]:
    """The least product (q,) that a candidate has, as the bits of bfloat16.

    A sum is off by at most q' db + dq b (lengths; Cauchy and Schwarz), then rounded. k rows are
    `floors` or more, before rounding at most half a step less; of what is that similar the
    product, rounded as the sums are, is `least` or more. Bits of positive numbers are in order, and
    above those of negative ones, which are not: a `least` below 0 lets every row pass.

    Args:
        bits: (q, N) products.
        errors: (q,) float32, how far off the sums are.
        k: Rows wanted.
        margin: How far off float32 sums are, twice.
    """
    floors = torch.tensor([_floor(row, k) for row in bits]).view(torch.bfloat16).float()
    least = (floors * (1 - 2.0**-8) - 2 * errors - margin).bfloat16()
    lowest = torch.iinfo(torch.int16).min
    return torch.where(least > 0, least.view(torch.int16), lowest).numpy()


def _bfloat16_pays(bank: Tensor, queries: Tensor) -> bool:
    """Whether this processor multiplies bfloat16 much faster; the neighbours are the same."""
    if len(bank) * len(queries) < FEW_PRODUCTS:
        return False
    few, times = queries[:64], []
    for dtype in (torch.float32, torch.bfloat16):
        left, right = few.to(dtype), bank[:PART_ROWS].to(dtype).T
        torch.mm(left, right)  # the first call chooses a kernel
        start = time.process_time()
        for _ in range(4):
            torch.mm(left, right)
        times.append(time.process_time() - start)
    return times[1] < 0.6 * times[0]


def _floor(row: NDArray[Number], k: int) -> Number:
    """A number that at least k of the row are not below, and not many more. Half a pass."""
    while len(row) >= 16 * k:  # maxima of pairs: few of the k largest are in one pair
        half = len(row) // 2
        row = np.maximum(row[:half], row[half : 2 * half])
    floor: Number = np.partition(row, len(row) - k)[len(row) - k]
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
