"""Classification losses for embeddings: a softmax over classes with a margin on the target."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.metric_learning.heads.base import Head, row_mean
from sslpipe.metric_learning.heads.margins import (
    Adaptive,
    AdditiveMargins,
    CircleMargins,
    Curricular,
    MultipliedAngle,
    NoMargin,
    Scaled,
)
from sslpipe.metric_learning.losses.pairwise import linear, unit

Lengths = Literal["embedding", "both"]


class MarginSoftmax(Head):
    """Take the cross entropy of cosines to one weight a class, changed by a rule of `margins`.

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


class CosFace(MarginSoftmax):
    """Take a margin off the target's cosine: scale * (cos th - margin).

    Args:
        num_classes: C.
        dim: D.
        scale: Of the cosines.
        margin: Of the cosine.
        focal_gamma: See `MarginSoftmax`.

    Source:
        Wang et al. 2018, arXiv:1801.09414, eq. 4.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.35,
        focal_gamma: float = 0.0,
    ) -> None:
        rule = AdditiveMargins(scale, 1.0, 0.0, margin, "linear")
        super().__init__(num_classes, dim, rule, focal_gamma=focal_gamma)


class ArcFace(MarginSoftmax):
    """Add a margin to the target's angle: scale * cos(th + margin).

    Args:
        num_classes: C.
        dim: D.
        scale: Of the cosines.
        margin: Of the angle, in radians.
        beyond: The target where the angle exceeds pi, see `AdditiveMargins`.
        focal_gamma: See `MarginSoftmax`.

    Source:
        Deng et al. 2019, arXiv:1801.07698, eq. 3.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.5,
        beyond: Literal["linear", "cosine"] = "linear",
        focal_gamma: float = 0.0,
    ) -> None:
        rule = AdditiveMargins(scale, 1.0, margin, 0.0, beyond)
        super().__init__(num_classes, dim, rule, focal_gamma=focal_gamma)


class SubCenterArcFace(MarginSoftmax):
    """Use `ArcFace` to the nearest of several weights a class: room for noisy labels.

    Args:
        num_classes: C.
        dim: D.
        scale: Of the cosines.
        margin: Of the angle, in radians.
        beyond: The target where the angle exceeds pi, see `AdditiveMargins`.
        sub_centers: Weights a class.
        focal_gamma: See `MarginSoftmax`.

    Source:
        Deng et al. 2020 (sub-center ArcFace), eq. 3.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.5,
        beyond: Literal["linear", "cosine"] = "linear",
        sub_centers: int = 3,
        focal_gamma: float = 0.0,
    ) -> None:
        rule = AdditiveMargins(scale, 1.0, margin, 0.0, beyond)
        super().__init__(num_classes, dim, rule, sub_centers=sub_centers, focal_gamma=focal_gamma)


class CombinedMargin(MarginSoftmax):
    """Combine three margins on the target: scale * (cos(m1 th + m2) - m3).

    Args:
        num_classes: C.
        dim: D.
        scale: Of the cosines.
        m1: SphereFace's, a factor on the angle.
        m2: ArcFace's, added to the angle, in radians.
        m3: CosFace's, taken off the cosine.
        focal_gamma: See `MarginSoftmax`.

    Source:
        Deng et al. 2019, arXiv:1801.07698, eq. 4.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        m1: float = 1.0,
        m2: float = 0.3,
        m3: float = 0.2,
        focal_gamma: float = 0.0,
    ) -> None:
        rule = AdditiveMargins(scale, m1, m2, m3, "cosine")
        super().__init__(num_classes, dim, rule, focal_gamma=focal_gamma)


class _MultipliedAngleSoftmax(MarginSoftmax):
    """What A-Softmax and large-margin softmax share; they differ in which lengths count."""

    counted: Lengths

    def __init__(
        self,
        num_classes: int,
        dim: int,
        m: int = 4,
        lam_first: float = 0.0,
        lam_last: float = 0.0,
        lam_decay: float = 0.12,
        focal_gamma: float = 0.0,
    ) -> None:
        rule = MultipliedAngle(m, lam_first, lam_last, lam_decay)
        super().__init__(num_classes, dim, rule, lengths=self.counted, focal_gamma=focal_gamma)


class SphereFace(_MultipliedAngleSoftmax):
    """Multiply the target's angle (A-Softmax): |x| psi(th), weights of length 1.

    Args:
        num_classes: C.
        dim: D.
        m: What the angle is multiplied by.
        lam_first: See `MultipliedAngle`; 0 and 0 are the paper's, 1000 and 5 what it was trained
            with.
        lam_last: See `MultipliedAngle`.
        lam_decay: See `MultipliedAngle`.
        focal_gamma: See `MarginSoftmax`.

    Source:
        Liu et al. 2017, arXiv:1704.08063, eq. 7; psi: `MultipliedAngle`.
    """

    counted = "embedding"


class LSoftmax(_MultipliedAngleSoftmax):
    """Multiply the target's angle, weights with their lengths: |w| |x| psi(th).

    Args:
        num_classes: C.
        dim: D.
        m: What the angle is multiplied by.
        lam_first: As in `SphereFace`.
        lam_last: As in `SphereFace`.
        lam_decay: As in `SphereFace`.
        focal_gamma: See `MarginSoftmax`.

    Source:
        Liu et al. 2016, arXiv:1612.02295, eq. 5 and 6; psi: `MultipliedAngle`.
    """

    counted = "both"


class CurricularFace(MarginSoftmax):
    """Weigh hard negatives more as training proceeds, with the target of `ArcFace`.

    A negative with cos th_j > cos(th_y + margin) becomes cos th_j (t + cos th_j), see `Curricular`.

    Args:
        num_classes: C.
        dim: D.
        scale: Of the cosines.
        margin: Of the angle, in radians.
        momentum: The new batch's weight in the running mean t.
        focal_gamma: See `MarginSoftmax`.

    Source:
        Huang et al. 2020, arXiv:2004.00288, eq. 5 to 7.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.5,
        momentum: float = 0.01,
        focal_gamma: float = 0.0,
    ) -> None:
        rule = Curricular(scale, margin, momentum)
        super().__init__(num_classes, dim, rule, focal_gamma=focal_gamma)


class AdaFace(MarginSoftmax):
    """Let the margin follow the image's quality, read off the embedding's length.

    Target scale * (cos(th - margin q) - margin q - margin), see `Adaptive`.

    Args:
        num_classes: C.
        dim: D.
        scale: Of the cosines.
        margin: Of angle and cosine, times the quality q.
        h: Concentration of q.
        momentum: The new batch's weight in the running mean and deviation of norms.
        focal_gamma: See `MarginSoftmax`.

    Source:
        Kim et al. 2022, arXiv:2204.00964, eq. 10 to 13.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        scale: float = 64.0,
        margin: float = 0.4,
        h: float = 0.333,
        momentum: float = 0.01,
        focal_gamma: float = 0.0,
    ) -> None:
        rule = Adaptive(scale, margin, h, momentum)
        super().__init__(num_classes, dim, rule, focal_gamma=focal_gamma)


class CircleSoftmax(MarginSoftmax):
    """Use circle loss with class-level labels.

    Negatives gamma a_n (cos - m), target gamma a_p (cos - 1 + m), see `CircleMargins`.

    Args:
        num_classes: C.
        dim: D.
        gamma: Scale.
        margin: m.
        focal_gamma: See `MarginSoftmax`.

    Source:
        Sun et al. 2020, arXiv:2002.10857, eq. 6 and 8 with one positive.
    """

    def __init__(
        self,
        num_classes: int,
        dim: int,
        gamma: float = 256.0,
        margin: float = 0.25,
        focal_gamma: float = 0.0,
    ) -> None:
        rule = CircleMargins(gamma, margin)
        super().__init__(num_classes, dim, rule, focal_gamma=focal_gamma)
