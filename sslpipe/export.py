"""A trained backbone in formats that others load, each proved equal before it is handed over.

Layout of a folder that `export_backbone` writes (a format that was not asked for is not there):

    README.md             model card: what it is, how to load each format
    SHA256SUMS            of every other file; `sha256sum -c SHA256SUMS`
    model.safetensors     format "safetensors": the weights, keys of `models.backbones.Backbone`
    config.json           and all that `load_backbone` needs beside them: see `frozen.Config`
    torchvision/NAME.safetensors    format "torchvision": a state dict without the head
"""

import copy
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
import torchvision
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from sslpipe.errors import ExportError, did_you_mean
from sslpipe.evaluation.embed import evaluating
from sslpipe.frozen import FrozenBackbone, load_backbone, load_run
from sslpipe.model_card import model_card, sha256_sums
from sslpipe.models.backbones import HEADS

__all__ = ["FORMATS", "TOLERANCE", "export_backbone", "export_model", "load_backbone"]

TOLERANCE = 1e-5  # largest difference of two features, relative to the largest feature
PROOF_IMAGES = 4  # fixed random images that a reloaded backbone is compared on
PROOF_TIMEOUT_S = 600


def export_backbone(
    run_dir: str | Path, out: str | Path, formats: Sequence[str], *, overwrite: bool = False
) -> dict[str, Path]:
    """Write the backbone of a run's newest checkpoint into the folder `out`; see `export_model`."""
    return export_model(load_run(Path(run_dir)), out, formats, overwrite=overwrite)


def export_model(
    model: FrozenBackbone, out: str | Path, formats: Sequence[str], *, overwrite: bool = False
) -> dict[str, Path]:
    """Write the formats, prove each, and only then put the folder in its place.

    Each format is loaded in a clean process, with its own library, and its features of fixed random
    images are compared with those of `model`. Returns where each format lies.
    Raises: ExportError for an unknown format, one that cannot hold this backbone, a folder that
    exists (unless `overwrite`), or features that differ; nothing is left behind then.
    """
    out = Path(out)
    for name in formats:
        if name not in FORMATS:
            raise ExportError(
                f"unknown format {name!r}{did_you_mean(name, FORMATS)}; known: {', '.join(FORMATS)}"
            )
    if not formats:
        raise ExportError(f"no format is named; known: {', '.join(FORMATS)}")
    if out.exists() and not overwrite and (not out.is_dir() or any(out.iterdir())):
        raise ExportError(f"{out} exists; remove it, or choose another folder")
    model = copy.deepcopy(model).cpu().float().eval()
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{out.name}.", dir=out.parent) as scratch:
        folder = Path(scratch) / "export"
        folder.mkdir()
        written = {}
        for name in dict.fromkeys(formats):
            written[name] = FORMATS[name].write(model, folder)
            _prove(model, name, folder)
        usage = {name: FORMATS[name].usage for name in written}
        (folder / "README.md").write_text(model_card(model.config.model_dump(mode="json"), usage))
        (folder / "SHA256SUMS").write_text(sha256_sums(folder))
        if out.exists():
            shutil.move(out, Path(scratch) / "replaced")
        folder.replace(out)
        return {name: out / path.relative_to(folder) for name, path in written.items()}


def _prove(model: FrozenBackbone, name: str, folder: Path) -> None:
    """Raise ExportError unless a clean process reads the same features from the folder."""
    images = torch.randn(
        PROOF_IMAGES, 3, model.view.crop_px, model.view.crop_px, generator=_generator()
    )
    with evaluating(model), torch.no_grad():
        expected = model(images)  # (PROOF_IMAGES, F)
    largest = float(expected.abs().max())
    if not (torch.isfinite(expected).all() and largest > 0):
        raise ExportError("the backbone's features are not finite, or all zero; nothing to export")
    found = features_in_clean_process(name, folder, images)
    if found.shape != expected.shape:
        raise ExportError(
            f"format {name}: features are {tuple(found.shape)}, not {tuple(expected.shape)}"
        )
    difference = float((found - expected).abs().max()) / largest
    if not difference <= TOLERANCE:
        raise ExportError(
            f"format {name}: features in a clean process differ by {difference:.2g} of the "
            f"largest, more than {TOLERANCE:g}; nothing was written"
        )


def features_in_clean_process(name: str, folder: Path, images: Tensor) -> Tensor:
    """What a new Python process, that knows nothing of this one, gets from the folder."""
    with tempfile.TemporaryDirectory() as scratch:
        images_file, features_file = Path(scratch) / "images", Path(scratch) / "features"
        save_file({"images": images}, images_file)
        code = (
            "import sys; from sslpipe.export import write_features; write_features(*sys.argv[1:])"
        )
        done = subprocess.run(
            [sys.executable, "-c", code, name, str(folder), str(images_file), str(features_file)],
            capture_output=True,
            text=True,
            timeout=PROOF_TIMEOUT_S,
        )
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise ExportError(f"format {name}: a clean process could not load it: {last}")
        return load_file(features_file)["features"]


def write_features(name: str, folder: str, images_file: str, features_file: str) -> None:
    """Load one format and write its features of the images: what the clean process runs."""
    model = FORMATS[name].load(Path(folder)).eval()
    with torch.no_grad():
        features = model(load_file(images_file)["images"])
    save_file({"features": features.contiguous()}, features_file)


def _generator() -> torch.Generator:
    return torch.Generator().manual_seed(0)


def _write_safetensors(model: FrozenBackbone, folder: Path) -> Path:
    tensors = {key: t.contiguous().clone() for key, t in model.backbone.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(model.config.model_dump_json(indent=1) + "\n")
    return folder / "model.safetensors"


def _write_torchvision(model: FrozenBackbone, folder: Path) -> Path:
    component, backbone = model.config.backbone, model.backbone
    family, _, architecture = component.kind.partition("/")
    if family != "torchvision":
        raise ExportError(
            f"format torchvision: a {component.kind!r} backbone is none of torchvision's; "
            "use --format safetensors"
        )
    if backbone.stem not in (None, "imagenet"):
        raise ExportError(
            f"format torchvision: this backbone has the small-image stem {backbone.stem!r}, which "
            f"torchvision.models.{architecture} has not; use --format safetensors"
        )
    if architecture.startswith("vit_") and model.config.crop_px != 224:
        raise ExportError(
            f"format torchvision: {architecture} at {model.config.crop_px} px has another position "
            "table than torchvision's at 224 px; use --format safetensors"
        )
    path = folder / "torchvision" / f"{architecture}.safetensors"
    path.parent.mkdir()
    tensors = {key: t.contiguous().clone() for key, t in backbone.network.state_dict().items()}
    save_file(tensors, path, metadata={"format": "pt"})
    return path


def _load_torchvision(folder: Path) -> nn.Module:
    """torchvision's own model with the file's weights; only its head may be missing from them."""
    (path,) = (folder / "torchvision").glob("*.safetensors")
    network = torchvision.models.get_model(path.stem, weights=None)
    head = HEADS[type(network).__name__]
    in_head = [key for key in network.state_dict() if key.startswith(f"{head}.")]
    result = network.load_state_dict(load_file(path), strict=False)
    if sorted(result.missing_keys) != sorted(in_head) or result.unexpected_keys:
        raise ExportError(f"{path.name}: missing {result.missing_keys}, {result.unexpected_keys}")
    parent, _, name = head.rpartition(".")
    setattr(network.get_submodule(parent), name, nn.Identity())
    return network  # type: ignore[no-any-return]


@dataclass(frozen=True)
class Format:
    """write: into the folder, returning the main file. load: a module images -> features, with the
    format's own library. usage: Python lines for the model card."""

    write: Callable[[FrozenBackbone, Path], Path]
    load: Callable[[Path], nn.Module]
    usage: str


FORMATS: dict[str, Format] = {
    "safetensors": Format(
        _write_safetensors,
        load_backbone,
        """import sslpipe

backbone = sslpipe.load_backbone("FOLDER")
features = backbone.encode(images)  # (B, 3, H, W) uint8 RGB -> (B, F), not normalised
""",
    ),
    "torchvision": Format(
        _write_torchvision,
        _load_torchvision,
        """import torchvision
from safetensors.torch import load_file

model = torchvision.models.get_model("ARCHITECTURE", weights=None, num_classes=10)  # a new head
missing = model.load_state_dict(
    load_file("FOLDER/torchvision/ARCHITECTURE.safetensors"), strict=False
)
print(missing)  # only the head's keys
""",
    ),
}
