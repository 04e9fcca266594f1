"""An ONNX file as a backbone: to embed with and to compare with, never to train.

The graph is read before it runs, and first runs in a process of its own, with limits.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import WeightsError, shown
from sslpipe.models.backbones import Backbone
from sslpipe.models.limits import check_side, most_image_bytes
from sslpipe.portable import sha256_of
from sslpipe.weights.files import sha256_of_lines
from sslpipe.weights.views import scaled_resize, unknown_view

_VIEW = ("crop_px", "resize_px", "mean", "std", "crops", "reduce", "interpolation", "squash")
_REPEATS = ("Loop", "Scan", "SequenceMap")  # may run for ever, and no backbone needs them
PROBE_TIMEOUT_S = 100  # of one image
BASE_BYTES = 2**30  # what Python and onnxruntime take beside the file


class OnnxNetwork(nn.Module):
    """A network that onnxruntime runs on the CPU; it has no parameters.

    `size` is the side of its images (None: any), `metadata` what the file says of itself, `files`
    are it and those with its external data.

    Raises:
        WeightsError: onnxruntime is not installed, or the file is damaged or no network from images
            to one row of features an image.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            import onnx
            import onnxruntime  # noqa: F401 (it is used after the file has been judged)
        except ImportError as error:
            raise WeightsError(f"{path} needs onnxruntime: pip install 'sslpipe[onnx]'") from error
        try:
            model = onnx.load(path, load_external_data=False)
        except OSError as error:
            raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
        except Exception as error:  # protobuf's have no common base
            raise WeightsError(f"{path} is damaged, or no ONNX file: {error}") from error
        self.path, graph = path, model.graph
        self.files = [path, *_external_files(path, model)]
        self.metadata = {entry.key: entry.value for entry in model.metadata_props}
        initial = {tensor.name for tensor in graph.initializer}
        inputs = [each for each in graph.input if each.name not in initial]
        # one input: float images, square and RGB
        taken = inputs[0].type.tensor_type if len(inputs) == 1 else None
        of_floats = taken is not None and taken.elem_type == onnx.TensorProto.FLOAT
        if taken is None or not of_floats or len(taken.shape.dim) != 4:
            given = ", ".join(each.name for each in inputs[:5]) or "nothing"
            raise WeightsError(f"{path} takes {given}; a backbone takes float images (B, 3, H, W)")
        dims = taken.shape.dim
        shape = [dim.dim_value if dim.HasField("dim_value") else None for dim in dims]
        sides = {side for side in shape[2:] if side is not None}
        if shape[1] not in (3, None) or len(sides) > 1 or min(sides, default=1) < 1:
            raise WeightsError(f"{path} takes images of {shape}; a backbone takes square RGB ones")
        self.input, self.size = inputs[0].name, next(iter(sides), None)
        self.fixed_batch = shape[0]
        # one output; `open` sees its type and shape
        named = [each for each in graph.output if each.name == "features"] or list(graph.output)
        if len(named) != 1:
            names = ", ".join(each.name for each in named[:5]) or "none"
            raise WeightsError(f"{path} has several outputs ({names}), none called 'features'")
        self.output = named[0].name
        self.session: Any = None  # once `open` has judged what it takes

    def open(self, side: int) -> int:
        """Run one batch of black images in a process of its own, then open the file in this one.

        Returns the number of features of an image of `side` px.

        Raises:
            WeightsError: It takes too long or too much memory, or gives no row of features.
        """
        most = most_image_bytes() + BASE_BYTES + 3 * sum(file.stat().st_size for file in self.files)
        batch = 1 if self.fixed_batch is None else self.fixed_batch
        words = [self.path, self.input, self.output, str(batch), str(side), str(most)]
        threads = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
        try:
            done = subprocess.run(
                [sys.executable, Path(__file__).with_name("onnx_probe.py"), *words],
                capture_output=True,
                text=True,
                timeout=PROBE_TIMEOUT_S,
                stdin=subprocess.DEVNULL,
                env={**os.environ, **threads},
            )
        except subprocess.TimeoutExpired as late:
            raise WeightsError(
                f"{self.path} has not computed one image in {PROBE_TIMEOUT_S} s; name another file"
            ) from late
        if done.returncode:
            lines = done.stderr.strip().splitlines() or [f"it ended with {done.returncode}"]
            raise WeightsError(
                f"{self.path} is damaged, or cannot be run on an image of {side} px within "
                f"{most / 2**30:.1f} GiB: {lines[-1]}; SSLPIPE_IMAGE_GB=N allows N GiB for an image"
            )
        dtype, shape = json.loads(done.stdout.splitlines()[-1])
        pooled = shape[2:] in ([], [1, 1]) and len(shape) in (2, 4)
        if not pooled or shape[0] != batch or 0 in shape:
            raise WeightsError(
                f"{self.path}: its output {shown(self.output)} is {tuple(shape)}, not one row of "
                "features an image; export the network without what follows the pooling"
            )
        if not dtype.startswith("float"):
            raise WeightsError(f"{self.path}: its output is of type {dtype}; features are floats")
        import onnxruntime

        try:
            self.session = onnxruntime.InferenceSession(
                self.path, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its errors have no common base
            raise WeightsError(f"{self.path} cannot be opened: {error}") from error
        return int(shape[1])

    def forward(self, images: Tensor) -> Tensor:
        """Compute features: (B, 3, S, S) normalised floats -> (B, F) float32."""
        pixels = images.detach().to("cpu", torch.float32).contiguous()
        rows = []
        for batch in torch.split(pixels, self.fixed_batch or max(1, len(pixels))):
            short = 0 if self.fixed_batch is None else self.fixed_batch - len(batch)
            filled = torch.cat([batch, batch.new_zeros(short, *batch.shape[1:])])
            (features,) = self.session.run([self.output], {self.input: filled.numpy()})
            rows.append(torch.from_numpy(features)[: len(batch)].float().flatten(1))
        return torch.cat(rows).to(images.device)


def _external_files(path: Path, model: Any) -> list[Path]:
    """Find the files with a model's external data, sorted. Raises: WeightsError."""
    tensors = _tensors(path, [model.graph, *model.functions])
    beside = (each for each in tensors if each.data_location == each.EXTERNAL)
    names = {e.value for each in beside for e in each.external_data if e.key == "location"}
    for name in sorted(names):
        inner = PurePosixPath(name)
        if inner.is_absolute() or ".." in inner.parts or not (path.parent / name).is_file():
            raise WeightsError(
                f"{path} names {shown(name)} with its weights, which is no file beside it; copy "
                "both into one folder"
            )
    return [path.parent / name for name in sorted(names)]


def _tensors(path: Path, graphs: Sequence[Any]) -> Iterator[Any]:
    """Walk through all tensors of graphs and functions, and of the graphs inside of their nodes."""
    waiting = list(graphs)
    while waiting:
        graph = waiting.pop()
        yield from getattr(graph, "initializer", ())
        sparse_ones = [*getattr(graph, "sparse_initializer", ())]
        for node in graph.node:
            if node.op_type in _REPEATS:
                raise WeightsError(
                    f"{path} repeats a part of itself ({node.op_type}), which may never end; "
                    "export the network without loops"
                )
            for attribute in node.attribute:
                yield from (attribute.t, *attribute.tensors)
                sparse_ones += [attribute.sparse_tensor, *attribute.sparse_tensors]
                waiting += [attribute.g, *attribute.graphs]
        for sparse in sparse_ones:
            yield from (sparse.values, sparse.indices)


def read_onnx(
    path: Path, what: str, crop_px: int | None
) -> tuple[Backbone, EvalView, str, list[str]]:
    """Read an ONNX file: the backbone, its view, its sha256, and notes.

    The view is what the file names, as exports of sslpipe do; else ImageNet's.

    Raises:
        WeightsError: See OnnxNetwork; or images of `crop_px` do not fit.
    """
    network = OnnxNetwork(path)
    if network.size is not None and crop_px not in (None, network.size):
        raise WeightsError(f"{what} takes images of {network.size} px only, not of {crop_px}")
    notes = ["the file is run as it is: it can be embedded with, not trained"]
    said = network.metadata
    try:
        stated = {key: json.loads(said[key]) for key in _VIEW if key in said}
        named = {"crop_px", "resize_px", "mean", "std"} <= stated.keys()
        view = EvalView(**stated) if named else None
    except (ValueError, TypeError, RecursionError) as error:
        raise WeightsError(f"{what}: its metadata are garbled: {error}") from error
    if view is None:
        view, more = unknown_view(what, crop_px, size=network.size or 224)
        notes += more
    elif crop_px not in (None, view.crop_px):
        resize_px = scaled_resize(crop_px, view.crop_px, view.resize_px)
        view = EvalView(**{**stated, "crop_px": crop_px, "resize_px": resize_px})
    if crop_px is None:
        check_side(what, max(view.resize_px, network.size or 1))
    if network.size not in (None, view.crop_px):
        raise WeightsError(
            f"{what} takes images of {network.size} px, and its metadata say {view.crop_px}"
        )
    files = network.files
    sha256 = sha256_of(path) if len(files) == 1 else sha256_of_lines(path.parent, files)
    return Backbone(network, network.open(view.crop_px)), view, sha256, notes
