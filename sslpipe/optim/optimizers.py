"""The optimizers that [optim] may name: the settings of each, and how it is made of them."""

import math
from typing import Any, Literal, Self

import torch
from pydantic import model_validator
from torch.optim import SGD, AdamW, Optimizer

from sslpipe.optim.lars import LARS, on_one_gpu
from sslpipe.recipe.sections import Beta, Optim, Rate
from sslpipe.registry import Table


class SgdSettings(Optim):
    """SGD with momentum: torch's."""

    kind: Literal["sgd"] = "sgd"
    momentum: Beta = 0.9
    """Part of the last step that the next one keeps."""
    nesterov: bool = False
    """Nesterov momentum."""

    @model_validator(mode="after")
    def _nesterov_has_momentum(self) -> Self:
        if self.nesterov and not self.momentum:
            raise ValueError("nesterov = true needs momentum above 0; set momentum = 0.9")
        return self

    @property
    def state_copies(self) -> int:
        """The momentum, where there is one."""
        return int(self.momentum > 0)

    def usual_rate(self, batch_size: int) -> tuple[float, str]:
        """Return that of arXiv:1706.02677, section 5.1."""
        return 0.1 * _batches(batch_size), "Goyal et al. 2017"

    def build(self, **known: Any) -> Optimizer:
        """Build it over `groups`, fused on a GPU."""
        groups = known["groups"]
        sgd = SGD(
            groups,
            lr=self.peak_lr,
            momentum=self.momentum,
            nesterov=self.nesterov,
            fused=_fused(groups),
        )
        return _with_own_kernels(sgd)


class AdamWSettings(Optim):
    """AdamW: torch's."""

    kind: Literal["adamw"] = "adamw"
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    """How much the averages of the gradient and of its square keep at each step."""

    @property
    def state_copies(self) -> int:
        """The two averages."""
        return 2

    def usual_rate(self, batch_size: int) -> tuple[float, str]:
        """Return that of arXiv:2104.14294, section 3.2."""
        return 5e-4 * _batches(batch_size), "DINO"

    def build(self, **known: Any) -> Optimizer:
        """Build it over `groups`, fused on a GPU."""
        groups = known["groups"]
        adamw = AdamW(groups, lr=self.peak_lr, betas=self.betas, fused=_fused(groups))
        return _with_own_kernels(adamw)


class LarsSettings(Optim):
    """LARS, for large batches: `sslpipe.optim.lars.LARS`."""

    kind: Literal["lars"] = "lars"
    momentum: Beta = 0.9
    """Part of the last step that the next one keeps."""
    trust_coefficient: Rate = 0.001
    """Length of a layer's step over the layer's own length, at a learning rate of 1."""

    @property
    def state_copies(self) -> int:
        """The momentum."""
        return 1

    @property
    def gathers_gradients(self) -> bool:
        """Their norms are one launch over the block."""
        return True

    def group_settings(self, decayed: bool) -> dict[str, Any]:
        """Return that what has no weight decay is not adapted, either."""
        return {"adapt": decayed}

    def usual_rate(self, batch_size: int) -> tuple[float, str]:
        """Return the larger one of arXiv:2002.05709, section 2.3 and appendix B.1."""
        return max(0.3 * _batches(batch_size), 0.075 * math.sqrt(batch_size)), "SimCLR"

    def build(self, **known: Any) -> Optimizer:
        """Build it over `groups`."""
        return LARS(
            known["groups"],
            lr=self.peak_lr,
            momentum=self.momentum,
            trust_coefficient=self.trust_coefficient,
        )


OPTIMIZERS: Table[type[Optim]] = Table(
    "optimizer", {"sgd": SgdSettings, "adamw": AdamWSettings, "lars": LarsSettings}
)


def _batches(batch_size: int) -> float:
    """Return a batch in those of 256 images, for which rates are published; at least one."""
    return max(1.0, batch_size / 256)


def _fused(groups: list[dict[str, Any]]) -> bool | None:
    """Return True where all parameters are on one GPU; None: torch chooses."""
    return all(on_one_gpu(group["params"]) for group in groups) or None


def _with_own_kernels(optimizer: SGD | AdamW) -> Optimizer:
    """Prepare one of torch's optimizers for checkpoints of other devices, and for skipped steps."""

    def keep(optimizer: Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        """Which kernels compute a step is this process's choice, not the checkpoint's."""
        groups = [
            {**saved, "fused": current["fused"], "foreach": current["foreach"]}
            for saved, current in zip(state["param_groups"], optimizer.param_groups, strict=False)
        ]
        return {**state, "param_groups": groups}

    optimizer.register_load_state_dict_pre_hook(keep)
    for group in optimizer.param_groups:
        if group["fused"] and group.get("momentum"):
            for p in group["params"]:  # or a first step that is skipped leaves them unset
                optimizer.state[p]["momentum_buffer"] = torch.zeros_like(p)
    return optimizer
