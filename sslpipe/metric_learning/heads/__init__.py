"""Heads: losses with weights of their own for each class, behind the signature of all losses.

For fine-tuning recipes (`loss.kind` may be a name of HEADS) and for notebooks:
`ArcFace(num_classes=10, dim=128)(embeddings, labels)`. They compare rows with weights, so `ref` and
`miner` mean nothing to them. Their weights are trained with the model, their state lies in buffers,
and an export leaves them out. Start with `margin_softmax.MarginSoftmax`; `proxies` has the other
heads. A new head is a class on `head.Head` and a line below.
"""

from sslpipe.metric_learning.heads.head import Head
from sslpipe.metric_learning.heads.margin_softmax import (
    ArcFace,
    CircleSoftmax,
    CombinedMargin,
    CosFace,
    LSoftmax,
    MarginSoftmax,
    ModifiedSoftmax,
    NormFace,
    Softmax,
    SphereFace,
    SubCenterArcFace,
)
from sslpipe.metric_learning.heads.proxies import CenterLoss, ProxyAnchor, ProxyNCA, SoftTriple
from sslpipe.registry import Table

HEADS: Table[type[Head]] = Table(
    "head",
    {
        "arcface": ArcFace,
        "center": CenterLoss,
        "circle_softmax": CircleSoftmax,
        "combined_margin": CombinedMargin,
        "cosface": CosFace,
        "l_softmax": LSoftmax,
        "modified_softmax": ModifiedSoftmax,
        "normface": NormFace,
        "proxy_anchor": ProxyAnchor,
        "proxy_nca": ProxyNCA,
        "soft_triple": SoftTriple,
        "softmax": Softmax,
        "sphereface": SphereFace,
        "sub_center_arcface": SubCenterArcFace,
    },
    "sslpipe.heads",
)

__all__ = ["HEADS", "Head"]
__all__ += ["ArcFace", "CircleSoftmax", "CombinedMargin", "CosFace", "LSoftmax", "MarginSoftmax"]
__all__ += ["ModifiedSoftmax", "NormFace", "Softmax", "SphereFace", "SubCenterArcFace"]
__all__ += ["CenterLoss", "ProxyAnchor", "ProxyNCA", "SoftTriple"]
