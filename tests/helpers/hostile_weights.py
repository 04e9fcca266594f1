"""Files that claim to be weights and are not, or ask for too much: name -> a writer of a SOURCE.

Each writer takes an empty folder and returns what `load_backbone` is called with. All have to end
as one line, at once, in little memory.
"""

import json
import os
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import timm
import torch
import torchvision
from safetensors.torch import save_file

Writer = Callable[[Path], Path | str]
HOSTILE: dict[str, Writer] = {}


def hostile(name: str, *arguments: Any) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Register a writer, called with the folder and the arguments."""

    def register(writer: Callable[..., Any]) -> Callable[..., Any]:
        HOSTILE[name] = lambda folder: writer(folder, *arguments)
        return writer

    return register


# --- files that are no regular files


def _special(path: Path, kind: str) -> Path:
    """Put a FIFO, a link to one, or a link to an endless device there."""
    path.unlink(missing_ok=True)
    pipe = path if kind == "FIFO" else path.with_name("pipe")
    if "FIFO" in kind:
        os.mkfifo(pipe)
    if pipe != path:
        path.symlink_to(pipe if "FIFO" in kind else "/dev/zero")
    return path


for _name in ("a.pth", "a.safetensors"):
    for _kind in ("FIFO", "link to a FIFO", "link to /dev/zero"):
        hostile(f"{_kind} {_name}", _name, _kind)(
            lambda folder, name, kind: _special(folder / name, kind)
        )
for _name in ("model.safetensors", "config.json", "preprocessor_config.json", "recipe.json"):
    hostile(f"FIFO {_name}", _name)(
        lambda folder, name: _special(_transformers(folder) / name, "FIFO").parent
    )
hostile("endless config.json")(
    lambda folder: _special(_transformers(folder) / "config.json", "/dev/zero").parent
)
hostile("/dev/zero as it is")(lambda folder: "torchvision/resnet18@/dev/zero")


# --- tensors


@cache
def _state() -> dict[str, torch.Tensor]:
    return torchvision.models.resnet18().state_dict()


def _resnet(**changes: Any) -> dict[str, Any]:
    return {**_state(), **{key.replace("__", "."): value for key, value in changes.items()}}


@hostile("float8", torch.zeros(64, dtype=torch.float8_e4m3fn))
@hostile("sparse", torch.zeros(64).to_sparse())
@hostile("complex", torch.zeros(64, dtype=torch.complex64))
@hostile("scalar", torch.tensor(1.0))
@hostile("bool", torch.zeros(64, dtype=torch.bool))
def _odd_tensor(folder: Path, tensor: torch.Tensor) -> str:
    torch.save(_resnet(bn1__bias=tensor), folder / "a.pth")
    return f"torchvision/resnet18@{folder}/a.pth"


@hostile("all float8", torch.float8_e5m2)
@hostile("all bool", torch.bool)
def _odd_dtype(folder: Path, dtype: torch.dtype) -> str:
    state = {key: t.to(dtype) if t.ndim else t for key, t in _resnet().items()}
    torch.save(state, folder / "a.pth")
    return f"torchvision/resnet18@{folder}/a.pth"


@hostile("conv1 (7,)", (7,), "torchvision/resnet18@")
@hostile("conv1 ()", (), "torchvision/resnet18@")
@hostile("conv1 (64, 3)", (64, 3), "torchvision/resnet18@")
@hostile("conv1 (0, 3, 7, 7)", (0, 3, 7, 7), "torchvision/resnet18@")
@hostile("conv1 (64, 1, 0, 0)", (64, 1, 0, 0), "torchvision/resnet18@")
@hostile("conv1 (7,), nobody named", (7,), "")
@hostile("conv1 (7,), timm", (7,), "timm/resnet18@")
@hostile("conv1 5-D", (64, 3, 7, 7, 1), "timm/resnet18@")
def _odd_first(folder: Path, shape: tuple[int, ...], kind: str) -> str:
    torch.save(_resnet(conv1__weight=torch.zeros(shape)), folder / "a.pth")
    return f"{kind}{folder}/a.pth"


@hostile("position table of stride 0")
def _stride_zero(folder: Path) -> str:
    state = torchvision.models.vit_b_16().state_dict()
    state = {k: t for k, t in state.items() if not k.startswith("encoder.layers.")}
    state["encoder.pos_embedding"] = torch.zeros(1, 1, 768).expand(1, 10**8 + 1, 768)
    torch.save(state, folder / "a.pth")
    return f"torchvision/vit_b_16@{folder}/a.pth"


# --- folders of transformers and timm


VIT = {
    "model_type": "vit", "hidden_size": 192, "num_hidden_layers": 1, "num_attention_heads": 3,
    "intermediate_size": 768, "patch_size": 16, "image_size": 224, "hidden_act": "gelu",
}  # fmt: skip


def _transformers(folder: Path, **changes: Any) -> Path:
    save_file({"layernorm.weight": torch.ones(192)}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**VIT, **changes}))
    return folder


for _key, _values in {
    "image_size": ("224", None, 48000, [], [224, 112], 1e400, True, 0, -1),
    "hidden_size": (0, -1, 2**62, 10**9, "x", None, 1e400),
    "num_hidden_layers": (10**9, 0, -1, 2**70, None),
    "num_attention_heads": (0, 7, -1, 10**9),
    "intermediate_size": (0, 2**60, None),
    "patch_size": (0, -1, 10**9, [16, 16, 16], None),
    "layer_norm_eps": ("x", None, float("nan")),
    "model_type": ([], {}, None, 7),
}.items():
    for _value in _values:
        hostile(f"transformers {_key} = {_value!r}", {_key: _value})(
            lambda folder, changes: _transformers(folder, **changes)
        )


for _stated in ({}, {"depths": 3, "hidden_sizes": [1]}):
    hostile(f"transformers resnet {_stated}", {"model_type": "resnet", **_stated})(
        lambda folder, changes: _transformers(folder, **changes)
    )


@hostile("preprocessor image_mean = []", {"image_mean": []})
@hostile("preprocessor size = 48000", {"size": 48000})
@hostile("preprocessor crop_pct = 1e-320", {"size": {"shortest_edge": 224}, "crop_pct": 1e-320})
@hostile("preprocessor resample = 99", {"resample": 99})
@hostile("preprocessor resample = None", {"resample": None})
def _preprocessor(folder: Path, changes: dict[str, Any]) -> Path:
    stated = {"image_mean": [0.5] * 3, "image_std": [0.5] * 3, "size": 224, **changes}
    (folder / "preprocessor_config.json").write_text(json.dumps(stated))
    return _transformers(folder)


@cache
def small_resnet() -> dict[str, torch.Tensor]:
    """Make the tensors of timm/test_resnet: 2 MB."""
    return timm.create_model("test_resnet").state_dict()


def _timm(folder: Path, stated: dict[str, Any]) -> Path:
    save_file(small_resnet(), folder / "model.safetensors")
    tree = {"architecture": "test_resnet", "pretrained_cfg": {"input_size": [3, 160, 160]}}
    (folder / "config.json").write_text(json.dumps({**tree, **stated}))
    return folder


_ARGUMENTS: tuple[Any, ...] = (
    *([["img_size", 224], ["depth", 3]], [["a", "b", "c"]], "img_size", {"img_size": {"a": 1}}),
    *({"layers": [10**6] * 4}, {"width": 10**9}, 3, {"x": {"y": "\0"}}, {"depht": 3}),
)
_OF_VIT: tuple[dict[str, Any], ...] = (
    *({"depth": 10**9}, {"embed_dim": 3 * 2**20}, {"img_size": 48000}, {"img_size": "x"}),
    *({"num_heads": 0}, {"mlp_ratio": 1e300}),
)
_PRETRAINED: tuple[Any, ...] = (
    *({"crop_pct": value} for value in (1e-320, 0, -1, float("nan"))),
    *({"input_size": value} for value in ([3, 20000, 20000], [3, 0, 0], [3, 2**70, 2**70], "abc")),
    *({"mean": "abc"}, {"std": [0, 0, 0]}, {"interpolation": [1]}, {"crop_mode": [1]}),
    *([["crop_pct", 1]], {"crop_pct": "x"}, {"input_size": 3}, {"mean": [1, 2]}, 3),
)
for _stated in (
    *({"model_args": arguments} for arguments in _ARGUMENTS),
    *({"architecture": "vit_tiny_patch16_224", "model_args": each} for each in _OF_VIT),
    *({"pretrained_cfg": stated} for stated in _PRETRAINED),
    *({"architecture": name} for name in (["resnet18"], "resnet81", 18)),
):
    hostile(f"timm {json.dumps(_stated)[:90]}", _stated)(_timm)
