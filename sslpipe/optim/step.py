"""What each step does with an optimizer: the learning rate of the step, the gradient's length."""

import math
from collections.abc import Iterable
from functools import cache

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from sslpipe.optim.lars import LARS
from sslpipe.recipe.sections import Optim, Tune


def lr_at(step: int, optim: Optim, steps: int) -> float:
    """Compute the learning rate of one step.

    With w = warmup_steps: peak_lr * step / w for step < w (as in SimCLR's code); from there on
    peak_lr * (1 + cos(pi (step - w) / (steps - w))) / 2, 0 one past the last step, or, where the
    schedule is "constant", peak_lr. A run shorter than its warm-up ends inside it.

    Args:
        step: counts from 0.
        optim: the recipe's section.
        steps: length of the run.
    """
    warmup = optim.warmup_steps
    if step < warmup:
        return optim.peak_lr * step / warmup
    if optim.schedule == "constant":
        return optim.peak_lr
    progress = min(1.0, (step - warmup) / max(1, steps - warmup))
    return optim.peak_lr * (1 + math.cos(math.pi * progress)) / 2


def ramp_at(step: int, tune: Tune) -> float:
    """Compute what the rate of a backbone that starts from weights is multiplied by at one step.

    With r = ramp_steps and s = step - projector_first_steps: (s + 1) / r for s < r, then 1.
    """
    if not tune.ramp_steps:
        return 1.0
    return min(1.0, max(0, step - tune.projector_first_steps + 1) / tune.ramp_steps)


def set_lr(optimizer: Optimizer, lr: float, ramp: float = 1.0) -> float:
    """Set every group's learning rate, times the group's own factor; returns it, for the log.

    Args:
        optimizer: As `Optim.build` makes it.
        lr: The rate.
        ramp: Further factor of the groups of pretrained parameters.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)  # none in an optimizer of one's own
        if ramp != 1 and group.get("pretrained", False):
            group["lr"] *= ramp
    return lr


def gradient_norm(optimizer: Optimizer, parameters: Iterable[Tensor]) -> Tensor:
    """Compute the length () of the gradients of these parameters, which are the optimizer's."""
    block = optimizer.gather_gradients() if isinstance(optimizer, LARS) else None
    if block is not None:
        norm: Tensor = torch.linalg.vector_norm(block)
        return norm
    grads = [p.grad for p in parameters if p.grad is not None]
    return nn.utils.get_total_norm(grads)


def clip_gradient(
    optimizer: Optimizer, parameters: list[nn.Parameter], most: float | None
) -> Tensor:
    """Bring the gradient's length to at most `most`: in place, on CUDA by writing a `grad_scale`.

    Args:
        optimizer: Of the parameters.
        parameters: Whose gradients are one vector.
        most: The length; None: any.

    Returns:
        The length () before that.
    """
    norm = gradient_norm(optimizer, parameters)
    if most is not None and norm.is_cuda and takes_found_inf(optimizer):
        # 1 / min(1, most / (norm + 1e-6)), in two launches; 1 of NaN, whose step is skipped
        excess = torch.rsub(norm, 1e-6 / most, alpha=-1 / most)
        optimizer.grad_scale = torch.fmax(excess, _one(norm.device))  # type: ignore[attr-defined]
    elif most is not None:
        nn.utils.clip_grads_with_norm_(parameters, most, norm)
    return norm


def takes_found_inf(optimizer: Optimizer) -> bool:
    """Whether a step does nothing where `found_inf` is 1, and divides by `grad_scale`.

    `LARS`, and torch's fused ones, which say so to its GradScaler.
    """
    return isinstance(optimizer, LARS) or getattr(optimizer, "_step_supports_amp_scaling", False)


@cache
def _one(device: torch.device) -> Tensor:
    """(), 1. Shared by all calls: not to be changed."""
    return torch.ones((), device=device)
