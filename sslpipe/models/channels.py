"""Networks for images of other channels than red, green and blue."""

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from sslpipe.data.image_type import RGB8
from sslpipe.errors import RecipeError


def first_convolution(network: nn.Module) -> tuple[str, nn.Conv2d] | None:
    """Find the layer that sees the images, a stem or a patch embedding: its name and itself."""
    for name, module in network.named_modules():
        if isinstance(module, nn.Conv2d):
            return (name, module) if module.groups == 1 else None
    return None


def set_channels(network: nn.Module, channels: int, kind: str) -> None:
    """Replace the first convolution (or patch embedding) by one of other channels, in place.

    Its weights are drawn with the spread of the one that goes, less by sqrt(3 / channels): what
    comes out of it is as large as with RGB.

    Raises:
        RecipeError: It does not begin with a convolution of three channels.
    """
    convolution = first_convolution(network)
    if convolution is None or convolution[1].in_channels != 3:
        raise RecipeError(
            f"backbone.kind = {kind!r} does not begin with a convolution of 3 channels, "
            f"which could get {channels}; use another one"
        )
    module = convolution[1]
    weight = module.weight.detach()
    other = weight.new_empty(len(weight), channels, *weight.shape[2:])
    nn.init.normal_(other, 0.0, 1.0)
    with torch.no_grad():
        other *= weight.std() * (3 / channels) ** 0.5
    module.in_channels = channels
    module.weight = nn.Parameter(other)
    for each in network.modules():  # transformers' embeddings check their images
        if getattr(each, "num_channels", None) == 3:
            each.num_channels = channels  # type: ignore[assignment]


def adapt_kernels(weight: Tensor, channels: Sequence[str]) -> Tensor:
    """Make the first layer's RGB weights fit images of other channels.

    A channel called red, green or blue gets the weights of that colour, any other those of red,
    green and blue in turn; all are scaled by 3 / C, so that what comes out keeps its size. One
    channel alone gets the sum.

    Args:
        weight: (O, 3, h, w).
        channels: C names.

    Returns:
        (O, C, h, w).

    Source:
        timm, `adapt_input_conv`, which knows no names.
    """
    if len(channels) == 1:
        return weight.sum(1, keepdim=True)
    rgb = RGB8.channels
    places = [rgb.index(name) if name in rgb else k % 3 for k, name in enumerate(channels)]
    return weight[:, places] * (3 / len(channels))
