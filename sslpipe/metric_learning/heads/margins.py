"""What a margin-softmax head does to its logits: one class a rule, each from its own paper.

A rule is a module `forward(cosines, labels, *, norms, lengths) -> logits`, all float32 or wider:

    cosines (B, C)  cosine of each embedding and each class's weight
    labels (B,)     int64, in 0..C-1
    norms (B,)      lengths of the embeddings before they were normalised
    lengths (B, C)  what a cosine is multiplied by where the rule has no scale of its own
    logits (B, C)   for the cross entropy; rules with a state keep it in buffers

Only the target's logit changes, except in CurricularFace.
"""

import math
from typing import Literal

import torch
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows

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


class NoMargin(nn.Module):
    """Use lengths * cos: the modified softmax, and the plain one without its bias."""

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits (B, C)."""
        return lengths * cosines


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


class AdditiveMargins(nn.Module):
    """Use scale * (cos(m1 th + m2) - m3) for the target, scale * cos th for the others.

    m2 alone is ArcFace, m3 alone CosFace.

    Args:
        scale: Of all.
        m1: A factor on the angle.
        m2: Added to the angle, in radians.
        m3: Taken off the cosine.
        beyond: What the target is where m1 th + m2 > pi, and the cosine rises again: "linear" takes
            scale * (cos th - m2 sin m2 - m3), which keeps falling (ArcFace's released code; needs
            m1 = 1), "cosine" the formula as it stands.

    Source:
        Deng et al. 2019, arXiv:1801.07698, eq. 3 and 4.
    """

    def __init__(
        self, scale: float, m1: float, m2: float, m3: float, beyond: Literal["linear", "cosine"]
    ) -> None:
        super().__init__()
        if beyond not in ("linear", "cosine"):
            raise ValueError(f"beyond = {beyond!r} must be 'linear' or 'cosine'")
        if beyond == "linear" and m1 != 1:
            raise ValueError(f"beyond = 'linear' needs m1 = 1, not {m1}; use beyond = 'cosine'")
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


class MultipliedAngle(nn.Module):
    """Use lengths * psi(th) for the target.

    psi = (-1)^k cos(m th) - 2k on [k pi / m, (k + 1) pi / m] falls from 1 to 1 - 2m over 0 to pi;
    cos(m th) alone would rise again at pi / m. The target is (lam cos th + psi) / (1 + lam), with
    lam = max(lam_last, lam_first / (1 + lam_decay * steps)), steps = training forwards so far.

    Args:
        m: A whole number of at least 1.
        lam_first: At least 0. 0 is the papers' formula, 1000 what SphereFace was trained with.
        lam_last: At least 0. 0 is the papers' formula, 5 what SphereFace was trained with.
        lam_decay: At least 0. 0.12 is what SphereFace was trained with.

    Source:
        Liu et al. 2016 (L-Softmax), arXiv:1612.02295, eq. 5 and 6; Liu et al. 2017 (SphereFace),
        arXiv:1704.08063, eq. 7.
    """

    steps: Tensor

    def __init__(self, m: int, lam_first: float, lam_last: float, lam_decay: float) -> None:
        super().__init__()
        if m < 1 or m != int(m):
            raise ValueError(f"m = {m} must be a whole number of at least 1")
        for name, value in (
            ("lam_first", lam_first),
            ("lam_last", lam_last),
            ("lam_decay", lam_decay),
        ):
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


class Curricular(nn.Module):
    """Use ArcFace's target; cos th_j > cos(th_y + margin) becomes cos th_j (t + cos th_j).

    t, a buffer that starts at 0, is the running mean of the target cosines over all processes:
    t = momentum * mean + (1 - momentum) * t, taken before it is used, in training only.

    Args:
        scale: Of the logits.
        margin: Of the target's angle, in radians.
        momentum: The new batch's weight; 0.01 in the released code. The paper's text puts its 0.99
            on the new batch, which would make it no average.

    Source:
        Huang et al. 2020, arXiv:2004.00288, eq. 5 to 7.
    """

    t: Tensor

    def __init__(self, scale: float, margin: float, momentum: float) -> None:
        super().__init__()
        self.arc = AdditiveMargins(1.0, 1.0, margin, 0.0, "linear")
        self.scale, self.margin, self.momentum = scale, margin, momentum
        self.register_buffer("t", torch.zeros(()))

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits (B, C)."""
        target = take_target(cosines, labels)
        if self.training:
            targets = all_gather_rows(target)
            if len(targets):
                self.t.mul_(1 - self.momentum).add_(self.momentum * targets.mean())
        threshold = torch.cos(angle(target) + self.margin)
        hard = cosines > threshold[:, None]  # (B, C)
        logits = torch.where(hard, cosines * (self.t.to(cosines.dtype) + cosines), cosines)
        return self.scale * with_target(logits, labels, self.arc.with_margin(target))


class Adaptive(nn.Module):
    """Use scale * (cos(th - margin q) - margin q - margin) for the target, q from the norm.

    q = clip(h (norm - mean) / (std + 0.001), -1, 1) stands for an image's quality: a long embedding
    gets CosFace-like margins, a short one ArcFace-like. mean and std (unbiased) are running ones
    over all processes, without gradient, updated in training before they are used:
    x = momentum * batch's + (1 - momentum) * x, from 20 and 100. Norms are clipped to 0.001..100.
    The angle th - margin q is kept inside 0..pi.

    Args:
        scale: Of the logits.
        margin: Of angle and cosine, times q.
        h: Concentration of q.
        momentum: The new batch's weight; 0.01 in the released code, where the paper's text has
            0.99.

    Source:
        Kim et al. 2022 (AdaFace), arXiv:2204.00964, eq. 10 to 13; clipping and start: its code.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, scale: float, margin: float, h: float, momentum: float) -> None:
        super().__init__()
        self.scale, self.margin, self.h, self.momentum = scale, margin, h, momentum
        self.register_buffer("mean", torch.tensor(20.0))
        self.register_buffer("std", torch.tensor(100.0))

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits (B, C)."""
        norms = norms.detach().clamp(0.001, 100)
        if self.training:
            all_norms = all_gather_rows(norms)
            spread = all_norms.std() if len(all_norms) > 1 else all_norms.new_zeros(())
            running = ((self.mean, all_norms.mean()), (self.std, spread)) if len(all_norms) else ()
            for kept, new in running:
                kept.mul_(1 - self.momentum).add_(self.momentum * new)
        quality = (self.h * (norms - self.mean) / (self.std + 0.001)).clamp(-1, 1)
        quality = quality.to(cosines.dtype)  # (B,)
        shifted = angle(take_target(cosines, labels)) - self.margin * quality
        target = torch.cos(shifted.clamp(0, math.pi)) - self.margin * (1 + quality)
        return self.scale * with_target(cosines, labels, target)


class CircleMargins(nn.Module):
    """Make the softmax logits whose cross entropy is circle loss on class weights.

    Negatives gamma a_n (cos - m), target gamma a_p (cos - 1 + m), with the weights
    a_n = [cos + m]+, a_p = [1 + m - cos]+ taken without gradient.

    Args:
        gamma: Scale.
        margin: m.

    Source:
        Sun et al. 2020, arXiv:2002.10857, eq. 6 and 8 with one positive.
    """

    def __init__(self, gamma: float, margin: float) -> None:
        super().__init__()
        self.gamma, self.margin = gamma, margin

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        """Return the logits (B, C)."""
        m = self.margin
        target = take_target(cosines, labels)
        others = (cosines.detach() + m).clamp_min(0) * (cosines - m)
        own = (1 + m - target.detach()).clamp_min(0) * (target - (1 - m))
        return self.gamma * with_target(others, labels, own)
