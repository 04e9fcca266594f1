"""Folders of Hugging Face transformers: ViT, DINOv2, ConvNeXt and ResNet, as timm's networks.

Keys become those of the model's original code, which timm's own filters read.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import WeightsError, did_you_mean, shown
from sslpipe.recipe.base import Component
from sslpipe.registry import REFUSALS
from sslpipe.weights.views import make_view, unknown_view

Config = Mapping[str, Any]
Tensors = dict[str, Tensor]


@dataclass
class Renamed:
    """Tensors of a folder of transformers with the keys of another library's network."""

    tensors: Tensors
    component: Component
    dropped: list[str]
    notes: list[str] = field(default_factory=list)


Rules = tuple[tuple[str, str], ...]  # pattern of a whole key -> what it becomes

_LAYER = r"encoder\.layer\.(\d+)\."
_BLOCK: Rules = (
    (r"embeddings\.(cls_token|mask_token|register_tokens)", r"\1"),
    (r"embeddings\.position_embeddings", r"pos_embed"),
    (r"embeddings\.patch_embeddings\.projection\.(.*)", r"patch_embed.proj.\1"),
    (_LAYER + r"attention\.output\.dense\.(.*)", r"blocks.\1.attn.proj.\2"),
    (_LAYER + r"layernorm_before\.(.*)", r"blocks.\1.norm1.\2"),
    (_LAYER + r"layernorm_after\.(.*)", r"blocks.\1.norm2.\2"),
    (_LAYER + r"intermediate\.dense\.(.*)", r"blocks.\1.mlp.fc1.\2"),
    (_LAYER + r"output\.dense\.(.*)", r"blocks.\1.mlp.fc2.\2"),
    (_LAYER + r"(norm[12]|mlp\.fc[12])\.(.*)", r"blocks.\1.\2.\3"),
    (_LAYER + r"layer_scale([12])\.lambda1", r"blocks.\1.ls\2.gamma"),
    (_LAYER + r"mlp\.weights_in\.(.*)", r"blocks.\1.mlp.w12.\2"),
    (_LAYER + r"mlp\.weights_out\.(.*)", r"blocks.\1.mlp.w3.\2"),
    (r"layernorm\.(.*)", r"norm.\1"),
    (r"classifier\.(.*)", r"head.\1"),
)
_STAGE = r"encoder\.stages\.(\d+)\."
_CONVNEXT: Rules = (
    (r"embeddings\.patch_embeddings\.(.*)", r"downsample_layers.0.0.\1"),
    (r"embeddings\.layernorm\.(.*)", r"downsample_layers.0.1.\1"),
    (_STAGE + r"downsampling_layer\.(.*)", r"downsample_layers.\1.\2"),
    (_STAGE + r"layers\.(\d+)\.(dwconv|pwconv[12])\.(.*)", r"stages.\1.\2.\3.\4"),
    (_STAGE + r"layers\.(\d+)\.layernorm\.(.*)", r"stages.\1.\2.norm.\3"),
    (_STAGE + r"layers\.(\d+)\.layer_scale_parameter", r"stages.\1.\2.gamma"),
    (_STAGE + r"layers\.(\d+)\.grn\.weight", r"stages.\1.\2.grn.gamma"),
    (_STAGE + r"layers\.(\d+)\.grn\.bias", r"stages.\1.\2.grn.beta"),
    (r"layernorm\.(.*)", r"norm.\1"),
    (r"classifier\.(.*)", r"head.\1"),
)
_NORM = r"normalization\.(.*)"
_RESNET: Rules = (
    (r"embedder\.embedder\.convolution\.(.*)", r"conv1.\1"),
    (r"embedder\.embedder\." + _NORM, r"bn1.\1"),
    (_STAGE + r"layers\.(\d+)\.shortcut\.convolution\.(.*)", r"layer{}.\2.downsample.0.\3"),
    (_STAGE + r"layers\.(\d+)\.shortcut\." + _NORM, r"layer{}.\2.downsample.1.\3"),
    *(
        (_STAGE + rf"layers\.(\d+)\.layer\.{n}\.{theirs}\.(.*)", rf"layer{{}}.\2.{ours}{n + 1}.\3")
        for n in range(3)
        for theirs, ours in (("convolution", "conv"), ("normalization", "bn"))
    ),
    (r"classifier\.1\.(.*)", r"fc.\1"),
)

MOST = 2**20  # of any size in a config.json
_TIMM_EPS = 1e-6  # of the LayerNorms of vision transformers and ConvNeXts

# (width, depth, heads) -> the size in timm's names
_SIZES = {
    (192, 12, 3): "tiny",
    (384, 12, 6): "small",
    (768, 12, 12): "base",
    (1024, 24, 16): "large",
    (1280, 32, 16): "huge",
    (1536, 40, 24): "giant",
}
_CONVNEXTS: dict[tuple[tuple[int, ...], ...], str] = {
    ((3, 3, 9, 3), (96, 192, 384, 768)): "tiny",
    ((3, 3, 27, 3), (96, 192, 384, 768)): "small",
    ((3, 3, 27, 3), (128, 256, 512, 1024)): "base",
    ((3, 3, 27, 3), (192, 384, 768, 1536)): "large",
    ((3, 3, 27, 3), (256, 512, 1024, 2048)): "xlarge",
}
_RESNETS: dict[tuple[str, tuple[int, ...], tuple[int, ...]], int] = {
    ("basic", (2, 2, 2, 2), (64, 128, 256, 512)): 18,
    ("basic", (3, 4, 6, 3), (64, 128, 256, 512)): 34,
    ("bottleneck", (3, 4, 6, 3), (256, 512, 1024, 2048)): 50,
    ("bottleneck", (3, 4, 23, 3), (256, 512, 1024, 2048)): 101,
    ("bottleneck", (3, 8, 36, 3), (256, 512, 1024, 2048)): 152,
}


def transformers_encoder(config: Config, tensors: Tensors, what: str) -> Renamed:
    """Rename the tensors of a folder of transformers, and name timm's or torchvision's network.

    Raises:
        WeightsError: A model that is not read, or a variant that timm and torchvision have not.
    """
    model_type = str(config.get("model_type"))
    if model_type not in MODELS:
        raise WeightsError(
            f"{what}: model_type {model_type!r} of transformers is not read"
            f"{did_you_mean(model_type, MODELS)}; known: {', '.join(MODELS)}"
        )
    rules, find_component = MODELS[model_type]
    bare = {key.removeprefix(f"{model_type}."): tensor for key, tensor in tensors.items()}
    try:
        if model_type in ("vit", "dinov2", "dinov2_with_registers"):
            bare = _join_attention(bare)
        renamed, dropped = _rename(bare, rules)
        component = find_component(config, bare)
    except REFUSALS as error:
        raise WeightsError(
            f"{what}: its config.json lacks or garbles what a {model_type} needs: {error!r}"
        ) from error
    encoder = Renamed(renamed, component, dropped)
    if dropped:
        encoder.notes.append("features are those before the model's own pooler")
    return encoder


def transformers_view(
    what: str, crop_px: int | None, config: Config, stated: Config
) -> tuple[EvalView, list[str]]:
    """Make the view of a folder of transformers; `stated`: its preprocessor_config.json, if any."""
    name = "preprocessor_config.json" if stated else "config.json"
    try:
        if not stated:
            return unknown_view(what, crop_px, _whole({"image_size": 224, **config}, "image_size"))
        size, crop = _sides(stated.get("size", 224)), _sides(stated.get("crop_size", 224))
        cropped = bool(stated.get("do_center_crop", False))
        share = stated.get("crop_pct")  # of ConvNeXt: a crop below 384 px, squashed from there on
        if share is not None and size < (384,):
            cropped, crop, size = True, size, (int(size[0] / float(share)),)
        normalised = bool(stated.get("do_normalize", True))
        return make_view(
            what,
            crop_px,
            size=crop[0] if cropped else size[0],
            resize=size[0],
            mean=stated["image_mean"] if normalised else (0, 0, 0),
            std=stated["image_std"] if normalised else (1, 1, 1),
            interpolation=_PIL[int(stated.get("resample", 2))],
            squash=len(size) == 2 or (share is not None and not cropped),
        )
    except WeightsError:
        raise
    except REFUSALS as error:
        raise WeightsError(f"{what}: its {name} is garbled: {error!r}") from error


_PIL = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by PIL's numbers


def _sides(value: Any) -> tuple[int, ...]:
    """Take a size of transformers: (shorter side,), or (height, width)."""
    if not isinstance(value, Mapping):
        return (int(value), int(value))
    if "shortest_edge" in value:
        return (int(value["shortest_edge"]),)
    height, width = int(value["height"]), int(value["width"])
    if height != width:
        raise ValueError(f"images of {height} x {width}, and only square ones are made")
    return height, width


def _rename(tensors: Tensors, rules: Rules) -> tuple[Tensors, list[str]]:
    """Rename what a rule knows; poolers and the like are listed, the rest stays as it is."""
    renamed: Tensors = {}
    dropped = []
    for key, tensor in tensors.items():
        if key.startswith(("pooler.", "decoder.")):  # a layer behind the features; SimMIM's head
            dropped.append(key)
            continue
        for pattern, becomes in rules:
            if (match := re.fullmatch(pattern, key)) is not None:
                # torchvision counts layers from 1
                counted = becomes.format(int(match[1]) + 1) if "{}" in becomes else becomes
                key = match.expand(counted)
                break
        renamed[key] = tensor
    return renamed, dropped


def _join_attention(tensors: Tensors) -> Tensors:
    """Join query, key and value into one matrix, as the original code has it."""
    joined = dict(tensors)
    for key in tensors:
        match = re.fullmatch(_LAYER + r"attention\.attention\.query\.(weight|bias)", key)
        if match is None:
            continue
        parts = [key.replace(".query.", f".{name}.") for name in ("query", "key", "value")]
        if all(part in joined for part in parts):
            three = torch.cat([joined.pop(part) for part in parts])
            joined[f"blocks.{match[1]}.attn.qkv.{match[2]}"] = three
    return joined


def _whole(config: Config, key: str) -> int:
    """Read a positive number, or two equal ones of height and width."""
    sides = config[key] if isinstance(config[key], list) else [config[key]]
    if len({*sides}) != 1 or type(sides[0]) is not int or not 0 < sides[0] <= MOST:
        raise ValueError(
            f"{key} = {shown(config[key])} is no number, or two equal ones, of 1 to {MOST:,}"
        )
    return int(sides[0])


def _require(config: Config, **expected: Any) -> None:
    for key, value in expected.items():
        if config.get(key, value) != value:
            raise ValueError(f"{key} = {config[key]!r}, and only {value!r} is read")


def _vit(config: Config, tensors: Tensors) -> Component:
    _require(config, hidden_act="gelu", num_channels=3)
    size, sizes = _sizes(config)
    ratio = _whole(config, "intermediate_size") / sizes["embed_dim"]
    bias = bool(config.get("qkv_bias", True))
    others = {**sizes, "mlp_ratio": ratio, "qkv_bias": bias}
    name = f"vit_{size}_patch{sizes['patch_size']}_224"
    usual = ratio == 4 and bias
    return _timm(name if usual else "", "vit_base_patch16_224", others, _eps(config))


def _dinov2(config: Config, tensors: Tensors) -> Component:
    _require(config, hidden_act="gelu", num_channels=3, qkv_bias=True)
    size, sizes = _sizes(config)
    registers = int(config.get("num_register_tokens", 0))
    if registers not in (0, 4):
        raise ValueError(f"num_register_tokens = {registers}, and only 0 and 4 are read")
    family = "patch14_reg4_dinov2" if registers else "patch14_dinov2"
    gated = bool(config.get("use_swiglu_ffn", False))
    usual = sizes["patch_size"] == 14 and gated == (size == "giant")
    usual = usual and config.get("mlp_ratio", 4) == 4
    inner = tensors[f"encoder.layer.0.mlp.{'weights_in' if gated else 'fc1'}.weight"].shape[0]
    width = sizes["embed_dim"]
    ratio = inner / width
    if int(width * ratio) != inner:  # as timm computes it
        ratio = (inner + 0.5) / width
    general = f"vit_{'giant' if gated else 'base'}_{family}"
    others = {**sizes, "mlp_ratio": ratio}
    return _timm(f"vit_{size}_{family}" if usual else "", general, others, _eps(config))


def _convnext(config: Config, tensors: Tensors) -> Component:
    _require(config, hidden_act="gelu", num_channels=3, patch_size=4)
    family = "convnextv2" if any(".grn." in key for key in tensors) else "convnext"
    depths, dims = (tuple(map(int, config[key])) for key in ("depths", "hidden_sizes"))
    name = f"{family}_{_CONVNEXTS.get((depths, dims), '')}"
    others = {"depths": list(depths), "dims": list(dims)}
    return _timm(name, f"{family}_tiny", others, _eps(config, "head_norm_eps"))


def _resnet(config: Config, tensors: Tensors) -> Component:
    _require(config, hidden_act="relu", num_channels=3, embedding_size=64)
    _require(config, downsample_in_first_stage=False, downsample_in_bottleneck=False)
    depths, sizes = (tuple(map(int, config[key])) for key in ("depths", "hidden_sizes"))
    layers = _RESNETS.get((str(config["layer_type"]), depths, sizes))
    if layers is None:
        raise ValueError(f"depths = {depths}, hidden_sizes = {sizes} are no ResNet of torchvision")
    return Component(kind=f"torchvision/resnet{layers}")


def _timm(name: str, general: str, sizes: Mapping[str, Any], eps: Mapping[str, float]) -> Component:
    """Name timm's network of these sizes; where it has none, a general one with all sizes."""
    import timm

    tree = {"kind": f"timm/{name}"} if timm.is_model(name) else {"kind": f"timm/{general}", **sizes}
    return Component.model_validate({**tree, **eps})


def _sizes(config: Config) -> tuple[str, dict[str, int]]:
    """Return the size in timm's names, "" for others, and timm's arguments."""
    keys = ("hidden_size", "num_hidden_layers", "num_attention_heads", "patch_size")
    names = ("embed_dim", "depth", "num_heads", "patch_size")
    sizes = {name: _whole(config, key) for name, key in zip(names, keys, strict=True)}
    return _SIZES.get((sizes["embed_dim"], sizes["depth"], sizes["num_heads"]), ""), sizes


def _eps(config: Config, argument: str = "norm_eps") -> dict[str, float]:
    """Return the epsilon of norms where it is not timm's: of small hidden states, it matters."""
    eps = float(config.get("layer_norm_eps", _TIMM_EPS))
    if not 0 <= eps < 1:
        raise ValueError(f"layer_norm_eps = {eps}")
    return {} if eps == _TIMM_EPS else {argument: eps}


# model_type -> how keys are renamed, and what names the network
MODELS: dict[str, tuple[Rules, Callable[[Config, Tensors], Component]]] = {
    "vit": (_BLOCK, _vit),
    "dinov2": (_BLOCK, _dinov2),
    "dinov2_with_registers": (_BLOCK, _dinov2),
    "convnext": (_CONVNEXT, _convnext),
    "convnextv2": (_CONVNEXT, _convnext),
    "resnet": (_RESNET, _resnet),
}
