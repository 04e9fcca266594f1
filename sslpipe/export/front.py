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
    kind = "of several networks" if isinstance(view, JoinedView) else f"of {view.crops} crops"
    if not any(name.startswith("onnx") for name in files):
        why = "preprocessing fits into ONNX files only; add a format (--format onnx), or"
    elif not image_type.is_rgb8:
        why = f"an ONNX file with preprocessing takes 8-bit RGB, and not {image_type};"
    elif kind != "of center crops":
        why = f"this view is {kind}, and an ONNX file makes one central crop of an image;"
    else:
        return
    raise ExportError(f"{why} leave --with-preprocessing out")


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

    network = onnx.load(file)
    front = _front(view, network.opset_import, network.ir_version)
    make_images = OnnxSession(front.SerializeToString(), "pixels", "front_images")
    generator = torch.Generator().manual_seed(0)
    for shares in _PROOF_SIDES:
        height, width = (max(1, round(share * view.resize_px)) for share in shares)
        shape = 2, height, width, 3
        pixels = torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator)
        images = make_images(pixels)
        _compare(images, pixels, view)
    model = onnx.compose.merge_models(front, network, io_map=[("front_images", "images")])
    stated = {each.key: each.value for each in network.metadata_props}
    del model.metadata_props[:]
    stated["images"] = "pixels: (batch, height, width, 3) uint8 RGB, of any size"
    onnx.helper.set_model_props(model, stated)
    path = save_onnx(model, file.with_name(f"{file.stem}.pixels.onnx"))
    features = OnnxSession(path, "pixels")(pixels), OnnxSession(file)(images)
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


# the shorter side becomes resize_px, the longer one follows, rounded down
_KEEPING_SHAPE = """
  front_sides = Shape <end = 3, start = 1> (pixels)
  front_shorter = ReduceMin <keepdims = 1> (front_sides)
  front_longer = ReduceMax <keepdims = 1> (front_sides)
  front_product = Mul (front_longer, front_resized)
  front_longer_resized = Div (front_product, front_shorter)
  front_is_shorter = Equal (front_sides, front_shorter)
  front_sizes = Where (front_is_shorter, front_resized, front_longer_resized)"""
# In Resize, the weights of what is inside sum to 1, as torch's do. All four sizes: onnxruntime's
# optimizer does not see `axes` where it moves the transposition. A half of the crop is rounded to
# the even number, as Python does.
_GRAPH = """
front (uint8[batch, height, width, 3] pixels) => (float[batch, 3, {crop}, {crop}] front_images)
<float front_most = {{255.0}}, int64[2] front_resized = {{{resize}, {resize}}},
 int64[2] front_crop = {{{crop}, {crop}}}, int64[1] front_channels = {{3}},
 float front_half = {{0.5}}, int64[2] front_axes = {{2, 3}}{limits},
 float[3, 1, 1] front_mean = {{{mean}}}, float[3, 1, 1] front_std = {{{std}}}>
{{
  front_floats = Cast <to = 1> (pixels)
  front_channels_first = Transpose <perm = [0, 3, 1, 2]> (front_floats)
  front_shares = Div (front_channels_first, front_most){sizes}
  front_count = Shape <end = 1, start = 0> (pixels)
  front_all_sizes = Concat <axis = 0> (front_count, front_channels, front_sizes)
  front_overshot = Resize <antialias = 1, coordinate_transformation_mode = "half_pixel",
    cubic_coeff_a = -0.5, exclude_outside = 1, mode = "{mode}"> (front_shares, , , front_all_sizes)
  front_picture = {clip}
  front_low = Sub (front_sizes, front_crop)
  front_low_float = Cast <to = 1> (front_low)
  front_low_half = Mul (front_low_float, front_half)
  front_first_float = Round (front_low_half)
  front_first = Cast <to = 7> (front_first_float)
  front_last = Add (front_first, front_crop)
  front_cropped = Slice (front_picture, front_first, front_last, front_axes)
  front_centred = Sub (front_cropped, front_mean)
  front_images = Div (front_centred, front_std)
}}"""

_LIMITS = ", front_zero, front_one"


def _front(view: EvalView, opsets: Any, ir_version: int) -> Any:
    """Build the graph (batch, height, width, 3) uint8 -> (batch, 3, S, S) normalised float32."""
    import onnx

    settings, cubic = view.config(), view.interpolation == "bicubic"
    text = _GRAPH.format(
        crop=view.crop_px,
        resize=view.resize_px,
        sizes="\n  front_sizes = Identity (front_resized)" if view.squash else _KEEPING_SHAPE,
        mode="cubic" if cubic else "linear",
        limits=", float front_zero = {0.0}, float front_one = {1.0}" if cubic else "",
        clip=f"{'Clip' if cubic else 'Identity'} (front_overshot{_LIMITS if cubic else ''})",
        **{key: ", ".join(str(np.float32(v)) for v in settings[key]) for key in ("mean", "std")},
    )
    graph = onnx.parser.parse_graph(text)
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=ir_version)
    onnx.checker.check_model(model)
    return model
