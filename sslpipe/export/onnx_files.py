"""ONNX files of a backbone: in float32, in int8, and with preprocessing inside.

The int8 file is proved by what search needs, the same nearest images: some images of a split
calibrate it, and others are searched among each other by its features and by those in float32.
With preprocessing inside, a file takes uint8 pixels of any size.
"""

import importlib.util
import json
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView, JoinedView
from sslpipe.data.image_type import RGB8, ImageType
from sslpipe.data.index import Split
from sslpipe.data.loader import one_pass
from sslpipe.errors import ExportError, install
from sslpipe.evaluation.embed import EmbedOptions, embed
from sslpipe.evaluation.neighbours import nearest
from sslpipe.export.model import FrozenBackbone
from sslpipe.export.model_card import USAGE
from sslpipe.export.verify import OnnxSession, relative_difference

PACKAGES = ("onnx", "onnxscript", "onnxruntime")  # the extra `onnx`
OPSET = 20
MOST_BYTES = 2**31 - 2**20  # protobuf's limit of one message, with room for the graph
TRACED_IMAGES = 2  # neither 1 nor the sizes that the proof uses: the batch size must stay free

INT8 = "onnx-int8"  # the format
INT8_FILE = "model.int8.onnx"
LEAST_EQUAL = 0.95  # share of images whose nearest image must be the same
TOP = 10  # neighbours that are also compared
CALIBRATION_IMAGES = 256
PROOF_IMAGES = 2000
LEAST_IMAGES = 50  # of a split: fewer prove nothing
BATCH_IMAGES = 32

TOLERANCE = 5e-4  # largest difference of two normalised pixels; one of 255 levels is 1 / (255 std)
FEATURE_TOLERANCE = 0.01  # of the largest feature: layers are fused otherwise
# (height, width) of the proof, in shares of the resized side: both directions, both ratios
_PROOF_SIDES = ((1, 1), (0.6, 0.8), (2.3, 1.7), (1.1, 3.1), (5.05, 4.95))


def refuses_onnx(model: FrozenBackbone) -> str | None:
    """Return why this machine has no ONNX files, or a backbone is too large for them."""
    absent = [name for name in PACKAGES if importlib.util.find_spec(name) is None]
    if absent:
        return f"it needs {', '.join(absent)}: {install('onnx')}"
    size = sum(t.numel() * t.element_size() for t in model.backbone.state_dict().values())
    if size > MOST_BYTES:
        return f"{size / 1e9:.1f} GB of weights are more than the 2 GB of an ONNX file"
    return None


def traced_images(model: FrozenBackbone) -> Tensor:
    """Return images to trace a network with."""
    return torch.zeros(TRACED_IMAGES, *model.view.image_shape)


def free_batch() -> dict[str, dict[int, Any]]:
    """Return the free batch size of `images`, as torch's exporters want it."""
    return {"images": {0: torch.export.Dim("batch")}}


def onnx_graph(model: FrozenBackbone) -> Any:
    """Trace a backbone, with its whitening; metadata say how images are made."""
    import onnx

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the exporter's own deprecations; the proof is what counts
        program = torch.onnx.export(
            model.flattened,
            (traced_images(model),),
            dynamo=True,
            opset_version=OPSET,
            dynamic_shapes=free_batch(),
            input_names=["images"],
            output_names=["features"],
            verbose=False,
        )
    assert program is not None
    proto = program.model_proto
    graph = proto.graph
    # the exporter writes down its stack traces, with the folders of this machine
    parts = (graph, *graph.node, *graph.input, *graph.output, *graph.value_info, *graph.initializer)
    for part in parts:
        part.ClearField("metadata_props")
    # what a reader must know of the images
    view = model.view.config()
    image_type = model.image_type
    what = "RGB" if image_type.is_rgb8 else ", ".join(image_type.channels)
    where = "in [0, 1]" if image_type.is_rgb8 else "low to high as 0 to 1"
    shape = f"(batch, {len(image_type.channels)}, crop_px, crop_px)"
    images = f"{shape} float32 {what}: {where}, less mean, over std"
    if "views" in view:
        images = (
            f"(batch, {', '.join(map(str, model.view.image_shape))}): for each of `views` such "
            f"images, {images}, flattened to (batch, 3, 1, crop_px * crop_px); side by side"
        )
    length = "of length 1" if model.backbone.normalize else "not normalised"
    if model.whitening is not None:
        length = "flattened"
    metadata = {
        "images": images,
        "features": f"(batch, {model.num_encoded}) float32, {length}",
        **{key: json.dumps(value) for key, value in view.items()},
        **({} if image_type == RGB8 else {"image": image_type.model_dump_json()}),
        "weights_sha256": model.config.weights_sha256,
    }
    onnx.helper.set_model_props(proto, metadata)
    return proto


def save_onnx(proto: Any, path: Path) -> Path:
    """Check an ONNX model and write it; the same model gives the same bytes."""
    import onnx

    onnx.checker.check_model(proto)
    path.write_bytes(proto.SerializeToString(deterministic=True))
    return path


def _state(proto: Any, **more: str) -> None:
    """Add to what a model says of itself, or replace it."""
    import onnx

    stated = {each.key: each.value for each in proto.metadata_props}
    onnx.helper.set_model_props(proto, {**stated, **more})


def onnx_usage(file: str, agreement: "Agreement | None" = None) -> str:
    """Return the lines of Python that load an ONNX file, and how an int8 one was proved."""
    code = USAGE["onnx"].strip().replace("model.onnx", file)
    if file.endswith(".pixels.onnx"):
        code = code.partition("  #")[0].replace("images", "pixels")
        return f"{code}  # (B, height, width, 3) uint8 RGB, of any size\n"
    return f"# {agreement}\n{code}\n"


# int8


@dataclass(frozen=True)
class Agreement:
    """How alike two kinds of features find the nearest of some images among each other."""

    first: float  # share of images whose nearest image is the same
    ten: float  # share of the TOP nearest that are, whatever their order; mean over images
    images: int  # how many
    data: str  # name of their data set
    split: str

    def __str__(self) -> str:
        return (
            f"nearest image as in float32 for {self.first:.1%} of {self.images:,} images of "
            f"{self.data}, split {self.split}; of the {TOP} nearest {self.ten:.1%} are the same"
        )


def agreement(expected: Tensor, actual: Tensor, data: str = "", split: str = "") -> Agreement:
    """Compare the neighbours of some images by two kinds of features, (N, F) each; N > TOP."""
    ids = torch.arange(len(expected))
    expected_ids, actual_ids = (
        nearest(rows, rows, TOP, hidden=(ids, ids)).indices for rows in (expected, actual)
    )  # (N, TOP)
    first = (expected_ids[:, 0] == actual_ids[:, 0]).double().mean()
    ten = (expected_ids[:, :, None] == actual_ids[:, None]).any(dim=2).double().mean()
    return Agreement(first=float(first), ten=float(ten), images=len(ids), data=data, split=split)


def write_int8(
    model: FrozenBackbone, split: Split, *, least: float, scratch: Path, folder: Path
) -> tuple[Path, Agreement]:
    """Write the int8 file of a backbone in float32 on the CPU; files in between go to `scratch`.

    Images of a split, at least LEAST_IMAGES that training has not seen, calibrate it, and prove
    that a share `least` of first neighbours is the same. Raises: ExportError where they are others,
    or images are too few.
    """
    data = split.index.manifest.name
    if len(split) < LEAST_IMAGES:
        raise ExportError(
            f"split {split.name!r} of {data} has {len(split)} images, and {INT8} is "
            f"proved with {LEAST_IMAGES} or more; name another one"
        )
    matched, (split,) = model.matched(split)
    view = matched.view  # which allows for the range of these images
    order = np.random.default_rng(0).permutation(len(split))
    calibrating = min(CALIBRATION_IMAGES, len(split) // 2)
    proof = np.sort(order[calibrating : calibrating + PROOF_IMAGES])

    def features(network: nn.Module) -> Tensor:
        rows = embed(network, view, split, EmbedOptions(batch_size=BATCH_IMAGES), ids=proof)
        return rows.features

    expected = features(model.flattened)
    batches = one_pass(
        split,
        ids=np.sort(order[:calibrating]),
        batch_size=BATCH_IMAGES,
        canvas_px=view.canvas_px,
    )
    images = ({"images": view.make_views(batch).contiguous().numpy()} for batch in batches)
    graph = _quantised(onnx_graph(model), images, scratch)
    path = save_onnx(graph, folder / INT8_FILE)
    agreed = agreement(expected, features(OnnxSession(path)), data, split.name)
    if not agreed.first >= least:
        raise ExportError(
            f"format {INT8}: {agreed}; {least:.1%} are wanted, and nothing was written; "
            f"--least-equal={agreed.first:.3f} would accept it"
        )
    _state(graph, agreement=json.dumps(asdict(agreed)))
    return save_onnx(graph, path), agreed


def _quantised(plain: Any, images: Iterator[dict[str, Any]], scratch: Path) -> Any:
    """Quantise: activations to uint8, weights to int8 of 7 bits, a scale each channel.

    Products of 8-bit weights can overflow on processors without VNNI; those of 7 bits cannot, so
    that the proof holds on any processor. `images` are batches that calibrate.
    """
    import onnx
    from onnxruntime.quantization import QuantType, quantize_static
    from onnxruntime.quantization.shape_inference import quant_pre_process

    whole, prepared, quantised = (
        str(scratch / f"{name}.onnx") for name in ("whole", "prepared", "int8")
    )
    save_onnx(plain, Path(whole))  # it takes graphs, too, but misses their weights
    quant_pre_process(whole, prepared, skip_symbolic_shape=True)
    quantize_static(
        prepared,
        quantised,
        SimpleNamespace(get_next=lambda: next(images, None)),  # how it asks for them
        per_channel=True,
        reduce_range=True,
        activation_type=QuantType.QUInt8,
        weight_type=QuantType.QInt8,
    )
    graph = onnx.load(quantised)
    stated = {each.key: each.value for each in plain.metadata_props}
    onnx.helper.set_model_props(graph, stated)  # in place of the quantiser's own
    return graph


# preprocessing inside


def check_front(files: Iterable[str], view: EvalView, image_type: ImageType) -> None:
    """Raise ExportError where formats have no ONNX file, or a file cannot make this view."""
    if not any(name.startswith("onnx") for name in files):
        why = "preprocessing fits into ONNX files only; add a format (--format=onnx), or"
    elif not image_type.is_rgb8:
        why = f"an ONNX file with preprocessing takes 8-bit RGB, and not {image_type};"
    elif isinstance(view, JoinedView):
        why = "this view is of several networks, and an ONNX file makes one crop of an image;"
    else:
        return
    raise ExportError(f"{why} leave --with-preprocessing out")


def add_preprocessing(file: Path, view: EvalView) -> Path:
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
        expected = view(pixels.permute(0, 3, 1, 2), torch.tensor([[height, width]] * 2))
        difference = float((images - expected).abs().max())
        if not difference <= TOLERANCE:
            raise ExportError(
                f"onnxruntime makes other images of {shape} pixels (by {difference:.2g}, "
                f"{TOLERANCE:g} is allowed); leave --with-preprocessing out"
            )
    model = onnx.compose.merge_models(front, network, io_map=[("front_images", "images")])
    _state(model, images="pixels: (batch, height, width, 3) uint8 RGB, of any size")
    path = save_onnx(model, file.with_name(f"{file.stem}.pixels.onnx"))
    difference = relative_difference(OnnxSession(path, "pixels")(pixels), OnnxSession(file)(images))
    if not difference <= FEATURE_TOLERANCE:
        raise ExportError(
            f"{path.name}: its features differ from those of {file.name} by {difference:.2g} of "
            "the largest; leave --with-preprocessing out"
        )
    return path


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

    settings = view.config()
    cubic = view.interpolation == "bicubic"
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
