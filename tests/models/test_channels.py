"""Networks for images of other channels than red, green and blue."""

import pytest
import torch
from timm.models._manipulate import adapt_input_conv

from sslpipe.errors import RecipeError
from sslpipe.models.backbones import build_backbone
from sslpipe.models.channels import adapt_kernels
from sslpipe.recipe.base import Component


@pytest.mark.parametrize(
    ("kind", "side", "channels"),
    [
        ("small_resnet", 32, 5),
        ("torchvision/resnet18", 32, 1),
        ("torchvision/convnext_tiny", 64, 5),
        ("torchvision/vit_b_32", 64, 1),
        ("timm/mobilenetv3_small_050", 64, 1),
        ("timm/vit_tiny_patch16_224", 64, 5),
    ],
)
def test_any_backbone_takes_any_channels(kind: str, side: int, channels: int) -> None:
    torch.manual_seed(0)
    component = Component.model_validate({"kind": kind, "channels": channels})
    backbone = build_backbone(component, crop_px=side).eval()
    assert backbone.channels == channels
    features = backbone(torch.randn(2, channels, side, side))
    assert features.shape == (2, backbone.num_features)
    assert features.isfinite().all()
    with pytest.raises(RuntimeError):
        backbone(torch.randn(2, 3, side, side))


def test_the_first_layer_of_other_channels_answers_as_loudly_as_that_of_rgb() -> None:
    loud = []
    for channels in (1, 3, 12):
        torch.manual_seed(0)
        component = Component.model_validate({"kind": "torchvision/resnet18", "channels": channels})
        first = build_backbone(component, crop_px=224).network.conv1
        loud.append(first(torch.randn(4, channels, 64, 64)).std().item())
    assert max(loud) / min(loud) < 1.1, loud


def test_three_channels_are_the_network_that_it_was() -> None:
    states = []
    for arguments in ({}, {"channels": 3}):
        torch.manual_seed(0)
        component = Component.model_validate({"kind": "small_resnet", **arguments})
        states.append(build_backbone(component, crop_px=32).state_dict())
    assert all(torch.equal(states[0][key], states[1][key]) for key in states[0])


def test_channels_of_no_colour_are_adapted_as_timm_does() -> None:
    weight = torch.randn(8, 3, 4, 4)
    for count in (1, 2, 4, 7):
        names = [f"band{k}" for k in range(count)]
        torch.testing.assert_close(adapt_kernels(weight, names), adapt_input_conv(count, weight))


def test_a_colour_gets_its_own_kernels_wherever_it_stands() -> None:
    weight = torch.randn(8, 3, 4, 4)
    adapted = adapt_kernels(weight, ["nir", "blue", "green", "red"])
    torch.testing.assert_close(adapted[:, [3, 2, 1]], weight * 3 / 4)
    torch.testing.assert_close(adapt_kernels(weight, ["blue", "green", "red"]), weight.flip(1))


@pytest.mark.parametrize("value", [0, 65, "five", 2.5])
def test_channels_that_cannot_be_are_refused_by_name(value: object) -> None:
    component = Component.model_validate({"kind": "small_resnet", "channels": value})
    with pytest.raises(RecipeError, match=r"backbone\.channels"):
        build_backbone(component, crop_px=32)
