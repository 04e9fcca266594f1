"""The first layers of a ResNet, for images smaller than ImageNet's."""

from typing import Literal

from torch import nn

from sslpipe.errors import RecipeError
from sslpipe.registry.schema import KindSettings

Stem = Literal["imagenet", "small_pool", "small"]
STEMS: dict[str, str] = {
    "imagenet": "7x7 stride-2 convolution and max-pool: 1/4 of the resolution",
    "small_pool": "3x3 stride-1 convolution and max-pool: 1/2 of the resolution",
    "small": "3x3 stride-1 convolution, no max-pool: full resolution",
}

StemSetting = Literal["auto", "imagenet", "small_pool", "small"]


def fitting_stem(crop_px: int) -> Stem:
    """Choose the stem for square images of this size.

    32 px: every reference recipe drops both strides; 64 px: W-MSE (Ermolov et al. 2021, their
    code) keeps the max-pool; from 65 px on the ImageNet stem.
    """
    if crop_px <= 40:
        return "small"
    return "small_pool" if crop_px <= 64 else "imagenet"


def stem_warning(settings: KindSettings, crop_px: int) -> str | None:
    """Warn of a requested stem that does not fit the image size; None where it does."""
    requested = getattr(settings, "stem", "auto")
    fitting = fitting_stem(crop_px)
    if not isinstance(requested, str) or requested not in STEMS or requested == fitting:
        return None
    return (
        f"backbone.stem = {requested!r} ({STEMS[requested]}) does not fit {crop_px} px crops; "
        f"{fitting!r} ({STEMS[fitting]}) does: leave the key out, or set it to 'auto', unless "
        "an export for torchvision or timm needs 'imagenet'"
    )


def set_stem(
    network: nn.Module, resnet: type[nn.Module], stem: StemSetting, crop_px: int
) -> Stem | None:
    """Give a ResNet the requested stem, in place; return what it now has, None without a choice."""
    conv = network.conv1 if isinstance(network, resnet) else None
    if not isinstance(conv, nn.Conv2d) or conv.kernel_size != (7, 7):
        if stem != "auto":
            raise RecipeError(
                f"backbone.stem = {stem!r}: this architecture has no ResNet stem to replace; "
                "leave the key out"
            )
        return None
    chosen: Stem = fitting_stem(crop_px) if stem == "auto" else stem
    if chosen != "imagenet":
        network.conv1 = nn.Conv2d(3, conv.out_channels, 3, 1, 1, bias=False)
        nn.init.kaiming_normal_(network.conv1.weight, mode="fan_out", nonlinearity="relu")
    if chosen == "small":
        network.maxpool = nn.Identity()
    return chosen
