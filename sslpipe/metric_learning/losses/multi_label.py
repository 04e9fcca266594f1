"""Circle loss for classifiers of several classes an image: for notebooks, not for recipes."""

import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.distributed import global_mean
from sslpipe.metric_learning.losses.metric_loss import AboveZero
from sslpipe.metric_learning.losses.tiled import NEVER
from sslpipe.registry.part import Part


class MultiLabelCircleLoss(Part):
    """Want every score of an image's own classes above every score of the others.

    For each row log(1 + sum over other classes e^{gamma s_n} * sum over own ones e^{-gamma s_p});
    with one class an image this is softmax cross entropy. With `threshold`, a class of score 0
    stands between: log(1 + sum e^{gamma s_n}) + log(1 + sum e^{-gamma s_p}), so that own classes
    are those with a score above 0, however many; a row without any teaches then, too.

    Shape:
        scores (B, C) of any float dtype, targets (B, C) bool or 0 and 1 -> (), the mean over the
        rows of all ranks. Collective.

    Raises:
        ValueError: The shapes differ, or a target is neither 0 nor 1.

    Source:
        Sun et al. 2020, arXiv:2002.10857, eq. 1, with an image's classes for its pairs.
    """

    gamma: AboveZero = 1.0
    """Scale of the scores."""
    threshold: bool = True
    """Whether a class of score 0 stands between the own ones and the others."""

    def forward(self, scores: Tensor, targets: Tensor) -> Tensor:
        """Return the loss of the rows of all ranks."""
        if scores.dim() != 2 or scores.shape != targets.shape:
            raise ValueError(
                f"scores and targets must be (B, C) both, got {tuple(scores.shape)} and "
                f"{tuple(targets.shape)}"
            )
        if not targets.is_cuda and not bool(((targets == 0) | (targets == 1)).all()):
            raise ValueError("targets must be 0 or 1: whether a row has a class")
        has_class = targets.bool()
        with torch.autocast(scores.device.type, enabled=False):
            x = self.gamma * scores.to(torch.promote_types(scores.dtype, torch.float32))
            push = x.masked_fill(has_class, NEVER[x.dtype]).logsumexp(1)  # (B,)
            pull = (-x).masked_fill(~has_class, NEVER[x.dtype]).logsumexp(1)
            values = (
                F.softplus(push) + F.softplus(pull) if self.threshold else F.softplus(push + pull)
            )
            return global_mean(values.sum(), values.new_full((), len(values)))
