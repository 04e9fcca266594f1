"""HEADS: losses with weights of their own for each class, behind the signature of all losses.

Built with num_classes and dim beside the recipe's own arguments; labels are 0..num_classes-1. They
compare rows with weights, so `ref` and `miner` mean nothing to them. Their weights are trained with
the model, their state lies in buffers, and an export leaves them out.
"""

from collections.abc import Callable

from torch import nn

from sslpipe.metric_learning.heads.margin_softmax import (
    Softmax,
    adaface,
    arcface,
    circle_softmax,
    combined_margin,
    cosface,
    curricularface,
    l_softmax,
    modified_softmax,
    normface,
    sphereface,
    sub_center_arcface,
)
from sslpipe.metric_learning.heads.proxies import CenterLoss, ProxyAnchor, ProxyNCA, SoftTriple

HEADS: dict[str, Callable[..., nn.Module]] = {
    "adaface": adaface,
    "arcface": arcface,
    "center": CenterLoss,
    "circle_softmax": circle_softmax,
    "combined_margin": combined_margin,
    "cosface": cosface,
    "curricularface": curricularface,
    "l_softmax": l_softmax,
    "modified_softmax": modified_softmax,
    "normface": normface,
    "proxy_anchor": ProxyAnchor,
    "proxy_nca": ProxyNCA,
    "soft_triple": SoftTriple,
    "softmax": Softmax,
    "sphereface": sphereface,
    "sub_center_arcface": sub_center_arcface,
}
