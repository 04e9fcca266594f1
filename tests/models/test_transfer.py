"""Copying weights into a network of the same architecture: whole, or not at all."""

import pytest
import torch

from sslpipe.errors import WeightsError
from sslpipe.models.backbones import backbone_settings, build_backbone
from sslpipe.models.transfer import copy_weights

VIT = "timm/vit_tiny_patch16_224"


def built(kind, crop_px, seed, **arguments):
    torch.manual_seed(seed)
    component = backbone_settings(kind, arguments)
    return build_backbone(component, crop_px=crop_px).eval()


def test_a_position_table_is_resized_and_all_else_is_copied():
    source = built(VIT, 32, 0)
    target = built(VIT, 48, 1)
    copy_weights(source, target, VIT)
    theirs = source.network.state_dict()
    for key, value in target.network.state_dict().items():
        if key == "pos_embed":
            assert value.shape[1] == 1 + 9
            assert torch.equal(value[:, 0], theirs[key][:, 0])  # of the class token
            grid = value[:, 1:].mean(), theirs[key][:, 1:].mean()
            assert torch.allclose(*grid, atol=1e-3)
        else:
            assert torch.equal(value, theirs[key]), key


@pytest.mark.parametrize("change", ["another architecture", "fewer layers", "not finite"])
def test_what_does_not_fit_whole_is_refused_and_nothing_is_copied(change):
    kind = "torchvision/resnet34" if change == "another architecture" else "torchvision/resnet18"
    source = built(kind, 32, 0)
    if change == "fewer layers":
        del source.network.layer4
    if change == "not finite":
        source.network.layer4[1].bn2.bias.data[0] = torch.inf
    target = built("torchvision/resnet18", 32, 1)
    before = {key: value.clone() for key, value in target.state_dict().items()}
    with pytest.raises(WeightsError, match="layer"):
        copy_weights(source, target, "torchvision/resnet18")
    for key, value in target.state_dict().items():
        assert torch.equal(value, before[key]), key
