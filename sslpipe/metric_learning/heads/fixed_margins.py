"""Softmax losses whose margin stays as it is set: on the target's cosine, or on its angle."""

from typing import Literal

from sslpipe.metric_learning.heads.margin_softmax import Lengths, MarginSoftmax
from sslpipe.metric_learning.heads.margins import AdditiveMargins, MultipliedAngle


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
