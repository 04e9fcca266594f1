"""Pairs of samples that may be one picture, by descriptors or by features; exact, in tiles."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.curate.scan import Pictures
from sslpipe.curate.thumbnails import COARSE, EVEN, FREQUENCIES, FULL, LEVELS, rounded
from sslpipe.evaluation.neighbours import nearest
from sslpipe.precision import full_float32

Integers = NDArray[np.int64]
TILE_ROWS, TILE_COLUMNS = 32, 4096  # of similarities, twice 512 KiB: a core's cache
QUERIES = 2**15  # features searched at a time, for which the bank is rounded anew
NEIGHBOURS = 5  # of each picture; more stand in a group through those
WIDER, WIDER_SHARE = 64, 1 / 64  # of each picture, by few views: at least, and of all
LEAST_SIMILAR = 0.6  # cosine of descriptors below which nothing was a duplicate

# the lowest 5 x 5 frequencies, but the mean, of which a descriptor knows nothing
_LOW = np.flatnonzero(np.add.outer(np.arange(FREQUENCIES) < 5, np.arange(FREQUENCIES) < 5) == 2)[1:]


def by_descriptors(
    pictures: Pictures,
    k: int = NEIGHBOURS,
    least: float = LEAST_SIMILAR,
    *,
    progress: Callable[[int], None] | None = None,
) -> Integers:
    """Pair each sample with those whose whole picture is most like one of its views.

    Of each picture, WIDER are searched among all, by the low frequencies of its COARSE views; of
    those, the k that are most like any view stay.

    Args:
        pictures: Whose descriptors are compared.
        k: Neighbours of a picture.
        least: Cosine that a neighbour has at least.
        progress: Called with the number of pictures of each tile.

    Returns:
        (P, 2) int64 rows of samples, each pair once, the lower row first, in order. Sums are of
        whole numbers and exact, so that neither tiles nor threads change a pair.
    """
    count = len(pictures.sample)
    low = rounded(pictures.descriptors[:, COARSE][:, :, _LOW].astype(np.float32))
    even, odd = _halves(torch.from_numpy(low))  # (count, views, 14), (count, views, 10)
    bank = even[:, 0].T.contiguous(), odd[:, 0].T.contiguous()
    pairs = [np.zeros((0, 2), np.int64)]
    wide = min(max(WIDER, int(WIDER_SHARE * count)), count - 1)
    best = torch.empty(TILE_ROWS, count)
    for start in range(0, count if wide > 0 else 0, TILE_ROWS):
        part = slice(start, min(start + TILE_ROWS, count))
        alike = best[: part.stop - start]
        _most_alike(even[part], odd[part], bank, alike)
        own = torch.arange(len(alike))
        alike[own, start + own] = -torch.inf
        near = alike.numpy()
        floor = np.partition(near, count - wide, axis=1)[:, count - wide]
        pairs += [
            _finest(pictures, start + row, np.flatnonzero(near[row] >= floor[row]), k, least)
            for row in range(len(alike))
        ]
        if progress is not None:
            progress(len(alike))
    return _each_once(np.concatenate(pairs))


def _halves(low: Tensor) -> tuple[Tensor, Tensor]:
    """Even and odd horizontal frequencies as float32. (n, views, 24) int8 -> two of them."""
    even = torch.from_numpy(EVEN[_LOW])
    return low[..., even].float(), low[..., ~even].float()


def _most_alike(even: Tensor, odd: Tensor, bank: tuple[Tensor, Tensor], out: Tensor) -> None:
    """Write the products of rows with a bank, the largest of all views and of both mirrorings.

    Args:
        even: (n, views, 14) of the rows.
        odd: (n, views, 10) of the rows.
        bank: (14, N) and (10, N).
        out: (n, N).
    """
    buffer = torch.empty(len(even) * TILE_COLUMNS)
    with full_float32():
        for first in range(0, out.shape[1], TILE_COLUMNS):
            tile = out[:, first : first + TILE_COLUMNS]
            columns = [half[:, first : first + TILE_COLUMNS] for half in bank]
            similar = buffer[: tile.numel()].view(tile.shape)
            for view in range(even.shape[1]):
                # the same, or mirrored: the odd frequencies with either sign
                torch.mm(odd[:, view], columns[1], out=similar).abs_()
                similar.addmm_(even[:, view], columns[0])
                torch.maximum(tile, similar, out=tile) if view else tile.copy_(similar)


def _finest(pictures: Pictures, row: int, near: Integers, k: int, least: float) -> Integers:
    """Of a picture's neighbours, keep the k most like any of its views, as samples. -> (k, 2)."""
    views = pictures.descriptors[row].astype(np.float32)  # (VIEWS, 64)
    others = pictures.descriptors[near, FULL].astype(np.float32)  # (near, 64)
    alike = (views[:, EVEN] @ others[:, EVEN].T + np.abs(views[:, ~EVEN] @ others[:, ~EVEN].T)).max(
        0
    )
    samples = pictures.sample[near]
    alike[samples == pictures.sample[row]] = 0
    order = np.lexsort((near, -alike))[:k]
    kept = samples[order[alike[order] >= least * LEVELS**2]]
    return np.stack([np.full(len(kept), pictures.sample[row]), kept], 1)


def similarities(
    descriptors: NDArray[np.int8], whole: Integers, part: Integers
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compare every view of some rows with the whole of others.

    Returns:
        (P, VIEWS) each: what even and odd horizontal frequencies add to the cosine; of the mirror
        image the second counts negatively.
    """
    views = descriptors[whole].astype(np.float32)  # (P, VIEWS, 64)
    other = descriptors[part, FULL].astype(np.float32)[:, :, None]  # (P, 64, 1)
    even, odd = ((views[:, :, own] @ other[:, own])[:, :, 0] for own in (EVEN, ~EVEN))
    return even / LEVELS**2, odd / LEVELS**2


def by_features(features: Tensor, k: int = NEIGHBOURS) -> Integers:
    """Pair each sample with its nearest ones by cosine.

    Args:
        features: (N, F) float32, any scale.
        k: Neighbours of a sample.

    Returns:
        (P, 2) int64 rows, each pair once, the lower row first, in order.
    """
    count, pairs = len(features), []
    k = min(k, count - 1)
    ids = torch.arange(count)
    for start in range(0, count if k > 0 else 0, QUERIES):
        part = slice(start, start + QUERIES)
        near = nearest(features, features[part], k, bank_ids=ids, query_ids=ids[part]).indices
        pairs.append(torch.stack([ids[part, None].expand_as(near), near], 2).reshape(-1, 2))
    return _each_once(torch.cat([torch.zeros(0, 2, dtype=torch.int64), *pairs]).numpy())


def _each_once(pairs: Integers) -> Integers:
    found: Integers = np.unique(np.sort(pairs, axis=1), axis=0)
    return found
