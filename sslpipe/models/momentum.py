"""Moving averages of an encoder: one makes the keys of its queries, one is evaluated."""

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
        self.ema = trained.ema
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

    def embed(self, images: Tensor) -> Tensor:
        """Compute features (B, F) of images (B, 3, S, S) by the trained backbone, for use."""
        h: Tensor = self.backbone(images)  # (B, F)
        return h

    @torch.no_grad()
    def follow(self, momentum: float) -> None:
        """Move the copy after an optimizer step: momentum * it + (1 - momentum) * the trained."""
        follow(self.momentum, self, momentum)


@torch.no_grad()
def follow(slow: nn.Module, trained: nn.Module, momentum: float, *, buffers: bool = False) -> None:
    """Make momentum * itself + (1 - momentum) * the trained of each weight of a copy, in place.

    Args:
        slow: What `without_parameters` made of a copy.
        trained: The module that it follows.
        momentum: Of this step.
        buffers: Move buffers of floats likewise, and take over the others; else they stay.
    """
    copies = dict(slow.named_buffers())
    sources: dict[str, Tensor] = dict(trained.named_parameters())
    if buffers:
        for name, buffer in trained.named_buffers():
            if buffer.is_floating_point():
                sources[name] = buffer
            else:
                copies[name].copy_(buffer)
    moved = [copies[name] for name in sources]
    weights = list(sources.values())
    torch._foreach_lerp_(moved, weights, 1 - momentum)


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


def averaged(backbone: Backbone) -> Backbone:
    """Copy a backbone for `follow_average`: the average's start.

    The copy is all buffers, as in `MomentumPair`; its keys are the backbone's.
    """
    return without_parameters(copy.deepcopy(backbone))


@torch.no_grad()
def follow_average(average: Backbone, backbone: Backbone, decay: float, step: int) -> None:
    """Move an average towards its backbone after the optimizer step of this number, in place.

    BatchNorm's statistics are averaged as the weights are, and its counts taken over.

    Args:
        average: What `averaged` made.
        backbone: The trained one.
        decay: The recipe's optim.ema.
        step: Counts from 0.
    """
    follow(average, backbone, decay_at(step, decay), buffers=True)


def decay_at(step: int, decay: float) -> float:
    """Compute the part of itself that an average keeps at one step: at most (1 + t) / (10 + t).

    With a constant one, a short run's average would be mostly its random start.

    Args:
        step: t, counts from 0.
        decay: The recipe's optim.ema.

    Source:
        TensorFlow's `ExponentialMovingAverage` with num_updates.
    """
    return min(decay, (1 + step) / (10 + step))
