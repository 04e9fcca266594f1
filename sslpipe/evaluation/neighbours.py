"""Exact nearest neighbours by cosine, with ties in a fixed order, by torch or faiss.

Unit vectors are rounded to multiples of 2^-24, which float32 holds exactly. A product of two
components is then a multiple of 2^-48, and the sum of any of them fits into float64 without
rounding (it is at most 1): a similarity computed in float64 depends on the two vectors only, not
on the order of the sum, the tile, the library or the machine. It is rounded to float32; equal
similarities rank by the lower row of the bank.

The engines only name candidates, by float32 or bfloat16 products of which the error is bounded;
every row that may belong to the k nearest is one. A bank of few rows is compared as a whole.
"""

import time
from collections.abc import Callable, Iterable, Iterator
from typing import Literal, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.errors import DataError
from sslpipe.precision import full_float32

Search = Literal["torch", "faiss"]
Number = TypeVar("Number", np.float32, np.int16)

TILE_NUMBERS = 2**23  # similarities of a tile: 32 MiB, in a buffer that is used again
SMALL_BANK = 2048  # rows: compared as a whole, many queries at a time
PART_ROWS = 4096  # rows converted to float64 at a time
FEW_PRODUCTS = 2**26  # below, nothing is gained by bfloat16
CROWDED = 1 / 32  # of the bank, beyond k candidates: then float32 products are faster
SPARE = 32  # rows requested of faiss beyond k: most queries are then proved complete


class Neighbours(NamedTuple):
    """The nearest rows of some queries.

    Args:
        indices: (Q, k) int64 rows of the bank, nearest first.
        similarities: (Q, k) float32 cosines.
    """

    indices: Tensor
    similarities: Tensor


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
        DataError: k is larger than the number of rows a query may find.
    """
    if search not in ENGINES:
        raise DataError(f"search = {search!r} is unknown; known: {', '.join(ENGINES)}")
    # how many rows a query may find
    own_rows = 0  # at most, of one query
    if bank_ids is not None and query_ids is not None:
        known, times = torch.unique(bank_ids, return_counts=True)
        shared = times[torch.isin(known, query_ids)]
        own_rows = int(shared.max()) if len(shared) else 0
    usable = len(bank) - own_rows
    if not 1 <= k <= usable:
        raise DataError(f"k = {k} does not fit a bank of {usable} rows; use 1 <= k <= {usable}")

    # candidates by an engine, then their exact similarities
    device = bank.device
    bank, queries = fixed_point_units(bank), fixed_point_units(queries)
    if len(bank) <= SMALL_BANK and search == "torch":
        return _among_all(bank, queries, k, bank_ids, query_ids)
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
    return Neighbours(
        torch.from_numpy(indices).to(device), torch.from_numpy(similarities).to(device)
    )


def fixed_point_units(rows: Tensor) -> Tensor:
    """Scale rows to length 1, in multiples of 2^-24, (N, F) float32; zeros stay zeros."""
    units = torch.empty_like(rows, dtype=torch.float32, memory_format=torch.contiguous_format)
    for part, out in zip(torch.split(rows, PART_ROWS), torch.split(units, PART_ROWS), strict=True):
        wide = part.double()
        wide /= wide.norm(dim=1, keepdim=True).clamp_min(1e-300)
        out.copy_(wide.mul_(2.0**24).round_().mul_(2.0**-24))
    return units


def exact_similarities(
    rows: NDArray[np.float32],
) -> Callable[[NDArray[np.int64], NDArray[np.float32]], NDArray[np.float32]]:
    """Make a function of row numbers (n,) and a query (F,), both of fixed point: (n,) float32."""
    narrow = np.empty((PART_ROWS, rows.shape[1]), np.float32)  # used again: fresh memory is slow
    wide = np.empty((PART_ROWS, rows.shape[1]))

    def exactly(numbers: NDArray[np.int64], query: NDArray[np.float32]) -> NDArray[np.float32]:
        similarities = np.empty(len(numbers), np.float32)
        for at in range(0, len(numbers), PART_ROWS):
            part = numbers[at : at + PART_ROWS]
            np.take(rows, part, axis=0, out=narrow[: len(part)], mode="clip")
            wide[: len(part)] = narrow[: len(part)]
            similarities[at : at + PART_ROWS] = wide[: len(part)] @ query.astype(np.float64)
        return similarities

    return exactly


def float32_error(width: int) -> float:
    """Bound how far a float32 dot product of unit vectors, and its rounding, can be off.

    The bound is probabilistic, with lambda = 8: exceeded with a chance of 3e-14 times the width,
    whatever the order of the sum.

    Source:
        Higham and Mary 2019, SIAM J. Sci. Comput. 41(5).
    """
    unit_roundoff = 2.0**-24
    return float((8 * width**0.5 + 2) * unit_roundoff)


def rank_keys(similarities: Tensor, rows: Tensor) -> Tensor:
    """Make int64 keys, all different in a row: larger is nearer, of equal ones the first.

    Args:
        similarities: (q, N) float32; -inf is smaller than every number; there are no NaN.
        rows: (N,) the bank's row of each column.
    """
    bits = (similarities + 0.0).view(torch.int32).long()  # + 0.0: -0 and 0 are equal
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return (ordered << 32) - rows


def _among_all(
    bank: Tensor, queries: Tensor, k: int, bank_ids: Tensor | None, ids: Tensor | None
) -> Neighbours:
    """The k nearest, every similarity computed exactly."""
    wide, parts = bank.double(), []
    columns = torch.arange(len(bank), device=bank.device)
    step = max(1, TILE_NUMBERS // 4 // len(bank))
    for start in range(0, len(queries), step):
        part = slice(start, start + step)
        similarities = (queries[part].double() @ wide.T).float()  # (q, N)
        if bank_ids is not None and ids is not None:
            similarities[bank_ids == ids[part, None]] = -torch.inf
        rows = rank_keys(similarities, columns).topk(k, dim=1).indices  # (q, k)
        parts.append(Neighbours(rows, similarities.gather(1, rows)))
    return Neighbours(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


Candidates = Iterator[NDArray[np.int64]]


def _torch_candidates(bank: Tensor, queries: Tensor, k: int) -> Candidates:
    """For each query, ascending, all rows that may be among its k nearest."""
    # at least k rows have a product of `floor` or more; other rows are less similar than those
    margin = 2 * float32_error(bank.shape[1]) + 2.0**-23
    coarse = _rounded(bank) if _bfloat16_pays(bank, queries) else None
    step = max(1, TILE_NUMBERS // len(bank))
    buffer = torch.empty(min(step, len(queries)) * len(bank), device=bank.device)
    for part in torch.split(queries, step):
        shape = len(part), len(bank)
        least: Iterable[np.generic]
        if coarse is not None:
            tile = buffer.view(torch.bfloat16)[: len(part) * len(bank)].view(shape)
            rows, least = _bfloat16_tile(coarse, _rounded(part), k, margin, tile)
        else:
            tile = buffer[: len(part) * len(bank)].view(shape)
            products = torch.mm(part, bank.T, out=tile)  # (q, N)
            if products.is_cuda:
                floors = products.topk(k, dim=1).values[:, -1:] - margin
                for row in products >= floors:
                    yield row.nonzero()[:, 0].cpu().numpy()
                continue
            rows = products.numpy()
            least = (_floor(row, k) - np.float32(margin) for row in rows)
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


def _bfloat16_tile(
    bank: _Rounded, queries: _Rounded, k: int, margin: float, out: Tensor
) -> tuple[NDArray[np.int16], NDArray[np.int16]]:
    """Products (q, N) as the bits of bfloat16, and the least (q,) that a candidate has.

    A sum is off by at most q' db + dq b (lengths; Cauchy and Schwarz), then rounded. k rows are
    `floors` or more, before rounding at most half a step less; of what is that similar the
    product, rounded as the sums are, is `least` or more. Bits of positive numbers are in order, and
    above those of negative ones, which are not: a `least` below 0 lets every row pass.
    """
    torch.mm(queries.rows, bank.rows.T, out=out)
    bits: NDArray[np.int16] = out.view(torch.int16).numpy()
    floors = torch.tensor([_floor(row, k) for row in bits]).view(torch.bfloat16).float()
    errors = queries.errors + (1 + queries.errors) * bank.errors.max()
    least = (floors * (1 - 2.0**-8) - 2 * errors - margin).bfloat16()
    lowest = torch.iinfo(torch.int16).min
    return bits, torch.where(least > 0, least.view(torch.int16), lowest).numpy()


def _bfloat16_pays(bank: Tensor, queries: Tensor) -> bool:
    """Whether this processor multiplies bfloat16 much faster; the neighbours are the same."""
    if bank.is_cuda or len(bank) * len(queries) < FEW_PRODUCTS:
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


def _faiss_candidates(bank: Tensor, queries: Tensor, k: int) -> Candidates:
    try:
        import faiss
    except ImportError as error:
        raise DataError(
            'search = "faiss" needs faiss (pip install faiss-gpu or faiss-cpu); '
            'search = "torch" gives the same neighbours without it'
        ) from error

    index: faiss.Index = faiss.IndexFlatIP(bank.shape[1])
    if bank.is_cuda:
        index = faiss.index_cpu_to_gpu(faiss.StandardGpuResources(), bank.device.index or 0, index)
    index.add(bank.cpu().numpy())
    width = min(len(bank), k + SPARE)
    margin = 2 * float32_error(bank.shape[1]) + 2.0**-23
    for part in torch.split(queries, 1024):
        values, rows = index.search(part.cpu().numpy(), width)
        complete = (values[:, k - 1] - margin > values[:, -1]) | (width == len(bank))
        # of many nearly equal rows, more may belong to the k nearest than were requested of faiss
        doubtful = torch.from_numpy(np.flatnonzero(~complete)).to(bank.device)
        again = _torch_candidates(bank, part[doubtful], k)
        for row, whole in zip(np.sort(rows, axis=1), complete, strict=True):
            yield row if whole else next(again)


ENGINES: dict[str, Callable[[Tensor, Tensor, int], Candidates]] = {
    "faiss": _faiss_candidates,
    "torch": _torch_candidates,
}
