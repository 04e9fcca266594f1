"""NT-Xent, exact over the global batch, in memory O(rows * features + one tile)."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.losses.base import LabelMaskingLoss, positive_similarities
from sslpipe.losses.engine.anchors import Anchors
from sslpipe.losses.engine.contrast import Sums


class NTXentLoss(LabelMaskingLoss):
    """Find each image's other view among all views of the global batch (cross entropy).

    An anchor has 1 positive, its image's other view, and 2N - 2 negatives, less those that show the
    same sample id as the anchor's; the value is the mean over all 2N anchors, in nats, equal on all
    ranks. A zero row has cosine 0 with everything and gets no gradient. Collective: all ranks call
    it.

    Shape:
        z_a, z_b: (B, D), B images on this rank, N on all; any scale and float dtype. B may differ
        between ranks. ids: (B,) int64, the sample really read, or None: all different. Output: ().

    Gradient:
        W times the complete gradient of this rank's rows, so that DDP's mean equals one process on
        N images. It is made in forward, so backward communicates nothing.

    Attributes:
        masked_pairs: after a call, the ordered (anchor, view) pairs of the global batch that were
            masked because of equal ids or labels.
        last_negatives: after a call, the mean number of negatives of an anchor.

    Raises:
        ValueError: a setting is out of its range, or shapes or device do not fit.

    Source:
        Chen et al. 2020, arXiv:2002.05709, eq. 1; gradient in closed form: tests compare it with
        loops and finite differences.
    """

    def row_loss(self, v: Tensor, sums: Sums, anchors: Anchors) -> Tensor:
        """-log p of the positive, which is no part of the sum: a loss near 0 keeps its digits."""
        return _softplus(sums[0] - positive_similarities(v)).mean()

    def derivatives(self, v: Tensor, sums: Sums, anchors: Anchors) -> tuple[Tensor, Tensor, Tensor]:
        """Differentiate as autograd would, in a third of its time: small batches feel it."""
        excess = sums[0] - positive_similarities(v)  # (N, 2)
        missing = torch.sigmoid(excess).div_(excess.numel())  # 1 - p of the positive, over 2N
        of_image = missing.sum(1).neg_().view(-1, 1, 1)
        return _softplus(excess).mean(), v.flip(1).mul_(of_image), missing.unsqueeze(0)


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=40)  # above, float64 too knows no difference from x
