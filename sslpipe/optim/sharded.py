"""SGD and AdamW of weights that FSDP2 has cut into parts over the ranks."""

from typing import Any

import torch
from torch import Tensor
from torch.optim import SGD, AdamW
from torch.optim.sgd import sgd

from sslpipe.distributed import local_part
from sslpipe.optim.lars import ClosureStep

_SETTINGS = ("weight_decay", "momentum", "dampening", "nesterov", "maximize", "foreach", "fused")


class ShardedSGD(ClosureStep, SGD):
    """torch's SGD, which moves this rank's parts of the weights.

    torch's fused kernel takes plain tensors only; what it does, each number has for itself. State
    and gradients stay cut tensors, from which a checkpoint makes whole ones.
    """

    def _update(self) -> None:
        for group in self.param_groups:
            weights = [p for p in group["params"] if p.grad is not None]
            settings: dict[str, Any] = {name: group[name] for name in _SETTINGS}
            for name in ("grad_scale", "found_inf"):
                settings[name] = getattr(self, name, None)
            velocities: list[Tensor | None] = []
            if group["momentum"]:
                velocities += _parts(self._velocities(weights))
            grads = _parts([p.grad for p in weights])
            sgd(_parts(weights), grads, velocities, lr=group["lr"], **settings)

    def _velocities(self, weights: list[Tensor]) -> list[Tensor]:
        for p in weights:
            if self.state[p].get("momentum_buffer") is None:  # a first step may be skipped
                self.state[p]["momentum_buffer"] = torch.zeros_like(p)
        return [self.state[p]["momentum_buffer"] for p in weights]


class ShardedAdamW(AdamW):
    """torch's AdamW, which moves this rank's parts of the weights; see `ShardedSGD`."""

    def _init_group(self, group: dict[str, Any], *lists: list[Tensor]) -> bool:
        """Collect what a step takes: weights, gradients, moments, numbers of steps."""
        has_complex: bool = super()._init_group(group, *lists)  # type: ignore[no-untyped-call]
        for tensors in lists:
            tensors[:] = _parts(tensors)
        return has_complex


def _parts(tensors: list[Any]) -> list[Tensor]:
    return [local_part(x) for x in tensors]
