"""Pairs of samples that may be one picture, by their descriptors; exact, in tiles."""

from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.curate.scan import Progress as Advance
from sslpipe.curate.scan import one_thread_an_operation
from sslpipe.curate.thumbnails import COARSE, EVEN, FREQUENCIES, FULL, rounded
from sslpipe.precision import full_float32

Integers = NDArray[np.int64]
Floats = NDArray[np.float32]
TILE_ROWS, TILE_COLUMNS = 32, 512  # of similarities, of ten views 640 KiB: a core's cache
NEIGHBOURS = 5  # of each picture, at first; see `duplicates.find_duplicates`
WIDER, WIDER_SHARE = 256, 1 / 64  # of each picture, by few views: at least, and of all
LEAST_SIMILAR = 0.6  # cosine of descriptors below which nothing was a duplicate

# the lowest 5 x 5 frequencies, but the mean, of which a descriptor knows nothing
_FEW = np.arange(FREQUENCIES) < 5
_LOW = np.flatnonzero(np.logical_and.outer(_FEW, _FEW))[1:]
# all frequencies, the even ones first
_HALVED, _HALF = np.argsort(~EVEN, kind="stable"), int(EVEN.sum())


class ByDescriptors:
    """Search of the samples whose whole picture is most like a view of another.

    WIDER are found by the low frequencies of a picture's COARSE views; the k of them most like any
    view stay. Sums of whole numbers are exact: neither tiles nor threads change a pair.

    Args:
        descriptors: (N, VIEWS, 64) int8, of all samples; they are held once.
        rows: (M,) int64 of those that are compared, ascending.
        num_workers: Threads that search; 0: the caller does.
    """

    def __init__(
        self, descriptors: NDArray[np.int8], rows: Integers, *, num_workers: int = 2
    ) -> None:
        self.descriptors, self.rows, self.num_workers = descriptors, rows, num_workers
        wholes = descriptors[rows, FULL]
        low = _low_halves(wholes[:, None])
        self.low = [half[:, 0].T.contiguous() for half in low]  # (14, M), (10, M)
        self.whole = np.ascontiguousarray(wholes[:, _HALVED], np.float32)  # (M, 64)
        # rounded descriptors are longer or shorter than 127 by up to 1 %, and of pictures that look
        # alike cosines differ by less
        self.length = _lengths(self.whole)  # (M,)

    def pairs(self, samples: Integers, k: int, advance: Advance | None = None) -> Integers:
        """Pair each of some samples, ascending, with its k nearest.

        Args:
            samples: (n,) which.
            k: How many neighbours.
            advance: Called with the number of samples of each part that is done.

        Returns:
            (P, 2) int64 rows of samples, each pair once, the lower row first, in order.
        """
        rows = np.searchsorted(self.rows, samples)
        parts = [rows[at : at + TILE_ROWS] for at in range(0, len(rows), TILE_ROWS)]

        def near(part: Integers) -> Integers:
            found = self._near(part, k)
            if advance is not None:
                advance(len(part))
            return found

        with (
            full_float32(),
            one_thread_an_operation(),
            ThreadPoolExecutor(max(1, self.num_workers), "sslpipe-search") as pool,
        ):
            return each_once(list((pool.map if self.num_workers else map)(near, parts)))

    def _near(self, part: Integers, k: int) -> Integers:
        count = len(self.rows)
        wide = min(max(WIDER, int(WIDER_SHARE * count), 4 * k), count - 1)
        if wide < 1:
            return np.zeros((0, 2), np.int64)
        descriptors = self.descriptors[self.rows[part]]
        near = self._most_alike(descriptors[:, COARSE])
        near[np.arange(len(part)), part] = -np.inf
        floors = _floors(near, wide)
        views = np.ascontiguousarray(descriptors[:, :, _HALVED], np.float32)
        return np.concatenate(
            [
                self._finest(row, views[i], np.flatnonzero(near[i] >= floors[i]), k)
                for i, row in enumerate(part.tolist())
            ]
        )

    def _most_alike(self, views: NDArray[np.int8]) -> Floats:
        """The largest products, of all views and both mirrorings, with the bank. (n, M)."""
        even, odd = _low_halves(views)
        rows, count = even.shape[:2]
        even, odd = even.flatten(0, 1), odd.flatten(0, 1)
        out = torch.empty(rows, len(self.rows))
        buffer = torch.empty(len(even) * TILE_COLUMNS)
        for first in range(0, out.shape[1], TILE_COLUMNS):
            tile = out[:, first : first + TILE_COLUMNS]
            bank = [half[:, first : first + TILE_COLUMNS] for half in self.low]
            similar = buffer[: count * tile.numel()].view(len(even), tile.shape[1])
            # the same, or mirrored: the odd frequencies with either sign
            torch.mm(odd, bank[1], out=similar).abs_()
            similar.addmm_(even, bank[0])
            torch.amax(similar.view(rows, count, -1), 1, out=tile)
        return out.numpy()

    def _finest(self, row: int, views: Floats, near: Integers, k: int) -> Integers:
        """Pair a picture with the k of its neighbours most like any of its views. (k, 2)."""
        wholes = self.whole.take(near, axis=0)
        even, odd = (
            views[:, half] @ wholes[:, half].T for half in (slice(_HALF), slice(_HALF, None))
        )  # (VIEWS, near)
        alike = ((even + np.abs(odd)) * (1 / _lengths(views)[:, None])).max(0) / self.length[near]
        alike[near == row] = 0
        if len(near) > k:
            kept = np.flatnonzero(alike >= np.partition(alike, len(near) - k)[len(near) - k])
            near, alike = near[kept], alike[kept]
        order = np.lexsort((near, -alike))[:k]
        kept = self.rows[near[order[alike[order] >= LEAST_SIMILAR]]]
        return np.stack([np.full(len(kept), self.rows[row]), kept], 1)


def each_once(pairs: list[Integers]) -> Integers:
    """Join lists of pairs, (P, 2) each: each pair once, the lower row first, in order."""
    every = np.concatenate([np.zeros((0, 2), np.int64), *pairs])
    found: Integers = np.unique(np.sort(every, axis=1), axis=0)
    return found


def _low_halves(descriptors: NDArray[np.int8]) -> tuple[Tensor, Tensor]:
    """Even and odd low frequencies of views. (n, v, 64) -> (n, v, 14), (n, v, 10), length 127."""
    low = torch.from_numpy(rounded(descriptors[:, :, _LOW].astype(np.float32)))
    even = torch.from_numpy(EVEN[_LOW])
    return low[..., even].float(), low[..., ~even].float()


def _floors(rows: Floats, wide: int) -> Floats:
    """Numbers that at least `wide` of each row are not below, and few more. (n, N) -> (n,)."""
    # maxima of eight: few of the largest are in one of them
    folds = 1
    while folds < 8 and rows.shape[1] // (2 * folds) >= 4 * wide:
        folds *= 2
    width = rows.shape[1] // folds
    maxima = rows[:, : folds * width].reshape(len(rows), folds, width).max(1)
    floors: Floats = np.partition(maxima, width - wide, axis=1)[:, width - wide]
    return floors


def _lengths(rows: Floats) -> Floats:
    """Lengths of rows of whole numbers, (..., d) -> (...); 1 of zeros. The sums are exact."""
    lengths: Floats = np.sqrt(np.maximum((rows**2).sum(-1), 1))
    return lengths
