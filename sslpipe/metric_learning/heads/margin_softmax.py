"""Classification losses for embeddings: a softmax, plain or of cosines that a paper's rule changes.

The rule puts a margin on the target's cosine, on its angle, or on all cosines.
"""

import math
from abc import abstractmethod
from typing import Annotated, Literal

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from sslpipe.metric_learning.heads.head import Head, row_mean
from sslpipe.metric_learning.losses.metric_loss import Radians
from sslpipe.metric_learning.losses.pairwise import linear, unit
from sslpipe.precision import wide_dtype

Beyond = Literal["linear", "cosine"]

COSINE_LIMIT = 1e-7  # acos has an infinite slope at 1 and -1: angles are taken this far inside


class MarginSoftmax(Head):
    """Take the cross entropy of cosines to one weight a class, changed by the paper's rule.

    A subclass declares its settings as fields, and defines `change`, the rule.

    Shape:
        As `Head`, embeddings of any scale, in nats: the mean over the rows of all ranks. A zero row
        has cosine 0 with everything and gets no gradient.
    """

    focal_gamma: Annotated[float, Field(ge=0)] = 0.0
    """The cross entropy -log p is multiplied by (1 - p)^gamma (Lin et al. 2017, arXiv:1708.02002,
    eq. 4); 0: it is not."""

    with_lengths_of_weights = False
    weights_per_class = 1

    def setup(self) -> None:
        super().setup()
        rows = self.num_classes * self.weights_per_class
        self.weight = nn.Parameter(torch.empty(rows, self.dim))
        nn.init.xavier_uniform_(self.weight)

    @abstractmethod
    def change(self, cosines: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        """Make logits (B, C) for the cross entropy; all are float32 or wider.

        Args:
            cosines: (B, C), of each embedding and each class's weight.
            labels: (B,) int64, in 0..C-1.
            lengths: (B, 1) of the embeddings, or (B, C) times those of the weights where
                `with_lengths_of_weights`: for rules without a scale of their own.
        """

    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return row_mean(focal_cross_entropy(self.logits(x, labels), labels, self.focal_gamma))

    def logits(self, x: Tensor, labels: Tensor) -> Tensor:
        """Return (B, C) for the cross entropy."""
        weight = self.weight.to(x.dtype)
        wide = wide_dtype(x.device)  # squares leave float32 before lengths do
        norms = torch.linalg.vector_norm(x, dim=1, dtype=wide).to(x.dtype)  # (B,)
        lengths = norms[:, None]
        if self.with_lengths_of_weights:
            lengths = lengths * weight.norm(dim=1)  # (B, C)
        cosines = unit(x) @ unit(weight).T
        if self.weights_per_class > 1:
            cosines = cosines.view(-1, self.num_classes, self.weights_per_class).amax(2)  # (B, C)
        return self.change(cosines, labels, lengths)


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
    """Classify plainly: the cross entropy of W x + b."""

    bias: bool = True
    """Whether there is a b."""
    focal_gamma: Annotated[float, Field(ge=0)] = 0.0
    """As in MarginSoftmax."""

    def setup(self) -> None:
        super().setup()
        self.linear = nn.Linear(self.dim, self.num_classes, bias=self.bias)

    def compute_loss(self, x: Tensor, labels: Tensor) -> Tensor:
        return row_mean(focal_cross_entropy(linear(self.linear, x), labels, self.focal_gamma))


class ModifiedSoftmax(MarginSoftmax):
    """Use weights of length 1 and no bias: logits |x| cos.

    Source:
        SphereFace (Liu et al. 2017, arXiv:1704.08063), eq. 4.
    """

    def change(self, cosines: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        return lengths * cosines


class NormFace(MarginSoftmax):
    """Use scale * cos as logits, the scale learned.

    With n classes and a scale s the loss cannot fall below log(1 + (n - 1) exp(-s n / (n - 1))):
    choose s so that this is small.

    Source:
        Wang et al. 2017, arXiv:1704.06369, eq. 6 and section 3.3.
    """

    scale: float = 20.0
    """Of the cosines."""
    learn_scale: bool = True
    """Train it, from `scale` on."""

    def setup(self) -> None:
        super().setup()
        start = torch.tensor(float(self.scale))
        self.learned_scale = nn.Parameter(start, requires_grad=self.learn_scale)

    def change(self, cosines: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        return self.learned_scale * cosines


class CosFace(MarginSoftmax):
    """Take a margin off the target's cosine: scale * (cos th - margin).

    Source:
        Wang et al. 2018, arXiv:1801.09414, eq. 4.
    """

    scale: float = 64.0
    """Of the cosines."""
    margin: float = 0.35
    """Of the cosine."""

    def change(self, cosines: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        target = take_target(cosines, labels)
        return self.scale * with_target(cosines, labels, target - self.margin)


class ArcFace(MarginSoftmax):
    """Add a margin to the target's angle: scale * cos(th + margin).

    Source:
        Deng et al. 2019, arXiv:1801.07698, eq. 3.
    """

    scale: float = 64.0
    """Of the cosines."""
    margin: Radians = 0.5
    """Of the angle, in radians."""
    beyond: Beyond = "linear"
    """The target where th + margin > pi, and the cosine rises again: linear takes scale * (cos th -
    margin sin margin), which keeps falling (the released code), cosine the formula as it stands."""

    def change(self, cosines: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        target = shifted_angle(take_target(cosines, labels), self.margin, self.beyond)
        return self.scale * with_target(cosines, labels, target)


class SubCenterArcFace(ArcFace):
    """Use `ArcFace` to the nearest of several weights a class: room for noisy labels.

    Source:
        Deng et al. 2020 (sub-center ArcFace), eq. 3.
    """

    sub_centers: Annotated[int, Field(ge=1, le=10_000)] = 3
    """Weights a class."""

    def setup(self) -> None:
        self.weights_per_class = self.sub_centers
        super().setup()


class CombinedMargin(MarginSoftmax):
    """Combine three margins on the target: scale * (cos(m1 th + m2) - m3).

    Source:
        Deng et al. 2019, arXiv:1801.07698, eq. 4.
    """

    scale: float = 64.0
    """Of the cosines."""
    m1: float = 1.0
    """SphereFace's, a factor on the angle."""
    m2: Radians = 0.3
    """ArcFace's, added to the angle, in radians."""
    m3: float = 0.2
    """CosFace's, taken off the cosine."""

    def change(self, cosines: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        target = take_target(cosines, labels)
        if self.m1 != 1 or self.m2 != 0:  # else exact, without the way through the angle
            target = torch.cos(self.m1 * angle(target) + self.m2)
        return self.scale * with_target(cosines, labels, target - self.m3)


def shifted_angle(target: Tensor, margin: float, beyond: Beyond) -> Tensor:
    """Return cos(th + margin) of cos th (B,); see `ArcFace.beyond`."""
    if margin == 0:  # exact, without the way through the angle
        return target
    shifted = angle(target) + margin
    if beyond == "cosine":
        return torch.cos(shifted)
    falling = target - margin * math.sin(margin)
    return torch.where(shifted <= math.pi, torch.cos(shifted), falling)


class MultipliedAngle(MarginSoftmax):
    """Use lengths * (lam cos th + psi(th)) / (1 + lam) for the target, see `SphereFace`."""

    m: Annotated[int, Field(ge=1, le=100)] = 4
    """What the angle is multiplied by."""
    lam_first: Annotated[float, Field(ge=0)] = 0.0
    """0 is the paper's formula, 1000 what it was trained with."""
    lam_last: Annotated[float, Field(ge=0)] = 0.0
    """0 is the paper's formula, 5 what it was trained with."""
    lam_decay: Annotated[float, Field(ge=0)] = 0.12
    """0.12 is what it was trained with."""

    def setup(self) -> None:
        super().setup()
        self.steps = nn.Buffer(torch.zeros((), dtype=torch.int64))

    def change(self, cosines: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        if self.training:
            self.steps.add_(1)
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


class SphereFace(MultipliedAngle):
    """Multiply the target's angle (A-Softmax): |x| psi(th), weights of length 1.

    psi = (-1)^k cos(m th) - 2k on [k pi / m, (k + 1) pi / m] falls from 1 to 1 - 2m over 0 to pi;
    cos(m th) alone would rise again at pi / m. With lam > 0 it is (lam cos th + psi) / (1 + lam),
    lam = max(lam_last, lam_first / (1 + lam_decay * steps)), steps = training forwards so far.

    Source:
        Liu et al. 2017, arXiv:1704.08063, eq. 7.
    """


class LSoftmax(MultipliedAngle):
    """Multiply the target's angle, weights with their lengths: |w| |x| psi(th), see `SphereFace`.

    Source:
        Liu et al. 2016, arXiv:1612.02295, eq. 5 and 6.
    """

    with_lengths_of_weights = True


class CircleSoftmax(MarginSoftmax):
    """Use circle loss with class-level labels.

    Negatives gamma a_n (cos - m), target gamma a_p (cos - 1 + m), with the weights
    a_n = [cos + m]+, a_p = [1 + m - cos]+ taken without gradient.

    Source:
        Sun et al. 2020, arXiv:2002.10857, eq. 6 and 8 with one positive.
    """

    gamma: float = 256.0
    """Scale."""
    margin: float = 0.25
    """m."""

    def change(self, cosines: Tensor, labels: Tensor, lengths: Tensor) -> Tensor:
        m = self.margin
        target = take_target(cosines, labels)
        others = (cosines.detach() + m).clamp_min(0) * (cosines - m)
        of_class = (1 + m - target.detach()).clamp_min(0) * (target - (1 - m))
        return self.gamma * with_target(others, labels, of_class)
