"""Objectives `forward(z_a, z_b, *, ids, labels) -> ()`; LOSSES names them for recipes."""

from collections.abc import Callable
from functools import partial

from sslpipe.losses.dcl import DCLLoss
from sslpipe.losses.hard_negatives import HardNegativeLoss
from sslpipe.losses.moco import MoCoLoss
from sslpipe.losses.nt_xent import NTXentLoss
from sslpipe.losses.sup_con import SupConLoss

Objective = NTXentLoss | DCLLoss | SupConLoss | HardNegativeLoss | MoCoLoss
LOSSES: dict[str, Callable[..., Objective]] = {
    "nt_xent": NTXentLoss,
    "dcl": DCLLoss,
    "dclw": partial(DCLLoss, sigma=0.5),
    "sup_con": SupConLoss,
    "hard_negatives": HardNegativeLoss,
    "moco": MoCoLoss,
}
