"""Embedding layers at several depths of a network: hard-aware deeply cascaded embedding."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.errors import RecipeError, did_you_mean
from sslpipe.models.state import evaluating

TAPS = "embedding.taps (backbone.embedding_taps)"


class DepthEmbedding(nn.Module):
    """Embed what a network gives at several depths, a linear layer each, side by side.

    These are the branches of a hard-aware deeply cascaded embedding; `HDCLoss` trains them.

    Args:
        widths: Features at each depth.
        dim: Of all layers together; each has its share.

    Shape:
        (B, width) of each depth -> (B, dim).

    Source:
        Yuan et al. 2017, arXiv:1611.05720, section 3.
    """

    def __init__(self, widths: Sequence[int], dim: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, dim // len(widths)) for width in widths)

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Concatenate the branches."""
        each = [layer(x) for layer, x in zip(self.layers, features, strict=True)]
        return torch.cat(each, dim=1)


def features_at(network: nn.Module, taps: Sequence[str], images: Tensor) -> list[Tensor]:
    """Compute the outputs of some modules of a network, averaged over positions, then its own.

    Args:
        network: (B, C, H, W) -> (B, F).
        taps: Names of its modules that give a map (B, F, H, W), tokens (B, N, F) or features.
        images: (B, C, H, W).

    Returns:
        (B, F) of each tap, in the order of their names, and of the network.
    """
    outputs: dict[str, Tensor] = {}

    def keep(name: str) -> Callable[[nn.Module, Any, Tensor], None]:
        def hook(module: nn.Module, inputs: Any, output: Tensor) -> None:
            outputs[name] = output

        return hook

    # hooks of this call alone: a copy of the network has none that belong to another
    hooks = [network.get_submodule(name).register_forward_hook(keep(name)) for name in taps]
    try:
        last: Tensor = network(images)
    finally:
        for handle in hooks:
            handle.remove()
    pooled = {name: x.flatten(2).mean(2) if x.dim() == 4 else x for name, x in outputs.items()}
    pooled = {name: x.mean(1) if x.dim() == 3 else x for name, x in pooled.items()}
    return [*(pooled[name] for name in taps), last]


def embed_depths(
    network: nn.Module, taps: Sequence[str], dim: int | None, *, channels: int, crop_px: int
) -> DepthEmbedding:
    """Make the embedding layers of a network's taps and of its features.

    Args:
        network: (B, C, H, W) -> (B, F); an image of zeros tells the width at each tap.
        taps: As in `features_at`.
        dim: Of all layers together.
        channels: C.
        crop_px: H and W.

    Raises:
        RecipeError: No such module, one that gives no features, or a width that cannot be divided.
    """
    branches = len(taps) + 1
    if dim is None or dim % branches:
        raise RecipeError(
            f"embedding.dim = {dim} (backbone.embedding_dim) cannot be divided among the "
            f"{branches} branches of {TAPS}; use {(dim or 128) // branches * branches or branches}"
        )
    modules = {name for name, _ in network.named_modules() if name}
    for name in taps:
        if name not in modules:
            near = did_you_mean(name, modules)
            outer = sorted(each for each in modules if "." not in each)
            raise RecipeError(
                f"{TAPS} names {name!r}, which is no module of the network{near}; its "
                f"outermost are: {', '.join(outer)}"
            )
    if len({*taps}) < len(taps):
        raise RecipeError(f"{TAPS} = {list(taps)} names a module twice; name each once")
    images = torch.zeros(1, channels, crop_px, crop_px)
    try:
        with torch.no_grad(), evaluating(network):
            features = features_at(network, taps, images)
    except (KeyError, AttributeError, RuntimeError) as error:
        raise RecipeError(
            f"{TAPS} = {list(taps)}: one of them gives no features of an image; name "
            "stages of the network"
        ) from error
    return DepthEmbedding([x.shape[1] for x in features], dim)
