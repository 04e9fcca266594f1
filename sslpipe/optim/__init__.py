"""Optimizers of a run: their parameter groups, LARS, and the learning rate of each step.

Start with `build_optimizer`; `optimizers.py` has the kinds that a recipe names (OPTIMIZERS), and
`lars.py` the one that torch does not have.
"""

from sslpipe.optim.build import (
    build_optimizer,
    clip_gradient,
    describe_groups,
    gradient_norm,
    lr_at,
    optimizer_over,
    parameter_groups,
    ramp_at,
    rate_warning,
    set_lr,
    takes_found_inf,
)
from sslpipe.optim.lars import LARS
from sslpipe.optim.optimizers import OPTIMIZERS

__all__ = ["LARS", "OPTIMIZERS", "build_optimizer", "optimizer_over", "parameter_groups"]
__all__ += ["clip_gradient", "describe_groups", "gradient_norm", "takes_found_inf"]
__all__ += ["lr_at", "ramp_at", "rate_warning", "set_lr"]
