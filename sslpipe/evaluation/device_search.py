"""The k nearest rows on a GPU: what `neighbours.nearest` finds on the CPU, bit for bit.

Of a tile of queries an engine proposes the nearest rows by float32 products, of which the error is
bounded; their similarities are computed exactly, and the rare query of which a nearer row may have
been left out is compared with the whole bank. The host waits for the device a few times a search,
however many the tiles.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from sslpipe.errors import DataError
from sslpipe.evaluation.exact import Neighbours, among_all, best, float32_error

MOST_NUMBERS = 2**28  # similarities of a tile: 1 GiB
RANKED_NUMBERS = 2**24  # float64 components of candidates at a time: 128 MiB, and copies
SPARE = 32  # rows proposed beyond k: most queries are then proved complete
FAISS_MOST = 2048  # neighbours that faiss finds on a GPU

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
    """Find the k nearest rows of the bank for each query.

    Args:
        bank: (N, F) float32 in fixed point.
        queries: (Q, F) float32 in fixed point, on the bank's device.
        k: At most N - own_rows.
        own_rows: How many rows of the bank have a query's own id, at most.
        bank_ids: (N,) int64; with query_ids, a query never finds a row of its own id.
        query_ids: (Q,) int64.
        propose: The engine.
    """
    margin = float32_error(bank.shape[1]) + 2.0**-23  # of a float32 product, both ways
    width = min(len(bank), k + own_rows + SPARE)
    parts, complete = [], []
    step = max(1, tile_numbers(bank.device) // len(bank))
    for start in range(0, len(queries), step):
        part = slice(start, start + step)
        products, rows = propose(queries[part], width)
        exact = _exactly(bank, queries[part], rows)
        if bank_ids is not None and query_ids is not None:
            exact.masked_fill_(bank_ids[rows] == query_ids[part, None], -torch.inf)
        found = best(exact, rows, k)
        parts.append(found)
        # no row that was not proposed is as near as the last of those found
        complete.append(found.similarities[:, -1] > products[:, -1] + margin)
    if not parts:
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
    """Propose by products of torch, in a buffer that is used again."""
    buffer = bank.new_empty(0)

    def propose(queries: Tensor, width: int) -> tuple[Tensor, Tensor]:
        nonlocal buffer
        size = len(queries) * len(bank)
        if len(buffer) < size:
            buffer = bank.new_empty(size)
        tile = buffer[:size].view(len(queries), len(bank))
        products, rows = torch.mm(queries, bank.T, out=tile).topk(width, dim=1)
        return products, rows

    return propose


def faiss_proposals(bank: Tensor) -> Propose:
    """Propose by faiss's search on the GPU, over the bank as it lies there: no second copy."""
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
        products, rows = faiss.knn_gpu(
            resources,
            queries,
            bank,
            width,
            metric=faiss.METRIC_INNER_PRODUCT,
            device=queries.device.index or 0,
        )
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
