"""Folders of Hugging Face transformers: the layout of its files, features as its models give."""

import json
import re
from pathlib import Path

import pytest
import timm
import torch
import torchvision
from safetensors.torch import save_file

from sslpipe.errors import WeightsError
from sslpipe.export.load import load_backbone
from sslpipe.recipe.base import Component
from sslpipe.weights.huggingface import transformers_view
from tests.helpers.weights import difference, randomised

SIZES = {"embed_dim": 32, "depth": 2, "num_heads": 2}
CONFIG = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
COMMON = [
    (r"cls_token", "embeddings.cls_token"),
    (r"pos_embed", "embeddings.position_embeddings"),
    (r"patch_embed\.proj", "embeddings.patch_embeddings.projection"),
    (r"^norm\.", "layernorm."),
    (r"^blocks\.", "encoder.layer."),
    (r"attn\.proj", "attention.output.dense"),
]
# timm's key -> that of transformers' files, as `save_pretrained` writes them
NAMES = {
    "vit": [
        *COMMON,
        (r"norm1", "layernorm_before"),
        (r"norm2", "layernorm_after"),
        (r"mlp\.fc1", "intermediate.dense"),
        (r"mlp\.fc2", "output.dense"),
    ],
    "dinov2": [*COMMON, (r"ls([12])\.gamma", r"layer_scale\1.lambda1")],
    "convnext": [
        (r"^stem\.0", "embeddings.patch_embeddings"),
        (r"^stem\.1", "embeddings.layernorm"),
        (r"^head\.norm", "layernorm"),
        (r"^stages", "encoder.stages"),
        (r"\.downsample\.", ".downsampling_layer."),
        (r"\.blocks\.(\d+)\.norm", r".layers.\1.layernorm"),
        (r"\.blocks\.", ".layers."),
        (r"conv_dw", "dwconv"),
        (r"mlp\.fc", "pwconv"),
        (r"gamma", "layer_scale_parameter"),
    ],
    "resnet": [
        (r"^conv1", "embedder.embedder.convolution"),
        (r"^bn1", "embedder.embedder.normalization"),
        (r"downsample\.0", "shortcut.convolution"),
        (r"downsample\.1", "shortcut.normalization"),
        (r"conv1", "layer.0.convolution"),
        (r"conv2", "layer.1.convolution"),
        (r"bn1", "layer.0.normalization"),
        (r"bn2", "layer.1.normalization"),
        *[(rf"^layer{n + 1}\.", f"encoder.stages.{n}.layers.") for n in range(4)],
    ],
}


def written(network, model_type, config, folder: Path) -> Path:
    """Write a network of timm or torchvision as a folder of transformers."""
    tree = {}
    for key, tensor in network.state_dict().items():
        if key.startswith("fc."):
            continue
        for pattern, becomes in NAMES[model_type]:
            key = re.sub(pattern, becomes, key)
        if "attn.qkv" in key:
            for name, third in zip(("query", "key", "value"), tensor.chunk(3), strict=True):
                tree[key.replace("attn.qkv", f"attention.attention.{name}")] = third.clone()
        else:
            tree[key] = tensor
    if model_type == "dinov2":
        tree["embeddings.mask_token"] = torch.zeros(1, 32)
    else:  # as a classifier has them
        tree = {f"{model_type}.{key}": t for key, t in tree.items()}
        tree[f"classifier.{'1.' * (model_type == 'resnet')}weight"] = torch.ones(2, 32)
    save_file(tree, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, "model_type": model_type}))
    return folder


STAGES = {"depths": [1, 1, 2, 1], "dims": [8, 16, 24, 32]}
# model_type -> timm's name and arguments, the config of transformers, and the side of images
CASES = {
    "vit": (
        ("vit_base_patch16_224", {**SIZES, "patch_size": 8}),
        {**CONFIG, "intermediate_size": 128, "image_size": 32, "patch_size": 8},
        32,
    ),
    "dinov2": (
        ("vit_base_patch14_dinov2", SIZES),
        {**CONFIG, "image_size": 56, "patch_size": 14, "mlp_ratio": 4},
        56,
    ),
    "convnext": (
        ("convnext_tiny", STAGES),
        {"depths": STAGES["depths"], "hidden_sizes": STAGES["dims"], "patch_size": 4},
        64,
    ),
}
RESNET = {"depths": [2, 2, 2, 2], "hidden_sizes": [64, 128, 256, 512], "embedding_size": 64,
          "layer_type": "basic"}  # fmt: skip


def created(name, arguments, px=None):
    sides = {} if px is None or "convnext" in name else {"img_size": px}
    return randomised(timm.create_model(name, num_classes=0, **arguments, **sides))


@pytest.mark.parametrize("model_type", [*CASES, "resnet"])
def test_the_keys_of_its_files_become_those_of_the_network(tmp_path, model_type):
    if model_type == "resnet":
        network, config, crop_px = randomised(torchvision.models.resnet18()), RESNET, 64
    else:
        own, config, crop_px = CASES[model_type]
        network = created(*own, crop_px)
    model = load_backbone(written(network, model_type, config, tmp_path), crop_px=crop_px)
    if model_type == "resnet":
        network.fc = torch.nn.Identity()
    own = model.backbone.network.state_dict()
    assert all(own[key].equal(tensor) for key, tensor in network.state_dict().items())
    assert difference(model, network, crop_px) <= 1e-5
    init = model.config.facts["init"]
    assert (init["format"], init["loaded"]) == ("transformers", len(own))
    assert (init["missing"], init["resized"]) == ([], [])


def test_models_and_variants_that_are_not_read_are_named(tmp_path):
    network = torchvision.models.resnet18()
    for changes, message in (
        ({"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ({"downsample_in_bottleneck": True}, "downsample_in_bottleneck = True"),
        ({"depths": [1, 2, 2, 2]}, "are no ResNet of torchvision"),
    ):
        with pytest.raises(WeightsError, match=re.escape(message)):
            load_backbone(written(network, "resnet", {**RESNET, **changes}, tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "dinov3_vit"}')
    with pytest.raises(WeightsError, match=r"'dinov3_vit' of transformers is not read.*known: vit"):
        load_backbone(tmp_path)


SEVEN_EIGHTHS = {"crop_pct": 0.875, "resample": 3}


@pytest.mark.parametrize(
    ("stated", "expected"),
    [
        # ViT squashes; ConvNeXt crops below 384 px and squashes from there on; Bit crops
        ({"size": {"height": 32, "width": 32}, "resample": 2}, (32, 32, "bilinear", True)),
        ({"size": {"shortest_edge": 224}, **SEVEN_EIGHTHS}, (224, 256, "bicubic", False)),
        ({"size": {"shortest_edge": 384}, **SEVEN_EIGHTHS}, (384, 384, "bicubic", True)),
        (
            {"size": {"shortest_edge": 256}, "crop_size": {"height": 224, "width": 224},
             "do_center_crop": True, "resample": 3},
            (224, 256, "bicubic", False),
        ),
        ({"size": 48, "resample": 2}, (48, 48, "bilinear", True)),
    ],
    ids=["vit", "convnext", "convnext, 384 px", "bit", "old"],
)  # fmt: skip
def test_the_view_is_that_of_its_preprocessor(stated, expected):
    stated = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.4, 0.5, 0.6], **stated}
    view, notes = transformers_view("x", None, {}, stated)
    assert (view.crop_px, view.resize_px, view.interpolation, view.squash) == expected
    assert view.mean.tolist() == pytest.approx([0.1, 0.2, 0.3])
    assert view.std.tolist() == pytest.approx([0.4, 0.5, 0.6])
    assert notes == []


@pytest.mark.parametrize("initialised", [False, True], ids=["random", "as transformers begins"])
def test_features_equal_those_of_transformers_own_models(tmp_path, initialised):
    hf = pytest.importorskip("transformers")
    tiny, stages = {**CONFIG, "image_size": 56, "patch_size": 14}, CASES["convnext"][1]
    cases = {
        "vit": hf.ViTModel(hf.ViTConfig(**tiny, intermediate_size=64)),
        "dinov2": hf.Dinov2Model(hf.Dinov2Config(**tiny)),
        "swiglu": hf.Dinov2Model(hf.Dinov2Config(**tiny, use_swiglu_ffn=True)),
        "registers": hf.Dinov2WithRegistersModel(
            hf.Dinov2WithRegistersConfig(**tiny, num_register_tokens=4)
        ),
        "convnextv2": hf.ConvNextV2Model(hf.ConvNextV2Config(**stages)),
        "resnet": hf.ResNetModel(hf.ResNetConfig(**RESNET)),
    }
    for name, network in cases.items():
        network = network.eval() if initialised else randomised(network)
        network.save_pretrained(tmp_path / name)
        pooled = name in ("convnextv2", "resnet")

        def features(images, network=network, pooled=pooled):
            out = network(images)
            return out.pooler_output.flatten(1) if pooled else out.last_hidden_state[:, 0]

        assert difference(load_backbone(tmp_path / name), features, 56) <= 1e-5, name


@pytest.mark.parametrize("model_type", CASES)
def test_the_epsilon_of_norms_is_the_configs_also_for_a_backbone_that_the_user_names(
    tmp_path, model_type
):
    (kind, sizes), config, crop_px = CASES[model_type]
    network, said = created(kind, sizes, crop_px), {**config, "layer_norm_eps": 0.01}
    folder = written(network, model_type, said, tmp_path)
    of_recipe = Component.model_validate({"kind": f"timm/{kind}", **sizes})
    model = load_backbone(folder, component=of_recipe, crop_px=crop_px)
    alone = load_backbone(folder, crop_px=crop_px)
    assert difference(alone, network, crop_px) > 1e-3  # timm's own is 1e-6
    # transformers: all of a vision transformer's, and that behind the pooling of a ConvNeXt
    norms = [network.head.norm] if model_type == "convnext" else network.modules()
    for module in norms:
        if isinstance(module, torch.nn.LayerNorm):
            module.eps = 0.01
    for each in (alone, model):
        assert difference(each, network, crop_px) <= 1e-5
    # an export of it is the same network again; what the recipe says itself counts
    key = "head_norm_eps" if model_type == "convnext" else "norm_eps"
    assert model.config.backbone.arguments[key] == 0.01
    another = Component.model_validate({**of_recipe.model_dump(), key: 0.1})
    model = load_backbone(folder, component=another, crop_px=crop_px)
    assert model.config.backbone.arguments[key] == 0.1
    stated = {**said, "layer_norm_eps": -1, "model_type": model_type}
    (folder / "config.json").write_text(json.dumps(stated))
    with pytest.raises(WeightsError, match=r"layer_norm_eps = -1"):
        load_backbone(folder, crop_px=crop_px)


def test_a_kind_before_the_folder_has_the_epsilon_of_the_config(tmp_path):
    network = created("vit_tiny_patch16_224", {}, 32)
    config = {"hidden_size": 192, "num_hidden_layers": 12, "num_attention_heads": 3}
    config |= {"intermediate_size": 768, "image_size": 32, "patch_size": 16}
    folder = written(network, "vit", {**config, "layer_norm_eps": 0.01}, tmp_path)
    alone = load_backbone(folder, crop_px=32)
    named = load_backbone(f"timm/vit_tiny_patch16_224@{folder}", crop_px=32)
    assert difference(named, alone, 32) <= 1e-6


def test_a_backbone_of_a_recipe_has_the_activation_of_timms_config(tmp_path):
    arguments = {**STAGES, "act_layer": "relu"}
    network = created("convnext_tiny", arguments)
    save_file(network.state_dict(), tmp_path / "model.safetensors")
    config = {"architecture": "convnext_tiny", "model_args": arguments}
    (tmp_path / "config.json").write_text(json.dumps(config))
    component = Component.model_validate({"kind": "timm/convnext_tiny", **STAGES})
    model = load_backbone(tmp_path, component=component, crop_px=64)
    assert difference(model, network, 64) <= 1e-5
