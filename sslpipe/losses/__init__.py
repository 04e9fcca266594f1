"""Objectives of pretraining: `forward(z_a, z_b, *, ids, labels, groups) -> ()` and `stats()`.

For training (`LOSSES` names them for recipes) and for notebooks:
`NTXentLoss(temperature=0.1)(z_a, z_b)`. Start with `nt_xent.py`; `base.py` holds what an objective
is, `engine/` how sums over all pairs are made without the matrix of pairs. To add one: a class on
`base.InBatchLoss` with its settings as fields and its `row_loss` (any other two-view objective: on
`base.Objective`), and a line in LOSSES.
"""

from sslpipe.losses.base import ContrastiveObjective, InBatchLoss, Objective
from sslpipe.losses.dcl import DCLLoss, DCLWLoss
from sslpipe.losses.diet import DietLoss
from sslpipe.losses.distill import DistillLoss, TeacherFeatures
from sslpipe.losses.hard_negatives import HardNegativeLoss
from sslpipe.losses.moco import MoCoLoss
from sslpipe.losses.nt_xent import NTXentLoss
from sslpipe.losses.sup_con import SupConLoss
from sslpipe.registry import Table

__all__ = ["LOSSES", "ContrastiveObjective", "InBatchLoss", "Objective"]
__all__ += ["DCLLoss", "DCLWLoss", "HardNegativeLoss", "MoCoLoss", "NTXentLoss", "SupConLoss"]
__all__ += ["DietLoss", "DistillLoss", "TeacherFeatures"]

_BUILT_IN: dict[str, type[Objective]] = {
    "nt_xent": NTXentLoss,
    "dcl": DCLLoss,
    "dclw": DCLWLoss,
    "sup_con": SupConLoss,
    "hard_negatives": HardNegativeLoss,
    "moco": MoCoLoss,
    "diet": DietLoss,
    "distill": DistillLoss,
}
LOSSES = Table("objective", _BUILT_IN, "sslpipe.losses")
