"""Cosines without rounding, and their ranks with ties in a fixed order.

Unit vectors are rounded to multiples of 2^-24, which float32 holds exactly. A product of two
components is then a multiple of 2^-48, and the sum of any of them fits into float64 without
rounding (it is at most 1): a similarity computed in float64 depends on the two vectors only, not
on the order of the sum, the tile, the library or the machine. It is rounded to float32; equal
similarities rank by the lower row of the bank.
"""

from typing import NamedTuple

import torch
from torch import Tensor

PART_ROWS = 4096  # rows converted to float64 at a time
EXACT_NUMBERS = 2**21  # float64 similarities of a tile; 32 times as many on a GPU
BANK_PART = 2**16  # rows of a bank that is compared as a whole, at a time


class Neighbours(NamedTuple):
    """The nearest rows of some queries, (Q, k) int64, and their cosines, (Q, k) float32."""

    indices: Tensor
    similarities: Tensor


def fixed_point_units(rows: Tensor) -> Tensor:
    """Scale rows to length 1, in multiples of 2^-24, (N, F) float32; zeros stay zeros."""
    units = torch.empty_like(rows, dtype=torch.float32, memory_format=torch.contiguous_format)
    for part, out in zip(torch.split(rows, PART_ROWS), torch.split(units, PART_ROWS), strict=True):
        wide = part.double()
        wide /= wide.norm(dim=1, keepdim=True).clamp_min(1e-300)
        out.copy_(wide.mul_(2.0**24).round_().mul_(2.0**-24))
    return units


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
    """Keep the k nearest of the columns, nearest first.

    `similarities` (q, n) are -inf for what may not be found; `rows` (n,) or (q, n) are the bank's.
    """
    columns = rank_keys(similarities, rows).topk(k, dim=1).indices  # (q, k)
    return Neighbours(
        rows.expand_as(similarities).gather(1, columns), similarities.gather(1, columns)
    )


def among_all(
    bank: Tensor, queries: Tensor, k: int, bank_ids: Tensor | None, ids: Tensor | None
) -> Neighbours:
    """Find the k nearest with every similarity computed exactly; rows in fixed point."""
    numbers, found = EXACT_NUMBERS * (32 if bank.is_cuda else 1), list[Neighbours]()
    for first in range(0, len(bank), BANK_PART):
        some = torch.arange(first, min(first + BANK_PART, len(bank)), device=bank.device)
        wide, parts = bank[first : first + BANK_PART].double(), []
        step = max(1, numbers // len(some))
        for start in range(0, max(1, len(queries)), step):
            part = slice(start, start + step)
            similarities = (queries[part].double() @ wide.T).float()  # (q, N)
            similarities.nan_to_num_(torch.inf, torch.inf, -torch.inf)  # of damaged rows: seen
            if bank_ids is not None and ids is not None:
                own = bank_ids[first : first + BANK_PART] == ids[part, None]
                similarities.masked_fill_(own, -torch.inf)
            parts.append(best(similarities, some, min(k, len(some))))
        found.append(Neighbours(*(torch.cat(columns) for columns in zip(*parts, strict=True))))
        if len(found) > 1:  # the best among this part and those before
            indices, similarities = (torch.cat(side, 1) for side in zip(*found, strict=True))
            found = [best(similarities, indices, min(k, indices.shape[1]))]
    return found[0]
