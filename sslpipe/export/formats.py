"""Write each export format, and say which backbones it cannot hold: the table FORMATS.

`verify.READERS` has how each is loaded again.
"""

import importlib.util
import io
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save
from torch import nn

from sslpipe.errors import install
from sslpipe.export.folder import POOLER, SSLPIPE_KEY, write_folder, write_tensors
from sslpipe.export.model import FrozenBackbone
from sslpipe.export.model_card import USAGE, hub_card, model_card
from sslpipe.export.onnx_files import (
    free_batch,
    onnx_graph,
    refuses_onnx,
    save_onnx,
    traced_images,
)
from sslpipe.files import write_json
from sslpipe.models.libraries import TransformersTower


@dataclass(frozen=True)
class Format:
    """One export format."""

    write: Callable[[FrozenBackbone, Path], Path]  # into a folder; returns the main file or folder
    # says why this backbone, or this machine, cannot have the format; None: it can
    refuses: Callable[[FrozenBackbone], str | None] = lambda model: None
    flattens: bool = False  # its features are those of `encode`, by a whitening inside


def _write_safetensors(model: FrozenBackbone, folder: Path) -> Path:
    if model.whitening is not None:
        (folder / "whitening.safetensors").write_bytes(save(model.whitening._asdict()))
    return write_folder(model, folder)


def _extra_layers(
    model: FrozenBackbone, library: str, *, head: bool = False, length: bool = False
) -> str | None:
    """Name what a backbone has that its library's network has not, if any.

    Args:
        model: The backbone.
        library: The library's network, for the message.
        head: That network may end with a linear layer.
        length: Features of length 1 are left to who uses that network.
    """
    backbone = model.backbone
    taken = model.image_type
    pool = backbone.pool
    stem = backbone.stem
    layer = f"it has an embedding layer of {model.num_features} behind the network's features"
    extra = (
        (not taken.is_rgb8, f"it takes images of {taken}, and {library} 8-bit RGB"),
        (
            backbone.embedding is not None
            and not (head and isinstance(backbone.embedding, nn.Linear)),
            layer,
        ),
        (backbone.normalize and not length, "its features are normalised to length 1"),
        (pool != "avg", f"it has backbone.pool = {pool!r}, and that library averages"),
        (
            stem not in (None, "imagenet"),
            f"its small-image stem {stem!r} is not one of {library}: train with "
            'backbone.stem="imagenet" for it',
        ),
    )
    return next((text for has, text in extra if has), None)


def _refuses_torchvision(model: FrozenBackbone) -> str | None:
    kind = model.config.backbone.kind
    family, _, architecture = kind.partition("/")
    if (extra := _extra_layers(model, f"torchvision.models.{architecture}")) is not None:
        return extra
    if family != "torchvision":
        return f"a {kind!r} backbone is not one of torchvision's"
    if architecture.startswith("vit_") and model.config.crop_px != 224:
        return (
            f"{architecture} at {model.config.crop_px} px has another position table than "
            "torchvision's at 224 px"
        )
    return None


def _write_torchvision(model: FrozenBackbone, folder: Path) -> Path:
    path = folder / "torchvision" / f"{model.config.backbone.kind.partition('/')[2]}.safetensors"
    path.parent.mkdir()
    return write_tensors(model.backbone.network.state_dict(), path)


def _refuses_timm(model: FrozenBackbone) -> str | None:
    kind = model.config.backbone.kind
    family, _, architecture = kind.partition("/")
    if (
        extra := _extra_layers(model, f"timm's {architecture}", head=True, length=True)
    ) is not None:
        return extra
    # by name: to import torchvision takes a second, and who has such a network has imported it
    bases = {f"{each.__module__}.{each.__name__}" for each in type(model.backbone.network).__mro__}
    if family != "timm" and "torchvision.models.resnet.ResNet" not in bases:
        return f"a {kind!r} backbone is not one of timm's, nor a ResNet, whose keys it shares"
    return None


def _timm_config(model: FrozenBackbone) -> dict[str, Any]:
    """Return what timm.create_model("local-dir:...") and "hf-hub:..." read from config.json."""
    family, _, architecture = model.config.backbone.kind.partition("/")
    view = model.view.config()
    network = model.backbone.network
    embedding = model.backbone.embedding
    head_width = embedding.out_features if isinstance(embedding, nn.Linear) else 0
    pooled_width = embedding.in_features if isinstance(embedding, nn.Linear) else model.num_features
    arguments: dict[str, Any] = {}
    layers: dict[str, Any] = {"first_conv": "conv1", "classifier": "fc", "pool_size": None}
    fixed_size = False
    if family == "timm":
        import timm

        not_timm = {"stem", "embedding_dim", "normalize", "pool", "pool_power"}
        settings = model.config.backbone.arguments
        arguments = {key: settings[key] for key in settings if key not in not_timm}
        timm_config: Any = network.pretrained_cfg
        layers = {key: timm_config.get(key) for key in layers}
        fixed_size = isinstance(network, timm.models.VisionTransformer)
        if fixed_size:  # its position table is of this size
            arguments.setdefault("img_size", model.config.crop_px)
    return {
        "architecture": architecture,
        "num_classes": head_width,
        "num_features": pooled_width,
        "pretrained_cfg": {
            "tag": "sslpipe",
            "num_classes": head_width,
            "input_size": [3, view["crop_px"], view["crop_px"]],
            "fixed_input_size": fixed_size,
            "interpolation": view.get("interpolation", "bilinear"),
            "crop_pct": _crop_pct(view["crop_px"], view["resize_px"]),
            "crop_mode": "squash" if view.get("squash") else "center",
            "mean": view["mean"],
            "std": view["std"],
            **{key: value for key, value in layers.items() if value is not None},
        },
        **({"model_args": arguments} if arguments else {}),
    }


def _crop_pct(crop_px: int, resize_px: int) -> float:
    """Return the share of the resized side that timm, which rounds that side down, crops alike."""
    share = crop_px / resize_px
    return share if math.floor(crop_px / share) == resize_px else math.nextafter(share, 0)


def _write_timm_folder(model: FrozenBackbone, folder: Path) -> Path:
    """Write weights with timm's keys, and a config.json that timm and `load_backbone` read."""
    folder.mkdir()
    timm_config = _timm_config(model)
    state = model.backbone.network.state_dict()
    if model.backbone.embedding is not None:  # the classifier's layer
        name = timm_config["pretrained_cfg"]["classifier"]
        layer = model.backbone.embedding.state_dict()
        state |= {f"{name}.{key}": tensor for key, tensor in layer.items()}
    return _write_repository(model, folder, timm_config, state)


def _write_transformers_folder(model: FrozenBackbone, folder: Path) -> Path:
    """Write a model of transformers as it writes one, and what makes its images."""
    folder.mkdir()
    tower: Any = model.backbone.network
    config = json.loads(tower.model.config.to_json_string())
    config["architectures"] = [type(tower.model).__name__]
    view = model.view.config()
    side = view["resize_px"]
    size = {"height": side, "width": side} if view.get("squash") else {"shortest_edge": side}
    processor = {
        "image_processor_type": "BitImageProcessor",  # resizes, crops and normalises, as DINOv2's
        "do_resize": True,
        "size": size,
        "resample": {"bilinear": 2, "bicubic": 3}[view.get("interpolation", "bilinear")],
        "do_center_crop": True,
        "crop_size": {"height": view["crop_px"], "width": view["crop_px"]},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": view["mean"],
        "image_std": view["std"],
    }
    write_json(folder / "preprocessor_config.json", processor)
    state = tower.model.state_dict()
    if tower.omits_pooler and "pooler_act" in config:  # else AutoModel draws one, for pooler_output
        width = model.num_features
        config |= {"pooler_act": "linear", "pooler_output_size": width}
        identity = {"weight": torch.eye(width), "bias": torch.zeros(width)}
        state |= {f"{POOLER}{key}": tensor for key, tensor in identity.items()}
    return _write_repository(model, folder, config, state)


def _write_repository(
    model: FrozenBackbone, folder: Path, config: dict[str, Any], state: dict[str, Any]
) -> Path:
    """Write a library's weights and config.json, with what `load_backbone` needs beside them."""
    write_tensors(state, folder / "model.safetensors")
    tree = {**config, SSLPIPE_KEY: model.config.model_dump(mode="json")}
    write_json(folder / "config.json", tree)
    return folder


def _refuses_hf(model: FrozenBackbone) -> str | None:
    """Return why neither transformers' AutoModel nor timm's reader of the Hub has the network."""
    if importlib.util.find_spec("transformers") is None:
        return f"it needs transformers, which proves it: {install('hf')}"
    if model.config.backbone.kind == "transformers":
        return _extra_layers(model, "its model of transformers", length=True)
    if (reason := _refuses_timm(model)) is not None:
        return f"neither AutoModel of transformers nor timm has such a network: {reason}"
    return None


def _write_hf(model: FrozenBackbone, folder: Path) -> Path:
    path = folder / "hf"
    if model.config.backbone.kind == "transformers":
        library = "transformers"
        _write_transformers_folder(model, path)
    else:
        library = "timm"
        _write_timm_folder(model, path)
    lines = usage_lines("hf", model).partition("\n")[2]  # the first one is about the upload
    usage = {"transformers": lines.replace("FOLDER/hf", "USER/NAME")}
    if library == "timm":
        usage["timm"] = USAGE["timm"].replace("local-dir:FOLDER/timm", "hf-hub:USER/NAME")
    usage["sslpipe"] = USAGE["hub_sslpipe"]
    config = model.config.model_dump(mode="json")
    card = hub_card(config, model_card(config, usage), library=library)
    (path / "README.md").write_text(card, encoding="utf-8")
    return path


def usage_lines(name: str, model: FrozenBackbone) -> str:
    """Return the lines of Python that load a format of a backbone."""
    lines: str = USAGE[name]
    if name != "hf":
        return lines
    network = model.backbone.network
    if isinstance(network, TransformersTower):
        arguments = ", interpolate_pos_encoding=True" if network.resizes else ""
        called = f"model(images{arguments}).{network.features_of_output(model.view.image_shape)}"
        return lines.replace("model(images).pooler_output", called)
    if model.backbone.embedding is None:
        return lines
    lines = lines.replace("AutoModel", "AutoModelForImageClassification")
    return lines.replace("pooler_output", "logits")  # the embedding, in the place of the classes


def _write_pt2(model: FrozenBackbone, folder: Path) -> Path:
    program = torch.export.export(
        model.flattened, (traced_images(model),), dynamic_shapes=free_batch(), strict=False
    )
    for part in program.graph_module.modules():
        for node in part.graph.nodes if isinstance(part, torch.fx.GraphModule) else ():
            node.meta.pop("stack_trace", None)  # it tells the folders of this machine
    file = io.BytesIO()  # into a file, the archive would carry the file's name
    torch.export.save(program, file)
    path = folder / "model.pt2"
    path.write_bytes(file.getvalue())
    return path


# `usage_lines` says how each is loaded
FORMATS: dict[str, Format] = {
    "safetensors": Format(_write_safetensors),
    "torchvision": Format(_write_torchvision, _refuses_torchvision),
    "timm": Format(lambda model, folder: _write_timm_folder(model, folder / "timm"), _refuses_timm),
    "onnx": Format(
        lambda model, folder: save_onnx(onnx_graph(model), folder / "model.onnx"),
        refuses_onnx,
        flattens=True,
    ),
    "pt2": Format(_write_pt2, flattens=True),
    "hf": Format(_write_hf, _refuses_hf),
}
