"""Sums over all triplets of a batch, with their gradient, without a list of triplets."""

from typing import Any, Literal, NamedTuple, cast

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from sslpipe.metric_learning.losses.pairwise import Pairs, PerAnchor, positive_slots, tiles

Shape = Literal["hinge", "softplus", "ratio"]
Kind = Literal["all", "violating", "hard", "semi_hard"]

MOST_POSITIVES = 24  # from here on sorting the negatives costs less than meeting each


def triplet_sums(
    near: Tensor,
    far: Tensor | None,
    pairs: Pairs,
    *,
    margin: float = 0.0,
    shape: Shape = "hinge",
    kind: Kind = "all",
) -> PerAnchor:
    """Add up f(near_ap - far_an + margin) for each anchor over the triplets of `pairs`.

    Args:
        near: (n, M) distances.
        far: (n, M), with a margin of its own say; None: `near`.
        pairs: What counts.
        margin: Of v = near_ap - far_an + margin.
        shape: "hinge" f = [v]+, "softplus" log(1 + e^v), "ratio" 2 / (1 + e^-v)^2.
        kind: Which triplets count: "all"; "violating" v > 0; "hard" v > margin, that is
            far_an < near_ap; "semi_hard" 0 < v < margin.

    O(n M) memory. Time O(n M P) for P positives an anchor; for hinges with more than MOST_POSITIVES
    O(n M log M): negatives are sorted once a row and each positive meets a prefix of them, whose
    sum is known.
    """
    if shape not in ("hinge", "softplus", "ratio"):
        raise ValueError(f"shape = {shape!r} must be 'hinge', 'softplus' or 'ratio'")
    if kind not in ("all", "violating", "hard", "semi_hard"):
        raise ValueError(f"triplets = {kind!r} must be 'all', 'violating', 'hard' or 'semi_hard'")
    rule = _Rule(pairs, margin, shape, kind)
    return PerAnchor(*cast(tuple[Tensor, ...], _TripletSums.apply(near, far, rule)))


class _Rule(NamedTuple):
    pairs: Pairs
    margin: float
    shape: Shape
    kind: Kind


class _TripletSums(torch.autograd.Function):
    """The gradient is made with the sums: it is linear in what comes back for each anchor."""

    @staticmethod
    def forward(ctx: Any, near: Tensor, far: Tensor | None, rule: _Rule) -> tuple[Tensor, ...]:
        ctx.apart = far is not None
        far = near if far is None else far
        slots = positive_slots(rule.pairs.positive, rule.pairs.most_positives)
        nearby = slots.take(near).masked_fill_(~slots.filled, -torch.inf)  # (n, P)
        most = slots.columns.shape[1]
        if rule.shape == "hinge" and rule.pairs.triplets is None and most > MOST_POSITIVES:
            total, active, grad_near, grad_far = _sorted_sums(nearby, far, rule)
        else:
            total, active, grad_near, grad_far = _direct_sums(nearby, far, rule)
        if rule.kind != "all":
            items = active
        elif rule.pairs.triplets is None:
            items = slots.filled.sum(1) * rule.pairs.negative.sum(1)
        else:
            items = rule.pairs.triplets.sum((1, 2))
        if not ctx.apart:  # a column is a positive or a negative of the anchor, never both
            grad_far.scatter_add_(1, slots.columns, grad_near)
        ctx.save_for_backward(slots.columns, grad_near, grad_far)
        ctx.mark_non_differentiable(items, active)
        return total, items, active

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor, *_: Tensor) -> tuple[Tensor, Tensor | None, None]:
        columns, grad_near, grad_far = ctx.saved_tensors
        far = grad_far * grad[:, None]
        if not ctx.apart:
            return far, None, None
        near = torch.zeros_like(grad_far).scatter_add_(1, columns, grad_near * grad[:, None])
        return near, far, None


def _direct_sums(nearby: Tensor, far: Tensor, rule: _Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Every positive against every column, in tiles of rows."""
    total = far.new_empty(len(far))
    active = torch.empty(len(far), dtype=torch.int64, device=far.device)
    grad_near, grad_far = torch.empty_like(nearby), torch.empty_like(far)
    for rows in tiles(len(far), nearby.shape[1] * far.shape[1]):
        negatives = far[rows].masked_fill(~rule.pairs.negative[rows], torch.inf)  # v = -inf, f = 0
        v = (nearby[rows] + rule.margin)[:, :, None] - negatives[:, None]  # (r, P, M)
        _leave_out(v, rule, rows)
        value, slope = _curve(v, rule.shape)
        total[rows] = value.sum((1, 2))
        torch.sum(slope, 2, out=grad_near[rows])
        torch.sum(slope, 1, out=grad_far[rows]).neg_()
        counts = grad_near[rows] if rule.shape == "hinge" else (value > 0).sum(2)
        active[rows] = counts.to(torch.int64).sum(1)
    return total, active, grad_near, grad_far


def _leave_out(v: Tensor, rule: _Rule, rows: slice) -> None:
    """Set v = -inf, where f and its slope are 0, for triplets of another kind."""
    if rule.pairs.triplets is not None:
        v.masked_fill_(~rule.pairs.triplets[rows], -torch.inf)
    if rule.kind in ("violating", "semi_hard"):
        v.masked_fill_(v <= 0, -torch.inf)
    if rule.kind == "semi_hard":
        v.masked_fill_(v >= rule.margin, -torch.inf)
    if rule.kind == "hard":
        v.masked_fill_(v <= rule.margin, -torch.inf)


def _curve(v: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return f(v) and f'(v)."""
    if shape == "hinge":
        return v.clamp_min_(0), v.sign()
    p = torch.sigmoid(v)
    if shape == "softplus":
        return torch.nn.functional.softplus(v), p
    square = p.square()
    return 2 * square, 4 * square * (1 - p)


def _sorted_sums(nearby: Tensor, far: Tensor, rule: _Rule) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """A positive counts with the sorted negatives from place `low` to before place `high`."""
    ordered, order = far.masked_fill(~rule.pairs.negative, torch.inf).sort(1)
    sums = torch.nn.functional.pad(ordered.masked_fill(ordered == torch.inf, 0).cumsum(1), (1, 0))
    reach = nearby + rule.margin  # (n, P): a far distance below it is active
    low = torch.zeros_like(order[:, : nearby.shape[1]])
    high = torch.searchsorted(ordered, reach if rule.kind != "hard" else nearby)
    if rule.kind == "semi_hard":  # beyond the positive
        low = torch.searchsorted(ordered, nearby, right=True)
    met = (high - low).clamp_min_(0)  # (n, P)
    high = low + met
    ends = torch.where(met > 0, reach, 0) * met - (sums.gather(1, high) - sums.gather(1, low))
    steps = torch.zeros_like(sums)  # +1 where a positive's stretch begins, -1 behind its end
    one = torch.ones_like(nearby)
    steps.scatter_add_(1, low, one).scatter_add_(1, high, -one)
    grad_far = torch.empty_like(far).scatter_(1, order, -steps.cumsum(1)[:, :-1])
    return ends.sum(1), met.sum(1), met.to(far.dtype), grad_far
