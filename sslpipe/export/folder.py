"""An export's own files: a backbone's config.json and weights, read and written.

RUN/init is such a folder, too. `load` adds a whitening, `write` proves other formats.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file, save
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import ExportError, UserError, WeightsError, one_line
from sslpipe.export.saved import Config, HubConfig, SavedBackbone
from sslpipe.files import Tree, read_json, write_json
from sslpipe.models.backbones import Backbone, build_backbone
from sslpipe.models.limits import TooLarge, check_side, sketch, within_memory
from sslpipe.models.state import module_sha256
from sslpipe.portable import memory_is_short, sha256_lines, sha256_of
from sslpipe.precision import torch_defaults
from sslpipe.registry import REFUSALS
from sslpipe.registry.plugins import made_with

SSLPIPE_KEY = "sslpipe"  # where a Config lies inside the config.json of another library
POOLER = "pooler.dense."  # of a ViT in the hf format: the identity, so that pooler_output is ours
# files of an export that are read
LOADED = ("config.json", "model.safetensors", "whitening.safetensors")
_REMEDY = "copy the export again"
# of the timm and hf formats: `save_pretrained` keeps all keys of config.json
_REMEDY_OF_LIBRARIES = (
    f"{_REMEDY}, or, where another program has trained it further, remove the key {SSLPIPE_KEY!r} "
    "from config.json"
)


@torch_defaults()
def read_folder(path: Path) -> SavedBackbone:
    """Read an export's backbone, with the weights that were proved: safetensors, timm or hf format.

    Raises:
        ExportError: It is damaged, or another program has changed its weights.
    """
    for file in (path / name for name in (*LOADED, "SHA256SUMS")):
        if file.exists() and not file.is_file():
            raise ExportError(f"{file} is no regular file; copy the export again")
    with refusing_damage(path):
        _check_sums(path)
        # build the network and what goes with it, then load the weights
        file = path / "config.json"
        is_of_library = SSLPIPE_KEY in read_json(file, Tree, remedy=_REMEDY, error=ExportError)
        if is_of_library:  # the timm and hf formats, whose weights have their libraries' keys
            config = read_json(file, HubConfig, remedy=_REMEDY, error=ExportError).sslpipe
        else:
            config = read_json(file, Config, remedy=_REMEDY, error=ExportError)
        with within_memory("backbone"), made_with(config.facts.get("plugins")):
            build_network = partial(build_backbone, config.backbone, crop_px=config.crop_px)
            check_size("backbone", build_network, path / "model.safetensors")
            backbone = build_network()
        if backbone.num_features != config.num_features:
            raise ExportError(
                f"{path}/config.json: num_features = {config.num_features}, but its backbone has "
                f"{backbone.num_features}"
            )
        tensors = load_file(path / "model.safetensors")
        remedy = _REMEDY
        if is_of_library:
            tensors = _named(tensors, backbone)
            remedy = _REMEDY_OF_LIBRARIES
        shapes = {key: tensor.shape for key, tensor in backbone.state_dict().items()}
        for key, tensor in tensors.items():
            if tensor.shape != shapes.get(key):
                raise ExportError(
                    f"{path}: {key} {tuple(tensor.shape)} is not of the network that config.json "
                    f"names; {remedy}"
                )
        backbone.load_state_dict(tensors, strict=True)
        view = EvalView.from_config(config.view)
        check_side(f"{path}/config.json", view.resize_px)
        for what, makes, sees in (
            ("channels, by view.mean", view.image_shape[0], backbone.channels),
            ("sides in px", view.sides, getattr(backbone, "sides", view.sides)),  # of a join
        ):
            if makes != sees:
                raise ExportError(
                    f"{path}/config.json: its view makes images of {makes} {what}, and the network "
                    f"sees {sees}"
                )
    if module_sha256(backbone) != config.weights_sha256:
        raise ExportError(f"{path}: the weights are not those that config.json names; {remedy}")
    return SavedBackbone(backbone, view, config)


def _named(tensors: Mapping[str, Tensor], backbone: Backbone) -> dict[str, Tensor]:
    """Rename what timm or transformers names; timm's layer behind its network is the embedding."""
    state = backbone.network.state_dict()
    named = {}
    for key, tensor in tensors.items():
        if key in state:
            named[f"network.{key}"] = tensor
        elif f"model.{key}" in state:  # of a `TransformersTower`
            named[f"network.model.{key}"] = tensor
        elif not key.startswith(POOLER):
            named[f"embedding.{key.rpartition('.')[2]}"] = tensor
    return named


@contextmanager
def refusing_damage(path: Path) -> Iterator[None]:
    """Raise ExportError where what is read inside is missing, damaged, or no such export."""
    try:
        yield
    except FileNotFoundError as error:
        raise ExportError(
            f"{path} is neither an export in the safetensors, timm or hf format nor a run: "
            f"{error.filename} is missing"
        ) from error
    except (ExportError, WeightsError):
        raise
    except OSError as error:
        raise ExportError(f"cannot read {error.filename}: {error.strerror}") from error
    except (SafetensorError, *REFUSALS) as error:
        if memory_is_short(error):
            raise
        reason = one_line(str(error)) or type(error).__name__
        remedy = "; copy the export again" * isinstance(error, SafetensorError)
        raise ExportError(f"{path}: {reason}{remedy}") from error


def check_size(what: str, build: Callable[[], nn.Module], file: Path) -> None:
    """Refuse a network of more numbers than its file has bytes, before memory is taken for it.

    Raises:
        ExportError: It is of other weights.
    """
    try:
        sketched = sketch(what, build)
    except TooLarge:
        raise
    except (UserError, *REFUSALS):  # some constructors read what they compute: the real one decides
        return
    numbers = sum(tensor.numel() for tensor in sketched.state_dict().values())
    file_bytes = file.stat().st_size
    if numbers > file_bytes:
        raise ExportError(
            f"config.json: its {what} has {numbers:,} numbers, and {file.name} "
            f"{file_bytes:,} bytes: it is of other weights; copy the export again"
        )


def _check_sums(folder: Path) -> None:
    """Check the files that are read here against SHA256SUMS, if there is one. Raises: ExportError.

    A whitening that is being written has two lines for a file: see `whiten`.
    """
    path = folder / "SHA256SUMS"
    if not path.exists():  # a copy without it
        return
    listed = set(path.read_text(encoding="utf-8", errors="replace").splitlines())
    names = {line.partition("  ")[2] for line in listed}
    for name in LOADED:
        if not (folder / name).is_file():
            continue
        if name not in names:
            raise ExportError(f"{path} does not list {name}: it is damaged; copy the export again")
        if f"{sha256_of(folder / name)}  {name}" not in listed:
            raise ExportError(
                f"{folder / name} is not the file that SHA256SUMS beside it names: one of them is "
                "damaged; copy the export again"
            )


def write_folder(model: SavedBackbone, folder: Path) -> Path:
    """Write config.json and the weights into a folder; return the weights' file."""
    write_json(folder / "config.json", model.config)
    return write_tensors(model.backbone.state_dict(), folder / "model.safetensors")


def write_tensors(state: Mapping[str, Tensor], path: Path) -> Path:
    """Write a state dict; return the file."""
    tensors = {key: tensor.contiguous().clone() for key, tensor in state.items()}
    # bytes: save_file gives a file that only its owner may read
    path.write_bytes(save(tensors, metadata={"format": "pt"}))
    return path


def sha256_sums(folder: Path) -> str:
    """Return lines of `sha256sum`, by name, for every file under the folder."""
    return sha256_lines(folder, sorted(path for path in folder.rglob("*") if path.is_file()))
