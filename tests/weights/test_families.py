"""One member of each family of timm and torchvision: every tensor is loaded, bit for bit.

Its features are those of the library, too, but for the families of TENSORS_ONLY.
"""

import copy

import pytest
import timm
import torchvision
from torch import nn

from sslpipe.export.load import load_backbone
from sslpipe.models.backbones import CLASSIFIERS, backbone_settings
from tests.helpers.weights import difference, equals, randomised, saved

# words in the names of a family's smallest members, the smallest first
SMALL = (
    "test_", "zepto", "atto", "femto", "pico", "nano", "xxtiny", "xtiny", "xxs", "_mini", "tiny",
    "_050", "_t0", "_s0", "_m0", "_b0", "_s1", "_xs", "_ti", "121", "small", "18", "26", "_s",
    "_t", "_b",
)  # fmt: skip
QUICK = ("convnext", "efficientnet", "resnet", "vision_transformer")
SMALLEST = {"mobilenetv3": "mobilenetv3_small_050", "mlp_mixer": "gmixer_12_224"}
ARGUMENTS = {  # families whose smallest member is large
    "deepseek_vit": {"depth": 1},
    **{family: {"depth": 2} for family in ("beit", "gemma4_vit", "naflexvit")},
    "nasnet": {"num_features": 1056, "stem_size": 32},
    "vision_transformer_sam": {"depth": 3},
}
TENSORS_ONLY = {  # features of their images, 512 to 1,024 px, take minutes
    "csatv2", "deepseek_vit", "gemma4_vit", "hieradet_sam2", "qwen3_vit", "vision_transformer_sam",
}  # fmt: skip

TORCHVISION = {
    "ConvNeXt": "convnext_tiny",
    "DenseNet": "densenet121",
    "EfficientNet": "efficientnet_b0",
    "MobileNetV2": "mobilenet_v2",
    "MobileNetV3": "mobilenet_v3_small",
    "RegNet": "regnet_y_400mf",
    "ResNet": "resnet18",
    "ShuffleNetV2": "shufflenet_v2_x0_5",
    "SwinTransformer": "swin_t",
    "VisionTransformer": "vit_b_32",
}


def smallest(family: str) -> str:
    """A small model of a module of timm, by its name."""
    names = sorted(timm.list_models(module=family), key=len)
    ranked = sorted(names, key=lambda n: next((i for i, w in enumerate(SMALL) if w in n), 99))
    wanted = SMALLEST.get(family)
    return wanted if wanted in names else ranked[0]


def check(kind: str, full: nn.Module, tmp_path, *, features: bool = True, **options) -> None:
    """The full network's file gives the headless network, tensors and features."""
    headless = copy.deepcopy(full)
    path = saved(full.state_dict(), tmp_path)
    model = load_backbone(f"{kind}@{path}", **options)
    path.unlink()
    own = model.backbone.network.state_dict()
    assert all(own[key].equal(full.state_dict()[key]) for key in own)
    init = model.config.facts["init"]
    assert (init["loaded"], init["missing"], init["resized"]) == (len(own), [], [])
    assert set(init["unexpected"]) == set(full.state_dict()) - set(own)
    if kind.startswith("timm/"):
        headless.reset_classifier(0)
    else:
        parent, _, name = CLASSIFIERS[type(full).__name__].rpartition(".")
        setattr(headless.get_submodule(parent), name, nn.Identity())
    assert equals(model, headless)
    if features:
        assert difference(model, headless, model.view.crop_px, count=1) <= 1e-5


def slow_but(quick, families):
    """The families as parameters of a test, slow but for some."""
    assert {*quick} <= {*families}
    return [pytest.param(f, marks=() if f in quick else pytest.mark.slow) for f in families]


@pytest.mark.promise(10)
@pytest.mark.timeout(900)
@pytest.mark.parametrize("family", slow_but(QUICK, timm.list_modules()))
def test_every_family_of_timm_loads_whole(family, tmp_path):
    name = smallest(family)
    kind, arguments = f"timm/{name}", ARGUMENTS.get(family, {})
    full = timm.create_model(name, **arguments)
    options = {"component": backbone_settings(kind, arguments)} if arguments else {}
    features = family not in TENSORS_ONLY
    check(kind, randomised(full), tmp_path, features=features, **options)


@pytest.mark.promise(10)
@pytest.mark.parametrize(
    "family", slow_but(("MobileNetV3", "ResNet", "ShuffleNetV2"), [*CLASSIFIERS])
)
def test_every_family_of_torchvision_loads_whole(family, tmp_path):
    full = torchvision.models.get_model(TORCHVISION[family], weights=None)
    assert type(full).__name__ == family
    check(f"torchvision/{TORCHVISION[family]}", randomised(full), tmp_path)
