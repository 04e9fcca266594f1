"""ONNX files of lower precision, proved by what search needs: the same nearest images.

Images of a split calibrate the int8 file, and others are searched among each other, by the features
of the file and by those in float32. The file is kept where the first neighbours are the same.
"""

import copy
import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sslpipe.data.index import Split
from sslpipe.data.loader import one_pass
from sslpipe.errors import ExportError
from sslpipe.evaluation.embed import embed
from sslpipe.evaluation.neighbours import nearest
from sslpipe.export.formats import USAGE, onnx_graph, save_onnx
from sslpipe.export.load import FrozenBackbone
from sslpipe.export.verify import OnnxSession

LEAST_EQUAL = 0.95  # share of images whose nearest image must be the same
TOP = 10  # neighbours that are also compared
CALIBRATION_IMAGES = 256
PROOF_IMAGES = 2000
LEAST_IMAGES = 50  # of a split: fewer prove nothing
BATCH_IMAGES = 32


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
    ours, theirs = (
        nearest(rows, rows, TOP, hidden=(ids, ids)).indices for rows in (expected, actual)
    )  # (N, TOP)
    first = (ours[:, 0] == theirs[:, 0]).double().mean()
    ten = (ours[:, :, None] == theirs[:, None]).any(dim=2).double().mean()
    return Agreement(float(first), float(ten), len(ids), data, split)


class _Half(nn.Module):
    """A backbone in float16 whose images and features are float32."""

    def __init__(self, backbone: nn.Module) -> None:
        super().__init__()
        self.backbone = copy.deepcopy(backbone).half()

    def forward(self, images: Tensor) -> Tensor:
        features: Tensor = self.backbone(images.half()).float()
        return features


class LowerFormats:
    """Write formats of LOWER of a backbone in float32 on the CPU; files in between go to `scratch`.

    Images of a split, at least LEAST_IMAGES that training has not seen, calibrate them, and prove
    that a share `least` of first neighbours is the same. Raises: ExportError for too few.
    """

    def __init__(
        self, model: FrozenBackbone, split: Split, data: str, least: float, scratch: Path
    ) -> None:
        if len(split) < LEAST_IMAGES:
            raise ExportError(
                f"split {split.name!r} of {data} has {len(split)} images, and a format of lower "
                f"precision is proved with {LEAST_IMAGES} or more; name another one"
            )
        matched, (split,) = model.matched(split)
        self._view = matched.view  # which allows for the range of these images
        self._model, self._split, self._data = model, split, data
        self._least, self._scratch = least, scratch
        self._reading: Any = {"batch_size": BATCH_IMAGES, "canvas_px": self._view.canvas_px}
        order = np.random.default_rng(0).permutation(len(split))
        calibrating = min(CALIBRATION_IMAGES, len(split) // 2)
        self._calibration = np.sort(order[:calibrating])
        self._proof = np.sort(order[calibrating : calibrating + PROOF_IMAGES])
        self._expected = self._features(model.backbone)

    def _features(self, network: nn.Module) -> Tensor:
        return embed(network, self._view, self._split, ids=self._proof, **self._reading).features

    def write(self, name: str, folder: Path) -> tuple[Path, Agreement]:
        """Write one of LOWER into a folder. Raises: ExportError where neighbours are others."""
        import onnx

        path = folder / LOWER[name]
        half = _Half(self._model.backbone) if name == "onnx-float16" else None
        graph = self._int8() if half is None else onnx_graph(self._model, half)
        save_onnx(graph, path)
        actual = self._features(OnnxSession(path))
        found = agreement(self._expected, actual, self._data, self._split.name)
        if not found.first >= self._least:
            raise ExportError(
                f"format {name}: {found}; {self._least:.1%} are wanted, and nothing was written; "
                f"--least-equal {found.first:.3f} would accept it"
            )
        stated = {each.key: each.value for each in graph.metadata_props}
        onnx.helper.set_model_props(graph, {**stated, "agreement": json.dumps(asdict(found))})
        return save_onnx(graph, path), found

    def _int8(self) -> Any:
        """Quantise: activations to uint8, weights to int8 of 7 bits, a scale each channel.

        Products of 8-bit weights can overflow on processors without VNNI; those of 7 bits cannot,
        so that the proof holds on any processor.
        """
        import onnx
        from onnxruntime.quantization import QuantType, quantize_static
        from onnxruntime.quantization.shape_inference import quant_pre_process

        self._batches = one_pass(self._split, ids=self._calibration, **self._reading)
        plain = onnx_graph(self._model, self._model.backbone)
        whole, prepared, quantised = (
            self._scratch / f"{name}.onnx" for name in ("whole", "prepared", "int8")
        )
        save_onnx(plain, whole)  # it takes graphs, too, but misses their weights
        quant_pre_process(str(whole), str(prepared), skip_symbolic_shape=True)
        quantize_static(
            str(prepared),
            str(quantised),
            self,  # which asks for images by `get_next`
            per_channel=True,
            reduce_range=True,
            activation_type=QuantType.QUInt8,
            weight_type=QuantType.QInt8,
        )
        graph = onnx.load(quantised)
        stated = {each.key: each.value for each in plain.metadata_props}
        onnx.helper.set_model_props(graph, stated)
        return graph

    def get_next(self) -> dict[str, Any] | None:
        """Return a batch of images that calibrate, for onnxruntime; None after the last."""
        batch = next(self._batches, None)
        if batch is None:
            return None
        return {"images": self._view.make_views(batch).contiguous().numpy()}


LOWER = {"onnx-float16": "model.float16.onnx", "onnx-int8": "model.int8.onnx"}  # format -> file


def usage(name: str, found: Agreement) -> str:
    """Say in Python how a format of LOWER is loaded, and how it was proved."""
    return f"# {found}\n{USAGE['onnx'].strip().replace('model.onnx', LOWER[name])}\n"
