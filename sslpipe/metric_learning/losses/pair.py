"""Losses of pairs: a term for each positive and for each negative, whatever the others are.

Each is a `MetricLoss`: its formula is `row_terms(batch, pairs) -> terms`.
"""

import math
from collections.abc import Sequence
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sslpipe.metric_learning.losses.metric_loss import AboveZero, MetricLoss, NumClasses
from sslpipe.metric_learning.losses.pairwise import (
    LabelledRows,
    Pairs,
    PerAnchor,
    hardest_pairs,
    linear,
    per_pair,
    per_row,
)
from sslpipe.registry.part import Derived, Dim


class ContrastiveLoss(MetricLoss):
    """Pull positives together, push negatives a margin apart; D is Euclidean.

    1/2 [D - positive_margin]+^2 for a positive, 1/2 [margin - D]+^2 for a negative.

    Source:
        Hadsell et al. 2006, CVPR, eq. 4.
    """

    margin: float = 1.0
    """The distance that negatives should reach."""
    positive_margin: float = 0.0
    """The distance that positives may keep."""
    squared: bool = True
    """False drops the squares."""
    halved: bool = True
    """False drops the 1/2."""
    sides: Literal["together", "apart"] = "together"
    """"together" is one mean over all pairs; "apart" the mean over positives plus the mean over
    negatives, of which there are many more."""

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        d = batch.distances("euclidean")
        factor = 0.5 if self.halved else 1.0
        positive = _beyond(d, pairs, self.positive_margin, squared=self.squared).times(factor)
        negative = _within(d, pairs, self.margin, squared=self.squared).times(factor)
        if self.sides == "apart":
            return [positive, negative]
        return [positive.plus(negative)]


class ChopraLoss(MetricLoss):
    """Compare pairs by their L1 distance E, with an exponential for negatives.

    2/Q E^2 for a positive, 2 Q exp(-2.77 E / Q) for a negative.

    Source:
        Chopra et al. 2005, CVPR, section 2.
    """

    bound: AboveZero | None = None
    """Q, which E never exceeds; None: 2 sqrt(D), its bound for rows of length 1."""
    normalize: bool = True

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        q = 2 * math.sqrt(batch.anchors.shape[1]) if self.bound is None else self.bound
        e = torch.cdist(batch.anchors, batch.columns, p=1)  # (n, M)
        values = torch.where(pairs.positive, 2 / q * e.square(), 2 * q * torch.exp(-2.77 / q * e))
        return [per_pair(values, pairs.positive | pairs.negative)]


class DeepID2Loss(MetricLoss):
    """Add a classifier's cross entropy and `weight` times `ContrastiveLoss`.

    Source:
        Sun et al. 2014, arXiv:1406.4773, eq. 1 and 2: the hinge of the plain distance, squared.
    """

    num_classes: NumClasses
    """Of the classifier, which is trained along."""
    dim: Dim
    """D of the embeddings."""
    margin: float = 1.0
    """Of the verification term. The authors tuned it and the weight; these are starting points."""
    weight: float = 0.05
    """Of the verification term."""

    def setup(self) -> None:
        super().setup()
        self.classifier = nn.Linear(self.dim, self.num_classes)

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        logits = linear(self.classifier, batch.anchors)  # (n, C)
        identification = F.cross_entropy(logits, batch.labels.clamp_min(0), reduction="none")
        verification = contrastive_term(batch, pairs, self.margin)
        return [verification.times(self.weight), per_row(identification, batch.labels >= 0)]


class HDCLoss(MetricLoss):
    """Train branches of one embedding, each on the hardest pairs of the one before.

    `ContrastiveLoss` of each branch; the k-th sees shares[k] of the pairs, hardest by branch k - 1.
    The embedding is its branches side by side, equally wide; so is what a search uses afterwards.
    With `embedding.taps` of a recipe each branch reads the network at another depth, as published:
    easy pairs train its first stages, and hard ones all of it.
    Hard: positives far apart, negatives close, in Euclidean distance.

    Source:
        Yuan et al. 2017, arXiv:1611.05720, section 3; ratios 100, 50, 20 %.
    """

    shares: Annotated[Sequence[float], Field(min_length=1)] = (1.0, 0.5, 0.2)
    """Of the pairs; they fall, the first is 1."""
    margin: float = 1.0
    """Of `ContrastiveLoss`."""

    def setup(self) -> None:
        super().setup()
        shares = list(self.shares)
        if shares != sorted(shares, reverse=True) or shares[0] != 1 or shares[-1] <= 0:
            raise ValueError(f"shares = {shares} must fall from 1 and stay above 0")

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        dim = batch.anchors.shape[1]
        if dim % len(self.shares):
            raise ValueError(
                f"{dim} features do not part into {len(self.shares)} branches equally wide"
            )
        width = dim // len(self.shares)
        anchors = torch.split(batch.anchors, width, 1)
        columns = torch.split(batch.columns, width, 1)
        branches = [
            batch._replace(anchors=a, columns=c) for a, c in zip(anchors, columns, strict=True)
        ]
        terms = [contrastive_term(branches[0], pairs, self.margin)]
        for k, branch in enumerate(branches[1:]):
            with torch.no_grad():
                left = self.shares[k + 1] / self.shares[k]
                pairs = hardest_pairs(
                    batch=branches[k],
                    pairs=pairs,
                    positive_share=left,
                    negative_share=left,
                    distance="euclidean",
                )
            terms.append(contrastive_term(branch, pairs, self.margin))
        return terms


class MarginLoss(MetricLoss):
    """Keep positives alpha nearer and negatives alpha farther than a distance beta.

    [alpha + y (D - beta)]+, y = 1 for a positive and -1 for a negative; D of rows of length 1.
    reduction = "mean_active" has the authors' divisor: pairs with a loss above 0.

    Source:
        Wu et al. 2017, arXiv:1706.07567, section 4.
    """

    alpha: float = 0.2
    """Half the width of the band between same and different."""
    beta: float = 1.2
    """The distance that parts same from different; where it is learned, its start."""
    learn: Literal["no", "shared", "class"] = "no"
    """no; shared, one beta for all; class, one for the anchor's class."""
    nu: float = 0.0
    """Weight of beta as a penalty where it is learned: without it nothing pulls beta down."""
    num_classes: Annotated[int | None, Derived()] = None
    """For learn = "class"."""
    normalize: bool = True

    def setup(self) -> None:
        super().setup()
        if self.learn == "class" and self.num_classes is None:
            raise ValueError("learn = 'class' needs num_classes")
        size = self.num_classes if self.learn == "class" and self.num_classes else 1
        start = torch.full((size,), self.beta)
        self.learned_beta = None if self.learn == "no" else nn.Parameter(start)

    def row_terms(self, batch: LabelledRows, pairs: Pairs) -> list[PerAnchor]:
        beta = batch.anchors.new_full((len(batch.labels),), self.beta)
        if self.learned_beta is not None:
            places = batch.labels.clamp_min(0) if self.learn == "class" else 0 * batch.labels
            beta = self.learned_beta.to(beta.dtype)[places]  # (n,)
        d = batch.distances("euclidean")
        positive = _beyond(d, pairs, (beta - self.alpha)[:, None], squared=False)
        negative = _within(d, pairs, (beta + self.alpha)[:, None], squared=False)
        term = positive.plus(negative)
        if self.learned_beta is not None:  # once for each pair: nu weighs the same in any batch
            term = term._replace(total=term.total + self.nu * beta * term.items)
        return [term]


def contrastive_term(batch: LabelledRows, pairs: Pairs, margin: float) -> PerAnchor:
    """Compute `ContrastiveLoss` of its other defaults."""
    d = batch.distances("euclidean")
    positive = _beyond(d, pairs, 0.0, squared=True)
    return positive.plus(_within(d, pairs, margin, squared=True)).times(0.5)


def _beyond(d: Tensor, pairs: Pairs, near: float | Tensor, *, squared: bool) -> PerAnchor:
    """[d - near]+ of the positives, squared or not: d (n, M), near () or (n, 1) with gradient."""
    slots = pairs.slots()
    gap = F.relu(slots.take(d) - near)  # (n, P)
    return per_pair(gap.square() if squared else gap, slots.filled)


def _within(d: Tensor, pairs: Pairs, far: float | Tensor, *, squared: bool) -> PerAnchor:
    """[far - d]+ of the negatives, squared or not; as `_beyond`."""
    gap = F.relu(far - d)  # (n, M)
    return per_pair(gap.square() if squared else gap, pairs.negative)
