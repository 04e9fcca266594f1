"""Hard-aware cascade: branches of one embedding, each trained on the hardest pairs of the last."""

from collections.abc import Sequence

import torch

from sslpipe.metric_learning.losses.pair import contrastive
from sslpipe.metric_learning.losses.pairwise import Batch, Pairs, PerAnchor, hardest_pairs


def hdc(
    batch: Batch,
    pairs: Pairs,
    *,
    shares: Sequence[float] = (1.0, 0.5, 0.2),
    margin: float = 1.0,
) -> list[PerAnchor]:
    """`contrastive` of each branch; the k-th sees shares[k] of the pairs, hardest by branch k - 1.

    The embedding is its branches side by side, equally wide; so is what a search uses afterwards.
    shares fall; the first is 1. Hard: positives far apart, negatives close, in Euclidean distance.
    Source: Yuan et al. 2017, arXiv:1611.05720, section 3; ratios 100, 50, 20 %.
    """
    dim = batch.anchors.shape[1]
    if list(shares) != sorted(shares, reverse=True) or shares[0] != 1 or shares[-1] <= 0:
        raise ValueError(f"shares = {list(shares)} must fall from 1 and stay above 0")
    if dim % len(shares):
        raise ValueError(f"{dim} features do not part into {len(shares)} branches equally wide")
    width = dim // len(shares)
    anchors, columns = torch.split(batch.anchors, width, 1), torch.split(batch.columns, width, 1)
    branches = [batch._replace(anchors=a, columns=c) for a, c in zip(anchors, columns, strict=True)]
    terms = contrastive(branches[0], pairs, margin=margin)
    for k, branch in enumerate(branches[1:]):
        with torch.no_grad():
            left = shares[k + 1] / shares[k]
            pairs = hardest_pairs(branches[k], pairs, left, left, "euclidean")
        terms += contrastive(branch, pairs, margin=margin)
    return terms
