"""A moving average of an encoder, which makes the keys of its queries."""

import copy
import math
from typing import TypeVar

import torch
from torch import Tensor, nn

from sslpipe.models.backbones import Backbone
from sslpipe.models.simclr import SimCLR
from sslpipe.recipe.pretrain import Momentum, Projector

ModuleT = TypeVar("ModuleT", bound=nn.Module)


class MomentumPair(nn.Module):
    """Backbone and projector, trained, beside a copy whose weights follow them slowly.

    The copy is all buffers, so the optimizer and DDP leave it alone, and checkpoints and the
    undoing of a skipped step include it; its BatchNorms keep running statistics of their own.
    Before the first `follow` both are equal.

    Queries and keys are normalised apart, each over its views of the global batch. MoCo shuffles
    keys over the GPUs, as the statistics of one GPU's images tell which keys belong to a query;
    those of the global batch are the same for all.

    Args:
        backbone: images -> features.
        projector: the recipe's section.

    Source:
        He et al. 2019 (MoCo), arXiv:1911.05722, eq. 2, alg. 1 and section 3.3; Chen et al. 2020
        (MoCo v2), arXiv:2003.04297.
    """

    def __init__(self, backbone: Backbone, projector: Projector) -> None:
        super().__init__()
        trained = SimCLR(backbone, projector)
        self.backbone = trained.backbone
        self.projector = trained.projector
        self.momentum = without_parameters(copy.deepcopy(trained))

    def forward(self, views: Tensor) -> Tensor:
        """Compute queries of the first views, then keys of the second, which carry no gradient.

        Shape:
            views (2B, 3, S, S) -> z (2B, D), not normalised.
        """
        view_a, view_b = views.chunk(2)  # (B, 3, S, S) each
        queries = self.projector(self.backbone(view_a))  # (B, D)
        with torch.no_grad():
            keys = self.momentum(view_b)  # (B, D)
        return torch.cat([queries, keys])

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """Move the copy after an optimizer step: momentum * it + (1 - momentum) * the trained."""
        copies = dict(self.momentum.named_buffers())
        trained = dict(self.named_parameters())
        slow = [copies[name] for name in trained]
        torch._foreach_lerp_(slow, list(trained.values()), 1 - momentum)


def without_parameters(module: ModuleT) -> ModuleT:
    """Return the module with every parameter replaced by a buffer of the same name."""
    for part in module.modules():
        for name, parameter in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, parameter.detach())
    return module


def momentum_at(step: int, settings: Momentum, steps: int) -> float:
    """Compute the momentum of one step, from settings.start at step 0.

    "constant": always that. "cosine": rises to 1 at step = steps, one past the last:
    1 - (1 - start) (1 + cos(pi step / steps)) / 2.

    Args:
        step: counts from 0.
        settings: the recipe's section.
        steps: length of the run.

    Source:
        Grill et al. 2020 (BYOL), arXiv:2006.07733, section 3.3.
    """
    if settings.schedule == "constant":
        return settings.start
    return 1 - (1 - settings.start) * (1 + math.cos(math.pi * step / steps)) / 2
