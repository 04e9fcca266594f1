"""Approximate search: an inverted file of faiss proposes rows, exact cosines rank them."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sslpipe.errors import DataError
from sslpipe.evaluation.neighbours import (
    SPARE,
    Neighbours,
    best,
    exact_cosines,
    import_faiss,
    nearest,
)
from sslpipe.portable import sha256_of

LEAST_ROWS = 100_000  # fewer are compared with a query in some hundredths of a second
LEAST_RECALL = 0.95  # of the TOP nearest, on rows of its own
TOP = 10
MEASURED = 200  # rows that are queries, evenly spaced
TRAINED = 64  # rows for each list, to find its centre
MOST_LOOKED = 8  # a query looks into one list of so many at most
ADDED_ROWS = 65536  # at a time
_AGAIN = "make the index anew with `sslpipe index build`"
_NEEDS = ("an approximate index", "leave --approximate out, or search with --exact")


class Approximate:
    """An inverted file of faiss, and how many of its lists a query looks into.

    K-means cuts the rows into lists; a query looks into the lists whose centres are nearest, and
    compares 8-bit copies of their rows there. What it finds is ranked by exact cosines; rows in
    other lists are missed, and how many is measured when the file is made.
    """

    def __init__(self, index: Any, lists: int) -> None:
        self._index, self.lists = index, lists

    @classmethod
    def read(cls, path: Path, sha256: str, lists: int, shape: torch.Size) -> "Approximate":
        """Memory-map a file that has this sha256, as faiss does not check it, of (N, F) rows.

        Raises:
            DataError: It is not there, or another one; or faiss is missing.
        """
        faiss = import_faiss(*_NEEDS)
        try:
            found = sha256_of(path)
        except OSError as error:
            raise DataError(f"cannot read {path}: {error.strerror}; {_AGAIN}") from error
        if found != sha256:
            raise DataError(f"{path} is damaged: its sha256 is another one; {_AGAIN}")
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP)
        if (index.ntotal, index.d) != tuple(shape):
            raise DataError(f"{path} is of other features; {_AGAIN}")
        return cls(index, lists)

    def nearest(
        self, bank: Tensor, queries: Tensor, k: int, allowed: Tensor | None = None
    ) -> Neighbours:
        """Find about the k nearest rows of each query, ranked by exact cosines.

        Bank (N, F) and queries (Q, F) are as `fixed_point_units` returns them; only rows
        that are `allowed` (N,) are found. Where there are fewer, the last similarities are -inf.
        """
        faiss = import_faiss(*_NEEDS)
        settings = {"nprobe": min(self.lists, self._index.nlist)}
        if allowed is not None:
            bits = np.packbits(allowed.numpy(), bitorder="little")
            settings["sel"] = faiss.IDSelectorBitmap(bits)
        params, most = faiss.SearchParametersIVF(**settings), min(len(bank), k + SPARE)
        rows = torch.from_numpy(self._index.search(queries.numpy(), most, params=params)[1])
        similarities = torch.full(rows.shape, -torch.inf)
        there = (rows >= 0).nonzero(as_tuple=True)  # -1 where there are no more
        similarities[there] = exact_cosines(bank, rows[there], queries, there[0])
        return best(similarities, rows, k)


def write_approximate(rows: Tensor, path: Path) -> tuple[int, float]:
    """Write an inverted file of rows, (N, F) as `fixed_point_units` returns them.

    Returns how many lists a query looks into, as many as recall needs, and the recall, measured on
    MEASURED of the rows, each searched among all others.

    Raises:
        DataError: Too many lists would be needed, or faiss is missing.
    """
    faiss = import_faiss(*_NEEDS)
    lists = 2 ** round(math.log2(len(rows)) / 2)
    index = faiss.index_factory(rows.shape[1], f"IVF{lists},SQ8", faiss.METRIC_INNER_PRODUCT)
    index.train(rows[:: max(1, len(rows) // (TRAINED * lists))].numpy())
    for part in torch.split(rows, ADDED_ROWS):
        index.add(part.numpy())
    places = torch.arange(MEASURED) * len(rows) // MEASURED
    own = torch.arange(len(rows))
    # (MEASURED, TOP)
    true = nearest(rows, rows[places], TOP, units=True, hidden=(own, places)).indices
    looked, recall = 1, 0.0
    while looked <= max(1, lists // MOST_LOOKED):
        near = Approximate(index, looked).nearest(rows, rows[places], TOP + 1).indices
        hit = (true[:, :, None] == near[:, None]).any(2)  # a row itself is none of its true ones
        recall = float(hit.float().mean())
        if recall >= LEAST_RECALL:
            try:
                faiss.write_index(index, str(path))
            except RuntimeError as error:  # a full disk
                raise DataError(f"cannot write {path.parent}: {error}") from error
            return looked, recall
        looked *= 2
    raise DataError(
        f"an approximate index finds {recall:.1%} of the {TOP} nearest where a query looks into "
        f"one list of {MOST_LOOKED}, under {LEAST_RECALL:.0%}: leave --approximate out"
    )
