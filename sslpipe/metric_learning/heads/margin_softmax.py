"""Classification losses for embeddings: a softmax of cosines that a rule changes, or plain.

A rule is a module `forward(cosines, labels, *, norms, lengths) -> logits`, all float32 or wider:

    cosines (B, C)  cosine of each embedding and each class's weight
    labels (B,)     int64, in 0..C-1
    norms (B,)      lengths of the embeddings before they were normalised
    lengths (B, C)  what a cosine is multiplied by where the rule has no scale of its own
    logits (B, C)   for the cross entropy; rules with a state keep it in buffers

Each head has its rule beside it, here, in `fixed_margins` or in `adaptive_margins`. Only the
target's logit changes, except in CurricularFace.
"""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.metric_learning.heads.base import Head, row_mean
from sslpipe.metric_learning.losses.pairwise import linear, unit

Lengths = Literal["embedding", "both"]
COSINE_LIMIT = 1e-7  # acos has an infinite slope at 1 and -1: angles are taken this far inside


def angle(cosines: Tensor) -> Tensor:
    """Take acos, finite with its gradient everywhere; the gradient is 0 at 1 and -1."""
    return torch.acos(cosines.clamp(-1 + COSINE_LIMIT, 1 - COSINE_LIMIT))


def take_target(cosines: Tensor, labels: Tensor) -> Tensor:
    """Take each row's entry at its label: (B, C), (B,) -> (B,)."""
    return cosines.gather(1, labels[:, None])[:, 0]


def with_target(logits: Tensor, labels: Tensor, target: Tensor) -> Tensor:
    """Replace each row's entry at its label: (B, C), (B,), (B,) -> (B, C)."""
    return logits.scatter(1, labels[:, None], target[:, None].to(logits.dtype))


class MarginSoftmax(Head):
    """Take the cross entropy of cosines to one weight a class, changed by a rule.

    Args:
        num_classes: C.
        dim: D.
        rule: What becomes of the cosines.
        lengths: What NoMargin and MultipliedAngle multiply a cosine by: the embedding's length, or
            also the weight's ("both").
        sub_centers: Weights a class; the nearest counts (Deng et al. 2020, sub-center ArcFace,
            eq. 3).
        focal_gamma: The cross entropy -log p is multiplied by (1 - p)^gamma (Lin et al. 2017,
            arXiv:1708.02002, eq. 4); 0: it is not.

    Shape:
        As `Head`, embeddings of any scale, in nats: the mean over the rows of all ranks. A zero row
        has cosine 0 with everything and gets no gradient.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        rule: nn.Module,
        *,
        lengths: Lengths = "embedding",
        sub_centers: int = 1,
        focal_gamma: float = 0.0,
    ) -> None:
        super().__init__(num_classes, dim)
        if sub_centers < 1:
            raise ValueError(f"sub_centers = {sub_centers} must be at least 1")
        if not 0 <= focal_gamma < math.inf:
            raise ValueError(f"focal_gamma = {focal_gamma} must be 0 or more")
        self.sub_centers = sub_centers
        self.rule, self.lengths, self.focal_gamma = rule, lengths, focal_gamma
        self.weight = nn.Parameter(torch.empty(num_classes * sub_centers, dim))
        nn.init.xavier_uniform_(self.weight)

    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Average the cross entropy; collective, also for a rule's running statistics."""
        return row_mean(focal_cross_entropy(self.logits(x, labels), labels, self.focal_gamma))

    def logits(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return (B, C) for the cross entropy."""
        weight = self.weight.to(x.dtype)
        norms = x.norm(dim=1)  # (B,)
        lengths = norms[:, None]
        if self.lengths == "both":
            lengths = lengths * weight.norm(dim=1)  # (B, C)
        cosines = unit(x) @ unit(weight).T
        if self.sub_centers > 1:
            cosines = cosines.view(-1, self.num_classes, self.sub_centers).amax(2)  # (B, C)
        logits: Tensor = self.rule(cosines, labels, norms=norms, lengths=lengths)
        return logits


def focal_cross_entropy(logits: Tensor, labels: Tensor, gamma: float) -> Tensor:
    """Return (B,) of (1 - p)^gamma * -log p, p the target's probability."""
    values = F.cross_entropy(logits, labels, reduction="none")
    if gamma:
        wrong = -torch.expm1(-values)  # 1 - p
        values = (
            values * wrong.clamp_min(1e-12) ** gamma
        )  # its slope at 0 is infinite for gamma < 1
    return values


class Softmax(Head):
    """Classify plainly: the cross entropy of W x + b.

    Args:
        num_classes: C.
        dim: D.
        bias: Whether there is a b.
        focal_gamma: See `MarginSoftmax`.
    """

    def __init__(
        self, num_classes: int, dim: int, bias: bool = True, focal_gamma: float = 0.0
    ) -> None:
        super().__init__(num_classes, dim)
        self.linear = nn.Linear(dim, num_classes, bias=bias)
        self.focal_gamma = focal_gamma

    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Average the cross entropy. Collective."""
        return row_mean(focal_cross_entropy(linear(self.linear, x), labels, self.focal_gamma))


class NoMargin(nn.Module):
    """Use lengths * cos: the modified softmax, and the plain one without its bias."""

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits (B, C)."""
        return lengths * cosines


class ModifiedSoftmax(MarginSoftmax):
    """Use weights of length 1 and no bias: logits |x| cos.

    Args:
        num_classes: C.
        dim: D.
        focal_gamma: See `MarginSoftmax`.

    Source:
        SphereFace (Liu et al. 2017, arXiv:1704.08063), eq. 4.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        focal_gamma: float = 0.0,
    ) -> None:
        rule = NoMargin()
        super().__init__(num_classes, dim, rule, focal_gamma=focal_gamma)


class Scaled(nn.Module):
    """Use scale * cos.

    Args:
        scale: Of the cosines, or where it starts.
        learned: The scale is a parameter.

    Source:
        Wang et al. 2017 (NormFace), arXiv:1704.06369, eq. 6 and section 3.3.
    """

    def __init__(self, scale: float, learned: bool) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(scale)), requires_grad=learned)

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits (B, C)."""
        return self.scale * cosines


class NormFace(MarginSoftmax):
    """Use scale * cos as logits, the scale learned.

    With n classes and a scale s the loss cannot fall below log(1 + (n - 1) exp(-s n / (n - 1))):
    choose s so that this is small.

    Args:
        num_classes: C.
        dim: D.
        scale: Of the cosines.
        learn_scale: Train it, from `scale` on.
        focal_gamma: See `MarginSoftmax`.

    Source:
        Wang et al. 2017, arXiv:1704.06369, eq. 6 and section 3.3.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 20.0,
        learn_scale: bool = True,
        focal_gamma: float = 0.0,
    ) -> None:
        rule = Scaled(scale, learn_scale)
        super().__init__(num_classes, dim, rule, focal_gamma=focal_gamma)
