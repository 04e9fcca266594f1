"""Pairs of samples that may be one picture, by descriptors or by features; exact, in tiles."""

from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.curate.thumbnails import COARSE, EVEN, FULL, LEVELS
from sslpipe.evaluation.neighbours import nearest
from sslpipe.precision import full_float32

Integers = NDArray[np.int64]
TILE_NUMBERS = 2**22  # similarities of a tile, 16 MiB, twice
QUERIES = 2**15  # features searched at a time, for which the bank is rounded anew
NEIGHBOURS = 5  # of each sample; more stand in a group through those
WIDER = 32  # of each sample, by few views
FINE_PAIRS = 2**14  # compared by all views at a time: 112 MiB
LEAST_SIMILAR = 0.6  # cosine of descriptors below which nothing was a duplicate


def by_descriptors(
    descriptors: NDArray[np.int8],
    k: int = NEIGHBOURS,
    least: float = LEAST_SIMILAR,
    *,
    progress: Callable[[int], None] | None = None,
) -> Integers:
    """Pair each sample with those whose whole picture is most like one of its views.

    Of each sample, WIDER are searched by its COARSE views among all; of those, the k that are most
    like any view stay.

    Args:
        descriptors: (N, VIEWS, 64) int8 of `thumbnails.describe`.
        k: Neighbours of a sample, and what is as like it as the last of them.
        least: Cosine that a neighbour has at least.
        progress: Called with the number of samples of each tile.

    Returns:
        (P, 2) int64 rows, each pair once, the lower row first, in order. Sums are of whole numbers
        and exact, so that neither tiles nor threads change a pair.
    """
    count = len(descriptors)
    bank = _halves(torch.from_numpy(descriptors[:, FULL]))
    bank = bank[0].T.contiguous(), bank[1].T.contiguous()
    pairs = [np.zeros((0, 2), np.int64)]
    step = max(1, TILE_NUMBERS // max(1, count))
    wide = min(WIDER, count - 1)
    with full_float32():
        for start in range(0, count if wide > 0 else 0, step):
            part = descriptors[start : start + step]
            best = torch.full((len(part), count), -torch.inf)
            for view in COARSE:
                even, odd = _halves(torch.from_numpy(part[:, view]))
                # the same, or mirrored: the odd frequencies with either sign
                similar = torch.mm(odd, bank[1]).abs_().addmm_(even, bank[0])
                torch.maximum(best, similar, out=best)
            own = torch.arange(len(part))
            best[own, start + own] = -torch.inf
            # the largest, and whatever equals the last of them
            floor = best.topk(wide, dim=1).values[:, -1:].clamp_(min=least * LEVELS**2)
            rows, near = (best >= floor).nonzero(as_tuple=True)
            pairs.append(_finest(descriptors, (rows + start).numpy(), near.numpy(), k))
            if progress is not None:
                progress(len(part))
    return _each_once(np.concatenate(pairs))


def _halves(descriptors: Tensor) -> tuple[Tensor, Tensor]:
    """Even and odd horizontal frequencies as float32. (n, 64) int8 -> (n, 32), (n, 32)."""
    even = torch.from_numpy(EVEN)
    wide = descriptors.float()
    return wide[:, even], wide[:, ~even]


def _finest(descriptors: NDArray[np.int8], rows: Integers, near: Integers, k: int) -> Integers:
    """Of each row's neighbours, keep the k most like any of its views. -> (P, 2)."""
    alike = np.empty(len(rows), np.float32)
    for first in range(0, len(rows), FINE_PAIRS):
        part = slice(first, first + FINE_PAIRS)
        even, odd = similarities(descriptors, rows[part], near[part])
        alike[part] = (even + np.abs(odd)).max(1)  # cosines
    order = np.lexsort((near, -alike, rows))
    rank = np.arange(len(rows)) - np.searchsorted(rows[order], rows[order])
    kept = order[rank < k]
    return np.stack([rows[kept], near[kept]], 1)


def similarities(
    descriptors: NDArray[np.int8], whole: Integers, part: Integers
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Compare every view of some rows with the whole of others.

    Returns:
        (P, VIEWS) each: what even and odd horizontal frequencies add to the cosine; of the mirror
        image the second counts negatively.
    """
    views = descriptors[whole].astype(np.float32)  # (P, VIEWS, 64)
    other = descriptors[part, FULL].astype(np.float32)  # (P, 64)
    lengths = np.linalg.norm(views, axis=2) * np.linalg.norm(other, axis=1)[:, None]
    lengths = np.maximum(lengths, 1.0)
    other = other[:, :, None]
    even, odd = ((views[:, :, own] @ other[:, own])[:, :, 0] / lengths for own in (EVEN, ~EVEN))
    return even, odd


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
