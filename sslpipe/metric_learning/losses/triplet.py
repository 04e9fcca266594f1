"""Losses of triplets: a positive must be nearer to the anchor than a negative.

Each is a `MetricLoss`: its formula is `row_terms(batch, pairs) -> terms`.
"""

from collections.abc import Sequence
from typing import Annotated, Any, Literal, NamedTuple, cast

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sslpipe.gradients import first_order
from sslpipe.metric_learning.losses.metric_loss import MetricLoss, NumClasses, Reduction
from sslpipe.metric_learning.losses.pairwise import (
    Distance,
    LabelledRows,
    Pairs,
    PerAnchor,
    linear,
    per_pair,
    per_row,
)
from sslpipe.metric_learning.losses.tiled import tiles
from sslpipe.registry.part import Dim

Shape = Literal["hinge", "softplus", "ratio"]
Kind = Literal["all", "violating", "hard", "semi_hard"]


class TripletLoss(MetricLoss):
    """Want a positive nearer than a negative, by a margin: [D(a, p) - D(a, n) + margin]+.

    Items are all triplets of the batch; rows have length 1.

    Source:
        Schroff et al. 2015, arXiv:1503.03832, eq. 3; their reduction is the sum.
    """

    margin: float = 0.2
    """Of the hinge."""
    distance: Distance = "squared"
    """"squared" (of the Euclidean distance), "euclidean" or "cosine" (1 - cosine)."""
    triplets: Kind = "all"
    """Which count, in the mean too: "all"; "violating", with a loss above 0; "hard", D(a, n) <
    D(a, p); "semi_hard", D(a, p) < D(a, n) < D(a, p) + margin."""
    soft: bool = False
    """Log(1 + e^{D(a, p) - D(a, n) + margin}) instead of the hinge."""
    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        d = batch.distances(self.distance)
        shape: Literal["softplus", "hinge"] = "softplus" if self.soft else "hinge"
        return [triplet_sums(d, None, pairs, margin=self.margin, shape=shape, kind=self.triplets)]


class BatchHardLoss(MetricLoss):
    """Compare each anchor's farthest positive with its nearest negative; rows keep their lengths.

    [margin + D(farthest positive) - D(nearest negative)]+ for each anchor.

    Source:
        Hermans et al. 2017, arXiv:1703.07737, eq. 5 and section 2 for the soft margin.
    """

    margin: float = 0.2
    """Of the hinge."""
    distance: Distance = "euclidean"
    """"euclidean", "squared" or "cosine" (1 - dot product)."""
    soft: bool = False
    """Log(1 + e^{farthest positive - nearest negative}), without a margin."""

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        d = batch.distances(self.distance)
        farthest = d.masked_fill(~pairs.positive, -torch.inf).max(1).values
        nearest = d.masked_fill(~pairs.negative, torch.inf).min(1).values
        both = pairs.positive.any(1) & pairs.negative.any(1)
        gap = torch.where(both, farthest - nearest, 0)
        values = F.softplus(gap) if self.soft else (gap + self.margin).clamp_min(0)
        return [per_row(values, both)]


class TripletRatioLoss(MetricLoss):
    """Compare a softmax of two distances with (0, 1): 2 d^2 over all triplets; no margin.

    d = e^{D(a, p)} / (e^{D(a, p)} + e^{D(a, n)}), so 2 d^2 = d^2 + (1 - (1 - d))^2: the squared
    distance of the softmax of both from (0, 1). D is Euclidean.

    Source:
        Hoffer and Ailon 2015, arXiv:1412.6622, section 2.1.
    """

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        d = batch.distances("euclidean")
        return [triplet_sums(d, None, pairs, shape="ratio")]


class RankingAndTagsLoss(MetricLoss):
    """Rank triplets and classify tags: d^2 + weight * mean over tags of the cross entropy.

    d is that of `TripletRatioLoss`; items are triplets.

    Source:
        Simo-Serra and Ishikawa 2016, CVPR (Fashion style in 128 floats), section 4.
    """

    num_classes: NumClasses
    """Of the labels."""
    dim: Dim
    """D of the embeddings."""
    tags: Sequence[Sequence[int]] | None = None
    """For each class its tags, (num_classes, T) integers; none: the class is its only tag."""
    weight: float = 1.0
    """Of the cross entropy; not given in a confirmed source."""
    classified: Literal["negative", "anchor"] = "negative"
    """The image whose tags are classified, the negative (as published) or the anchor."""

    def setup(self) -> None:
        super().setup()
        classes = torch.arange(self.num_classes)[:, None]
        table = classes if self.tags is None else torch.tensor(self.tags)
        if table.dim() != 2 or len(table) != self.num_classes or int(table.min()) < 0:
            raise ValueError(
                f"tags must be a list of tags >= 0 for each of {self.num_classes} classes"
            )
        self.tag_table = nn.Buffer(table)
        classifiers = (nn.Linear(self.dim, int(top) + 1) for top in table.amax(0))
        self.classifiers = nn.ModuleList(classifiers)

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        d = batch.distances("euclidean")
        ratio = triplet_sums(d, None, pairs, shape="ratio")  # 2 d^2
        positives = pairs.positive.sum(1).to(d.dtype)
        if self.classified == "anchor":
            named = self._cross_entropy(batch.anchors, batch.labels) * ratio.items
        else:
            negatives = self._cross_entropy(batch.columns, batch.column_labels)  # (M,)
            named = pairs.negative.to(d.dtype) @ negatives * positives
        return [ratio._replace(total=ratio.total / 2 + self.weight * named)]

    def _cross_entropy(self, x: Tensor, labels: Tensor) -> Tensor:
        """(rows,): the mean over the tags; 0 for rows without a label, which are in no pair."""
        tags = self.tag_table[labels.clamp_min(0)]  # (rows, T)
        each = [
            F.cross_entropy(linear(cast(nn.Linear, classifier), x), tags[:, t], reduction="none")
            for t, classifier in enumerate(self.classifiers)
        ]
        return torch.stack(each).mean(0).masked_fill(labels < 0, 0)


class LMNNLoss(MetricLoss):
    """Learn a linear metric: d_A of similar pairs + weight * hinges of triplets.

    The hinge is [margin + d_A(a, p) - d_A(a, n)]+, and d_A(x, y) = |L x - L y|^2 with a learned
    L (dim, dim), so A = L^T L is positive semi-definite.

    Source:
        Weinberger et al. 2005, NeurIPS 18, eq. 2 (large margin nearest neighbours).
    """

    dim: Dim
    """D of the embeddings."""
    margin: float = 1.0
    """Of the hinge."""
    weight: float = 1.0
    """Of the hinges."""
    neighbours: Annotated[int, Field(ge=1)] | None = None
    """Similar are an anchor's so many nearest of its label before L; none: all of them."""
    reduction: Reduction = "sum"

    def setup(self) -> None:
        super().setup()
        self.map = nn.Linear(self.dim, self.dim, bias=False)
        nn.init.eye_(self.map.weight)

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        if self.neighbours is not None:
            before = batch.distances("squared").masked_fill(~pairs.positive, torch.inf)
            nearest = torch.sort(before, dim=1, stable=True).indices[:, : self.neighbours]
            chosen = torch.zeros_like(pairs.positive).scatter_(1, nearest, True)
            pairs = pairs._replace(positive=pairs.positive & chosen)
        weight = self.map.weight.to(batch.anchors.dtype)
        mapped = batch._replace(anchors=batch.anchors @ weight.T, columns=batch.columns @ weight.T)
        d = mapped.distances("squared")
        push = triplet_sums(d, None, pairs._replace(triplets=None), margin=self.margin)
        return [push.times(self.weight), per_pair(d, pairs.positive)]


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
        kind: Which triplets count: "all"; "violating" v > 0; "hard" far_an < near_ap; "semi_hard"
            far_an > near_ap and v > 0.

    O(n M) memory, O(n M P) time for P positives an anchor.
    """
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
        slots = rule.pairs.slots()
        nearby = slots.take(near).masked_fill_(~slots.filled, -torch.inf)  # (n, P)
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
    @first_order
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
    grad_near = torch.empty_like(nearby)
    grad_far = torch.empty_like(far)
    for rows in tiles(len(far), nearby.shape[1] * far.shape[1]):
        negatives = far[rows].masked_fill(~rule.pairs.negative[rows], torch.inf)  # v = -inf, f = 0
        v = (nearby[rows] + rule.margin)[:, :, None] - negatives[:, None]  # (r, P, M)
        if rule.pairs.triplets is not None:
            v.masked_fill_(~rule.pairs.triplets[rows], -torch.inf)
        _mask_other_kinds(v, nearby[rows, :, None], negatives[:, None], rule.kind)
        value, slope = _curve(v, rule.shape)
        total[rows] = value.sum((1, 2))
        torch.sum(slope, 2, out=grad_near[rows])
        torch.sum(slope, 1, out=grad_far[rows]).neg_()
        counts = grad_near[rows] if rule.shape == "hinge" else (value > 0).sum(2)
        active[rows] = counts.to(torch.int64).sum(1)
    return total, active, grad_near, grad_far


def _mask_other_kinds(v: Tensor, near: Tensor, far: Tensor, kind: Kind) -> None:
    """Set v = near + margin - far to -inf, where f and its slope are 0, for other triplets.

    near and far are compared themselves: in v equal ones are rounded apart.
    """
    if kind in ("violating", "semi_hard"):
        v.masked_fill_(v <= 0, -torch.inf)
    if kind == "semi_hard":
        v.masked_fill_(far <= near, -torch.inf)
    if kind == "hard":
        v.masked_fill_(far >= near, -torch.inf)


def _curve(v: Tensor, shape: Shape) -> tuple[Tensor, Tensor]:
    """Return f(v) and f'(v)."""
    if shape == "hinge":
        return v.clamp_min_(0), v.sign()
    p = torch.sigmoid(v)
    if shape == "softplus":
        return F.softplus(v), p
    square = p.square()
    return 2 * square, 4 * square * (1 - p)
