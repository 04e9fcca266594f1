"""Softmax losses whose margin follows training, the image's quality, or the cosines themselves."""

from sslpipe.metric_learning.heads.margin_softmax import MarginSoftmax
from sslpipe.metric_learning.heads.margins import Adaptive, CircleMargins, Curricular


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
