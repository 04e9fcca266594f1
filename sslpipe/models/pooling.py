"""Pooling of a map of features: POOLS, what stands where a network averages over its positions.

For `backbone.pool` of a recipe, and for networks of one's own: `GeM()(maps)`.
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from sslpipe.errors import RecipeError

MOST_POWER = 100  # of a generalised mean: beyond, it is the maximum
LEARNED = "pooling_p"  # the only parameter: nothing else may be called so


class GeM(nn.Module):
    """Take the generalised mean over positions, (mean of x^p)^(1/p).

    p = 1 is the average of what is positive, 2 is L2 pooling (FaceNet's, but for a factor), large p
    nears the maximum. Computed in float32 at least, whatever the size of the features: they are
    divided by their largest first.

    Args:
        p: Above 0; where it is learned, the value at the start.
        eps: Features below it are raised to it, without gradient.
        learnable: Whether p is trained; a set p is in no state dict.

    Shape:
        (B, C, H, W) -> (B, C, 1, 1).

    Source:
        Radenovic et al. 2019, arXiv:1711.02512, eq. 2 and 3; Schroff et al. 2015,
        arXiv:1503.03832, table 1 (L2).
    """

    def __init__(self, p: float = 3.0, eps: float = 1e-6, learnable: bool = True) -> None:
        super().__init__()
        if p <= 0 or eps <= 0:
            raise ValueError(f"p = {p} and eps = {eps} must be above 0")
        self.eps = eps
        self.pooling_p: float | Tensor = p
        if learnable:
            self.pooling_p = nn.Parameter(torch.full((1,), float(p)))

    def forward(self, maps: Tensor) -> Tensor:
        """Pool (B, C, H, W) to (B, C, 1, 1)."""
        x = maps.to(torch.promote_types(maps.dtype, torch.float32)).clamp_min(self.eps)
        p = self.pooling_p
        if isinstance(p, Tensor):
            p = p.to(x.dtype)
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


def set_pool(network: nn.Module, pool: str, kind: str, power: float | None = None) -> None:
    """Replace a network's average over all positions, in place; "avg" leaves it as it is.

    Args:
        network: Of torchvision, timm or this library.
        pool: A name of POOLS.
        kind: The recipe's name of the network, for messages.
        power: Of "gem", set and not learned; None: it is learned.

    Raises:
        RecipeError: It has no such average, or not as a module; or `pool` has no power.
    """
    if power is not None and (pool != "gem" or not 0 < power <= MOST_POWER):
        raise RecipeError(
            f"backbone.pool_power = {power:g}: a number above 0, up to {MOST_POWER}, for "
            f"backbone.pool = 'gem'; this one is {pool!r}"
        )
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
    pooling = POOLS[pool]() if power is None else GeM(power, learnable=False)
    network.set_submodule(places[0], pooling)


def is_pooling(parameter: str) -> bool:
    """Return whether a parameter's name is that of a learned pooling."""
    return parameter.rpartition(".")[2] == LEARNED
