"""Write a trained backbone in formats that others load, each proved equal before it is kept.

Layout of a folder that `export_backbone` writes (a format that was not requested is not there):

    README.md             model card: what it is, how to load each format
    SHA256SUMS            of every other file; `sha256sum -c SHA256SUMS`; `load_backbone` checks it
    model.safetensors     format "safetensors": the weights, keys of `models.backbones.Backbone`
    config.json           and all that `load_backbone` needs beside them: see `saved.Config`
    torchvision/NAME.safetensors    format "torchvision": a state dict without the head
    timm/                 format "timm": for timm.create_model("local-dir:...")
    model.onnx            format "onnx": normalised images -> features, any batch size
    model.int8.onnx       format "onnx-int8": the same in 8 bits, proved by its `Agreement`
    model*.pixels.onnx    beside each of these, where requested: uint8 pixels -> features
    model.pt2             format "pt2": the same as a program of torch.export
    hf/                   format "hf": a repository of the Hugging Face Hub, for AutoModel and timm
"""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.arguments import checked
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.errors import ExportError, as_output, did_you_mean
from sslpipe.export.folder import sha256_sums
from sslpipe.export.formats import FORMATS, usage_lines
from sslpipe.export.load import FrozenBackbone, load_backbone
from sslpipe.export.model_card import model_card
from sslpipe.export.onnx_files import (
    INT8,
    INT8_FILE,
    LEAST_EQUAL,
    Agreement,
    add_preprocessing,
    check_front,
    onnx_usage,
    write_int8,
)
from sslpipe.export.verify import TOLERANCE, outputs, read_outputs, relative_difference
from sslpipe.portable import disk_error, one_at_a_time

SUMS = "SHA256SUMS"
_OF_DESKTOPS = (".DS_Store", "Thumbs.db", "desktop.ini")  # which come where a folder is looked at
PROOF_IMAGES = 4  # of noise, that a reloaded backbone is compared on, 1 and then 3


@checked
def export_backbone(
    source: nn.Module | str | Path,
    out: str | Path,
    formats: Sequence[str] = ("safetensors",),
    *,
    with_preprocessing: bool = False,
    data: DatasetIndex | str | Path | None = None,
    split: str = "test",
    least_equal: float = LEAST_EQUAL,
    checkpoint: str | None = None,
    overwrite: bool = False,
    say: Callable[[str], None] | None = None,
    on_agreement: Callable[[str, Agreement], None] | None = None,
) -> dict[str, Path]:
    """Write a backbone into a folder, each format proved equal, as `sslpipe export` does.

    >>> sslpipe.export_backbone("runs/photos", "out/backbone", ["safetensors", "onnx"])

    Each is proved in a clean process, and only then the folder is put in its place.

    Args:
        source: What `load_backbone` returns, or takes; of a run its newest checkpoint, or a named
            one. A backbone stays as it is.
        out: The folder to write.
        formats: "safetensors", "torchvision", "timm", "onnx", "pt2", "hf", "onnx-int8"; or "all":
            each that can hold this backbone, but onnx-int8.
        with_preprocessing: Beside each ONNX file, write one that takes uint8 pixels of any size.
        data: For onnx-int8: the data set of the images that calibrate and verify it.
        split: Its split, which training has not seen.
        least_equal: Share of these images whose nearest image must be the same as in float32.
        checkpoint: Of a run: "best" or "step-00000012"; None: see `load_backbone`.
        overwrite: Replace an export that is there.
        say: Called with what comes next; None: nobody is.
        on_agreement: Called with the name and the `Agreement` of onnx-int8; None: nobody is.

    Returns:
        Each format, and where it lies.

    Raises:
        ExportError: A format is unknown or not possible, the folder exists, or features differ;
            nothing is left behind then.
        UserError: The weights or the data set cannot be had.
    """
    say = say or (lambda text: None)
    out = as_output(out, "out")
    images = None if data is None else load_index(data).split(split)
    model = load_backbone(source, checkpoint=checkpoint)
    formats = _possible_formats(model, formats)
    if INT8 in formats and images is None:
        raise ExportError(
            f"format {INT8} is proved with images: name a data set and a split that training "
            "has not seen (--data, --split)"
        )
    if with_preprocessing:
        check_front(formats, model.view, model.image_type)
    _check_free(out, overwrite=overwrite)
    model = copy.deepcopy(model).cpu().float().eval()
    with one_at_a_time(out.parent, say), _scratch_beside(out) as scratch:
        _check_free(out, overwrite=overwrite)  # another export may have written it meanwhile
        folder = scratch / "export"
        folder.mkdir()
        proof = _proof(model)
        written = {}
        usages = {}
        if INT8 in formats and images is not None:
            say(f"write {INT8}, and search with it")
            written[INT8], agreement = write_int8(
                model, images, least=least_equal, scratch=scratch, folder=folder
            )
            usages[INT8] = onnx_usage(INT8_FILE, agreement)
            if on_agreement is not None:
                on_agreement(INT8, agreement)
        formats = [name for name in formats if name != INT8]
        written |= _write_proved(model, formats, folder, proof, say)
        if with_preprocessing:
            for name in [name for name in written if name.startswith("onnx")]:
                say(f"put preprocessing into {name}")
                path = add_preprocessing(written[name], model.view)
                written[f"{name}-pixels"] = path
                usages[f"{name}-pixels"] = onnx_usage(path.name)
        usages |= {name: usage_lines(name, model) for name in formats}
        # what people read, and sums; each library's folder has its own, and can be used alone
        config = model.config.model_dump(mode="json")
        card = model_card(config, usages, None if model.whitening is None else model.num_encoded)
        (folder / "README.md").write_text(card, encoding="utf-8")
        for part in (folder / "timm", folder / "hf", folder):
            if part.is_dir():
                (part / SUMS).write_text(sha256_sums(part))
        if out.exists():
            shutil.move(out, scratch / "replaced")
        folder.replace(out)
        return {name: out / path.relative_to(folder) for name, path in written.items()}


class _Proof(NamedTuple):
    """Fixed noise, and the `outputs` of a backbone that each format must have."""

    images: Tensor
    expected: Tensor


def _write_proved(
    model: FrozenBackbone,
    formats: Sequence[str],
    folder: Path,
    proof: _Proof,
    say: Callable[[str], None],
) -> dict[str, Path]:
    """Write formats. Raises: ExportError: one, reloaded, has other features of the noise."""
    written = {}
    for number, name in enumerate(formats, 1):
        say(f"write {name}, {number} of {len(formats)}")
        written[name] = FORMATS[name].write(model, folder)
    if not formats:
        return {}
    say("prove them in a clean process")
    expected = proof.expected
    encoded = expected if model.whitening is None else model.whitening.apply(expected)
    for name, all_reloaded in read_outputs(folder, formats, proof.images).items():
        wanted = encoded if FORMATS[name].flattens else expected
        for number, value in enumerate(all_reloaded, 1):
            if value.shape != wanted.shape:
                raise ExportError(
                    f"format {name}: features are {(*value.shape,)}, not {(*wanted.shape,)}"
                )
            if model.backbone.normalize and name in ("timm", "hf"):  # left to who uses them
                value = F.normalize(value, dim=1)
            difference = relative_difference(value, wanted)
            if not difference <= TOLERANCE:
                raise ExportError(
                    f"format {name}: features in a clean process differ by {difference:.2g} of the "
                    f"largest, more than {TOLERANCE:g} (reader {number}); nothing was written"
                )
    return written


def _check_free(out: Path, *, overwrite: bool) -> None:
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return
    if not overwrite:
        raise ExportError(f"{out} exists; replace it with --overwrite, or choose another folder")
    others = _of_no_export(out)
    if others:  # such as a run's checkpoints: they would be gone
        raise ExportError(
            f"{out} holds {others[0]}, which no export wrote, and --overwrite replaces exports "
            "alone; choose another folder"
        )


def _of_no_export(out: Path) -> list[str]:
    """List the files of a folder that its SHA256SUMS, an export's, does not name."""
    if not out.is_dir():
        return [out.name]
    sums = out / SUMS
    lines = sums.read_text(encoding="utf-8", errors="replace").splitlines() if sums.exists() else []
    listed = {SUMS, *(line.partition("  ")[2] for line in lines)}
    files = (path for path in sorted(out.rglob("*")) if path.is_symlink() or not path.is_dir())
    names = (path.relative_to(out).as_posix() for path in files if path.name not in _OF_DESKTOPS)
    return [name for name in names if name not in listed]


@contextmanager
def _scratch_beside(out: Path) -> Iterator[Path]:
    """A folder beside `out`, gone at the end; what a killed export left there goes first."""
    scratch = out.with_name(f".{out.name}.exporting")
    if scratch.exists():
        shutil.rmtree(scratch)  # which follows no link
    scratch.mkdir()
    try:
        yield scratch
    except Exception as error:
        failed = disk_error(error)
        if failed is None:
            raise
        raise OSError(failed.errno, failed.strerror, str(out)) from error
    finally:
        shutil.rmtree(scratch)


def refusals(model: FrozenBackbone) -> dict[str, str]:
    """Return format -> why it cannot hold this backbone; formats that can are not in it."""
    reasons = {name: each.refuses(model) for name, each in FORMATS.items()}
    if model.whitening is not None:
        flat = "its features are flattened by `encode`, and this format holds the network alone"
        holding = {"safetensors", *(name for name, each in FORMATS.items() if each.flattens)}
        reasons |= {name: flat for name in FORMATS if name not in holding}
    return {name: reason for name, reason in reasons.items() if reason is not None}


def _possible_formats(model: FrozenBackbone, formats: Sequence[str]) -> list[str]:
    """Resolve "all" and repeats. Raises ExportError where a format is not possible."""
    names = (*FORMATS, INT8)
    known = f"known: {', '.join(names)}, all"
    if not formats:
        raise ExportError(f"no format is named; {known}")
    refused = refusals(model)
    if "onnx" in refused:
        refused[INT8] = refused["onnx"]
    possible = [name for name in FORMATS if name not in refused]
    for name in formats:
        if name not in (*names, "all"):
            raise ExportError(f"unknown format {name!r}{did_you_mean(name, names)}; {known}")
        if name in refused:
            raise ExportError(
                f"format {name}: {refused[name]}; this backbone can have {', '.join(possible)}"
            )
    everything = possible if "all" in formats else []
    return list(dict.fromkeys(name for name in (*everything, *formats) if name != "all"))


def _proof(model: FrozenBackbone) -> _Proof:
    """Compute what formats are compared by. Raises: ExportError, where it proves nothing."""
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(PROOF_IMAGES, *model.view.image_shape, generator=generator)
    with torch.no_grad():
        expected = outputs(model, images)
    if not (torch.isfinite(expected).all() and expected.any()):
        raise ExportError(
            f"the features of {model.name} are not finite, or all zero: its weights are damaged "
            "or diverged; export other weights"
        )
    return _Proof(images, expected)
