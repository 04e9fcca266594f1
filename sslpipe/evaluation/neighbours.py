"""Exact nearest neighbours by cosine, with ties in a fixed order, wherever they are searched.

Unit vectors are rounded to multiples of 2^-24, which float32 holds exactly. A product of two
components is then a multiple of 2^-48, and the sum of any of them fits into float64 without
rounding (it is at most 1): a similarity computed in float64 depends on the two vectors only, not
on the order of the sum, the tile, the library or the machine. It is rounded to float32; equal
similarities rank by the lower row of the bank.

Float32 products, of torch or faiss, whose error is bounded, propose rows, and only those that may
be among the nearest are compared exactly. `among_all`, which compares everything, is the oracle.
"""

from collections.abc import Iterator, Sequence
from importlib import import_module
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from sslpipe.distributed import Rank, all_gather_rows
from sslpipe.errors import DataError
from sslpipe.precision import full_float32

Search = Literal["torch", "faiss"]
Hidden = tuple[Tensor, Tensor] | None  # (N,) and (Q,): a query finds no row of its own number

PART_ROWS = 4096  # rows converted to float64 at a time
EXACT_NUMBERS = 2**21  # float64 similarities of a tile; 32 times as many on a GPU
WIDE_NUMBERS = 2**23  # components of a bank in float64 at a time: 64 MiB
CPU_NUMBERS = 2**23  # float32 similarities of a tile on the CPU: 32 MiB
MOST_NUMBERS = 2**28  # on a GPU: 1 GiB
PROPOSED_NUMBERS = 2**21  # rows that are proposed for many queries at a time
PAIRED_NUMBERS = 2**17  # components of pairs at a time; 128 times as many on a GPU
PART_BYTES = 2**27  # of a bank on the CPU that is searched at a time: its unit rows are a copy
FAISS_MOST = 2048  # neighbours that faiss finds on a GPU
SPARE = 32  # rows proposed beyond k: most queries are then proved complete


class Neighbours(NamedTuple):
    """The nearest rows of some queries, (Q, k) int64, and their similarities, (Q, k) float32."""

    indices: Tensor
    similarities: Tensor

    @property
    def cosines(self) -> Tensor:
        """The similarities in [-1, 1], (Q, k): of rows in fixed point they may be 1e-7 beyond."""
        return self.similarities.clamp(-1, 1)

    def of(self, queries: Tensor | slice) -> "Neighbours":
        """Select some queries."""
        return Neighbours(self.indices[queries], self.similarities[queries])

    def put(self, queries: Tensor | slice, others: "Neighbours") -> None:
        """Replace what was found for some queries."""
        self.indices[queries], self.similarities[queries] = others


def nearest(
    bank: Tensor,
    queries: Tensor,
    k: int,
    *,
    units: bool = False,
    search: Search = "torch",
    hidden: Hidden = None,
    process: Rank = Rank(),  # noqa: B008 (immutable)
) -> Neighbours:
    """Find the k nearest rows of the bank for each query, the same bit for bit on all. Collective.

    Each process moves its share of the bank to where the queries are and searches it, on the CPU
    part by part.

    Args:
        bank: (N, F) float32, any scale, on any device.
        queries: (Q, F) float32, any scale.
        k: At least 1; more than a query may find is a DataError.
        units: Whether all rows are as `fixed_point_units` returns them, on one device: nothing is
            copied, and queries may be the bank itself.
        search: "torch" or "faiss"; both find the same neighbours.
        hidden: (N,) and (Q,) int64: a query never finds a row of its own number.
        process: This process; the other arguments are the same on all.
    """
    check_k(len(bank), k, hidden)
    device = queries.device
    asked = queries if units else fixed_point_units(queries)
    share = process.share(len(bank))
    neighbours = _nothing(len(queries), k, device)
    step = max(1, len(bank) if device.type == "cuda" else PART_BYTES // bank[:1].nbytes)
    for start in range(share.start, share.stop, step):
        part = slice(start, min(start + step, share.stop))
        rows = bank[part] if units else fixed_point_units(bank[part].to(device))
        for some in _tiles(len(queries), PROPOSED_NUMBERS // (k + SPARE)):
            ids = None if hidden is None else (hidden[0][part].to(device), hidden[1][some])
            neighbours.put(
                some,
                _with_part(
                    before=neighbours.of(some),
                    bank=rows,
                    first=start,
                    queries=asked[some],
                    hidden=ids,
                    search=search,
                ),
            )
    if process.world_size > 1:
        indices = all_gather_rows(neighbours.indices[None])  # (processes, Q, k)
        similarities = all_gather_rows(neighbours.similarities[None])
        neighbours = _merged(*map(Neighbours, indices, similarities))
    return neighbours


def _with_part(
    before: Neighbours, bank: Tensor, first: int, queries: Tensor, hidden: Hidden, search: Search
) -> Neighbours:
    """Add a part of the bank, which begins at row `first`, to what was found in those before.

    Of rows in fixed point. What may be nearer than the last that was found is compared exactly; a
    query of which a nearer row may not be proposed meets the whole part. The host waits for a GPU
    twice, however many the tiles of products.
    """
    k = before.indices.shape[1]
    margin = float32_error(bank.shape[1]) + 2.0**-23  # of a float32 product, both ways
    width = min(len(bank), k + SPARE)
    propose = _by_faiss if search == "faiss" else _by_torch
    products = queries.new_empty(len(queries), width)
    rows = torch.empty_like(products, dtype=torch.int64)
    with full_float32():
        for some in _tiles(len(queries), tile_numbers(bank.device) // len(bank)):
            same = None if hidden is None else hidden[0] == hidden[1][some, None]  # (q, N)
            products[some], rows[some] = propose(bank, queries[some], width, same)
    least = before.similarities[:, -1]  # of the last of k rows, at least; NaN of damaged ones
    if width >= k:
        least = torch.maximum(least, products[:, k - 1] - margin)
    close = ~((products + margin < least[:, None]) | (products == -torch.inf))
    asked, place = close.nonzero(as_tuple=True)  # the host waits here
    similarities = torch.full_like(products, -torch.inf)
    similarities[asked, place] = exact_cosines(bank, rows[asked, place], queries, asked)
    similarities.nan_to_num_(torch.inf, torch.inf, -torch.inf)  # of damaged rows: seen, not last
    nearer = _merged(before, Neighbours(rows + first, similarities))
    if width < len(bank):
        last = products[:, -1]  # no row that was not proposed has a larger product
        doubts = (nearer.similarities[:, -1] <= last + margin) & (last > -torch.inf)
        doubtful = doubts.nonzero()[:, 0]  # and here
        if len(doubtful):
            ids = None if hidden is None else (hidden[0], hidden[1][doubtful])
            near = among_all(bank, queries[doubtful], k, ids)
            near = near._replace(indices=near.indices + first)
            nearer.put(doubtful, _merged(before.of(doubtful), near))
    return nearer


def among_all(bank: Tensor, queries: Tensor, k: int, hidden: Hidden = None) -> Neighbours:
    """Find the k nearest with every similarity computed exactly; rows in fixed point."""
    neighbours = _nothing(len(queries), k, bank.device)
    numbers = EXACT_NUMBERS * (32 if bank.is_cuda else 1)
    rows = max(1, WIDE_NUMBERS // bank.shape[1])
    for first in range(0, len(bank), rows):
        wide = bank[first : first + rows].double()
        some = torch.arange(first, first + len(wide), device=bank.device)
        for part in _tiles(len(queries), numbers // len(wide)):
            similarities = (queries[part].double() @ wide.T).float()  # (q, n)
            similarities.nan_to_num_(torch.inf, torch.inf, -torch.inf)
            if hidden is not None:
                similarities.masked_fill_(hidden[0][some] == hidden[1][part, None], -torch.inf)
            neighbours.put(part, _merged(neighbours.of(part), best(similarities, some, k)))
    return neighbours


def _tiles(count: int, rows: int) -> Iterator[slice]:
    """Cut so many rows into pieces."""
    return (slice(at, at + max(1, rows)) for at in range(0, count, max(1, rows)))


def _nothing(queries: int, k: int, device: torch.device) -> Neighbours:
    """Lists of what none may find, behind which all that is found comes first."""
    indices = torch.zeros(queries, k, dtype=torch.int64, device=device)
    nothing = torch.full((queries, k), -torch.inf, dtype=torch.float32, device=device)
    return Neighbours(indices, nothing)


def _merged(*lists: Neighbours) -> Neighbours:
    """The nearest of all lists, as many as the first one has."""
    rows = torch.cat([each.indices for each in lists], dim=1)
    similarities = torch.cat([each.similarities for each in lists], dim=1)
    return best(similarities, rows, lists[0].indices.shape[1])


def usual_k(usual: Sequence[int], rows: int) -> list[int]:
    """Return the usual numbers of neighbours that so many rows have; all rows where none fits."""
    return [k for k in usual if k <= rows] or [rows]


def usable_rows(rows: int, hidden: Hidden) -> int:
    """Return how many of a bank's rows each query may find, at least."""
    own_rows = 0
    if hidden is not None:
        known, times = torch.unique(hidden[0], return_counts=True)
        shared = times[torch.isin(known, hidden[1].to(known.device))]
        own_rows = int(shared.max()) if len(shared) else 0
    return rows - own_rows


def check_k(rows: int, k: int, hidden: Hidden) -> None:
    """Raise DataError where k is more than some query may find."""
    usable = usable_rows(rows, hidden)
    if not 1 <= k <= usable:
        raise DataError(
            f"k = {k} does not fit a bank of {usable} rows; use 1 <= k <= {usable}, as --k "
            f"{max(1, min(20, usable))}"
        )


def fixed_point_units(rows: Tensor) -> Tensor:
    """Scale rows to length 1, in multiples of 2^-24, (N, F) float32; zeros stay zeros."""
    units = torch.empty_like(rows, dtype=torch.float32, memory_format=torch.contiguous_format)
    for part, out in zip(torch.split(rows, PART_ROWS), torch.split(units, PART_ROWS), strict=True):
        wide = part.double()
        wide /= wide.norm(dim=1, keepdim=True).clamp_min(1e-300)
        out.copy_(wide.mul_(2.0**24).round_().mul_(2.0**-24))
    return units


def exact_cosines(bank: Tensor, rows: Tensor, queries: Tensor, asked: Tensor) -> Tensor:
    """Compare pairs of rows in fixed point: (n,) numbers in the bank and of queries -> (n,)."""
    step = max(1, PAIRED_NUMBERS * (128 if bank.is_cuda else 1) // bank.shape[1])
    similarities = bank.new_empty(len(rows))
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        similarities[part] = bank[rows[part]].double().mul_(queries[asked[part]]).sum(dim=1)
    return similarities


def float32_error(width: int) -> float:
    """Bound how far a float32 dot product of unit vectors, and its rounding, can be off.

    Probabilistic, with lambda = 8: exceeded with a chance of 3e-14 times the width, whatever the
    order of the sum. Source: Higham and Mary 2019, SIAM J. Sci. Comput. 41(5).
    """
    unit_roundoff = 2.0**-24
    return float((8 * width**0.5 + 2) * unit_roundoff)


def rank_keys(similarities: Tensor, rows: Tensor) -> Tensor:
    """Make int64 keys, all different in a row: larger is nearer, of equal ones the first.

    `similarities` (q, N) float32 have no NaN; `rows` (N,) are the bank's.
    """
    bits = (similarities + 0.0).view(torch.int32).long()  # + 0.0: -0 and 0 are equal
    ordered = torch.where(bits < 0, -(bits & 0x7FFFFFFF), bits)
    return (ordered << 32) - rows


def best(similarities: Tensor, rows: Tensor, k: int) -> Neighbours:
    """Keep the k nearest of the columns, or all where there are fewer, nearest first.

    `similarities` (q, n) are -inf for what may not be found; `rows` (n,) or (q, n) are the bank's.
    """
    keys = rank_keys(similarities, rows)
    columns = keys.topk(min(k, keys.shape[1]), dim=1).indices  # (q, k)
    return Neighbours(
        rows.expand_as(similarities).gather(1, columns), similarities.gather(1, columns)
    )


# (bank (N, F), queries (q, F), how many, who finds none of which rows (q, N)) -> products (q, n)
# float32, falling, and their rows of the bank (q, n); no other row's product is larger
def _by_torch(
    bank: Tensor, queries: Tensor, width: int, excluded: Tensor | None
) -> tuple[Tensor, Tensor]:
    products = torch.mm(queries, bank.T)  # (q, N)
    if excluded is not None:
        products.masked_fill_(excluded, -torch.inf)
    largest, rows = products.topk(width, dim=1)
    return largest, rows


def _by_faiss(
    bank: Tensor, queries: Tensor, width: int, excluded: Tensor | None
) -> tuple[Tensor, Tensor]:
    try:
        import faiss
    except ImportError as error:
        raise DataError(
            'search = "faiss" needs faiss (pip install faiss-gpu or faiss-cpu); search = "torch" '
            "gives the same neighbours without it"
        ) from error
    most = width if excluded is None else min(len(bank), width + int(excluded.sum(1).max()))
    inner = faiss.METRIC_INNER_PRODUCT
    if bank.is_cuda:
        import_module("faiss.contrib.torch_utils")  # takes tensors where they lie
        if not hasattr(faiss, "StandardGpuResources") or most > FAISS_MOST:
            raise DataError(
                f'search = "faiss" on a GPU needs faiss-gpu and finds at most {FAISS_MOST} '
                f'neighbours, of {most} needed; search = "torch" gives the same neighbours'
            )
        resources = faiss.StandardGpuResources()
        device = bank.device.index or 0
        products, rows = faiss.knn_gpu(resources, queries, bank, most, metric=inner, device=device)
    else:
        near = faiss.knn(queries.numpy(), bank.numpy(), most, metric=inner)
        products, rows = map(torch.from_numpy, near)
    if excluded is None:
        return products, rows
    products = products.masked_fill(excluded.gather(1, rows), -torch.inf)
    largest, places = products.topk(width, dim=1)
    return largest, rows.gather(1, places)


def tile_numbers(device: torch.device) -> int:
    """Choose how many similarities a tile has: on a GPU an eighth of the free memory at most."""
    if device.type != "cuda":
        return CPU_NUMBERS
    free, _ = torch.cuda.mem_get_info(device)
    unused = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return max(1, min(MOST_NUMBERS, (free + unused) // (8 * 4)))
