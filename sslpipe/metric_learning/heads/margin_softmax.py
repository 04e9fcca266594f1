"""Classification losses for embeddings: a softmax of cosines that a rule changes, or plain."""

import inspect
import math
from collections.abc import Callable
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.metric_learning.heads.base import Head, row_mean
from sslpipe.metric_learning.losses.pairwise import linear, unit

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
        num_classes, dim = settings.pop("num_classes"), settings.pop("dim")
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
