"""Classification losses for embeddings: a softmax over classes with a margin on the target."""

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.distributed import global_mean
from sslpipe.metric_learning.heads.margins import (
    Adaptive,
    AdditiveMargins,
    CircleMargins,
    Curricular,
    MultipliedAngle,
    NoMargin,
    Scaled,
)
from sslpipe.metric_learning.losses.pairwise import References, unit

Lengths = Literal["embedding", "both"]


def exact_dtype(x: Tensor) -> Tensor:
    """float32 at least: half precision rounds a cosine by 0.002, times 64 in a logit."""
    return x.to(torch.promote_types(x.dtype, torch.float32))


def row_mean(values: Tensor) -> Tensor:
    """(n,) of this rank -> (): the mean over the rows of all ranks. Collective."""
    return global_mean(values.sum(), values.new_tensor(len(values)))


class MarginSoftmax(nn.Module):
    """Cross entropy over cosines to one weight a class, after a rule of `margins` changed them.

    num_classes: C. dim: D. lengths: what NoMargin and MultipliedAngle multiply a cosine by: the
    embedding's length, or also the weight's ("both"). sub_centers: weights a class; the nearest
    counts (Deng et al. 2020, sub-center ArcFace, eq. 3). focal_gamma: the cross entropy -log p is
    multiplied by (1 - p)^gamma (Lin et al. 2017, arXiv:1708.02002, eq. 4); 0: it is not.
    Shapes: embeddings (B, D), any scale; labels (B,) int64 in 0..C-1 -> () in nats.
    The value is the mean over the rows of all ranks, equal on all of them, B may differ; the
    gradient is W times the own part, so that DDP's mean equals one process. Cosines are float32
    at least, also under autocast. A zero row has cosine 0 with everything and gets no gradient.
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
        super().__init__()
        if num_classes < 2 or dim < 1 or sub_centers < 1:
            raise ValueError(
                f"num_classes = {num_classes}, dim = {dim}, sub_centers = {sub_centers}: at least "
                "2, 1 and 1 are needed"
            )
        if not 0 <= focal_gamma < math.inf:
            raise ValueError(f"focal_gamma = {focal_gamma} must be 0 or more")
        self.num_classes, self.sub_centers = num_classes, sub_centers
        self.rule, self.lengths, self.focal_gamma = rule, lengths, focal_gamma
        self.weight = nn.Parameter(torch.empty(num_classes * sub_centers, dim))
        nn.init.xavier_uniform_(self.weight)

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        ids: Tensor | None = None,
        ref: References | None = None,
        miner: nn.Module | None = None,
    ) -> Tensor:
        return row_mean(self.losses(embeddings, labels))

    def losses(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        """(B,) in nats, of the local rows. Collective where the rule keeps running statistics."""
        with torch.autocast(embeddings.device.type, enabled=False):
            logits = self.logits(exact_dtype(embeddings), labels)
            values = F.cross_entropy(logits, labels, reduction="none")
            if self.focal_gamma:
                wrong = -torch.expm1(-values)  # 1 - p
                # the slope of x^gamma at 0 is infinite for gamma < 1
                values = values * wrong.clamp_min(1e-12) ** self.focal_gamma
        return values

    def logits(self, embeddings: Tensor, labels: Tensor) -> Tensor:
        weight = self.weight.to(embeddings.dtype)
        norms = embeddings.norm(dim=1)  # (B,)
        lengths = norms[:, None]
        if self.lengths == "both":
            lengths = lengths * weight.norm(dim=1)  # (B, C)
        cosines = unit(embeddings) @ unit(weight).T
        if self.sub_centers > 1:
            cosines = cosines.view(-1, self.num_classes, self.sub_centers).amax(2)  # (B, C)
        logits: Tensor = self.rule(cosines, labels, norms=norms, lengths=lengths)
        return logits


class Softmax(nn.Module):
    """A plain classifier: cross entropy of W x + b. Shapes and gradient as MarginSoftmax."""

    def __init__(
        self, num_classes: int, dim: int, bias: bool = True, focal_gamma: float = 0.0
    ) -> None:
        super().__init__()
        self.linear = nn.Linear(dim, num_classes, bias=bias)
        self.focal_gamma = focal_gamma

    def forward(
        self,
        embeddings: Tensor,
        labels: Tensor,
        *,
        ids: Tensor | None = None,
        ref: References | None = None,
        miner: nn.Module | None = None,
    ) -> Tensor:
        with torch.autocast(embeddings.device.type, enabled=False):
            values = F.cross_entropy(self.linear(exact_dtype(embeddings)), labels, reduction="none")
            if self.focal_gamma:
                values = values * (-torch.expm1(-values)).clamp_min(1e-12) ** self.focal_gamma
        return row_mean(values)


def modified_softmax(num_classes: int, dim: int, focal_gamma: float = 0.0) -> MarginSoftmax:
    """Weights of length 1, no bias: logits |x| cos. Source: SphereFace, eq. 4."""
    return MarginSoftmax(num_classes, dim, NoMargin(), focal_gamma=focal_gamma)


def normface(
    num_classes: int,
    dim: int,
    scale: float = 20.0,
    learn_scale: bool = True,
    focal_gamma: float = 0.0,
) -> MarginSoftmax:
    """scale * cos, the scale learned. With n classes and a scale s the loss cannot fall below
    log(1 + (n - 1) exp(-s n / (n - 1))): choose s so that this is small."""
    return MarginSoftmax(num_classes, dim, Scaled(scale, learn_scale), focal_gamma=focal_gamma)


def cosface(
    num_classes: int, dim: int, scale: float = 64.0, margin: float = 0.35, focal_gamma: float = 0.0
) -> MarginSoftmax:
    """Target scale * (cos - margin). Source: Wang et al. 2018, arXiv:1801.09414, eq. 4."""
    rule = AdditiveMargins(scale, 1.0, 0.0, margin, "linear")
    return MarginSoftmax(num_classes, dim, rule, focal_gamma=focal_gamma)


def arcface(
    num_classes: int,
    dim: int,
    scale: float = 64.0,
    margin: float = 0.5,
    beyond: Literal["linear", "cosine"] = "linear",
    focal_gamma: float = 0.0,
) -> MarginSoftmax:
    """Target scale * cos(th + margin), margin in radians. See AdditiveMargins."""
    rule = AdditiveMargins(scale, 1.0, margin, 0.0, beyond)
    return MarginSoftmax(num_classes, dim, rule, focal_gamma=focal_gamma)


def sub_center_arcface(
    num_classes: int,
    dim: int,
    scale: float = 64.0,
    margin: float = 0.5,
    beyond: Literal["linear", "cosine"] = "linear",
    sub_centers: int = 3,
    focal_gamma: float = 0.0,
) -> MarginSoftmax:
    """ArcFace to the nearest of several weights a class: room for noisy labels."""
    rule = AdditiveMargins(scale, 1.0, margin, 0.0, beyond)
    return MarginSoftmax(num_classes, dim, rule, sub_centers=sub_centers, focal_gamma=focal_gamma)


def combined_margin(
    num_classes: int,
    dim: int,
    scale: float = 64.0,
    m1: float = 1.0,
    m2: float = 0.3,
    m3: float = 0.2,
    focal_gamma: float = 0.0,
) -> MarginSoftmax:
    """Target scale * (cos(m1 th + m2) - m3). Source: ArcFace, eq. 4."""
    rule = AdditiveMargins(scale, m1, m2, m3, "cosine")
    return MarginSoftmax(num_classes, dim, rule, focal_gamma=focal_gamma)


def sphereface(
    num_classes: int,
    dim: int,
    m: int = 4,
    lam_first: float = 0.0,
    lam_last: float = 0.0,
    lam_decay: float = 0.12,
    focal_gamma: float = 0.0,
) -> MarginSoftmax:
    """A-Softmax: target |x| psi(th), weights of length 1. See MultipliedAngle."""
    rule = MultipliedAngle(m, lam_first, lam_last, lam_decay)
    return MarginSoftmax(num_classes, dim, rule, focal_gamma=focal_gamma)


def l_softmax(
    num_classes: int,
    dim: int,
    m: int = 4,
    lam_first: float = 0.0,
    lam_last: float = 0.0,
    lam_decay: float = 0.12,
    focal_gamma: float = 0.0,
) -> MarginSoftmax:
    """Target |w| |x| psi(th). See MultipliedAngle."""
    rule = MultipliedAngle(m, lam_first, lam_last, lam_decay)
    return MarginSoftmax(num_classes, dim, rule, lengths="both", focal_gamma=focal_gamma)


def curricularface(
    num_classes: int,
    dim: int,
    scale: float = 64.0,
    margin: float = 0.5,
    momentum: float = 0.01,
    focal_gamma: float = 0.0,
) -> MarginSoftmax:
    """ArcFace that learns to weigh hard negatives as training goes on. See Curricular."""
    return MarginSoftmax(
        num_classes, dim, Curricular(scale, margin, momentum), focal_gamma=focal_gamma
    )


def adaface(
    num_classes: int,
    dim: int,
    scale: float = 64.0,
    margin: float = 0.4,
    h: float = 0.333,
    momentum: float = 0.01,
    focal_gamma: float = 0.0,
) -> MarginSoftmax:
    """A margin that follows the image's quality, read off the embedding's length. See Adaptive."""
    return MarginSoftmax(
        num_classes, dim, Adaptive(scale, margin, h, momentum), focal_gamma=focal_gamma
    )


def circle_softmax(
    num_classes: int, dim: int, gamma: float = 256.0, margin: float = 0.25, focal_gamma: float = 0.0
) -> MarginSoftmax:
    """Circle loss with class-level labels. See CircleMargins."""
    return MarginSoftmax(num_classes, dim, CircleMargins(gamma, margin), focal_gamma=focal_gamma)
