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


def _special(path: Path, kind: str) -> Path:
    """Put a FIFO, a link to one, or a link to an endless device there."""
    path.unlink(missing_ok=True)
    pipe = path if kind == "FIFO" else path.with_name("pipe")
    if "FIFO" in kind:
        os.mkfifo(pipe)
    if pipe != path:
        path.symlink_to(pipe if "FIFO" in kind else "/dev/zero")
    return path


for _name in ("a.pth", "a.safetensors", "a.onnx"):
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


# --- ONNX


def onnx_model(nodes: list[Any], inputs: Any = None, outputs: Any = None, **graph: Any) -> Any:
    """Make a model; by default float images of a free size -> floats."""
    inputs = inputs or [helper.make_tensor_value_info("x", TensorProto.FLOAT, ["b", 3, "h", "w"])]
    outputs = outputs or [helper.make_tensor_value_info("features", TensorProto.FLOAT, None)]
    made = helper.make_graph(nodes, "g", inputs, outputs, **graph)
    return helper.make_model(made, opset_imports=[helper.make_opsetid("", 18)], ir_version=9)


def _node(words: str, out: str = "features", **attributes: Any) -> Any:
    """Make a node: its kind and inputs in words."""
    kind, *inputs = words.split()
    return helper.make_node(kind, inputs, [out], **attributes)


def _pooled(out: str = "features") -> Any:
    return _node("ReduceMean x axes", out, keepdims=0)


def _integers_named(**numbers: list[int]) -> list[Any]:
    return [helper.make_tensor(k, TensorProto.INT64, [len(v)], v) for k, v in numbers.items()]


def _axes() -> list[Any]:
    return _integers_named(axes=[2, 3])


def pooling(side: Any = "h", batch: Any = "b", **metadata: str) -> Any:
    """Make a sane model: each channel's mean. A side, a batch and metadata as wanted."""
    inputs = [helper.make_tensor_value_info("x", TensorProto.FLOAT, [batch, 3, side, side])]
    model = onnx_model([_pooled()], inputs, initializer=_axes())
    helper.set_model_props(model, metadata)
    return model


def _write(folder: Path, model: Any) -> Path:
    onnx.save(model, folder / "a.onnx")
    return folder / "a.onnx"


def _made(nodes: list[Any], kind: int = TensorProto.FLOAT, **initial: list[int]) -> Any:
    """Make a model of these nodes and named integers, whose output is of a kind."""
    outputs = [helper.make_tensor_value_info("features", kind, None)]
    return onnx_model(nodes, outputs=outputs, initializer=_integers_named(**initial))


def _text() -> Any:
    value = helper.make_tensor("t", TensorProto.STRING, [1], [b"hello"])
    outputs = [helper.make_tensor_value_info("features", TensorProto.STRING, [1])]
    return onnx_model([_node("Identity t")], outputs=outputs, initializer=[value])


def _sequence() -> Any:
    element = helper.make_tensor_type_proto(TensorProto.FLOAT, None)
    output = helper.make_value_info("features", helper.make_sequence_type_proto(element))
    return onnx_model([_node("SequenceConstruct x")], outputs=[output])


AXES = {"axes": [2, 3]}
VIEW = {"crop_px": "64", "resize_px": "64", "mean": "[0, 0, 0]", "std": "[1, 1, 1]"}
LARGE = [_node("ConstantOfShape s", "c"), _node("ReduceSum c", "d", keepdims=0), _node("Add y d")]
for _name, _model in {
    "batch 0": lambda: pooling(batch=0),
    "batch -1": lambda: pooling(batch=-1),
    "batch 1e9": lambda: pooling(batch=10**9),
    "side 50,000": lambda: pooling(side=50_000),
    "side 0": lambda: pooling(side=0),
    "metadata [[[": lambda: pooling(**{**VIEW, "mean": "[" * 100_000}),
    "metadata crop_px 30000": lambda: pooling(**{**VIEW, "crop_px": "30000", "resize_px": "30000"}),
    "metadata crop_px true": lambda: pooling(**{**VIEW, "crop_px": "true"}),
    "metadata crop_px 1e400": lambda: pooling(**{**VIEW, "crop_px": "1e400"}),
    "metadata crop_px list": lambda: pooling(**{**VIEW, "crop_px": "[64]"}),
    "metadata unlike the graph": lambda: pooling(side=32, **VIEW),
    "text output": _text,
    "sequence output": _sequence,
    "integers": lambda: _made(
        [_pooled("y"), _node("Cast y", to=TensorProto.INT64)], TensorProto.INT64, **AXES
    ),
    "0 features": lambda: _made(
        [_pooled("y"), _node("Slice y start end along")], start=[0], end=[0], along=[1], **AXES
    ),
    "6 GB on the way": lambda: _made([_pooled("y"), *LARGE], s=[2**15, 3, 2**14], **AXES),
    "one row whatever the batch": lambda: _made([_node("ConstantOfShape s")], s=[4, 8]),
    "ConstantOfShape 2^40": lambda: _made([_node("ConstantOfShape s")], s=[1, 2**40]),
    "ConstantOfShape 6 GB": lambda: _made([_node("ConstantOfShape s")], s=[1, 3 * 2**29]),
    "ConstantOfShape -1": lambda: _made([_node("ConstantOfShape s")], s=[1, -1]),
}.items():
    hostile(f"ONNX {_name}")(lambda folder, model=_model: _write(folder, model()))


@hostile("ONNX loop of 2^60", False)
@hostile("ONNX loop of 2^60 inside of an If", True)
def _loop(folder: Path, inside: bool) -> Path:
    info, kinds = helper.make_tensor_value_info, TensorProto
    body = helper.make_graph(
        [_node("Identity go", "on"), _node("Add v v", "w")],
        "body",
        [info("i", kinds.INT64, []), info("go", kinds.BOOL, []), info("v", kinds.FLOAT, None)],
        [info("on", kinds.BOOL, []), info("w", kinds.FLOAT, None)],
    )
    initial = [
        helper.make_tensor("n", TensorProto.INT64, [], [2**60]),
        helper.make_tensor("yes", TensorProto.BOOL, [], [True]),
        *_axes(),
    ]
    loop = _node("Loop n yes y", body=body)
    if inside:
        out = [info("features", kinds.FLOAT, None)]
        branch = helper.make_graph([loop], "branch", [], out)
        loop = _node("If yes", then_branch=branch, else_branch=branch)
    return _write(folder, onnx_model([_pooled("y"), loop], initializer=initial))


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
    model = pooling()
    axes = model.graph.initializer[0]
    axes.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(axes), axes.name))
    onnx.external_data_helper.set_external_data(axes, location, offset=0, length=16)
    axes.raw_data = b""
    axes.data_location = TensorProto.EXTERNAL
    (folder / "a.onnx").write_bytes(model.SerializeToString())
    return folder / "a.onnx"
