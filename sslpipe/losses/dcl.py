"""Decoupled contrastive learning: NT-Xent without the positive in the denominator."""

import math

import torch
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


class DCLLoss(nn.Module):
    """-w_i s_i+ + log sum over the negatives of exp(s_ij), s a cosine over the temperature.

    sigma: None for DCL, w = 1; a number > 0 for DCLW, where hard positives (far apart) weigh more:
    w_i = 2 - exp(c_i / sigma) / mean_k exp(c_k / sigma), c the cosine of an image's two views, the
    mean over the global batch. The gradient goes through w.
    An anchor without negatives counts 0. Everything else as in NTXentLoss: the negatives, the mean
    over 2N anchors, ids, mask_labels, products, tile_rows, processes, gradient, errors.
    Source: Yeh et al. 2022, arXiv:2110.06848, eq. 6 (DCL) and 7 (DCLW), over both views.
    """

    def __init__(
        self,
        temperature: float = 0.1,
        sigma: float | None = None,
        mask_labels: bool = False,
        products: Products = "float32",
        tile_rows: int | None = None,
    ) -> None:
        super().__init__()
        check_settings(temperature, products, tile_rows)
        if sigma is not None and not (sigma > 0 and math.isfinite(sigma)):
            raise ValueError(f"sigma = {sigma} must be a finite number above 0, or left out")
        self.engine = Engine(temperature, products, tile_rows)
        self.sigma = sigma
        self.mask_labels = mask_labels
        self.masked_pairs = 0
        self.last_negatives = 0.0

    def extra_repr(self) -> str:
        return f"{self.engine}, sigma={self.sigma}, mask_labels={self.mask_labels}"

    def forward(
        self, z_a: Tensor, z_b: Tensor, *, ids: Tensor | None = None, labels: Tensor | None = None
    ) -> Tensor:
        check_views(z_a, z_b, ids, labels)
        anchors = anchors_of(z_a, ids, labels if self.mask_labels else None)
        self.masked_pairs, self.last_negatives = anchors.masked_pairs, anchors.mean_negatives
        return contrast(z_a, z_b, anchors, self._row_loss, self.engine)

    def _row_loss(self, v: Tensor, sums: Sums, anchors: Anchors) -> Tensor:
        v_a, v_b = v.unbind(1)
        positive = (v_a * v_b).sum(1, keepdim=True)  # (N, 1)
        weight: Tensor | float = 1.0
        if self.sigma is not None:
            cosines = positive * self.engine.temperature
            weight = 2 - anchors.images * torch.softmax(cosines / self.sigma, dim=0)
        values = sums[0] - weight * positive  # (N, 2)
        return values.masked_fill(sums[0] == -math.inf, 0).mean()
