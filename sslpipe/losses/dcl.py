"""Decoupled contrastive learning: NT-Xent without the positive in the denominator."""

import math

import torch
from torch import Tensor

from sslpipe.losses.base import LabelMaskingLoss, Scale, positive_similarities
from sslpipe.losses.engine.anchors import Anchors
from sslpipe.losses.engine.contrast import Sums


class DCLLoss(LabelMaskingLoss):
    """Find each image's other view against the negatives alone (decoupled contrastive learning).

    -w_i s_i+ + log sum over the negatives of exp(s_ij), s a cosine over the temperature.
    An anchor without negatives counts 0. The negatives, the mean over 2N anchors, ids, shapes,
    processes, gradient and errors are as in NTXentLoss.

    Source:
        Yeh et al. 2022, arXiv:2110.06848, eq. 6 (DCL) and 7 (DCLW), over both views.
    """

    sigma: Scale | None = None
    """None for DCL, w = 1; a number for DCLW, where hard positives (far apart) weigh more:
    w_i = 2 - exp(c_i / sigma) / mean_k exp(c_k / sigma), c the cosine of an image's two views, the
    mean over the global batch. The gradient goes through w."""

    def row_loss(self, v: Tensor, sums: Sums, anchors: Anchors) -> Tensor:
        """Compute eq. 6 or 7."""
        positive = positive_similarities(v)  # (N, 1)
        weight: Tensor | float = 1.0
        if self.sigma is not None:
            cosines = positive * self.temperature
            weight = 2 - anchors.images * torch.softmax(cosines / self.sigma, dim=0)
        values = sums[0] - weight * positive  # (N, 2)
        return values.masked_fill(sums[0] == -math.inf, 0).mean()


class DCLWLoss(DCLLoss):
    """`DCLLoss` with the paper's weights of positives."""

    sigma: Scale | None = 0.5
