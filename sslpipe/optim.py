"""Optimizers with their parameter groups, LARS, and the learning rate as a function of the step."""

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate
from typing import Any, overload

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from sslpipe.recipe.base import Optim, Tune


def lr_at(step: int, optim: Optim, steps: int) -> float:
    """Compute the learning rate of one step.

    With w = warmup_steps: peak_lr * step / w for step < w, so 0 at step 0 and peak_lr at step w
    (as in SimCLR's code). From there on, for the cosine schedule,
    peak_lr * (1 + cos(pi (step - w) / (steps - w))) / 2: peak_lr / 2 at w + (steps - w) / 2, 0 at
    step = steps, which is one past the last; for "constant" peak_lr. A run shorter than its
    warm-up ends inside it.

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
        optimizer: Of `build_optimizer`.
        lr: The rate.
        ramp: Further factor of the groups of pretrained parameters.
    """
    for group in optimizer.param_groups:
        group["lr"] = lr * group.get("lr_scale", 1.0)  # none in an optimizer of one's own
        if ramp != 1 and group.get("pretrained", False):
            group["lr"] *= ramp
    return lr


def build_optimizer(
    model: nn.Module,
    optim: Optim,
    lr_scale: Callable[[str], float] = lambda name: 1.0,
    *,
    pretrained: str | None = None,
    l2_to_init: float = 0.0,
) -> Optimizer:
    """Build the recipe's optimizer over the model's trainable parameters.

    Groups "decay": parameters of two or more dimensions. "no_decay": biases, norms, scalars, which
    get no weight decay and no LARS adaptation unless optim.decay_one_dim. Distinguished by shape,
    since names differ from backbone to backbone.

    On CUDA SGD and AdamW are torch's fused ones. These and LARS take the gradient scaler's
    `found_inf`, a () float on the device: where it is 1, a step changes nothing.

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
        groups.append(group)
    optimizer = _optimizer_over(groups, optim)
    if l2_to_init:
        optimizer.register_step_pre_hook(_TowardsStart(groups))
    return optimizer


def _optimizer_over(groups: list[dict[str, Any]], optim: Optim) -> Optimizer:
    fused = all(_on_one_gpu(group["params"]) for group in groups) or None
    match optim.kind:
        case "sgd":
            momentum, nesterov = optim.momentum, optim.nesterov
            sgd = SGD(groups, lr=optim.peak_lr, momentum=momentum, nesterov=nesterov, fused=fused)
            return _with_own_kernels(sgd)
        case "adamw":
            adamw = AdamW(groups, lr=optim.peak_lr, betas=optim.betas, fused=fused)
            return _with_own_kernels(adamw)
        case "lars":
            for group in groups:
                group["adapt"] = group["name"].startswith("decay")
            return LARS(
                groups,
                lr=optim.peak_lr,
                momentum=optim.momentum,
                trust_coefficient=optim.trust_coefficient,
            )


class _TowardsStart:
    """Weight decay towards where the parameters of some groups were when this was made.

    Before each step: the gradient gets l2_to_init (w - start), as weight_decay adds
    weight_decay w to it; under AdamW w moves by lr l2_to_init (start - w), as there w moves by
    -lr weight_decay w. A step that `found_inf` skips moves nothing.

    Args:
        groups: Of the optimizer; those with `l2_to_init`.

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
        for group in optimizer.param_groups:
            strength = group.get("l2_to_init")
            weights = [p for p in group["params"] if p.grad is not None]
            if not strength or not weights:
                continue
            away = torch._foreach_sub(weights, [self._start[p] for p in weights])
            if isinstance(optimizer, AdamW):
                torch._foreach_mul_(away, -strength * group["lr"])
                if found_inf is not None:
                    torch._foreach_mul_(away, 1 - found_inf)
                torch._foreach_add_(weights, away)
            else:
                grads = [p.grad for p in weights if p.grad is not None]
                torch._foreach_add_(grads, away, alpha=strength)


def _with_own_kernels(optimizer: SGD | AdamW) -> Optimizer:
    """Prepare one of torch's optimizers for checkpoints of other devices, and for skipped steps."""

    def keep(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Which kernels compute a step is this process's choice, not the checkpoint's."""
        groups = [
            {**saved, "fused": own["fused"]}
            for saved, own in zip(state["param_groups"], optimizer.param_groups, strict=False)
        ]
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(keep)
    for group in optimizer.param_groups:
        if group["fused"] and group.get("momentum"):
            for p in group["params"]:  # or a first step that is skipped leaves them unset
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer


def describe_groups(optimizer: Optimizer, model: nn.Module) -> str:
    """Describe each group in one line.

    Its name, tensors, numbers, weight decay, whether LARS adapts it, and how many tensors of which
    kind it holds ("20 BatchNorm2d.bias").
    """
    kinds = {
        parameter: f"{type(module).__name__}.{name}"
        for module in model.modules()
        for name, parameter in module.named_parameters(recurse=False)
    }
    lines = []
    for group in optimizer.param_groups:
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


class LARS(Optimizer):
    """SGD with momentum whose step is scaled layer by layer to the layer's own length.

    For an adapted tensor w with gradient g: u = g + weight_decay w, ratio = trust_coefficient
    |w| / |u| (1 where |w| or |u| is 0), v = momentum v + lr ratio u, w = w - v. The learning rate
    stands inside the momentum, as in SimCLR's code, so a changed rate leaves past steps alone.

    Args:
        params: tensors, or groups.
        lr: >= 0, like momentum, weight_decay and trust_coefficient.
        momentum: of the velocity v.
        weight_decay: added to the gradient before the ratio.
        trust_coefficient: the ratio's factor.
        adapt: False, in a group too, means ratio 1.

    Attributes:
        found_inf: as in torch's fused optimizers: where this () float tensor is 1, a step changes
            neither weights nor velocities. Not set: it always does.

    Source:
        You et al. 2017, arXiv:1708.03888, alg. 1; google-research/simclr lars_optimizer.py.
    """

    def __init__(
        self,
        params: Iterable[Tensor] | Iterable[dict[str, Any]],
        lr: float,
        momentum: float = 0.9,
        weight_decay: float = 0.0,
        trust_coefficient: float = 0.001,
        adapt: bool = True,
    ) -> None:
        for name, value in (
            ("lr", lr),
            ("momentum", momentum),
            ("weight_decay", weight_decay),
            ("trust_coefficient", trust_coefficient),
        ):
            if not value >= 0:
                raise ValueError(f"{name} = {value} must be 0 or more")
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
            "adapt": adapt,
        }
        super().__init__(params, defaults)

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Update all groups; return the closure's loss, if there is a closure."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            self._step_group(group)
        return loss

    def _step_group(self, group: dict[str, Any]) -> None:
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            return
        for p in weights:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        velocity = [self.state[p]["momentum_buffer"] for p in weights]
        grads = [p.grad for p in weights if p.grad is not None]
        found_inf = getattr(self, "found_inf", None)
        dense = all(v.stride() == w.stride() for v, w in zip(velocity, weights, strict=True))
        if dense and _on_one_gpu([*weights, *grads]):
            updates = self._scaled_together(group, weights, grads)
        else:
            updates = grads
            if group["weight_decay"]:
                updates = list(torch._foreach_add(updates, weights, alpha=group["weight_decay"]))
            if group["adapt"]:
                ratios = _trust_ratios(group["trust_coefficient"], weights, updates)
                updates = list(torch._foreach_mul(updates, list(ratios.unbind())))
            if found_inf is None:
                torch._foreach_mul_(velocity, group["momentum"])
                torch._foreach_add_(velocity, updates, alpha=group["lr"])
                torch._foreach_sub_(weights, velocity)
                return
            updates = list(torch._foreach_mul(updates, group["lr"]))
        # the same by a kernel that does nothing where found_inf is 1: v = momentum v + lr u, w -= v
        torch._fused_sgd_(
            weights,
            updates,
            velocity,
            weight_decay=0.0,
            momentum=group["momentum"],
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=found_inf,
        )

    def _scaled_together(
        self, group: dict[str, Any], weights: list[Tensor], grads: list[Tensor]
    ) -> list[Tensor]:
        """Compute lr ratio u of each tensor in few launches: one product scales them all."""
        if not group["adapt"]:
            if group["weight_decay"]:
                grads = list(torch._foreach_add(grads, weights, alpha=group["weight_decay"]))
            return list(torch._foreach_mul(grads, group["lr"]))
        # the buffer of these weights, made at the first step: no state of a run
        buffers: dict[tuple[int, ...], _FlatUpdates] = self.__dict__.setdefault("_updates", {})
        key = tuple(map(id, weights))
        if key not in buffers:
            buffers[key] = _FlatUpdates(weights)
        flat = buffers[key]
        torch._foreach_copy_(flat.parts, grads)
        if group["weight_decay"]:
            torch._foreach_add_(flat.parts, weights, alpha=group["weight_decay"])
        ratios = _trust_ratios(group["trust_coefficient"], weights, flat.parts)
        flat.scale_(ratios * group["lr"])
        return flat.parts


def _on_one_gpu(tensors: Sequence[Tensor]) -> bool:
    """Whether one CUDA kernel can take them all: of one dtype on one GPU."""
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    return len(kinds) == 1 and tensors[0].is_cuda


def _trust_ratios(coefficient: float, weights: list[Tensor], updates: list[Tensor]) -> Tensor:
    """(tensors,): coefficient |w| / |u|, and 1 where either length is 0."""
    norms = torch.stack(torch._foreach_norm([*weights, *updates]))
    lengths, strides = norms[: len(weights)], norms[len(weights) :]
    ratios = coefficient * lengths / strides
    return torch.where((lengths > 0) & (strides > 0), ratios, 1.0)


class _FlatUpdates:
    """Tensors like the given ones in one buffer, each from a new row on: one product scales all.

    Attributes:
        parts: The tensors, views of the buffer.
    """

    ROW = 1024

    def __init__(self, weights: Sequence[Tensor]) -> None:
        rows = [-(-weight.numel() // self.ROW) for weight in weights]
        device, dtype = weights[0].device, weights[0].dtype
        self._buffer = torch.zeros(sum(rows), self.ROW, dtype=dtype, device=device)
        tensor = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
        self._tensor_of_row = tensor.to(device)
        starts = [0, *accumulate(rows)]
        self.parts = [
            self._buffer.as_strided(weight.shape, weight.stride(), self.ROW * start)
            for weight, start in zip(weights, starts, strict=False)
        ]

    def scale_(self, factors: Tensor) -> None:
        """Multiply each tensor by its factor, (tensors,)."""
        self._buffer.mul_(factors.index_select(0, self._tensor_of_row)[:, None])
