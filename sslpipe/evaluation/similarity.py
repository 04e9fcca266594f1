"""How near two rows of features are: SIMILARITIES, tables of queries against a whole gallery.

Each is rounded to float32 from float64, larger is nearer. What scales rows is a power of two, so
that numbers of any size are compared without a change of digits.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from sslpipe.evaluation.exact import fixed_point_units

Similarity = Literal["cosine", "dot", "euclidean"]

NEAR = 1e-6  # of the squared lengths: below it a squared distance is made of differences
PART_PAIRS = 4096  # of near rows at a time

Compare = Callable[[Tensor], Tensor]


def cosines(gallery: Tensor, most: int, dtype: torch.dtype = torch.float64) -> Compare:
    """Compare by the cosine, of rows in fixed point: exact in float64, see `exact`.

    Args:
        gallery: (N, F) float32; so of the others.
        most: Queries of a call, at most; so of the others.
        dtype: Of the products.
    """
    bank = fixed_point_units(gallery).to(dtype)
    buffer = bank.new_empty(most, len(bank))  # used again: fresh memory is slow

    def compare(queries: Tensor) -> Tensor:
        units = fixed_point_units(queries).to(dtype)
        return torch.mm(units, bank.T, out=buffer[: len(units)]).float()

    return compare


def dot_products(gallery: Tensor, most: int) -> Compare:
    """Compare by the dot product; the gallery and each query are scaled, which ranks nothing."""
    bank = gallery.double() * _power_of_two(gallery.abs().max())
    buffer = bank.new_empty(most, len(bank))

    def compare(queries: Tensor) -> Tensor:
        wide = queries.double() * _power_of_two(queries.abs().amax(1, keepdim=True))
        return torch.mm(wide, bank.T, out=buffer[: len(wide)]).float()

    return compare


def negative_distances(gallery: Tensor, most: int) -> Compare:
    """Compare by the Euclidean distance, less than 0; both sides are taken from one centre."""
    scale = _power_of_two(gallery.abs().max())
    wide = gallery.double() * scale
    center = wide.mean(0)  # distances know no origin, rounding does
    bank = wide - center
    lengths = bank.square().sum(1)
    buffer = bank.new_empty(most, len(bank))

    def compare(queries: Tensor) -> Tensor:
        rows = queries.double() * scale - center
        sums = lengths + rows.square().sum(1, keepdim=True)
        squared = torch.addmm(sums, rows, bank.T, alpha=-2, out=buffer[: len(rows)])  # (q, N)
        # where they nearly vanish, products have lost digits: equal rows have distance 0
        near = (squared < NEAR * sums).nonzero()  # (pairs, 2)
        for a, b in (part.T for part in torch.split(near, PART_PAIRS)):
            squared[a, b] = (rows[a] - bank[b]).square().sum(1)
        return squared.sqrt_().div_(-scale).float()

    return compare


def _power_of_two(largest: Tensor) -> Tensor:
    """Bring a largest number to 1/2..1; 1 for 0."""
    return torch.ldexp(torch.ones_like(largest, dtype=torch.float64), -torch.frexp(largest)[1])


SIMILARITIES: dict[str, Callable[[Tensor, int], Compare]] = {
    "cosine": cosines,
    "dot": dot_products,
    "euclidean": negative_distances,
}
