"""Softmax losses with each paper's margin: on the target's cosine, on its angle, or on all."""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from sslpipe.metric_learning.heads.margin_softmax import (
    MarginSoftmax,
    angle,
    take_target,
    with_target,
)

Beyond = Literal["linear", "cosine"]


class AdditiveMargins(nn.Module):
    """Use scale * (cos(m1 th + m2) - m3) for the target, scale * cos th for the others.

    Args:
        scale: Of all.
        m1: A factor on the angle.
        m2: Added to the angle, in radians.
        m3: Taken off the cosine.
        beyond: What the target is where m1 th + m2 > pi, and the cosine rises again: "linear" takes
            scale * (cos th - m2 sin m2 - m3), which keeps falling (ArcFace's released code; needs
            m1 = 1), "cosine" the formula as it stands.
    """

    def __init__(
        self,
        scale: float,
        *,
        m1: float = 1.0,
        m2: float = 0.0,
        m3: float = 0.0,
        beyond: Beyond = "linear",
    ) -> None:
        super().__init__()
        self.scale, self.m1, self.m2, self.m3, self.beyond = scale, m1, m2, m3, beyond

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits (B, C)."""
        target = take_target(cosines, labels)
        return self.scale * with_target(cosines, labels, self.with_margin(target) - self.m3)

    def with_margin(self, target: Tensor) -> Tensor:
        """Return cos(m1 th + m2) of cos th."""
        if self.m1 == 1 and self.m2 == 0:  # exact, without the way through the angle
            return target
        shifted = self.m1 * angle(target) + self.m2
        if self.beyond == "cosine":
            return torch.cos(shifted)
        return torch.where(
            shifted <= math.pi, torch.cos(shifted), target - self.m2 * math.sin(self.m2)
        )


class CosFace(MarginSoftmax):
    """Take a margin off the target's cosine: scale * (cos th - margin).

    Args:
        scale: Of the cosines.
        margin: Of the cosine.

    Source:
        Wang et al. 2018, arXiv:1801.09414, eq. 4.
    """

    @staticmethod
    def rule_class(scale: float = 64.0, margin: float = 0.35) -> nn.Module:
        return AdditiveMargins(scale, m3=margin)


class ArcFace(MarginSoftmax):
    """Add a margin to the target's angle: scale * cos(th + margin).

    Args:
        scale: Of the cosines.
        margin: Of the angle, in radians.
        beyond: The target where the angle exceeds pi, see `AdditiveMargins`.

    Source:
        Deng et al. 2019, arXiv:1801.07698, eq. 3.
    """

    @staticmethod
    def rule_class(
        scale: float = 64.0, margin: float = 0.5, beyond: Beyond = "linear"
    ) -> nn.Module:
        return AdditiveMargins(scale, m2=margin, beyond=beyond)


class SubCenterArcFace(MarginSoftmax):
    """Use `ArcFace` to the nearest of several weights a class: room for noisy labels.

    Args:
        scale: Of the cosines.
        margin: Of the angle, in radians.
        beyond: The target where the angle exceeds pi, see `AdditiveMargins`.
        sub_centers: Weights a class.

    Source:
        Deng et al. 2020 (sub-center ArcFace), eq. 3.
    """

    @staticmethod
    def rule_class(
        scale: float = 64.0, margin: float = 0.5, beyond: Beyond = "linear", sub_centers: int = 3
    ) -> nn.Module:
        return AdditiveMargins(scale, m2=margin, beyond=beyond)


class CombinedMargin(MarginSoftmax):
    """Combine three margins on the target: scale * (cos(m1 th + m2) - m3).

    Args:
        scale: Of the cosines.
        m1: SphereFace's, a factor on the angle.
        m2: ArcFace's, added to the angle, in radians.
        m3: CosFace's, taken off the cosine.

    Source:
        Deng et al. 2019, arXiv:1801.07698, eq. 4.
    """

    @staticmethod
    def rule_class(
        scale: float = 64.0, m1: float = 1.0, m2: float = 0.3, m3: float = 0.2
    ) -> nn.Module:
        return AdditiveMargins(scale, m1=m1, m2=m2, m3=m3, beyond="cosine")


class MultipliedAngle(nn.Module):
    """Use lengths * (lam cos th + psi(th)) / (1 + lam) for the target, see `SphereFace`."""

    steps: Tensor

    def __init__(
        self, m: int = 4, lam_first: float = 0.0, lam_last: float = 0.0, lam_decay: float = 0.12
    ) -> None:
        super().__init__()
        if m < 1 or m != int(m):
            raise ValueError(f"m = {m} must be a whole number of at least 1")
        lams = {"lam_first": lam_first, "lam_last": lam_last, "lam_decay": lam_decay}
        for name, value in lams.items():
            if not 0 <= value < math.inf:
                raise ValueError(f"{name} = {value:g} must be a finite number of at least 0")
        self.m, self.lam_first, self.lam_last, self.lam_decay = m, lam_first, lam_last, lam_decay
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits (B, C)."""
        if self.training:
            self.steps += 1
        lam = max(self.lam_last, self.lam_first / (1 + self.lam_decay * int(self.steps)))
        cos = take_target(cosines, labels)
        target = (lam * cos + self.psi(cos)) / (1 + lam)
        return lengths * with_target(cosines, labels, target)

    def psi(self, cos: Tensor) -> Tensor:
        """Return psi of the angle whose cosine is given, (B,) -> (B,)."""
        k = (angle(cos.detach()) * self.m / math.pi).floor().clamp_max(self.m - 1)
        before, multiple = torch.ones_like(cos), cos  # cos(0 th), cos(1 th)
        for _ in range(self.m - 1):  # cos((j + 1) th) = 2 cos th cos(j th) - cos((j - 1) th)
            before, multiple = multiple, 2 * cos * multiple - before
        return (1 - 2 * (k % 2)) * multiple - 2 * k


class SphereFace(MarginSoftmax):
    """Multiply the target's angle (A-Softmax): |x| psi(th), weights of length 1.

    psi = (-1)^k cos(m th) - 2k on [k pi / m, (k + 1) pi / m] falls from 1 to 1 - 2m over 0 to pi;
    cos(m th) alone would rise again at pi / m. With lam > 0 it is (lam cos th + psi) / (1 + lam),
    lam = max(lam_last, lam_first / (1 + lam_decay * steps)), steps = training forwards so far.

    Args:
        m: What the angle is multiplied by, a whole number of at least 1.
        lam_first: At least 0; 0 is the paper's formula, 1000 what it was trained with.
        lam_last: At least 0; 0 is the paper's formula, 5 what it was trained with.
        lam_decay: At least 0; 0.12 is what it was trained with.

    Source:
        Liu et al. 2017, arXiv:1704.08063, eq. 7.
    """

    rule_class = MultipliedAngle


class LSoftmax(MarginSoftmax):
    """Multiply the target's angle, weights with their lengths: |w| |x| psi(th), see `SphereFace`.

    Args:
        m: What the angle is multiplied by.
        lam_first: As in `SphereFace`.
        lam_last: As in `SphereFace`.
        lam_decay: As in `SphereFace`.

    Source:
        Liu et al. 2016, arXiv:1612.02295, eq. 5 and 6.
    """

    rule_class = MultipliedAngle
    lengths = "both"


class _CircleMargins(nn.Module):
    def __init__(self, gamma: float = 256.0, margin: float = 0.25) -> None:
        super().__init__()
        self.gamma, self.margin = gamma, margin

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        m = self.margin
        target = take_target(cosines, labels)
        others = (cosines.detach() + m).clamp_min(0) * (cosines - m)
        own = (1 + m - target.detach()).clamp_min(0) * (target - (1 - m))
        return self.gamma * with_target(others, labels, own)


class CircleSoftmax(MarginSoftmax):
    """Use circle loss with class-level labels.

    Negatives gamma a_n (cos - m), target gamma a_p (cos - 1 + m), with the weights
    a_n = [cos + m]+, a_p = [1 + m - cos]+ taken without gradient.

    Args:
        gamma: Scale.
        margin: m.

    Source:
        Sun et al. 2020, arXiv:2002.10857, eq. 6 and 8 with one positive.
    """

    rule_class = _CircleMargins
