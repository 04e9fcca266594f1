"""NT-Xent, exact over the global batch, in memory O(rows * features + one tile)."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.losses.engine.contrast import (
    Anchors,
    Engine,
    Sums,
    anchors_of,
    check_settings,
    check_views,
    contrast,
)
from sslpipe.losses.engine.products import Products


class NTXentLoss(nn.Module):
    """Cross entropy of finding each image's other view among all views of the global batch.

    temperature: divides cosine similarities; > 0, no unit.
    mask_labels: images of one label >= 0 are no negatives of each other either.
    products: "bfloat16" lets float32 tiles multiply in bfloat16 on CPUs that can, in TF32 on CUDA
    (loss within 1e-3, gradient within 2e-2); sums stay float32. float64 inputs stay float64.
    tile_rows: rows and columns of a tile of similarities; None: chosen for the device.
    Shapes (B images on this rank, N on all): z_a, z_b (B, D), any scale -> () in nats; B may
    differ between ranks. ids (B,) int64 name the sample really read, or None: all different.
    An anchor has 1 positive, its image's other view, and 2N - 2 negatives, less those that show the
    same sample id as the anchor's; the value is the mean over all 2N anchors, equal on all ranks.
    Gradient: W times the complete gradient of this rank's rows, so that DDP's mean equals one
    process on N images. It is made in forward, so backward communicates nothing. A zero row has
    cosine 0 with everything and gets no gradient. Collective: all ranks call it.
    After a call: `masked_pairs`, the ordered (anchor, view) pairs of the global batch left out
    because of equal ids or labels, and `last_negatives`, the mean number of negatives of an anchor.
    Raises: ValueError if temperature <= 0, or shapes or device do not fit.
    Source: Chen et al. 2020, arXiv:2002.05709, eq. 1; gradient in closed form: tests compare it
    with loops and finite differences.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        mask_labels: bool = False,
        products: Products = "float32",
        tile_rows: int | None = None,
    ) -> None:
        super().__init__()
        check_settings(temperature, products, tile_rows)
        self.engine = Engine(temperature, products, tile_rows)
        self.mask_labels = mask_labels
        self.masked_pairs = 0
        self.last_negatives = 0.0

    def extra_repr(self) -> str:
        return f"{self.engine}, mask_labels={self.mask_labels}"

    def forward(
        self, z_a: Tensor, z_b: Tensor, *, ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        check_views(z_a, z_b, ids, labels)
        anchors = anchors_of(z_a, ids, labels if self.mask_labels else None)
        self.masked_pairs, self.last_negatives = anchors.masked_pairs, anchors.mean_negatives
        return contrast(z_a, z_b, anchors, _nt_xent, self.engine, _nt_xent_derivatives)


def _nt_xent(v: Tensor, sums: Sums, anchors: Anchors) -> Tensor:
    """-log p of the positive, which is no part of the sum: a loss near 0 keeps its digits."""
    del anchors
    v_a, v_b = v.unbind(1)
    return _softplus(_excess(v_a, v_b, sums)).mean()


def _nt_xent_derivatives(v: Tensor, sums: Sums, anchors: Anchors) -> tuple[Tensor, Tensor, Tensor]:
    """As autograd would find them, in a third of its time: small batches feel it."""
    del anchors
    v_a, v_b = v.unbind(1)
    excess = _excess(v_a, v_b, sums)
    missing = torch.sigmoid(excess).div_(excess.numel())  # 1 - p of the positive, over 2N
    pulls = missing.sum(1).neg_().view(-1, 1, 1)
    return _softplus(excess).mean(), v.flip(1).mul_(pulls), missing.unsqueeze(0)


def _excess(v_a: Tensor, v_b: Tensor, sums: Sums) -> Tensor:
    """(N, 2): each anchor's log-sum-exp less its positive."""
    return sums[0] - (v_a * v_b).sum(1, keepdim=True)


def _softplus(x: Tensor) -> Tensor:
    return F.softplus(x, threshold=40)  # above, float64 too knows no difference from x
