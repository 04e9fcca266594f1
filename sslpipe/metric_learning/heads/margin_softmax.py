"""Classification losses for embeddings: a softmax, plain or of cosines that a paper's rule changes.

The rule puts a margin on the target's cosine, on its angle, or on all cosines.
"""

import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.metric_learning.heads.base import Head, row_mean
from sslpipe.metric_learning.losses.pairwise import linear, unit
from sslpipe.precision import wide_dtype

Beyond = Literal["linear", "cosine"]

COSINE_LIMIT = 1e-7  # acos has an infinite slope at 1 and -1: angles are taken this far inside


class MarginSoftmax(Head):
    """Take the cross entropy of cosines to one weight a class, changed by a rule.

    A subclass defines `rule_class`, a module `forward(cosines, labels, *, norms, lengths)`, all
    float32 or wider, or a function that makes one. Its arguments, between dim and focal_gamma, are
    those of the head; `sub_centers` is for the head itself.

        cosines (B, C)  cosine of each embedding and each class's weight
        labels (B,)     int64, in 0..C-1
        norms (B,)      lengths of the embeddings before they were normalised
        lengths (B, C)  what a cosine is multiplied by where the rule has no scale of its own
        -> (B, C)       logits; rules with a state keep it in buffers

    Args:
        focal_gamma: The cross entropy -log p is multiplied by (1 - p)^gamma (Lin et al. 2017,
            arXiv:1708.02002, eq. 4); 0: it is not.

    Shape:
        As `Head`, embeddings of any scale, in nats: the mean over the rows of all ranks. A zero row
        has cosine 0 with everything and gets no gradient.
    """

    rule_class: ClassVar[Callable[..., nn.Module]]
    lengths: ClassVar[Literal["embedding", "both"]] = "embedding"  # "both": also the weight's

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        rule = inspect.signature(cls.rule_class).parameters.values()
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        gamma = inspect.Parameter("focal_gamma", kind, default=0.0, annotation=float)
        sizes = list(inspect.signature(Head.__init__).parameters.values())[1:]
        cls.__signature__ = inspect.Signature([*sizes, *rule, gamma])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = self.__signature__.bind(*args, **kwargs)  # raises a TypeError for one that lacks
        bound.apply_defaults()
        settings = bound.arguments
        num_classes = settings.pop("num_classes")
        dim = settings.pop("dim")
        super().__init__(num_classes, dim)
        self.sub_centers = settings.get("sub_centers", 1)
        self.focal_gamma = settings.pop("focal_gamma")
        if self.sub_centers < 1:
            raise ValueError(f"sub_centers = {self.sub_centers} must be at least 1")
        if not 0 <= self.focal_gamma < math.inf:
            raise ValueError(f"focal_gamma = {self.focal_gamma} must be 0 or more")
        self.rule = type(self).rule_class(**settings)
        self.weight = nn.Parameter(torch.empty(num_classes * self.sub_centers, dim))
        nn.init.xavier_uniform_(self.weight)

    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        """Average the cross entropy; collective."""
        return row_mean(focal_cross_entropy(self.logits(x, labels), labels, self.focal_gamma))

    def logits(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return (B, C) for the cross entropy."""
        weight = self.weight.to(x.dtype)
        wide = wide_dtype(x.device)  # squares leave float32 before lengths do
        norms = torch.linalg.vector_norm(x, dim=1, dtype=wide).to(x.dtype)  # (B,)
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
    if gamma:  # 1 - p is kept above 0, where its slope is infinite for gamma < 1
        values = values * (-torch.expm1(-values)).clamp_min(1e-12) ** gamma
    return values


def angle(cosines: Tensor) -> Tensor:
    """Take acos, finite with its gradient everywhere; the gradient is 0 at 1 and -1."""
    return torch.acos(cosines.clamp(-1 + COSINE_LIMIT, 1 - COSINE_LIMIT))


def take_target(cosines: Tensor, labels: Tensor) -> Tensor:
    """Take each row's entry at its label: (B, C), (B,) -> (B,)."""
    return cosines.gather(1, labels[:, None])[:, 0]


def with_target(logits: Tensor, labels: Tensor, target: Tensor) -> Tensor:
    """Replace each row's entry at its label: (B, C), (B,), (B,) -> (B, C)."""
    return logits.scatter(1, labels[:, None], target[:, None].to(logits.dtype))


class Softmax(Head):
    """Classify plainly: the cross entropy of W x + b.

    Args:
        bias: Whether there is a b.
        focal_gamma: As in MarginSoftmax.
    """

    def __init__(
        self, num_classes: int, dim: int, bias: bool = True, focal_gamma: float = 0.0
    ) -> None:
        super().__init__(num_classes, dim)
        self.linear = nn.Linear(dim, num_classes, bias=bias)
        self.focal_gamma = focal_gamma

    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return row_mean(focal_cross_entropy(linear(self.linear, x), labels, self.focal_gamma))


class _NoMargin(nn.Module):
    def __init__(self) -> None:
        super().__init__()  # nn.Module's own signature takes anything

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        return lengths * cosines


class ModifiedSoftmax(MarginSoftmax):
    """Use weights of length 1 and no bias: logits |x| cos.

    Source:
        SphereFace (Liu et al. 2017, arXiv:1704.08063), eq. 4.
    """

    rule_class = _NoMargin


class _Scaled(nn.Module):
    def __init__(self, scale: float = 20.0, learn_scale: bool = True) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(float(scale)), requires_grad=learn_scale)

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        return self.scale * cosines


class NormFace(MarginSoftmax):
    """Use scale * cos as logits, the scale learned.

    With n classes and a scale s the loss cannot fall below log(1 + (n - 1) exp(-s n / (n - 1))):
    choose s so that this is small.

    Args:
        scale: Of the cosines.
        learn_scale: Train it, from `scale` on.

    Source:
        Wang et al. 2017, arXiv:1704.06369, eq. 6 and section 3.3.
    """

    rule_class = _Scaled


class _AdditiveMargins(nn.Module):
    """scale * (cos(m1 th + m2) - m3) for the target, scale * cos th for the others; see ArcFace."""

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
        self.scale = scale
        self.m1 = m1
        self.m2 = m2
        self.m3 = m3
        self.beyond = beyond

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
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
        return _AdditiveMargins(scale, m3=margin)


class ArcFace(MarginSoftmax):
    """Add a margin to the target's angle: scale * cos(th + margin).

    Args:
        scale: Of the cosines.
        margin: Of the angle, in radians.
        beyond: The target where th + margin > pi, and the cosine rises again: "linear" takes
            scale * (cos th - margin sin margin), which keeps falling (the released code), "cosine"
            the formula as it stands.

    Source:
        Deng et al. 2019, arXiv:1801.07698, eq. 3.
    """

    @staticmethod
    def rule_class(
        scale: float = 64.0, margin: float = 0.5, beyond: Beyond = "linear"
    ) -> nn.Module:
        return _AdditiveMargins(scale, m2=margin, beyond=beyond)


class SubCenterArcFace(MarginSoftmax):
    """Use `ArcFace` to the nearest of several weights a class: room for noisy labels.

    Args:
        scale: Of the cosines.
        margin: Of the angle, in radians.
        beyond: As in `ArcFace`.
        sub_centers: Weights a class.

    Source:
        Deng et al. 2020 (sub-center ArcFace), eq. 3.
    """

    @staticmethod
    def rule_class(
        scale: float = 64.0, margin: float = 0.5, beyond: Beyond = "linear", sub_centers: int = 3
    ) -> nn.Module:
        return _AdditiveMargins(scale, m2=margin, beyond=beyond)


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
        return _AdditiveMargins(scale, m1=m1, m2=m2, m3=m3, beyond="cosine")


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
        self.m = m
        self.lam_first = lam_first
        self.lam_last = lam_last
        self.lam_decay = lam_decay
        self.register_buffer("steps", torch.zeros((), dtype=torch.int64))

    def forward(self, cosines: Tensor, labels: Tensor, *, norms: Tensor, lengths: Tensor) -> Tensor:
        if self.training:
            self.steps += 1
        lam = max(self.lam_last, self.lam_first / (1 + self.lam_decay * int(self.steps)))
        cos = take_target(cosines, labels)
        target = (lam * cos + self.psi(cos)) / (1 + lam)
        return lengths * with_target(cosines, labels, target)

    def psi(self, cos: Tensor) -> Tensor:
        """Return psi of the angle whose cosine is given, (B,) -> (B,)."""
        k = (angle(cos.detach()) * self.m / math.pi).floor().clamp_max(self.m - 1)
        # cos(0 th), cos(1 th)
        before = torch.ones_like(cos)
        multiple = cos
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
        self.gamma = gamma
        self.margin = margin

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
