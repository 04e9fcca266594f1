"""Optimizers with their parameter groups."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import AdamW, Optimizer

from sslpipe.recipe.sections import Optim

ABSURD = 100  # times the usual rate


def build_optimizer(
    model: nn.Module,
    optim: Optim,
    lr_scale: Callable[[str], float] = lambda name: 1.0,
    *,
    pretrained: str | None = None,
    l2_to_init: float = 0.0,
) -> Optimizer:
    """Build the recipe's optimizer over the model's trainable parameters: `parameter_groups`."""
    groups = parameter_groups(model, optim, lr_scale, pretrained=pretrained, l2_to_init=l2_to_init)
    return optimizer_over(groups, optim)


def parameter_groups(
    model: nn.Module,
    optim: Optim,
    lr_scale: Callable[[str], float] = lambda name: 1.0,
    *,
    pretrained: str | None = None,
    l2_to_init: float = 0.0,
) -> list[dict[str, Any]]:
    """Make an optimizer's groups of the model's trainable parameters.

    "decay": parameters of two or more dimensions. "no_decay": others (biases, norms, scalars),
    without weight decay and LARS adaptation, unless optim.decay_one_dim.

    Args:
        model: its parameters that require a gradient.
        optim: the recipe's section.
        lr_scale: a parameter's name -> what its learning rate is multiplied by; each value makes
            groups of its own.
        pretrained: how the names of parameters begin that start from weights; they have groups of
            their own. None: there are none.
        l2_to_init: decay of these towards what they are now, instead of weight_decay.
    """
    # groups: by learning rate, then with and without decay, then pretrained ones
    members: dict[tuple[float, bool, bool], list[nn.Parameter]] = {}
    for name, p in model.named_parameters():
        if p.requires_grad:
            decayed = p.ndim > 1 or optim.decay_one_dim
            started = pretrained is not None and name.startswith(pretrained)
            members.setdefault((lr_scale(name), decayed, started), []).append(p)
    groups: list[dict[str, Any]] = []
    for (scale, decayed, started), parameters in sorted(
        members.items(), key=lambda item: (-item[0][0], not item[0][1], item[0][2])
    ):
        towards_0 = decayed and not (started and l2_to_init)
        group = {
            "name": ("decay" if decayed else "no_decay")
            + (" pretrained" if started else "")
            + (f" x{scale:.3g}" if scale != 1 else ""),
            "params": parameters,
            "weight_decay": optim.weight_decay if towards_0 else 0.0,
            "lr_scale": scale,
        }
        if started:
            group["pretrained"] = True
            group["l2_to_init"] = l2_to_init if decayed else 0.0
        if optim.kind == "lars":
            group["adapt"] = decayed
        groups.append(group)
    return groups


def optimizer_over(groups: list[dict[str, Any]], optim: Optim) -> Optimizer:
    """Build the recipe's optimizer over `parameter_groups`.

    On CUDA SGD and AdamW are torch's fused ones. These and LARS take
    the gradient scaler's `found_inf` and `grad_scale`, () floats on the device: where the first is
    1, a step changes nothing; the gradient is divided by the second.
    """
    optimizer: Optimizer = optim.build(groups=groups)
    if any(group.get("l2_to_init") for group in groups):
        optimizer.register_step_pre_hook(_TowardsStart(groups))
    return optimizer


class _TowardsStart:
    """Weight decay towards where the parameters of groups with `l2_to_init` were at the start.

    Before each step: the gradient gets l2_to_init (w - start); under AdamW w moves by
    lr l2_to_init (start - w). A step that `found_inf` skips moves nothing.

    Source:
        Li et al. 2018 (L2-SP), arXiv:1802.01483, eq. 2; Loshchilov & Hutter 2019 (AdamW),
        arXiv:1711.05101, alg. 2.
    """

    def __init__(self, groups: Sequence[dict[str, Any]]) -> None:
        self._start = {
            parameter: parameter.detach().clone()
            for group in groups
            if group.get("l2_to_init")
            for parameter in group["params"]
        }

    @torch.no_grad()
    def __call__(self, optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        found_inf = getattr(optimizer, "found_inf", None)
        grad_scale = getattr(optimizer, "grad_scale", None)  # what the step divides all of it by
        for group in optimizer.param_groups:
            strength = group.get("l2_to_init")
            weights = [p for p in group["params"] if p.grad is not None]
            if not strength or not weights:
                continue
            start = [self._start[p] for p in weights]
            grads = [p.grad for p in weights if p.grad is not None]
            away = torch._foreach_sub(weights, start)
            if isinstance(optimizer, AdamW):
                torch._foreach_mul_(away, -strength * group["lr"])
                if found_inf is not None:
                    torch._foreach_mul_(away, 1 - found_inf)
                torch._foreach_add_(weights, away)
            else:
                if grad_scale is not None:
                    torch._foreach_mul_(away, grad_scale)
                torch._foreach_add_(grads, away, alpha=strength)


def describe_groups(groups: Iterable[dict[str, Any]], model: nn.Module) -> str:
    """Describe each group in one line: its sizes and settings, its tensors of each kind."""
    kinds = {
        parameter: f"{type(module).__name__}.{name}"
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    lines = []
    for group in groups:
        numbers = sum(p.numel() for p in group["params"])
        adapted = {True: ", adapted layer by layer", False: ", not adapted", None: ""}
        counts = Counter(kinds[p] for p in group["params"])
        to_start = group.get("l2_to_init", 0.0)
        decay = f"{to_start:g} towards the start" if to_start else f"{group['weight_decay']:g}"
        lines.append(
            f"{group['name']}: {len(group['params'])} tensors, {numbers:,} numbers,"
            f" weight decay {decay}{adapted[group.get('adapt')]}"
            f" ({', '.join(f'{count} {kind}' for kind, count in counts.items())})"
        )
    return "\n".join(lines)


def rate_warning(optim: Optim, batch_size: int) -> str | None:
    """Return in one sentence that a rate is far above what is usual; None where it is not."""
    known = optim.usual_rate(batch_size)
    if known is None:
        return None
    usual, whose = known
    times = optim.peak_lr / usual
    if times <= ABSURD:
        return None
    return (
        f"optim.peak_lr = {optim.peak_lr:g} is {times:,.0f} times {usual:.2g}, which is usual of "
        f"{optim.kind} at a batch of {batch_size} ({whose}): is a digit too "
        "many? Such steps end in NaN, or teach nothing"
    )
