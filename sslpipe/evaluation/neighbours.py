"""Exact nearest neighbours by cosine, with ties in a fixed order, by torch or faiss.

Both engines find candidates with a float32 matrix product, whose last bits depend on the engine,
the tile and the machine. So the similarity that ranks is computed again for the candidates, pair
by pair, in float64 and rounded to float32: it depends on the two vectors only. Equal similarities
rank by the lower row of the bank. A query whose candidates cannot be proved complete (many
nearly equal neighbours) is searched again in float64 over the whole bank.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sslpipe.errors import DataError

Search = Literal["torch", "faiss"]

QUERY_ROWS = 1024  # queries of a tile
BANK_ROWS = 16384  # bank rows of a tile: a tile of similarities takes 64 MiB
DOUBTFUL_ROWS = 128  # queries searched again at a time
SPARE = 32  # candidates beyond k: most queries are then proved complete at once


class Neighbours(NamedTuple):
    """indices: (Q, k) int64 rows of the bank, nearest first; similarities: (Q, k) float32."""

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
    """The k nearest rows of the bank for each query.

    bank: (N, F), queries: (Q, F) float32, any scale, on one device.
    bank_ids, query_ids: (N,), (Q,) int64; where given, a query never finds a row of its own id.
    Raises: DataError where k is larger than the number of rows a query may find.
    """
    if search not in ENGINES:
        raise DataError(f"search = {search!r} is unknown; known: {', '.join(ENGINES)}")
    left_out = 0
    if bank_ids is not None and query_ids is not None:
        known, times = torch.unique(bank_ids, return_counts=True)
        found = times[torch.isin(known, query_ids)]
        left_out = int(found.max()) if len(found) else 0
    usable = len(bank) - left_out
    if not 1 <= k <= usable:
        raise DataError(f"k = {k} does not fit a bank of {usable} rows; use 1 <= k <= {usable}")

    bank, queries = _unit(bank), _unit(queries)
    width = min(len(bank), k + left_out + SPARE)
    slack = _float32_error(bank.shape[1])
    tiles = []
    with full_float32():
        find = ENGINES[search](bank, width)
        for start in range(0, len(queries), QUERY_ROWS):
            rows = slice(start, start + QUERY_ROWS)
            own = None if query_ids is None else query_ids[rows]
            rough, candidates = find(queries[rows])  # (q, width) each
            exact = _rank(bank, queries[rows], candidates, bank_ids, own)
            if width < len(bank):
                # what is no candidate is at most this similar
                ceiling = rough[:, -1].double() + slack
                doubtful = (exact.similarities[:, k - 1].double() <= ceiling).nonzero().flatten()
                for first in range(0, len(doubtful), DOUBTFUL_ROWS):
                    part = doubtful[first : first + DOUBTFUL_ROWS]
                    again = _search_all(
                        bank, queries[rows][part], k, bank_ids, None if own is None else own[part]
                    )
                    exact.indices[part, :k] = again.indices
                    exact.similarities[part, :k] = again.similarities
            tiles.append(Neighbours(exact.indices[:, :k], exact.similarities[:, :k]))
    return Neighbours(*(torch.cat(parts) for parts in zip(*tiles, strict=True)))


@contextmanager
def full_float32() -> Iterator[None]:
    """Matrix products in true float32, whatever training had set (TF32, bf16)."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def _unit(rows: Tensor) -> Tensor:
    """Rows of length 1, (N, F) float32; a row of zeros stays one (cosine 0 with everything)."""
    norms = torch.cat([part.double().norm(dim=1) for part in torch.split(rows, BANK_ROWS)])  # (N,)
    return (rows / norms.clamp_min(1e-30).float()[:, None]).contiguous()


def _float32_error(width: int) -> float:
    """How far a float32 dot product of unit vectors, and its rounding, can be off.

    The probabilistic bound of Higham and Mary 2019 (SIAM J. Sci. Comput. 41(5)) with lambda = 8:
    exceeded with a chance of 3e-14 times the width, whatever the order of the sum.
    """
    unit_roundoff = 2.0**-24
    return float((8 * width**0.5 + 2) * unit_roundoff)


def _rank(
    bank: Tensor, queries: Tensor, candidates: Tensor, bank_ids: Tensor | None, ids: Tensor | None
) -> Neighbours:
    """Candidates (q, w) ordered by exact similarity, then by row; own ids last, at -inf."""
    candidates = candidates.sort(dim=1).values  # so that a stable sort ranks ties by row
    similarities = torch.empty(candidates.shape, dtype=torch.float32, device=bank.device)
    flat, width = candidates.flatten(), candidates.shape[1]
    pairs = max(1, 2**22 // bank.shape[1])  # 32 MiB of float64 at a time
    for start in range(0, len(flat), pairs):
        part = slice(start, start + pairs)
        query = torch.arange(start, min(start + pairs, len(flat)), device=bank.device) // width
        products = bank[flat[part]].double().mul_(queries[query])  # (pairs, F)
        similarities.view(-1)[part] = products.sum(dim=1).float()
    if bank_ids is not None and ids is not None:
        similarities[bank_ids[candidates] == ids[:, None]] = -torch.inf
    ranked = similarities.sort(dim=1, descending=True, stable=True)
    return Neighbours(candidates.gather(1, ranked.indices), ranked.values)


def _search_all(
    bank: Tensor, queries: Tensor, k: int, bank_ids: Tensor | None, ids: Tensor | None
) -> Neighbours:
    """The k nearest of each query (q, F) among everything that may tie with its k-th."""
    parts = torch.split(bank, BANK_ROWS)
    rough = torch.cat([queries.double() @ part.double().T for part in parts], dim=1)  # (q, N)
    if bank_ids is not None and ids is not None:
        rough[bank_ids == ids[:, None]] = -torch.inf
    margin = 2.0**-23  # two roundings to float32 are 2^-24; float64 sums are far more exact
    floors = rough.topk(k, dim=1).values[:, -1] - margin
    found = []
    for row, floor in enumerate(floors):
        one = slice(row, row + 1)
        candidates = (rough[row] >= floor).nonzero().flatten()  # (w,)
        ranked = _rank(
            bank, queries[one], candidates[None], bank_ids, None if ids is None else ids[one]
        )
        found.append(Neighbours(ranked.indices[:, :k], ranked.similarities[:, :k]))
    return Neighbours(*(torch.cat(columns) for columns in zip(*found, strict=True)))


Find = Callable[[Tensor], tuple[Tensor, Tensor]]


def _torch_engine(bank: Tensor, width: int) -> Find:
    def find(queries: Tensor) -> tuple[Tensor, Tensor]:
        best = torch.empty((len(queries), 0), device=bank.device)
        rows = torch.empty((len(queries), 0), dtype=torch.int64, device=bank.device)
        for start in range(0, len(bank), BANK_ROWS):
            tile = queries @ bank[start : start + BANK_ROWS].T  # (q, tile)
            values, index = tile.topk(min(width, tile.shape[1]), dim=1)
            best, rows = torch.cat([best, values], 1), torch.cat([rows, index + start], 1)
            best, order = best.topk(min(width, best.shape[1]), dim=1)
            rows = rows.gather(1, order)
        return best, rows

    return find


def _faiss_engine(bank: Tensor, width: int) -> Find:
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

    def find(queries: Tensor) -> tuple[Tensor, Tensor]:
        values, rows = index.search(queries.cpu().numpy(), width)
        return torch.from_numpy(values).to(bank.device), torch.from_numpy(rows).to(bank.device)

    return find


ENGINES: dict[str, Callable[[Tensor, int], Find]] = {
    "faiss": _faiss_engine,
    "torch": _torch_engine,
}
