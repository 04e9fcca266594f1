"""Prove formats: a clean process loads them as a stranger would, and computes features.

python -m sslpipe.export.verify FOLDER OUT FORMAT...: OUT/FORMAT-0, OUT/FORMAT-1, ... are what the
format's readers make of OUT/images, and OUT/FORMAT.error says why one could not. The files of other
libraries are read without the rest of this package.
"""

import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sslpipe.errors import ExportError
from sslpipe.files import Tree, read_json
from sslpipe.models.libraries import TransformersTower
from sslpipe.run.launcher import watch_launcher

TOLERANCE = 1e-5  # largest difference of two features, relative to the largest feature
PROOF_TIMEOUT_S = 600  # of all formats


def relative_difference(value: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected number."""
    return float((value - expected).abs().max() / expected.abs().max())


def outputs(model: nn.Module, images: Tensor) -> Tensor:
    """Compute the features (B, F) that a proof compares.

    The first image goes alone, then the others: a batch size that became part of a file shows.
    """
    return torch.cat([model(images[:1]), model(images[1:])])


def read_outputs(folder: Path, names: Sequence[str], images: Tensor) -> dict[str, list[Tensor]]:
    """Read formats in a new process: format -> the `outputs` of each library that reads it.

    Raises:
        ExportError: A format could not be read.
    """
    with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
        out = Path(scratch)
        save_file({"images": images}, out / "images")
        try:
            done = subprocess.run(
                [sys.executable, "-m", "sslpipe.export.verify", folder, out, *names],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                timeout=PROOF_TIMEOUT_S,
            )
        except subprocess.TimeoutExpired as late:
            raise ExportError(
                f"a clean process had not read {', '.join(names)} after {PROOF_TIMEOUT_S} s"
            ) from late
        for name in names:
            message = out / f"{name}.error"
            if message.is_file() or not (out / f"{name}-0").is_file():
                output = message.read_text(encoding="utf-8") if message.is_file() else done.stderr
                last = (output.strip().splitlines() or [f"it ended with {done.returncode}"])[-1]
                raise ExportError(f"format {name}: a clean process could not load it: {last}")
        files = {name: sorted(out.glob(f"{name}-*")) for name in names}
        return {name: [load_file(file)["features"] for file in files[name]] for name in names}


def _read_torchvision(folder: Path) -> list[nn.Module]:
    """Load torchvision's own model with the file's weights; only its head may be missing there."""
    import torchvision

    from sslpipe.models.backbones import CLASSIFIERS

    (path,) = (folder / "torchvision").glob("*.safetensors")
    network = torchvision.models.get_model(path.stem, weights=None)
    head = CLASSIFIERS[type(network).__name__]
    in_head = [key for key in network.state_dict() if key.startswith(f"{head}.")]
    result = network.load_state_dict(load_file(path), strict=False)
    if sorted(result.missing_keys) != sorted(in_head) or result.unexpected_keys:
        raise ExportError(f"{path.name}: missing {result.missing_keys}, {result.unexpected_keys}")
    network.set_submodule(head, nn.Identity())
    return [network]


def _read_sslpipe(folder: Path) -> list[nn.Module]:
    """Load with `load_backbone`, after the modules of `--plugin` that may have the backbone."""
    from sslpipe.export.load import load_backbone
    from sslpipe.registry.plugins import load_module, requested

    for name in requested():
        load_module(name)
    return [load_backbone(folder)]


def _read_timm(folder: Path) -> list[nn.Module]:
    """Load timm's own model, and `load_backbone`'s."""
    import timm

    return [timm.create_model(f"local-dir:{folder}", pretrained=True), *_read_sslpipe(folder)]


def _read_hf(folder: Path) -> list[nn.Module]:
    """Load transformers' own model; timm's, where it is one of timm; and `load_backbone`'s."""
    import transformers

    config = read_json(folder / "config.json", Tree)
    if "architecture" not in config:
        model = transformers.AutoModel.from_pretrained(folder)
        tower = TransformersTower(model, config["sslpipe"]["crop_px"])
        return [tower, *_read_sslpipe(folder)]
    auto = transformers.AutoModel
    if config["num_classes"]:  # its layer is the embedding
        auto = transformers.AutoModelForImageClassification
    return [_FeaturesOf(auto.from_pretrained(folder)), *_read_timm(folder)]


class _FeaturesOf(nn.Module):
    """What a model of timm's in transformers gives out: pooled features, or logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: Tensor) -> Tensor:
        """Compute features (B, F)."""
        output = self.model(images)
        features: Tensor = output.logits if "logits" in output else output.pooler_output
        return features


class OnnxSession(nn.Module):
    """Run a file of the onnx format, or its bytes, by onnxruntime, on the CPU."""

    def __init__(
        self, file: Path | bytes, input_name: str = "images", output_name: str = "features"
    ) -> None:
        super().__init__()
        import onnxruntime

        self.input_name = input_name
        self.output_name = output_name
        self.session = onnxruntime.InferenceSession(file, providers=["CPUExecutionProvider"])

    def forward(self, images: Tensor) -> Tensor:
        """Compute what is wanted, features (B, F), of what the file takes."""
        (features,) = self.session.run(
            [self.output_name], {self.input_name: images.contiguous().numpy()}
        )
        return torch.from_numpy(features)


# format -> modules images -> features, one for each library that reads the files
READERS: dict[str, Callable[[Path], list[nn.Module]]] = {
    "safetensors": _read_sslpipe,
    "torchvision": _read_torchvision,
    "timm": lambda folder: _read_timm(folder / "timm"),
    "onnx": lambda folder: [OnnxSession(folder / "model.onnx")],
    "pt2": lambda folder: [torch.export.load(folder / "model.pt2").module()],
    "hf": lambda folder: _read_hf(folder / "hf"),
}


def read(name: str, folder: Path) -> list[nn.Module]:
    """Load a format from the folder with each of its readers, in eval mode."""
    modules = READERS[name](folder)
    # a program of torch.export is in eval mode for good, and refuses to be asked for it
    return modules if name == "pt2" else [module.eval() for module in modules]


def main(folder: str, out: str, *names: str) -> None:
    """Load formats, one after the other, and write what their readers make of the images."""
    images = load_file(f"{out}/images")["images"]
    for name in names:
        try:
            for number, model in enumerate(read(name, Path(folder))):
                with torch.no_grad():
                    features = outputs(model, images).contiguous()
                save_file({"features": features}, f"{out}/{name}-{number}")
        except Exception as error:
            message = "".join(traceback.format_exception_only(error))
            (Path(out) / f"{name}.error").write_text(message, encoding="utf-8")


if __name__ == "__main__":
    watch_launcher()
    main(*sys.argv[1:])
