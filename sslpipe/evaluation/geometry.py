"""The shape of frozen features: spread, dimension, and what stays between two checkpoints."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sslpipe.errors import DataError
from sslpipe.evaluation.difference import Z95, Interval, bootstrap_means95
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.knn import check_pair
from sslpipe.evaluation.result import Result
from sslpipe.evaluation.verification import draw_pairs
from sslpipe.precision import to_float64
from sslpipe.random import permutation

GROUPS = 10  # of samples, held out in turn for an interval


def geometry(
    bank: Embeddings,
    queries: Embeddings,
    *,
    pairs: int = 10_000,
    most_rows: int = 4096,
    seed: int = 0,
) -> list[Result]:
    """Measure alignment, uniformity, effective rank and spread; the bank takes no part.

    None of these is an accuracy, and more is not always better.

    Returns:
        alignment: mean squared distance of unit features of two samples of one label, over `pairs`
        seeded pairs; 0 to 4 (training logs that of two views of one image).
        uniformity: log of the mean of exp(-2 squared distance) over all pairs of at most
        `most_rows` samples; 0 (one point) to -4 (a sphere).
        effective_rank: exp of the entropy of the normalised singular values of all features, not
        centred; 1 to F. Both it and std have the whole spectrum in details.
        std: mean over the dimensions of the standard deviation of unit features, times sqrt(F); 0
        (collapsed) to 1.
        Intervals: bootstrap over pairs (alignment), else a jackknife over samples.

    Source:
        Wang and Isola 2020, arXiv:2005.10242, alpha = t = 2; Garrido et al. 2023 (RankMe),
        arXiv:2210.02885, eq. 1.
    """
    check_pair(bank, queries)
    if most_rows <= GROUPS:
        raise DataError(f"most_rows = {most_rows} must be above {GROUPS}")

    # rows in an order that depends on ids and seed alone
    shuffled = torch.from_numpy(permutation(len(queries.ids), seed))
    rows = queries.rows(torch.argsort(queries.ids).cpu()[shuffled].to(queries.ids.device))
    features = rows.features.double()
    unit = features / features.norm(dim=1, keepdim=True).clamp_min(1e-300)

    # numbers
    chosen = draw_pairs(rows, pairs, seed)
    a, b = (torch.from_numpy(part[chosen.same]) for part in (chosen.first, chosen.second))
    squared = (unit[a] - unit[b]).square().sum(dim=1).cpu().numpy()
    some = unit[:most_rows]
    tall, kept = len(features) >= features.shape[1], _without_groups(features)
    gram = features.T @ features if tall else features @ features.T
    grams = (
        gram - features[~each].T @ features[~each] if tall else gram[each][:, each] for each in kept
    )
    values, ranks = singular_values(gram), [float(rank_of(singular_values(g))) for g in grams]

    jackknifed: dict[str, tuple[float, Sequence[float], int, dict[str, Any]]] = {
        "uniformity": (float(uniformity(some)), _uniformities(some), len(some), {}),
        "effective_rank": (
            float(rank_of(values)),
            ranks,
            len(unit),
            {"singular_values": values.tolist()},
        ),
        "std": (
            _spread(unit),
            [_spread(unit[each]) for each in kept],
            len(unit),
            {"std_spectrum": unit.std(dim=0, correction=0).sort(descending=True).values.tolist()},
        ),
    }
    protocol, (interval,) = f"geometry seed={seed}", bootstrap_means95(squared[:, None])
    of_pairs, mean = f"{protocol} same-label pairs={len(squared)}", float(squared.mean())
    return [
        Result(of_pairs, "alignment", mean, interval, len(unit), 0, unit="number"),
        *(
            Result(protocol, name, whole, _jackknife95(whole, without), count, 0, details, "number")
            for name, (whole, without, count, details) in jackknifed.items()
        ),
    ]


def _without_groups(rows: Tensor) -> list[Tensor]:
    """(N,) bool for each of GROUPS groups of rows: those that are not in it."""
    group = torch.arange(len(rows), device=rows.device) % GROUPS
    return [group != number for number in range(GROUPS)]


def _uniformities(unit: Tensor) -> list[float]:
    """Uniformity without each group, from sums of one table."""
    kept = torch.stack(_without_groups(unit)).to(unit.dtype)  # (G, N)
    sums = ((kept @ potentials_less_one(unit)) * kept).sum(dim=1)
    rows = kept.sum(dim=1)
    return (sums / (rows * (rows - 1))).log1p().tolist()


def _spread(unit: Tensor) -> float:
    return float(unit.std(dim=0, correction=0).mean() * unit.shape[1] ** 0.5)


def _jackknife95(whole: float, without: Sequence[float]) -> Interval:
    """Interval of a value of all rows from its values without each group of them.

    Source: Efron and Stein 1981, Annals of Statistics 9(3), for groups.
    """
    spread = np.array(without) - np.mean(without)
    error = float(np.sqrt((GROUPS - 1) / GROUPS * (spread**2).sum()))
    return whole - Z95 * error, whole + Z95 * error


def effective_rank(rows: Tensor) -> Tensor:
    """Compute exp(entropy of s / sum(s)), s the singular values of rows (R, D), in float64.

    From the smaller Gram matrix; NaN if one number is not finite. On the CPU for tensors on a
    device without float64.
    """
    rows = to_float64(rows)  # squaring halves the digits of small singular values
    gram = rows.T @ rows if rows.shape[0] >= rows.shape[1] else rows @ rows.T
    return rank_of(singular_values(gram))


def singular_values(gram: Tensor) -> Tensor:
    """Compute those of the rows with this Gram matrix (n, n), from the largest; or NaN."""
    if not bool(torch.isfinite(gram).all()):  # eigvalsh would raise
        return gram.new_full((len(gram),), math.nan)
    squares: Tensor = torch.linalg.eigvalsh(gram)
    return squares.clamp_min(0).sqrt().flip(0)


def rank_of(s: Tensor) -> Tensor:
    """Compute exp(entropy of s / sum(s)) of singular values s (n,)."""
    p = s / s.sum().clamp_min(torch.finfo(s.dtype).tiny)
    entropy: Tensor = torch.special.entr(p).sum()
    return entropy.exp()


def potentials_less_one(u: Tensor) -> Tensor:
    """Compute exp(-2 |u_i - u_j|^2) - 1 of rows u (M, D): (M, M), 0 on the diagonal.

    Less one, so that the distances of collapsed rows are not lost beside it.
    """
    u = u - u.mean(dim=0)  # distances know no origin, rounding does
    lengths = u.square().sum(dim=1)
    squared = torch.addmm(lengths + lengths[:, None], u, u.T, alpha=-2).clamp_min_(0)
    return squared.mul_(-2).expm1_().fill_diagonal_(0)


def uniformity(u: Tensor) -> Tensor:
    """Compute the log of the mean of exp(-2 |u_i - u_j|^2) over i != j; 0 for a single row."""
    if len(u) < 2:
        return u.new_zeros(())
    total = to_float64(potentials_less_one(u).sum(dim=1)).sum()
    mean: Tensor = total / (len(u) * (len(u) - 1))
    return mean.log1p()
