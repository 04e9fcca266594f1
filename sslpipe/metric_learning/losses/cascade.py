"""Hard-aware cascade: branches of one embedding, each trained on the hardest pairs of the last."""

from collections.abc import Sequence

import torch

from sslpipe.metric_learning.losses.base import MetricLoss
from sslpipe.metric_learning.losses.pair import ContrastiveLoss
from sslpipe.metric_learning.losses.pairwise import LabelledRows, Pairs, PerAnchor, hardest_pairs


class HDCLoss(MetricLoss, normalize=False):
    """Train branches of one embedding, each on the hardest pairs of the one before.

    `ContrastiveLoss` of each branch; the k-th sees shares[k] of the pairs, hardest by branch k - 1.
    The embedding is its branches side by side, equally wide; so is what a search uses afterwards.
    Hard: positives far apart, negatives close, in Euclidean distance.

    Args:
        shares: Of the pairs; they fall, the first is 1.
        margin: Of `ContrastiveLoss`.

    Source:
        Yuan et al. 2017, arXiv:1611.05720, section 3; ratios 100, 50, 20 %.
    """

    @staticmethod
    def row_terms(
        batch: LabelledRows,
        pairs: Pairs,
        *,
        shares: Sequence[float] = (1.0, 0.5, 0.2),
        margin: float = 1.0,
    ) -> list[PerAnchor]:
        """Return the terms that are added up, see `MetricLoss`."""
        dim = batch.anchors.shape[1]
        if list(shares) != sorted(shares, reverse=True) or shares[0] != 1 or shares[-1] <= 0:
            raise ValueError(f"shares = {list(shares)} must fall from 1 and stay above 0")
        if dim % len(shares):
            raise ValueError(f"{dim} features do not part into {len(shares)} branches equally wide")
        width = dim // len(shares)
        anchors, columns = (
            torch.split(batch.anchors, width, 1),
            torch.split(batch.columns, width, 1),
        )
        branches = [
            batch._replace(anchors=a, columns=c) for a, c in zip(anchors, columns, strict=True)
        ]
        terms = ContrastiveLoss.row_terms(branches[0], pairs, margin=margin)
        for k, branch in enumerate(branches[1:]):
            with torch.no_grad():
                left = shares[k + 1] / shares[k]
                pairs = hardest_pairs(branches[k], pairs, left, left, "euclidean")
            terms += ContrastiveLoss.row_terms(branch, pairs, margin=margin)
        return terms
