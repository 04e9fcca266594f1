"""NT-Xent whose negatives weigh more the closer they are to the anchor."""

import math

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
from sslpipe.losses.engine.tiles import Term


class HardNegativeLoss(nn.Module):
    """-log e^(s+) / (e^(s+) + M g), g the reweighted mean of e^(s_ij) over an anchor's M negatives.

    beta: concentration, >= 0: negative j weighs in proportion to e^(beta s_ij); 0: all the same.
    class_prior: probability in [0, 1) that a "negative" is of the anchor's class; that share of
    e^(s+) is taken out of g, which stays at least e^(-1 / temperature). With beta = 0 it is the
    debiased loss, and with class_prior = 0 as well NT-Xent. The gradient goes through the weights.
    Everything else as in NTXentLoss: the negatives, the mean over 2N anchors, ids, mask_labels,
    products, tile_rows, processes, gradient, errors.
    Source: Robinson et al. 2021, arXiv:2010.04592, eq. 4 and section 3.3, with M for their Q;
    Chuang et al. 2020, arXiv:2007.00224, eq. 8, for the share that is taken out.
    """

    def __init__(
        self,
        temperature: float = 0.5,
        beta: float = 1.0,
        class_prior: float = 0.1,
        mask_labels: bool = False,
        products: Products = "float32",
        tile_rows: int | None = None,
    ) -> None:
        super().__init__()
        check_settings(temperature, products, tile_rows)
        if not (beta >= 0 and math.isfinite(beta)):
            raise ValueError(f"beta = {beta} must be a finite number, 0 or above")
        if not 0 <= class_prior < 1:
            raise ValueError(f"class_prior = {class_prior} must be in [0, 1)")
        terms = (Term(1 + beta), Term(beta, sign=-1)) if beta else (Term(),)
        self.engine = Engine(temperature, products, tile_rows, terms)
        self.beta = beta
        self.class_prior = class_prior
        self.mask_labels = mask_labels
        self.masked_pairs = 0
        self.last_negatives = 0.0

    def extra_repr(self) -> str:
        return (
            f"{self.engine}, beta={self.beta}, class_prior={self.class_prior}, "
            f"mask_labels={self.mask_labels}"
        )

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
        count = positive.new_full((), 2 * anchors.images - 2)
        if anchors.negatives is not None:
            count = anchors.negatives.to(v.dtype)[:, None]
        log_count = count.clamp_min(1).log()
        none = count == 0  # an anchor without negatives counts 0
        hard = sums[0].masked_fill(none, 0)  # (N, 2)
        of_weights = sums[1].masked_fill(none, 0) if self.beta else log_count
        # log of g over e^(s+), before and after the prior's share is out
        excess = hard - of_weights - positive
        lowest = -1 / self.engine.temperature - positive
        if self.class_prior:
            enough = excess > math.log(self.class_prior)
            share = self.class_prior * torch.where(enough, -excess, -math.inf).exp()
            left = excess + torch.log1p(-share) - math.log1p(-self.class_prior)
            excess = torch.where(enough, torch.maximum(left, lowest), lowest)
        else:
            excess = torch.maximum(excess, lowest)
        return -F.logsigmoid(-excess - log_count).masked_fill(none, 0).mean()
