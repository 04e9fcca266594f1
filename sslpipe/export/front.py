"""ONNX files that take pictures as they are: uint8 pixels of any size, resized by the file."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sslpipe.augment.eval_view import EvalView, JoinedView
from sslpipe.data.image_type import ImageType
from sslpipe.errors import ExportError
from sslpipe.export.formats import USAGE, save_onnx
from sslpipe.export.verify import OnnxSession, relative_difference

TOLERANCE = 5e-4  # largest difference of two normalised pixels; one of 255 levels is 1 / (255 std)
FEATURE_TOLERANCE = 0.01  # of the largest feature: layers are fused otherwise, in float16, too
# (height, width) of the proof, in shares of the resized side: both directions, both ratios
_PROOF_SIDES = ((1, 1), (0.6, 0.8), (2.3, 1.7), (1.1, 3.1), (5.05, 4.95))


def check_front(files: Iterable[str], view: EvalView, image_type: ImageType) -> None:
    """Raise ExportError where formats have no ONNX file, or a file cannot make this view."""
    if not any(name.startswith("onnx") for name in files):
        raise ExportError(
            "preprocessing fits into ONNX files only; add a format (--format onnx), or leave "
            "--with-preprocessing out"
        )
    if not image_type.is_rgb8:
        raise ExportError(
            "an ONNX file with preprocessing takes 8-bit RGB, and the network was trained on "
            f"{image_type}; leave --with-preprocessing out"
        )
    if isinstance(view, JoinedView) or view.crops != "center":
        kind = "of several networks" if isinstance(view, JoinedView) else f"of {view.crops} crops"
        raise ExportError(
            f"this view is {kind}, and an ONNX file makes one central crop of an image; leave "
            "--with-preprocessing out"
        )


def front_usage(file: str) -> str:
    """Say in Python how a file with preprocessing is loaded."""
    code = USAGE["onnx"].strip().replace("model.onnx", file).partition("  #")[0]
    return f"{code.replace('images', 'pixels')}  # (B, height, width, 3) uint8 RGB, of any size\n"


def with_preprocessing(file: Path, view: EvalView) -> Path:
    """Put the view before the network of an ONNX file; writes NAME.pixels.onnx beside it.

    The new file takes `pixels`, (batch, height, width, 3) uint8 RGB, and has the same features.

    Raises:
        ExportError: onnxruntime makes other images of random pixels, or other features of them.
    """
    import onnx
    import onnxruntime

    network = onnx.load(file)
    front = _front(view, network.opset_import, network.ir_version)
    session = onnxruntime.InferenceSession(
        front.SerializeToString(), providers=["CPUExecutionProvider"]
    )
    generator = torch.Generator().manual_seed(0)
    for shares in _PROOF_SIDES:
        height, width = (max(1, round(share * view.resize_px)) for share in shares)
        shape = 2, height, width, 3
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        (images,) = session.run(None, {"pixels": pixels.numpy()})
        _compare(torch.from_numpy(images), pixels, view)
    model = onnx.compose.merge_models(front, network, io_map=[("front_images", "images")])
    stated = {each.key: each.value for each in network.metadata_props}
    del model.metadata_props[:]
    stated["images"] = "pixels: (batch, height, width, 3) uint8 RGB, of any size"
    onnx.helper.set_model_props(model, stated)
    path = save_onnx(model, file.with_name(f"{file.stem}.pixels.onnx"))
    features = OnnxSession(path, "pixels")(pixels), OnnxSession(file)(torch.from_numpy(images))
    if not relative_difference(*features) <= FEATURE_TOLERANCE:
        raise ExportError(
            f"{path.name}: its features differ from those of {file.name} by "
            f"{relative_difference(*features):.2g} of the largest; leave --with-preprocessing out"
        )
    return path


def _compare(images: Tensor, pixels: Tensor, view: EvalView) -> None:
    sizes = torch.tensor(pixels.shape[1:3]).expand(len(pixels), 2)
    difference = float((images - view(pixels.permute(0, 3, 1, 2), sizes)).abs().max())
    if not difference <= TOLERANCE:
        raise ExportError(
            f"onnxruntime makes other images of {tuple(pixels.shape)} pixels "
            f"(by {difference:.2g}, {TOLERANCE:g} is allowed); leave --with-preprocessing out"
        )


def _front(view: EvalView, opsets: Any, ir_version: int) -> Any:
    """Build the graph (batch, height, width, 3) uint8 -> (batch, 3, S, S) normalised float32."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    settings = view.config()
    cubic = view.interpolation == "bicubic"
    constants = {
        "most": np.float32(255),
        "resized": np.array([view.resize_px, view.resize_px], np.int64),
        "crop": np.array([view.crop_px, view.crop_px], np.int64),
        "channels": np.array([3], np.int64),
        "half": np.float32(0.5),
        "axes": np.array([2, 3], np.int64),
        "zero": np.float32(0),
        "one": np.float32(1),
        "mean": np.array(settings["mean"], np.float32).reshape(3, 1, 1),
        "std": np.array(settings["std"], np.float32).reshape(3, 1, 1),
    }
    nodes = []

    def node(kind: str, given: str, made: str, **attributes: Any) -> None:
        inputs = [f"front_{name}" if name else "" for name in given.split(",")]
        inputs = ["pixels" if name == "front_pixels" else name for name in inputs]
        nodes.append(helper.make_node(kind, inputs, [f"front_{made}"], **attributes))

    # in [0, 1]
    node("Cast", "pixels", "floats", to=TensorProto.FLOAT)
    node("Transpose", "floats", "channels_first", perm=[0, 3, 1, 2])
    node("Div", "channels_first,most", "shares")
    # the shorter side to resize_px, the longer one by the same factor, rounded down
    if view.squash:
        node("Identity", "resized", "sizes")
    else:
        node("Shape", "pixels", "sides", start=1, end=3)
        node("ReduceMin", "sides", "shorter", keepdims=1)
        node("ReduceMax", "sides", "longer", keepdims=1)
        node("Mul", "longer,resized", "product")
        node("Div", "product,shorter", "longer_resized")
        node("Equal", "sides,shorter", "is_shorter")
        node("Where", "is_shorter,resized,longer_resized", "sizes")
    # all four sizes: onnxruntime's optimizer does not see `axes` where it moves the transposition
    node("Shape", "pixels", "count", start=0, end=1)
    node("Concat", "count,channels,sizes", "all_sizes", axis=0)
    node(
        "Resize",
        "shares,,,all_sizes",
        "overshot" if cubic else "picture",
        antialias=1,
        mode="cubic" if cubic else "linear",
        coordinate_transformation_mode="half_pixel",
        cubic_coeff_a=-0.5,
        exclude_outside=1,  # the weights of what is inside sum to 1, as torch's do
    )
    if cubic:
        node("Clip", "overshot,zero,one", "picture")
    # the central crop; a half is rounded to the even number, as Python does
    node("Sub", "sizes,crop", "low")
    node("Cast", "low", "low_float", to=TensorProto.FLOAT)
    node("Mul", "low_float,half", "low_half")
    node("Round", "low_half", "first_float")
    node("Cast", "first_float", "first", to=TensorProto.INT64)
    node("Add", "first,crop", "last")
    node("Slice", "picture,first,last,axes", "cropped")
    node("Sub", "cropped,mean", "centred")
    node("Div", "centred,std", "images")
    used = {name for each in nodes for name in each.input}
    graph = helper.make_graph(
        nodes,
        "front",
        [
            helper.make_tensor_value_info(
                "pixels", TensorProto.UINT8, ["batch", "height", "width", 3]
            )
        ],
        [
            helper.make_tensor_value_info(
                "front_images", TensorProto.FLOAT, ["batch", 3, view.crop_px, view.crop_px]
            )
        ],
        [
            numpy_helper.from_array(np.asarray(value), f"front_{name}")
            for name, value in constants.items()
            if f"front_{name}" in used
        ],
    )
    model = helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    onnx.checker.check_model(model)
    return model
