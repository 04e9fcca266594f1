"""LARS: on a GPU in few launches, on any device with the numbers of the formula."""

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate, repeat
from typing import Any, overload

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.optim import Optimizer


class LARS(Optimizer):
    """SGD with momentum whose step is scaled layer by layer to the layer's own length.

    For an adapted tensor w with gradient g: u = g + weight_decay w, ratio = trust_coefficient
    |w| / |u| (1 where |w| or |u| is 0), v = momentum v + lr ratio u, w = w - v. The learning rate
    stands inside the momentum, as in SimCLR's code, so a changed rate leaves past steps alone.
    On a GPU a step overwrites the gradients.

    Args:
        params: tensors, or groups.
        lr: >= 0, like momentum, weight_decay and trust_coefficient.
        momentum: of the velocity v.
        weight_decay: added to the gradient before the ratio.
        trust_coefficient: the ratio's factor.
        adapt: False, in a group too, means ratio 1.

    Attributes:
        found_inf: as in torch's fused optimizers: where this () float tensor is 1, a step changes
            neither weights nor velocities. None, or not set: it always does.
        grad_scale: as there: a step divides the gradients by this () tensor. None, or not set: it
            takes them as they are.

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
        settings = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "trust_coefficient": trust_coefficient,
        }
        for name, value in settings.items():
            if not value >= 0:
                raise ValueError(f"{name} = {value} must be 0 or more")
        super().__init__(params, {**settings, "adapt": adapt})

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
        self._update()
        return loss

    def _update(self) -> None:
        block = self._gathered()
        if block is not None and block.steps_together(self.param_groups):
            self._step_together(block)
        else:
            for group in self.param_groups:
                self._step_group(group)

    def gather_gradients(self) -> Tensor | None:
        """On one GPU bring all gradients into one block: norm and clipping take a launch each.

        Returns:
            (numbers,), where the gradients then lie, zeros between them; None where they are on
            several devices, on a CPU or not of one dtype.
        """
        block = self._gathered()
        return None if block is None else block.flat

    @torch.no_grad()
    def _gathered(self) -> "_GradientBlock | None":
        """Return the block of all gradients, made at the first step: no state of a run."""
        # all lists at once: a loop over the parameters would take longer than the rest
        weights = [p for group in self.param_groups for p in group["params"]]
        grads = [p.grad for p in weights]
        if any(map(operator.is_, grads, repeat(None))):
            weights = [p for p in weights if p.grad is not None]
            grads = [p.grad for p in weights]
        block: _GradientBlock | None = self.__dict__.get("_gradients")
        if block is None or not block.fits(weights):
            if not weights or not weights[0].is_cuda or not on_one_gpu([*weights, *grads]):
                return None
            block = _GradientBlock(weights, self._velocities(weights), _spans(self.param_groups))
            self.__dict__["_gradients"] = block
        block.take(grads)
        return block

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.__dict__.pop("_gradients", None)  # its velocities are no longer those of the state

    def _velocities(self, weights: Sequence[Tensor]) -> list[Tensor]:
        for p in weights:
            if not self.state[p]:
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return [self.state[p]["momentum_buffer"] for p in weights]

    def _step_group(self, group: dict[str, Any]) -> None:
        weights = [p for p in group["params"] if p.grad is not None]
        if not weights:
            return
        velocity = self._velocities(weights)
        updates = [p.grad for p in weights if p.grad is not None]
        if (scale := getattr(self, "grad_scale", None)) is not None:
            updates = list(torch._foreach_div(updates, scale))
        if group["weight_decay"]:
            updates = list(torch._foreach_add(updates, weights, alpha=group["weight_decay"]))
        if group["adapt"]:
            ratios = _trust_ratios(group["trust_coefficient"], weights, updates)
            updates = list(torch._foreach_mul(updates, list(ratios.unbind())))
        if getattr(self, "found_inf", None) is None:
            torch._foreach_mul_(velocity, group["momentum"])
            torch._foreach_add_(velocity, updates, alpha=group["lr"])
            torch._foreach_sub_(weights, velocity)
        else:
            updates = list(torch._foreach_mul(updates, group["lr"]))
            self._move(weights, updates, velocity, group["momentum"])

    def _move(
        self, weights: list[Tensor], updates: list[Tensor], velocity: list[Tensor], momentum: float
    ) -> None:
        """Set v = momentum v + update, w = w - v; the kernel does nothing where found_inf is 1."""
        torch._fused_sgd_(
            weights,
            updates,
            velocity,
            weight_decay=0.0,
            momentum=momentum,
            lr=1.0,
            dampening=0.0,
            nesterov=False,
            maximize=False,
            is_first_step=False,
            found_inf=getattr(self, "found_inf", None),
        )

    def _step_together(self, block: "_GradientBlock") -> None:
        """Update all groups at once on one GPU."""
        if (scale := getattr(self, "grad_scale", None)) is not None:
            block.flat.div_(scale)

        # u = gradient + weight_decay w, in place: what clears the gradients comes next
        weights = block.weights
        parts = block.parts
        for group, span in block.spans:
            if group["weight_decay"]:
                torch._foreach_add_(parts[span], weights[span], alpha=group["weight_decay"])

        # lr ratio, of each tensor
        adapted = [span for group, span in block.spans if group["adapt"]]
        lengths = [x for tensors in (weights, parts) for span in adapted for x in tensors[span]]
        norms = torch.stack(torch._foreach_norm(lengths)).view(2, -1) if lengths else None
        first = 0
        for group, span in block.spans:
            factors = block.factors[span]
            if not group["adapt"]:
                factors.fill_(group["lr"])
                continue
            assert norms is not None
            block_norms = norms[:, first : first + len(factors)]
            first += len(factors)
            _adapted_rates(
                group["lr"], group["trust_coefficient"], block_norms, block.zero, out=factors
            )

        block.scale_()
        self._move(weights, parts, block.velocities, self.param_groups[0]["momentum"])


def _spans(groups: Sequence[dict[str, Any]]) -> list[tuple[dict[str, Any], slice]]:
    """Give each group's place among all parameters that have a gradient."""
    spans = []
    end = 0
    for group in groups:
        first = end
        end = end + sum(p.grad is not None for p in group["params"])
        spans.append((group, slice(first, end)))
    return [(group, span) for group, span in spans if span.start < span.stop]


def on_one_gpu(tensors: Sequence[Tensor]) -> bool:
    """Whether one CUDA kernel can take them all: of one dtype, on one GPU."""
    kinds = {(tensor.device, tensor.dtype) for tensor in tensors}
    return len(kinds) == 1 and tensors[0].is_cuda


def _trust_ratios(coefficient: float, weights: list[Tensor], updates: list[Tensor]) -> Tensor:
    """(tensors,): coefficient |w| / |u|, 1 where either is 0."""
    norms = torch.stack(torch._foreach_norm([*weights, *updates]))
    lengths = norms[: len(weights)]
    strides = norms[len(weights) :]
    ratios = coefficient * lengths / strides
    return torch.where((lengths > 0) & (strides > 0), ratios, 1.0)


def _adapted_rates(lr: float, coefficient: float, norms: Tensor, zero: Tensor, out: Tensor) -> None:
    """Write lr times the trust ratio of norms (2, tensors), |w| and |u|, to out: always finite."""
    # The quotient is NaN where |w| is 0, and lr is put in its place. Where |u| is 0 or the step is
    # skipped, any finite factor will do. Three launches.
    lengths = F.threshold(norms[0], 0.0, math.nan)
    torch.addcdiv(zero, lengths, norms[1], value=lr * coefficient, out=out)
    out.nan_to_num_(nan=lr)


class _GradientBlock:
    """Gradients of some weights in one tensor, each from a new row on: one product scales all."""

    ROW = 1024

    def __init__(
        self,
        weights: list[Tensor],
        velocities: list[Tensor],
        spans: list[tuple[dict[str, Any], slice]],
    ) -> None:
        self.weights = weights
        self.velocities = velocities
        self.spans = spans
        pairs = zip(weights, velocities, strict=True)
        self._alike = all(w.stride() == v.stride() for w, v in pairs)
        rows = [-(-weight.numel() // self.ROW) for weight in weights]
        device = weights[0].device
        dtype = weights[0].dtype
        self._buffer = torch.zeros(sum(rows), self.ROW, dtype=dtype, device=device)
        tensor = torch.arange(len(rows)).repeat_interleave(torch.tensor(rows))
        self._tensor_of_row = tensor.to(device)
        starts = [0, *accumulate(rows)]
        self.parts = [
            self._buffer.as_strided(weight.shape, weight.stride(), self.ROW * start)
            for weight, start in zip(weights, starts, strict=False)
        ]
        self.flat = self._buffer.view(-1)  # (numbers,), zeros between the gradients
        self.factors = torch.ones(len(rows), dtype=dtype, device=device)  # of `scale_`, finite
        self.zero = torch.zeros((), dtype=dtype, device=device)

    def fits(self, weights: Sequence[Tensor]) -> bool:
        """Return whether it is of exactly these weights."""
        return len(weights) == len(self.weights) and all(map(operator.is_, weights, self.weights))

    def take(self, grads: list[Tensor]) -> None:
        """Copy the gradients; from then on those of the weights lie here."""
        if all(map(operator.is_, grads, self.parts)):
            return
        torch._foreach_copy_(self.parts, grads)
        for weight, part in zip(self.weights, self.parts, strict=True):
            weight.grad = part

    def steps_together(self, groups: Sequence[dict[str, Any]]) -> bool:
        """Return whether one kernel can move all weights."""
        return self._alike and len({group["momentum"] for group in groups}) == 1

    def scale_(self) -> None:
        """Multiply each gradient by its factor."""
        self._buffer.mul_(self.factors.index_select(0, self._tensor_of_row)[:, None])
