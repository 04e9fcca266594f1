"""Pooling of a map of features: POOLS, what stands where a network averages over its positions.

For `backbone.pool` of a recipe, and for networks of one's own: `GeM()(maps)`.
"""

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from sslpipe.errors import RecipeError

Pool = Literal["avg", "gem", "max"]

LEARNED = "pooling_p"  # the only parameter: nothing else may be called so


class GeM(nn.Module):
    """Take the generalised mean over positions, (mean of x^p)^(1/p), with one learned p.

    p = 1 is the average of what is positive, large p nears the maximum. Computed in float32 at
    least, whatever the size of the features: they are divided by their largest first.

    Args:
        p: Above 0, the value at the start.
        eps: Features below it are raised to it, without gradient.
        learnable: Whether p is trained.

    Shape:
        (B, C, H, W) -> (B, C, 1, 1).

    Source:
        Radenovic et al. 2019, arXiv:1711.02512, eq. 2 and 3.
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6, learnable: bool = True) -> None:
        super().__init__()
        if p <= 0 or eps <= 0:
            raise ValueError(f"p = {p} and eps = {eps} must be above 0")
        self.eps = eps
        self.pooling_p = nn.Parameter(torch.full((1,), float(p)), requires_grad=learnable)

    def forward(self, maps: Tensor) -> Tensor:
        """Pool (B, C, H, W) to (B, C, 1, 1)."""
        x = maps.to(torch.promote_types(maps.dtype, torch.float32)).clamp_min(self.eps)
        p = self.pooling_p.to(x.dtype)
        largest = x.detach().amax((2, 3), keepdim=True)  # a constant: it drops out of the mean
        mean = (x / largest).pow(p).mean((2, 3), keepdim=True)  # at least 1 / (H W)
        return (largest * mean.pow(1 / p)).to(maps.dtype)


class MaxPool(nn.Module):
    """Take the maximum over positions; equal ones share the gradient.

    Shape:
        (B, C, H, W) -> (B, C, 1, 1).
    """

    def forward(self, maps: Tensor) -> Tensor:
        """Pool (B, C, H, W) to (B, C, 1, 1)."""
        return maps.amax((2, 3), keepdim=True)


POOLS: dict[str, Callable[[], nn.Module]] = {
    "avg": lambda: nn.AdaptiveAvgPool2d(1),
    "gem": GeM,
    "max": MaxPool,
}


def set_pool(network: nn.Module, pool: str, kind: str) -> None:
    """Replace a network's average over all positions, in place; "avg" leaves it as it is.

    Args:
        network: Of torchvision, timm or this library.
        pool: A name of POOLS.
        kind: The recipe's name of the network, for messages.

    Raises:
        RecipeError: It has no such average, or not as a module.
    """
    if pool == "avg":
        return
    places = [
        name
        for name, module in network.named_modules()
        if isinstance(module, nn.AdaptiveAvgPool2d)
        # others stand inside of blocks: squeeze and excitation
        and ("." not in name or name.endswith("global_pool.pool"))
    ]
    if len(places) != 1:
        raise RecipeError(
            f"backbone.pool = {pool!r}: {kind!r} has no average pooling that could be replaced (a "
            "class token, or an average inside its code); leave the key out, or take a ResNet, "
            "RegNet, EfficientNet or ConvNeXt"
        )
    network.set_submodule(places[0], POOLS[pool]())


def is_pooling(parameter: str) -> bool:
    """Say whether a parameter's name is that of a learned pooling."""
    return parameter.rpartition(".")[2] == LEARNED
