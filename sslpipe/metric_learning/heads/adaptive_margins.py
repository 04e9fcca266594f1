"""Softmax losses whose margin follows training, the image's quality, or the cosines themselves."""

import math

import torch
from torch import Tensor, nn

from sslpipe.distributed import all_gather_rows
from sslpipe.metric_learning.heads.fixed_margins import AdditiveMargins
from sslpipe.metric_learning.heads.margin_softmax import (
    MarginSoftmax,
    angle,
    take_target,
    with_target,
)


class _Curricular(nn.Module):
    t: Tensor

    def __init__(self, scale: float = 64.0, margin: float = 0.5, momentum: float = 0.01) -> None:
        super().__init__()
        self.arc = AdditiveMargins(1.0, m2=margin)
        self.scale, self.margin, self.momentum = scale, margin, momentum
        self.register_buffer("t", torch.zeros(()))

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        target = take_target(cosines, labels)
        if self.training:
            targets = all_gather_rows(target)
            if len(targets):
                self.t.mul_(1 - self.momentum).add_(self.momentum * targets.mean())
        threshold = torch.cos(angle(target) + self.margin)
        hard = cosines > threshold[:, None]  # (B, C)
        logits = torch.where(hard, cosines * (self.t.to(cosines.dtype) + cosines), cosines)
        return self.scale * with_target(logits, labels, self.arc.with_margin(target))


class CurricularFace(MarginSoftmax):
    """Weigh hard negatives more as training proceeds, with the target of `ArcFace`.

    A negative with cos th_j > cos(th_y + margin) becomes cos th_j (t + cos th_j). t, a buffer that
    starts at 0, is the running mean of the target cosines over all processes:
    t = momentum * mean + (1 - momentum) * t, taken before it is used, in training only.

    Args:
        scale: Of the cosines.
        margin: Of the angle, in radians.
        momentum: The new batch's weight in t; 0.01 in the released code. The paper's text puts its
            0.99 on the new batch, which would make it no average.

    Source:
        Huang et al. 2020, arXiv:2004.00288, eq. 5 to 7.
    """

    rule_class = _Curricular


class _Adaptive(nn.Module):
    mean: Tensor
    std: Tensor

    def __init__(
        self, scale: float = 64.0, margin: float = 0.4, h: float = 0.333, momentum: float = 0.01
    ) -> None:
        super().__init__()
        self.scale, self.margin, self.h, self.momentum = scale, margin, h, momentum
        self.register_buffer("mean", torch.tensor(20.0))
        self.register_buffer("std", torch.tensor(100.0))

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
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


class AdaFace(MarginSoftmax):
    """Let the margin follow the image's quality q, read off the embedding's length.

    Target scale * (cos(th - margin q) - margin q - margin), th - margin q kept inside 0..pi, with
    q = clip(h (norm - mean) / (std + 0.001), -1, 1): a long embedding gets CosFace-like margins, a
    short one ArcFace-like. mean and std (unbiased) are running ones over all processes, without
    gradient, updated in training before they are used: x = momentum * batch's + (1 - momentum) * x,
    from 20 and 100. Norms are clipped to 0.001..100.

    Args:
        scale: Of the cosines.
        margin: Of angle and cosine, times the quality q.
        h: Concentration of q.
        momentum: The new batch's weight; 0.01 in the released code, where the text has 0.99.

    Source:
        Kim et al. 2022, arXiv:2204.00964, eq. 10 to 13; clipping and start: the released code.
    """

    rule_class = _Adaptive


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
