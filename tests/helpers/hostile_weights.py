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

import onnx
import timm
import torch
import torchvision
from onnx import TensorProto, helper
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


def _fifo(folder: Path, name: str, link: bool) -> Path:
    path = folder / name
    os.mkfifo(folder / "pipe" if link else path)
    if link:
        path.symlink_to(folder / "pipe")
    return path


for _name in ("a.pth", "a.safetensors", "a.onnx"):
    hostile(f"FIFO {_name}", _name, False)(_fifo)
    hostile(f"link to a FIFO {_name}", _name, True)(_fifo)
    hostile(f"link to /dev/zero {_name}", _name)(
        lambda folder, name: (folder / name).symlink_to("/dev/zero") or folder / name
    )


@hostile("/dev/zero as it is")
def _zero(folder: Path) -> str:
    return "torchvision/resnet18@/dev/zero"


@hostile("FIFO model.safetensors", "model.safetensors")
@hostile("FIFO config.json", "config.json")
@hostile("FIFO preprocessor_config.json", "preprocessor_config.json")
@hostile("FIFO recipe.json", "recipe.json")
def _fifo_in_folder(folder: Path, name: str) -> Path:
    _transformers(folder)
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    return folder


@hostile("endless config.json")
def _endless_config(folder: Path) -> Path:
    _transformers(folder)
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("/dev/zero")
    return folder


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


# --- ONNX: makers of models


def _value(name: str, shape: Any, kind: int = TensorProto.FLOAT) -> Any:
    return helper.make_tensor_value_info(name, kind, shape)


def _model(
    *nodes: Any, inputs: Any = (), outputs: Any = (), tensors: Any = (), **numbers: list[int]
) -> Any:
    """Make a model; by default float images of a free size -> floats. numbers: its constants."""
    inputs = list(inputs) or [_value("x", ["b", 3, "h", "w"])]
    outputs = list(outputs) or [_value("features", None)]
    numbers = {"axes": [2, 3], **numbers}
    named = [helper.make_tensor(k, TensorProto.INT64, [len(v)], v) for k, v in numbers.items()]
    graph = helper.make_graph(nodes, "g", inputs, outputs, initializer=[*named, *tensors])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _node(words: str, out: str = "features", **attributes: Any) -> Any:
    """Make a node: its kind and inputs in words."""
    kind, *inputs = words.split()
    return helper.make_node(kind, inputs, [out], **attributes)


def _pooled(out: str = "features") -> Any:
    return _node("ReduceMean x axes", out, keepdims=0)


def _sane(side: Any = "h", batch: Any = "b", **metadata: str) -> Any:
    """Make a model of each channel's mean, but for a side, a batch or metadata."""
    model = _model(_pooled(), inputs=[_value("x", [batch, 3, side, side])])
    helper.set_model_props(model, metadata)
    return model


def _sequence() -> Any:
    element = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    output = helper.make_value_info("features", helper.make_sequence_type_proto(element))
    return _model(_node("SequenceConstruct x"), outputs=[output])


def _loop(inside: bool) -> Any:
    """Make a loop of 2^60 turns, in a branch of an If or not."""
    body = helper.make_graph(
        [_node("Identity go", "on"), _node("Add v v", "w")],
        "body",
        [_value("i", [], TensorProto.INT64), _value("go", [], TensorProto.BOOL), _value("v", None)],
        [_value("on", [], TensorProto.BOOL), _value("w", None)],
    )
    turns = helper.make_tensor("n", TensorProto.INT64, [], [2**60])
    yes = helper.make_tensor("yes", TensorProto.BOOL, [], [True])
    loop = _node("Loop n yes y", body=body)
    if inside:
        branch = helper.make_graph([loop], "branch", [], [_value("features", None)])
        loop = _node("If yes", then_branch=branch, else_branch=branch)
    return _model(_pooled("y"), loop, tensors=[turns, yes])


TEXT, INTEGERS = TensorProto.STRING, TensorProto.INT64
VIEW = {"crop_px": "64", "resize_px": "64", "mean": "[0, 0, 0]", "std": "[1, 1, 1]"}
ONNX: dict[str, Callable[[], Any]] = {
    "batch 0": lambda: _sane(batch=0),
    "batch -1": lambda: _sane(batch=-1),
    "batch 1e9": lambda: _sane(batch=10**9),
    "side 50,000": lambda: _sane(side=50_000),
    "side 0": lambda: _sane(side=0),
    "metadata [[[": lambda: _sane(**{**VIEW, "mean": "[" * 100_000}),
    "metadata crop_px 30000": lambda: _sane(**{**VIEW, "crop_px": "30000", "resize_px": "30000"}),
    "metadata crop_px true": lambda: _sane(**{**VIEW, "crop_px": "true"}),
    "metadata crop_px 1e400": lambda: _sane(**{**VIEW, "crop_px": "1e400"}),
    "metadata crop_px list": lambda: _sane(**{**VIEW, "crop_px": "[64]"}),
    "metadata unlike the graph": lambda: _sane(side=32, **VIEW),
    "text output": lambda: _model(
        _node("Identity t"),
        outputs=[_value("features", [1], TEXT)],
        tensors=[helper.make_tensor("t", TEXT, [1], [b"hello"])],
    ),
    "sequence output": _sequence,
    "integers": lambda: _model(
        *(_pooled("y"), _node("Cast y", to=INTEGERS)), outputs=[_value("features", None, INTEGERS)]
    ),
    "0 features": lambda: _model(
        *(_pooled("y"), _node("Slice y start end along")), start=[0], end=[0], along=[1]
    ),
    "one row whatever the batch": lambda: _model(_node("ConstantOfShape s"), s=[4, 8]),
    "ConstantOfShape 2^40": lambda: _model(_node("ConstantOfShape s"), s=[1, 2**40]),
    "ConstantOfShape 6 GB": lambda: _model(_node("ConstantOfShape s"), s=[1, 3 * 2**29]),
    "ConstantOfShape -1": lambda: _model(_node("ConstantOfShape s"), s=[1, -1]),
    "6 GB on the way": lambda: _model(
        *(_pooled("y"), _node("ConstantOfShape s", "c"), _node("ReduceSum c", "d", keepdims=0)),
        _node("Add y d"),
        s=[2**15, 3, 2**14],
    ),
    "loop of 2^60": lambda: _loop(False),
    "loop of 2^60 inside of an If": lambda: _loop(True),
}


def _write(folder: Path, make: Callable[[], Any]) -> Path:
    onnx.save(make(), folder / "a.onnx")
    return folder / "a.onnx"


for _name, _make in ONNX.items():
    hostile(f"ONNX {_name}", _make)(_write)


@hostile("ONNX external data outside", "../secret")
@hostile("ONNX external data absolute", "/etc/passwd")
@hostile("ONNX external data missing", "missing.bin")
@hostile("ONNX external data a FIFO", "pipe")
@hostile("ONNX external data /dev/zero", "zero")
@hostile("ONNX external data too short", "short")
def _external(folder: Path, location: str) -> Path:
    os.mkfifo(folder / "pipe")
    (folder / "zero").symlink_to("/dev/zero")
    (folder / "short").write_bytes(b"12345678")
    model = _sane()
    axes = model.graph.initializer[0]
    axes.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(axes), axes.name))
    onnx.external_data_helper.set_external_data(axes, location, offset=0, length=16)
    axes.raw_data = b""
    axes.data_location = TensorProto.EXTERNAL
    (folder / "a.onnx").write_bytes(model.SerializeToString())
    return folder / "a.onnx"
