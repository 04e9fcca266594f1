"""Angular loss: the one tuple loss whose negatives are compared with the positive as well."""

import math
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from sslpipe.metric_learning.losses.base import MetricLoss
from sslpipe.metric_learning.losses.pairwise import (
    NEVER,
    LabelledRows,
    Pairs,
    PerAnchor,
    Slots,
    per_pair,
    positive_slots,
    tiles,
)


class AngularLoss(MetricLoss, normalize=True):
    """Compare positives and negatives by the angle at the negative: log(1 + sum of e^f).

    The sum runs over the anchor's negatives, once for each positive; rows have length 1, and
    f = 4 t (x_a + x_p) x_n - 2 (1 + t) x_a x_p with t = tan^2 of the angle.

    Args:
        angle_deg: The angle in degrees, above 0 and below 90; 36 to 55 are usual.

    Source:
        Wang et al. 2017, arXiv:1708.01682, section 3.
    """

    @staticmethod
    def row_terms(batch: LabelledRows, pairs: Pairs, *, angle_deg: float = 45.0) -> list[PerAnchor]:
        """Return the terms that are added up, see `MetricLoss`."""
        if not 0 < angle_deg < 90:
            raise ValueError(f"angle_deg = {angle_deg} must lie between 0 and 90")
        t = math.tan(math.radians(angle_deg)) ** 2
        s = batch.similarities()
        alone = batch.anchors.shape == batch.columns.shape
        everyone = s if alone else batch.columns @ batch.columns.T  # (M, M)
        slots = positive_slots(pairs.positive, pairs.most_positives)
        negatives = cast(Tensor, _NegativesOfPairs.apply(s, everyone, 4 * t, slots, pairs.negative))
        values = F.softplus(negatives - 2 * (1 + t) * slots.take(s))  # (n, P)
        return [per_pair(values, slots.filled & pairs.negative.any(1, keepdim=True))]


class _NegativesOfPairs(torch.autograd.Function):
    """(n, M), (M, M) -> (n, P): log of the sum over a's negatives j of e^{c (s_aj + e_pj)}.

    Made in tiles, forward and again in backward: nothing of size n P M is ever there.
    """

    @staticmethod
    def forward(
        ctx: Any, s: Tensor, everyone: Tensor, c: float, slots: Slots, negative: Tensor
    ) -> Tensor:
        ctx.c, ctx.slots, ctx.negative = c, slots, negative
        out = s.new_empty(slots.columns.shape)
        for rows in tiles(len(s), slots.filled.shape[1] * s.shape[1]):
            out[rows] = _exponents(s, everyone, c, slots, negative, rows).logsumexp(2)
        ctx.save_for_backward(s, everyone, out)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None, None]:
        s, everyone, out = ctx.saved_tensors
        grad = ctx.c * grad.masked_fill(~ctx.slots.filled, 0)
        grad_s, grad_everyone = torch.empty_like(s), torch.zeros_like(everyone)
        for rows in tiles(len(s), ctx.slots.filled.shape[1] * s.shape[1]):
            w = _exponents(s, everyone, ctx.c, ctx.slots, ctx.negative, rows)  # (r, P, M)
            w = w.sub_(out[rows, :, None]).exp_().mul_(grad[rows, :, None])
            grad_s[rows] = w.sum(1)
            grad_everyone.index_add_(0, ctx.slots.columns[rows].flatten(), w.flatten(0, 1))
        return grad_s, grad_everyone, None, None, None


def _exponents(
    s: Tensor, everyone: Tensor, c: float, slots: Slots, negative: Tensor, rows: slice
) -> Tensor:
    """(r, P, M); NEVER where the column is no negative."""
    own = s[rows].masked_fill(~negative[rows], NEVER)
    return everyone[slots.columns[rows]].add_(own[:, None]).mul_(c)
