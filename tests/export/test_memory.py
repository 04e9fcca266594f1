"""Networks that are in memory: loaded as those of files, and exported."""

import pytest
import timm
import torch
import torchvision
from torchvision.ops import FrozenBatchNorm2d

import sslpipe
from sslpipe.errors import WeightsError
from sslpipe.models.backbones import backbone_settings
from tests.helpers.weights import randomised


def torchvision_network():
    return randomised(torchvision.models.resnet18(weights=None))


def test_a_network_in_memory_gives_its_own_features_and_is_exported(tmp_path):
    network = torchvision_network()
    backbone = sslpipe.load_backbone(network, architecture="torchvision/resnet18", crop_px=64)
    images = torch.randn(2, 3, 64, 64)
    network.eval()
    network.fc = torch.nn.Identity()
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), network(images))
    sslpipe.export_backbone(backbone, tmp_path / "out", ("safetensors", "torchvision"))
    again = sslpipe.load_backbone(tmp_path / "out")
    torch.testing.assert_close(again(images), backbone(images))
    assert sslpipe.load_backbone(again) is again
    # a copy: training it leaves the user's own as it is
    backbone.backbone.network.conv1.weight.data.zero_()
    assert network.conv1.weight.any()


@pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated")
@pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor")
def test_a_quantized_network_is_refused_by_the_name_of_its_layer():
    network = torch.ao.quantization.quantize_dynamic(torchvision_network(), {torch.nn.Linear})
    with pytest.raises(WeightsError, match=r"fc\..* is quantized; give the network that it was"):
        sslpipe.load_backbone(network, architecture="torchvision/resnet18", crop_px=64)


def test_a_network_of_timm_knows_its_architecture():
    network = randomised(timm.create_model("resnet10t", pretrained=False))
    backbone = sslpipe.load_backbone(network)
    images = torch.randn(2, 3, 64, 64)
    network.eval().reset_classifier(0)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), network(images))


def test_a_network_of_timm_knows_its_images():
    """DINO's have another mean than timm's usual weights of the same network."""
    network = timm.create_model("vit_small_patch16_224.dino", img_size=96, num_classes=0)
    view = sslpipe.load_backbone(network).view
    release = timm.get_pretrained_cfg("vit_small_patch16_224.dino")
    usual = timm.get_pretrained_cfg("vit_small_patch16_224")
    assert view.mean.tolist() == pytest.approx(release.mean) != pytest.approx(usual.mean)
    assert (view.crop_px, view.resize_px) == (96, int(96 / release.crop_pct))
    assert view.interpolation == release.interpolation
    # named otherwise, it is another one's
    tagged = sslpipe.load_backbone(network, architecture="timm/vit_small_patch16_224.augreg_in1k")
    assert tagged.view.mean.tolist() == pytest.approx(usual.mean)


@pytest.mark.parametrize(
    ("name", "pool"), [("test_resnet", "max"), ("test_convnext", "avgmax"), ("test_vit", "avg")]
)
def test_a_network_of_timm_pools_as_it_was_made_to(name, pool):
    network = randomised(timm.create_model(name, global_pool=pool, num_classes=0))
    backbone = sslpipe.load_backbone(network, crop_px=64 if name != "test_vit" else None)
    images = torch.randn(2, *backbone.view.image_shape)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), network(images))


def test_a_network_of_timm_without_pooling_gets_the_usual_one():
    network = randomised(timm.create_model("test_resnet", global_pool="", num_classes=0))
    backbone = sslpipe.load_backbone(network, crop_px=64)
    images = torch.randn(2, *backbone.view.image_shape)
    with torch.no_grad():
        torch.testing.assert_close(backbone(images), network(images).mean((2, 3)))


def without_max_pool(network):
    network.maxpool = torch.nn.Identity()


def with_last_stride_one(network):
    """As in re-identification: larger maps, the same weights."""
    network.layer4[0].conv1.stride = (1, 1)
    network.layer4[0].downsample[0].stride = (1, 1)


def with_maxima(network):
    network.avgpool = torch.nn.AdaptiveMaxPool2d(1)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (without_max_pool, "maxpool is Identity"),
        (with_last_stride_one, "layer4.0.conv1 is Conv2d"),
        (with_maxima, "avgpool is AdaptiveMaxPool2d"),
    ],
)
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_network_that_was_changed_where_no_tensor_shows_it_is_refused(change, named, wrapped):
    """Its state dict fits the unchanged network, and its features are others."""
    network = torchvision_network().eval()
    images = torch.randn(2, 3, 64, 64)
    before = network(images)
    change(network)
    assert not torch.allclose(network(images), before)
    given = torch.nn.ModuleDict({"encoder": network}) if wrapped else network
    with pytest.raises(WeightsError, match=named):
        sslpipe.load_backbone(given, architecture="torchvision/resnet18")


@pytest.mark.parametrize(("stem", "pooled"), [("small", False), ("small_pool", True)])
def test_a_small_stem_is_taken_by_its_own_name_alone(stem, pooled):
    """No tensor shows whether a max-pool follows it."""
    images = torch.randn(2, 3, 32, 32)
    component = backbone_settings("torchvision/resnet18", {"stem": stem})
    for has_pool in (False, True):
        network = torchvision_network().eval()
        network.conv1 = torch.nn.Conv2d(3, 64, 3, 1, 1, bias=False)
        network.fc = torch.nn.Identity()
        if not has_pool:
            without_max_pool(network)
        name = {"architecture": "torchvision/resnet18", "component": component}
        if has_pool == pooled:
            backbone = sslpipe.load_backbone(network, **name)
            torch.testing.assert_close(backbone(images), network(images))
        else:
            with pytest.raises(WeightsError, match=r"maxpool is (Identity|MaxPool2d)"):
                sslpipe.load_backbone(network, **name)


def frozen(layer):
    """As torchvision's detectors have it: the same numbers, none of them a parameter."""
    other = FrozenBatchNorm2d(layer.num_features, eps=layer.eps)
    other.load_state_dict({**other.state_dict(), **layer.state_dict()}, strict=False)
    return other


def test_what_changes_no_feature_is_taken():
    network = torchvision_network().eval()
    images = torch.randn(2, 3, 64, 64)
    expected = torch.nn.Sequential(*list(network.children())[:-1])(images).flatten(1)
    network.avgpool = torch.nn.AdaptiveAvgPool2d(1)
    network.relu = torch.nn.ReLU()
    network.bn1 = frozen(network.bn1)
    network.fc = torch.nn.Sequential(torch.nn.Dropout(0.5), torch.nn.Linear(512, 7))
    backbone = sslpipe.load_backbone(network, architecture="torchvision/resnet18", crop_px=64)
    torch.testing.assert_close(backbone(images), expected)


@pytest.mark.filterwarnings("ignore:`torch.jit.trace")
def test_a_traced_network_is_taken_whose_layers_do_not_show_what_they_are():
    network = torchvision_network().eval()
    images = torch.randn(2, 3, 64, 64)
    traced = torch.jit.trace(network, images)
    network.fc = torch.nn.Identity()
    backbone = sslpipe.load_backbone(traced, architecture="torchvision/resnet18", crop_px=64)
    torch.testing.assert_close(backbone(images), network(images))


def test_without_a_name_or_with_another_one_it_is_an_error():
    with pytest.raises(WeightsError, match="architecture="):
        sslpipe.load_backbone(torchvision_network())
    with pytest.raises(WeightsError, match="resnet50"):
        sslpipe.load_backbone(torchvision_network(), architecture="torchvision/resnet50")
