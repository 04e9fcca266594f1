"""Losses of triplets: a positive must be nearer to the anchor than a negative.

Each is a `MetricLoss`: its formula is `row_terms(batch, pairs, *, settings) -> terms`.
"""

from collections.abc import Sequence
from typing import Literal, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.metric_learning.losses.base import MetricLoss
from sslpipe.metric_learning.losses.pairwise import (
    Distance,
    LabelledRows,
    Pairs,
    PerAnchor,
    linear,
    per_pair,
    per_row,
)
from sslpipe.metric_learning.losses.triplet_sums import Kind, triplet_sums


class TripletLoss(MetricLoss, normalize=True):
    """Want a positive nearer than a negative, by a margin: [D(a, p) - D(a, n) + margin]+.

    Items are all triplets of the batch; rows have length 1.

    Args:
        margin: Of the hinge.
        distance: "squared" (of the Euclidean distance), "euclidean" or "cosine" (1 - cosine).
        triplets: Which count, in the mean too: "all"; "violating", with a loss above 0; "hard",
            D(a, n) < D(a, p); "semi_hard", D(a, p) < D(a, n) < D(a, p) + margin.
        soft: log(1 + e^{D(a, p) - D(a, n) + margin}) instead of the hinge.

    Source:
        Schroff et al. 2015, arXiv:1503.03832, eq. 3; their reduction is the sum.
    """

    @staticmethod
    def row_terms(
        batch: LabelledRows,
        pairs: Pairs,
        *,
        margin: float = 0.2,
        distance: Distance = "squared",
        triplets: Kind = "all",
        soft: bool = False,
    ) -> list[PerAnchor]:
        """Return the terms that are added up, see `MetricLoss`."""
        d = batch.distances(distance)
        shape: Literal["softplus", "hinge"] = "softplus" if soft else "hinge"
        return [triplet_sums(d, None, pairs, margin=margin, shape=shape, kind=triplets)]


class BatchHardLoss(MetricLoss, normalize=False):
    """Compare each anchor's farthest positive with its nearest negative; rows keep their lengths.

    [margin + D(farthest positive) - D(nearest negative)]+ for each anchor.

    Args:
        margin: Of the hinge.
        distance: "euclidean", "squared" or "cosine" (1 - dot product).
        soft: log(1 + e^{farthest positive - nearest negative}), without a margin.

    Source:
        Hermans et al. 2017, arXiv:1703.07737, eq. 5 and section 2 for the soft margin.
    """

    @staticmethod
    def row_terms(
        batch: LabelledRows,
        pairs: Pairs,
        *,
        margin: float = 0.2,
        distance: Distance = "euclidean",
        soft: bool = False,
    ) -> list[PerAnchor]:
        """Return the terms that are added up, see `MetricLoss`."""
        d = batch.distances(distance)
        if d.shape[1] == 0:
            return [per_row(d.sum(1), d.new_zeros(len(d), dtype=torch.bool))]
        farthest = d.masked_fill(~pairs.positive, -torch.inf).max(1).values
        nearest = d.masked_fill(~pairs.negative, torch.inf).min(1).values
        both = pairs.positive.any(1) & pairs.negative.any(1)
        gap = torch.where(both, farthest - nearest, 0)
        values = F.softplus(gap) if soft else (gap + margin).clamp_min(0)
        return [per_row(values, both)]


class TripletRatioLoss(MetricLoss, normalize=False):
    """Compare a softmax of two distances with (0, 1): 2 d^2 over all triplets; no margin.

    d = e^{D(a, p)} / (e^{D(a, p)} + e^{D(a, n)}), so 2 d^2 = d^2 + (1 - (1 - d))^2: the squared
    distance of the softmax of both from (0, 1). D is Euclidean.

    Source:
        Hoffer and Ailon 2015, arXiv:1412.6622, section 2.1.
    """

    @staticmethod
    def row_terms(batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        """Return the terms that are added up, see `MetricLoss`."""
        d = batch.distances("euclidean")
        return [triplet_sums(d, None, pairs, shape="ratio")]


class _RankingAndTagsTerms(nn.Module):
    """Hold the weights and the formula of `RankingAndTagsLoss`."""

    tags: Tensor

    def __init__(
        self,
        num_classes: int,
        dim: int,
        tags: Sequence[Sequence[int]] | None = None,
        weight: float = 1.0,
        classified: Literal["negative", "anchor"] = "negative",
    ) -> None:
        super().__init__()
        if classified not in ("negative", "anchor"):
            raise ValueError(f"classified = {classified!r} must be 'negative' or 'anchor'")
        table = torch.arange(num_classes)[:, None] if tags is None else torch.tensor(tags)
        if table.dim() != 2 or len(table) != num_classes or int(table.min()) < 0:
            raise ValueError(f"tags must be a list of tags >= 0 for each of {num_classes} classes")
        self.register_buffer("tags", table)
        self.classifiers = nn.ModuleList(nn.Linear(dim, int(top) + 1) for top in table.amax(0))
        self.weight, self.classified = weight, classified

    def forward(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
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
        tags = self.tags[labels.clamp_min(0)]  # (rows, T)
        each = [
            F.cross_entropy(linear(cast(nn.Linear, classifier), x), tags[:, t], reduction="none")
            for t, classifier in enumerate(self.classifiers)
        ]
        return torch.stack(each).mean(0).masked_fill(labels < 0, 0)


class RankingAndTagsLoss(MetricLoss, normalize=False):
    """Rank triplets and classify tags: d^2 + weight * mean over tags of the cross entropy.

    d is that of `TripletRatioLoss`; items are triplets.

    Args:
        num_classes: Of the labels.
        dim: D of the embeddings.
        tags: For each class its tags, (num_classes, T) integers; None: the class is its only tag.
        weight: Of the cross entropy; not given in a confirmed source.
        classified: The image whose tags are classified, the "negative" (as published) or the
            "anchor".

    Source:
        Simo-Serra and Ishikawa 2016, CVPR (Fashion style in 128 floats), section 4.
    """

    row_terms = _RankingAndTagsTerms


class _LargeMarginNeighboursTerms(nn.Module):
    """Hold the weights and the formula of `LMNNLoss`."""

    def __init__(
        self, dim: int, margin: float = 1.0, weight: float = 1.0, neighbours: int | None = None
    ) -> None:
        super().__init__()
        if neighbours is not None and neighbours < 1:
            raise ValueError(f"neighbours = {neighbours} must be at least 1")
        self.map = nn.Linear(dim, dim, bias=False)
        nn.init.eye_(self.map.weight)
        self.margin, self.weight, self.neighbours = margin, weight, neighbours

    def forward(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        if self.neighbours is not None:
            before = batch.distances("squared").masked_fill(~pairs.positive, torch.inf)
            nearest = torch.sort(before, dim=1, stable=True).indices[:, : self.neighbours]
            chosen = torch.zeros_like(pairs.positive).scatter_(1, nearest, True)
            pairs = pairs._replace(positive=pairs.positive & chosen)
        weight = self.map.weight.to(batch.anchors.dtype)
        mapped = batch._replace(anchors=batch.anchors @ weight.T, columns=batch.columns @ weight.T)
        d = mapped.distances("squared")
        push = triplet_sums(d, None, pairs._replace(triplets=None), margin=self.margin)
        return [push._replace(total=self.weight * push.total), per_pair(d, pairs.positive)]


class LMNNLoss(MetricLoss, normalize=False, reduction="sum"):
    """Learn a linear metric: d_A of similar pairs + weight * hinges of triplets.

    The hinge is [margin + d_A(a, p) - d_A(a, n)]+, and d_A(x, y) = |L x - L y|^2 with a learned
    L (dim, dim), so A = L^T L is positive semi-definite.

    Args:
        dim: D of the embeddings.
        margin: Of the hinge.
        weight: Of the hinges.
        neighbours: Similar are an anchor's so many nearest of its label before L; None: all of
            them.

    Source:
        Weinberger et al. 2005, NeurIPS 18, eq. 2 (large margin nearest neighbours).
    """

    row_terms = _LargeMarginNeighboursTerms
