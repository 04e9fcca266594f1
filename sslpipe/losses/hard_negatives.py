"""NT-Xent whose negatives weigh more the closer they are to the anchor."""

import math
from typing import Annotated

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor

from sslpipe.distributed import to_device
from sslpipe.losses.base import LabelMaskingLoss, Scale, positive_similarities
from sslpipe.losses.engine.anchors import Anchors
from sslpipe.losses.engine.contrast import Sums
from sslpipe.losses.engine.tiles import ONE_SUM, Term


class HardNegativeLoss(LabelMaskingLoss):
    """Find each image's other view, negatives weighted by how hard they are (debiased, too).

    -log e^(s+) / (e^(s+) + M g), g the reweighted mean of e^(s_ij) over an anchor's M negatives.
    An anchor without negatives counts 0. The negatives, the mean over 2N anchors, ids, shapes,
    processes, gradient and errors are as in NTXentLoss; so is the value with beta = 0 and
    class_prior = 0. With beta = 0 alone it is the debiased loss. The gradient goes through the
    weights.

    Source:
        Robinson et al. 2021, arXiv:2010.04592, eq. 4 and section 3.3, with M for their Q; Chuang et
        al. 2020, arXiv:2007.00224, eq. 8, for the share that is taken out.
    """

    temperature: Scale = 0.5
    beta: Annotated[float, Field(ge=0)] = 1.0
    """Concentration: negative j weighs in proportion to e^(beta s_ij); 0: all the same."""
    class_prior: Annotated[float, Field(ge=0, lt=1)] = 0.1
    """Probability that a "negative" is of the anchor's class; that share of e^(s+) is taken out of
    g, which stays at least e^(-1 / temperature)."""

    @property
    def terms(self) -> tuple[Term, ...]:
        """Log sums of e^((1 + beta) s) and of the weights e^(beta s); their difference is log g."""
        return (Term(1 + self.beta), Term(self.beta, sign=-1)) if self.beta else ONE_SUM

    def row_loss(self, v: Tensor, sums: Sums, anchors: Anchors) -> Tensor:
        """Compute eq. 4, all in logarithms: softplus(log M + log g - s+)."""
        positive = positive_similarities(v)  # (N, 1)
        count = positive.new_full((), 2 * anchors.images - 2)
        if anchors.negatives is not None:
            count = to_device(anchors.negatives.to(v.dtype), v.device)
            count = count[:, None] if count.dim() == 1 else count  # (N, 1) or (N, 2)
        log_count = count.clamp_min(1).log()
        none = count == 0  # an anchor without negatives counts 0
        hard = sums[0].masked_fill(none, 0)  # (N, 2)
        log_weights = sums[1].masked_fill(none, 0) if self.beta else log_count

        # log of g over e^(s+), before and after the prior's share is taken out
        excess = hard - log_weights - positive
        lowest = -1 / self.temperature - positive
        if self.class_prior:
            enough = excess > math.log(self.class_prior)
            share = self.class_prior * torch.where(enough, -excess, -math.inf).exp()
            rest = excess + torch.log1p(-share) - math.log1p(-self.class_prior)
            excess = torch.where(enough, torch.maximum(rest, lowest), lowest)
        else:
            excess = torch.maximum(excess, lowest)
        return -F.logsigmoid(-excess - log_count).masked_fill(none, 0).mean()
