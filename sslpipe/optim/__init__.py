"""Optimizers of a run: their parameter groups, LARS, and the learning rate of each step.

Start with `build_optimizer`; `lars.py` is the one optimizer that torch does not have.
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
    set_lr,
    takes_found_inf,
)
from sslpipe.optim.lars import LARS
from sslpipe.optim.usual_rate import rate_warning

__all__ = [
    "LARS",
    "build_optimizer",
    "clip_gradient",
    "describe_groups",
    "gradient_norm",
    "lr_at",
    "optimizer_over",
    "parameter_groups",
    "ramp_at",
    "rate_warning",
    "set_lr",
    "takes_found_inf",
]
