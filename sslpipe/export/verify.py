"""Prove a format: a clean process loads it as a stranger would, and computes features.

python -m sslpipe.export.verify FOLDER OUT, with the name of a format on each line of its input:
OUT/FORMAT-0, OUT/FORMAT-1, ... are what the format's readers make of OUT/images, and
OUT/FORMAT.error says why one could not.

It reads each format in a child of its own, the fork of a process that has imported torch and what
this file imports: torchvision's, timm's, onnxruntime's and torch.export's files are read without
the rest of this package, and a format starts from there, whatever the others needed.
"""

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections.abc import Callable, Sequence
from contextlib import suppress
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sslpipe.errors import ExportError
from sslpipe.run.launcher import watch_launcher

TOLERANCE = 1e-5  # largest difference of two features, relative to the largest feature
PROOF_IMAGES = 4  # fixed random images that a reloaded backbone is compared on, 1 and then 3
PROOF_TIMEOUT_S = 600  # from the last format on


def proof_images(shape: Sequence[int]) -> Tensor:
    """Return the images of a proof, (PROOF_IMAGES, *shape) noise; shape: `EvalView.image_shape`."""
    generator = torch.Generator().manual_seed(0)
    return torch.randn(PROOF_IMAGES, *shape, generator=generator)


def relative_difference(value: Tensor, expected: Tensor) -> float:
    """Return the largest difference, relative to the largest expected number."""
    return float((value - expected).abs().max() / expected.abs().max())


def outputs(model: nn.Module, images: Tensor) -> dict[str, Tensor]:
    """Compute what a proof compares: "features", (B, F), and of a projector "projections", (B, D).

    The first image goes alone, then the others: a batch size that became part of a file shows.
    """
    features = torch.cat([model(images[:1]), model(images[1:])])  # (B, F)
    projector = dict(model.named_children()).get("projector")
    if projector is None:
        return {"features": features}
    return {"features": features, "projections": projector(features)}


class CleanProcess:
    """Compute `outputs` by each library that reads a format of `folder`, in new processes."""

    def __init__(self, folder: Path, images: Tensor) -> None:
        self._names: list[str] = []
        self._scratch = tempfile.TemporaryDirectory(dir=folder.parent)
        self._out = Path(self._scratch.name)
        save_file({"images": images}, self._out / "images")
        self._process = subprocess.Popen(
            [sys.executable, "-m", "sslpipe.export.verify", folder, self._out],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            process_group=0 if os.name == "posix" else None,  # with its children, to end all
        )

    def __enter__(self) -> "CleanProcess":
        return self

    def __exit__(self, *error: object) -> None:
        if self._process.poll() is None:  # an error here: what it does is of no use now
            if os.name == "posix":
                os.killpg(self._process.pid, signal.SIGKILL)
            else:
                self._process.kill()
        self._process.communicate()
        self._scratch.cleanup()

    def start(self, name: str) -> None:
        """Begin to read a format that has been written; returns at once."""
        assert self._process.stdin is not None
        self._names.append(name)
        with suppress(BrokenPipeError):  # it has ended: `outputs` says why
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()

    def outputs(self) -> dict[str, list[dict[str, Tensor]]]:
        """Wait for all that was begun: format -> the outputs of each of its readers.

        Raises:
            ExportError: A format could not be read.
        """
        try:
            _, stderr = self._process.communicate(timeout=PROOF_TIMEOUT_S)
        except subprocess.TimeoutExpired as late:
            raise ExportError(
                f"a clean process had not read {', '.join(self._names)} after {PROOF_TIMEOUT_S} s"
            ) from late
        for name in self._names:
            message = self._out / f"{name}.error"
            if message.is_file() or self._process.returncode:
                said = message.read_text(encoding="utf-8") if message.is_file() else stderr
                last = (said.strip().splitlines() or ["no message"])[-1]
                raise ExportError(f"format {name}: a clean process could not load it: {last}")
        return {
            name: [load_file(file) for file in sorted(self._out.glob(f"{name}-*"))]
            for name in self._names
        }


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


def _read_both(folder: Path) -> list[nn.Module]:
    """Load timm's own model, where config.json names one, and `load_backbone`'s."""
    models = _read_sslpipe(folder)
    if "architecture" in json.loads((folder / "config.json").read_text(encoding="utf-8")):
        import timm

        models.insert(0, timm.create_model(f"local-dir:{folder}", pretrained=True))
    return models


class OnnxSession(nn.Module):
    """Run a file of the onnx format by onnxruntime, on the CPU."""

    def __init__(self, path: Path, given: str = "images") -> None:
        super().__init__()
        import onnxruntime

        self.given = given

        self.session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])

    def forward(self, images: Tensor) -> Tensor:
        """Compute features, (B, F), of what the file takes."""
        (features,) = self.session.run(["features"], {self.given: images.contiguous().numpy()})
        return torch.from_numpy(features)


# format -> modules images -> features, one for each library that reads the files
READERS: dict[str, Callable[[Path], list[nn.Module]]] = {
    "safetensors": _read_sslpipe,
    "torchvision": _read_torchvision,
    "timm": lambda folder: _read_both(folder / "timm"),
    "onnx": lambda folder: [OnnxSession(folder / "model.onnx")],
    "pt2": lambda folder: [torch.export.load(folder / "model.pt2").module()],
    "hf": lambda folder: _read_both(folder / "hf"),
}


def read(name: str, folder: Path) -> list[nn.Module]:
    """Load a format from the folder with each of its readers, in eval mode."""
    modules = READERS[name](folder)
    # a program of torch.export is in eval mode for good, and refuses to be asked for it
    return modules if name == "pt2" else [module.eval() for module in modules]


def main(folder: str, out: str) -> None:
    """Read each format that the input names in a child of this process, several at a time."""
    # a fork has what is imported here already; elsewhere than on Linux, libraries forbid it
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    started: dict[str, BaseProcess] = {}
    for line in sys.stdin:
        running = [child.sentinel for child in started.values() if child.is_alive()]
        if len(running) >= (os.cpu_count() or 1):
            wait(running)
        name = line.strip()
        started[name] = context.Process(target=_read_alone, args=(name, folder, out))  # type: ignore[attr-defined]
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # the launcher's watch is a thread
            started[name].start()
    for name, child in started.items():
        child.join()
        message = Path(out) / f"{name}.error"
        if child.exitcode and not message.is_file():
            message.write_text(f"it ended with status {child.exitcode}")


def _read_alone(name: str, folder: str, out: str) -> None:
    """Load one format and write what each of its readers makes of the images."""
    watch_launcher()
    try:
        images = load_file(f"{out}/images")["images"]
        for number, model in enumerate(read(name, Path(folder))):
            with torch.no_grad():
                result = outputs(model, images)
            tensors = {key: value.contiguous() for key, value in result.items()}
            save_file(tensors, f"{out}/{name}-{number}")
    except Exception as error:
        message = "".join(traceback.format_exception_only(error))
        (Path(out) / f"{name}.error").write_text(message, encoding="utf-8")
        sys.exit(1)


if __name__ == "__main__":
    watch_launcher()
    main(*sys.argv[1:])
