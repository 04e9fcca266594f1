"""An ONNX file as a backbone: to embed with and to compare with, never to train."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import WeightsError
from sslpipe.models.backbones import Backbone
from sslpipe.portable import sha256_of
from sslpipe.weights.views import make_view, unknown_view

_VIEW = ("crop_px", "resize_px", "mean", "std", "crops", "reduce", "interpolation", "squash")


class OnnxNetwork(nn.Module):
    """A network that onnxruntime runs on the CPU; it has no parameters.

    Args:
        path: The .onnx file.

    Attributes:
        size: Side of the images, or None where any will do.
        metadata: What the file says of itself.

    Raises:
        WeightsError: onnxruntime is not installed or refuses the file, or it is no network from
            images to one row of features an image.
    """

    def __init__(self, path: Path) -> None:
        super().__init__()
        try:
            import onnxruntime
        except ImportError as error:
            raise WeightsError(f"{path} needs onnxruntime: pip install 'sslpipe[onnx]'") from error
        try:
            self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        except Exception as error:  # its errors have no common base
            text = " ".join(str(error).split())[:200]
            raise WeightsError(f"{path} is damaged, or no ONNX file: {text}") from error
        inputs, outputs = self.session.get_inputs(), self.session.get_outputs()
        if len(inputs) != 1 or inputs[0].type != "tensor(float)" or len(inputs[0].shape) != 4:
            given = ", ".join(f"{i.name}: {i.type} {i.shape}" for i in inputs)
            raise WeightsError(f"{path} takes {given}; a backbone takes float images (B, 3, H, W)")
        self.input, shape = inputs[0].name, inputs[0].shape
        sides = {side for side in shape[2:] if isinstance(side, int)}
        if (shape[1] not in (3, None) and isinstance(shape[1], int)) or len(sides) > 1:
            raise WeightsError(f"{path} takes images of {shape}; a backbone takes square RGB ones")
        self.size: int | None = next(iter(sides), None)
        self.fixed_batch = shape[0] if isinstance(shape[0], int) else None
        named = [out.name for out in outputs if out.name == "features"]
        if len(outputs) > 1 and not named:
            names = ", ".join(out.name for out in outputs)
            raise WeightsError(f"{path} has several outputs ({names}), none called 'features'")
        self.output = named[0] if named else outputs[0].name
        self.metadata: Mapping[str, str] = self.session.get_modelmeta().custom_metadata_map

    def forward(self, images: Tensor) -> Tensor:
        """Compute features: (B, 3, S, S) normalised floats -> (B, F) float32."""
        pixels = images.detach().to("cpu", torch.float32).contiguous()
        batches = (
            [pixels] if self.fixed_batch is None else list(torch.split(pixels, self.fixed_batch))
        )
        rows = []
        for batch in batches:
            short = 0 if self.fixed_batch is None else self.fixed_batch - len(batch)
            filled = torch.cat([batch, batch.new_zeros(short, *batch.shape[1:])])
            (features,) = self.session.run([self.output], {self.input: filled.numpy()})
            rows.append(torch.from_numpy(features)[: len(batch)])
        joined = torch.cat(rows)
        if joined.ndim == 4 and joined.shape[2:] == (1, 1):
            joined = joined.flatten(1)
        if joined.ndim != 2:
            raise WeightsError(
                f"an ONNX file's output {self.output!r} is {tuple(joined.shape)}, not one row of "
                "features an image; export the network without what follows the pooling"
            )
        return joined.to(images.device)


def read_onnx(
    path: Path, what: str, crop_px: int | None
) -> tuple[Backbone, EvalView, dict[str, Any]]:
    """Read an ONNX file: the backbone, its view, and what was loaded.

    Raises:
        WeightsError: See OnnxNetwork; or images of `crop_px` do not fit.
    """
    network = OnnxNetwork(path)
    if network.size is not None and crop_px not in (None, network.size):
        raise WeightsError(f"{what} takes images of {network.size} px only, not of {crop_px}")
    view, notes = _view(what, crop_px, network)
    with torch.no_grad():
        features = network(torch.zeros(1, 3, view.crop_px, view.crop_px))
    report = {
        "source": what,
        "format": "ONNX",
        "sha256": sha256_of(path),
        "loaded": 0,
        "missing": [],
        "unexpected": [],
        "resized": [],
        "notes": ["the file is run as it is: it can be embedded with, not trained", *notes],
    }
    return Backbone(network, features.shape[1]), view, report


def _view(what: str, crop_px: int | None, network: OnnxNetwork) -> tuple[EvalView, list[str]]:
    """Make the view that the file names, as exports of sslpipe do; else ImageNet's."""
    stated: dict[str, Any] = {}
    try:
        stated = {
            key: json.loads(network.metadata[key]) for key in _VIEW if key in network.metadata
        }
        if {"crop_px", "resize_px", "mean", "std"} <= stated.keys():
            return _own_view(what, crop_px, stated), []
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{what}: its metadata are garbled: {error}") from error
    size = 224 if network.size is None else network.size
    return unknown_view(what, crop_px, size=size)


def _own_view(what: str, crop_px: int | None, stated: Mapping[str, Any]) -> EvalView:
    own = EvalView(**stated)
    if crop_px in (None, own.crop_px):
        return own
    mean: Sequence[float] = stated["mean"]
    view, _ = make_view(
        what,
        crop_px,
        size=own.crop_px,
        resize=own.resize_px,
        mean=mean,
        std=stated["std"],
        interpolation=own.interpolation,
        squash=own.squash,
    )
    return view
