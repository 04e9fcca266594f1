"""Heads: losses with weights of their own for each class, behind the signature of all losses.

For fine-tuning recipes (`loss.kind` may be a name of HEADS) and for notebooks:
`HEADS["arcface"](num_classes=10, dim=128)(embeddings, labels)`. They compare rows with weights, so
`ref` and `miner` mean nothing to them. Their weights are trained with the model, their state lies
in buffers, and an export leaves them out. Start with `margin_softmax.MarginSoftmax`;
`fixed_margins` and `adaptive_margins` have it with each paper's rule, `proxies` the other heads. A
new head is a class on `base.Head` and a line below.
"""

from collections.abc import Callable

from sslpipe.metric_learning.heads import adaptive_margins, fixed_margins, margin_softmax, proxies
from sslpipe.metric_learning.heads.base import Head
from sslpipe.registry import Table

HEADS: Table[Callable[..., Head]] = Table(
    "head",
    {
        "adaface": adaptive_margins.AdaFace,
        "arcface": fixed_margins.ArcFace,
        "center": proxies.CenterLoss,
        "circle_softmax": adaptive_margins.CircleSoftmax,
        "combined_margin": fixed_margins.CombinedMargin,
        "cosface": fixed_margins.CosFace,
        "curricularface": adaptive_margins.CurricularFace,
        "l_softmax": fixed_margins.LSoftmax,
        "modified_softmax": margin_softmax.ModifiedSoftmax,
        "normface": margin_softmax.NormFace,
        "proxy_anchor": proxies.ProxyAnchor,
        "proxy_nca": proxies.ProxyNCA,
        "soft_triple": proxies.SoftTriple,
        "softmax": margin_softmax.Softmax,
        "sphereface": fixed_margins.SphereFace,
        "sub_center_arcface": fixed_margins.SubCenterArcFace,
    },
    "sslpipe.heads",
)

__all__ = ["HEADS", "Head"]
