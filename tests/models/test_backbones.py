"""Every backbone gives one row an image of any channels; the stem follows the image size.

That a backbone is its library's network without the head: weights/test_families.py.
"""

import pytest
import torch
from timm.models._manipulate import adapt_input_conv
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from sslpipe.errors import RecipeError
from sslpipe.models import limits
from sslpipe.models.backbones import (
    BACKBONES,
    backbone_settings,
    build_backbone,
)
from sslpipe.models.channels import adapt_kernels
from sslpipe.models.stems import fitting_stem, stem_warning
from sslpipe.registry.schema import SparseSettings

CASES = [  # kind, side, features, channels
    ("small_resnet", 28, 128, 3),
    ("small_resnet", 32, 128, 5),
    ("torchvision/resnet18", 32, 512, 1),
    ("torchvision/mobilenet_v3_small", 64, 576, 3),
    ("torchvision/shufflenet_v2_x0_5", 64, 1024, 3),
    ("torchvision/efficientnet_b0", 64, 1280, 3),
    ("torchvision/regnet_y_400mf", 64, 440, 3),
    ("torchvision/densenet121", 64, 1024, 3),
    ("torchvision/convnext_tiny", 64, 768, 5),
    ("torchvision/vit_b_32", 64, 768, 1),
    ("timm/resnet10t", 64, 512, 3),
    ("timm/vit_tiny_patch16_224", 32, 192, 5),
    ("timm/mobilenetv3_small_050", 64, 1024, 1),
]


def component(kind: str, **arguments: object) -> SparseSettings:
    return backbone_settings(kind, arguments)


@pytest.mark.parametrize(("kind", "crop_px", "width", "channels"), CASES)
def test_a_backbone_gives_num_features_numbers_an_image(kind, crop_px, width, channels):
    given = {} if channels == 3 else {"channels": channels}
    backbone = build_backbone(component(kind, **given), crop_px=crop_px).eval()
    features = backbone(torch.randn(2, channels, crop_px, crop_px))
    assert (backbone.num_features, backbone.channels) == (width, channels)
    assert features.shape == (2, width)
    assert features.isfinite().all()
    assert not torch.equal(features[0], features[1])
    features.square().mean().backward()
    # DDP waits for ever for a parameter that takes no part
    assert not [key for key, p in backbone.named_parameters() if p.grad is None]
    with pytest.raises(RuntimeError):
        backbone(torch.randn(2, channels + 1, crop_px, crop_px))


@pytest.mark.parametrize(
    ("crop_px", "stem"),
    [(28, "small"), (40, "small"), (41, "small_pool"), (64, "small_pool"), (65, "imagenet")],
)
def test_the_stem_follows_the_crop_size(crop_px, stem):
    assert fitting_stem(crop_px) == stem
    for kind in ("torchvision/resnet18", "timm/resnet18"):
        backbone = build_backbone(component(kind), crop_px=crop_px)
        network = backbone.network
        assert backbone.stem == stem
        assert network.conv1.kernel_size == ((7, 7) if stem == "imagenet" else (3, 3))
        assert network.conv1.stride == ((2, 2) if stem == "imagenet" else (1, 1))
        assert isinstance(network.maxpool, nn.Identity if stem == "small" else nn.MaxPool2d)


def test_a_stem_that_does_not_fit_is_a_warning_and_one_that_fits_is_none():
    assert stem_warning(component("torchvision/resnet18"), 32) is None
    assert stem_warning(component("torchvision/resnet18", stem="auto"), 224) is None
    assert stem_warning(component("torchvision/resnet18", stem="small"), 32) is None
    message = stem_warning(component("torchvision/resnet18", stem="imagenet"), 32)
    assert message is not None
    assert "'imagenet'" in message
    assert "32 px" in message
    assert "'small'" in message


@pytest.mark.parametrize(
    ("kind", "arguments", "message"),
    [
        ("small_resnt", {}, "did you mean 'small_resnet'"),
        ("torchvision", {}, "torchvision/resnet18"),
        ("small_resnet/x", {}, "write 'small_resnet'"),
        ("torchvision/resnet19", {}, "did you mean 'resnet1"),
        ("torchvision/alexnet", {}, "usable: convnext_base"),
        ("timm/resnet19999", {}, "timm has no 'resnet19999'"),
        ("timm/resnet18", {"pretrained": True}, "backbone.pretrained cannot be set"),
        ("torchvision/resnet18", {"stem": "smal"}, "did you mean 'small'"),
        ("torchvision/resnet18", {"steam": "small"}, "did you mean 'stem'"),
        ("torchvision/convnext_tiny", {"stem": "small"}, "no ResNet stem"),
        ("timm/vit_tiny_patch16_224", {"crop": 1}, "crop"),
        ("small_resnet", {"widths": []}, "at least 1 item"),
        ("small_resnet", {"stem_stride": 3}, "2 or 4"),
    ],
)
def test_a_wrong_backbone_is_one_error_that_names_the_key(kind, arguments, message):
    with pytest.raises(RecipeError, match="backbone") as error:
        build_backbone(component(kind, **arguments), crop_px=224)
    assert message in str(error.value)


def test_a_vision_transformer_refuses_a_crop_that_its_patches_do_not_divide():
    with pytest.raises(RecipeError, match="use a crop of 32 px"):
        build_backbone(component("timm/vit_tiny_patch16_224"), crop_px=40)


@pytest.mark.parametrize(
    ("given", "stride"), [({}, 2), ({"stem_stride": 2}, 2), ({"stem_stride": 4}, 4)]
)
@pytest.mark.parametrize("px", [28, 64, 65])
def test_the_stem_of_the_small_resnet_divides_the_side_and_sees_each_pixel(given, stride, px):
    backbone = build_backbone(component("small_resnet", **given), crop_px=px).eval()
    images = torch.rand(1, 3, px, px, requires_grad=True)
    out = backbone.network[0](images)
    assert out.shape[2:] == (px // stride, px // stride)
    out.sum().backward()
    inner = px // stride * stride  # of a side that the stride does not divide the last are cut
    assert (images.grad[:, :, :inner, :inner] != 0).all()


def test_every_family_of_the_table_is_tried_here():
    of_files = {"join", "open_clip", "transformers"}  # export/test_join, weights/test_transformers
    assert {kind.partition("/")[0] for kind, *_ in CASES} | of_files == set(BACKBONES)


def test_the_first_layer_of_other_channels_answers_as_loudly_as_that_of_rgb() -> None:
    loud = []
    for channels in (1, 3, 12):
        torch.manual_seed(0)
        backbone = build_backbone(component("torchvision/resnet18", channels=channels), crop_px=224)
        first = backbone.network.conv1
        loud.append(first(torch.randn(4, channels, 64, 64)).std().item())
    assert max(loud) / min(loud) < 1.1, loud


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
    with pytest.raises(RecipeError, match=r"backbone\.channels"):
        build_backbone(component("small_resnet", channels=value), crop_px=32)


VIT = {"embed_dim": 24, "num_heads": 2}


@pytest.mark.parametrize(
    ("kind", "settings", "words"),
    [
        ("small_resnet", {"blocks": 2**31 - 1}, "10,000 modules; use fewer layers"),
        ("timm/vit_tiny_patch16_224", {**VIT, "depth": 60_000}, "10,000 modules; use fewer layers"),
        (
            "timm/vit_tiny_patch16_224",
            {**VIT, "depth": 2**31 - 1},
            "backbone.depth = 2147483647: no network",
        ),
        ("timm/resnet10t", {"layers": [1, 2**31, 1, 1]}, "backbone.layers = "),
    ],
)
def test_a_network_of_endless_layers_is_refused_before_memory_is_full(kind, settings, words):
    with pytest.raises(RecipeError, match=words):
        build_backbone(backbone_settings(kind, settings), crop_px=32)


def test_weights_larger_than_memory_are_refused_before_they_take_any(monkeypatch):
    sizes = {**VIT, "depth": 1, "embed_dim": 10_000}
    settings = backbone_settings("timm/vit_tiny_patch16_224", sizes)
    reserved = []  # bytes of weights that were declared
    monkeypatch.setattr(limits, "total_memory_bytes", lambda: 2**31)
    counting = register_module_parameter_registration_hook(
        lambda module, name, weights: reserved.append(weights.nbytes)
    )
    try:
        with pytest.raises(RecipeError, match=r"\[backbone\] asks for weights .*memory \(2\.0 GiB"):
            build_backbone(settings, crop_px=32)
    finally:
        counting.remove()
    assert 2**31 < sum(reserved) < 2**32  # of 4.8 GB; the last was declared, and not drawn
