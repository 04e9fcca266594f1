"""What a SOURCE of weights is, by its words and names of files, and its files from the hubs.

Torch is not needed to take one apart. Hubs are reached by their own clients, with their caches.
"""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sslpipe.errors import WeightsError, did_you_mean, listed, one_line, shown
from sslpipe.files import parse_object

Scheme = Literal["sslpipe", "path", "timm", "torchvision", "hf-hub", "join"]
LOCAL = "local-dir:"  # before a folder, as timm has it
HUBS = ("timm", "torchvision", "hf-hub")  # need a network, or what was downloaded before

# weights of a folder, the first that is there; then the only file of these kinds
PREFERRED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model.pth",
    "model.pth",
    "open_clip_model.safetensors",
    "open_clip_pytorch_model.bin",
)
SAFE = ["*.json", "*.safetensors"]
PICKLED = ["*.json", "*.bin", "*.pth"]  # read as tensors only, where there is nothing safer
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
INDEX = "dataset.json"  # of a folder of shards
OF_SSLPIPE = ("recipe.json", "config.json")
INSIDE = "backbone"  # folder of an export, in the folder of a command that wrote more than one
MOST_JSON_BYTES = 2**26
_OF_OTHERS = {"architecture", "architectures", "model_type"}  # keys of timm and transformers
_SIZED = re.compile(r"(.+)@([0-9]{1,5})", re.DOTALL)
_NAMED = re.compile(r"([A-Za-z][\w.-]*(?:/[\w.-]+)?)@(.+)", re.DOTALL)
EXPECTED = (
    "an export or a run, a folder or file of weights, KIND@FILE as in "
    "timm/vit_small_patch16_224@weights.pth, or, with a network, timm:NAME, torchvision:NAME, "
    "hf-hub:OWNER/NAME; SOURCE@PX sets the size, A+B joins two"
)
VECTORS = (  # is what a file holds
    "holds vectors, not weights; in Python sslpipe.rank_features(dict(mine=..., theirs=...), "
    "labels) ranks vectors"
)


@dataclass(frozen=True)
class Source:
    """Where weights come from."""

    text: str  # as the user wrote it, for messages and reports
    scheme: Scheme  # "sslpipe": an export or run; "path": a file or folder of another program
    path: Path = Path()  # of all but hubs and joins
    kind: str | None = None  # "timm/resnet50": the network that the user named
    name: str = ""  # of hubs: what follows the colon
    px: int | None = None  # side of the images that the user asked for
    parts: "tuple[Source, ...]" = ()  # of a join


def parse_source(text: str | Path) -> Source:
    """Take a SOURCE apart, and check that its files are there.

    What is a path is one, also before @PX and between two +; else A+B is a join, and a number
    behind the last @ a size in px.

    Raises:
        WeightsError: It is not a source, its file is missing, or a join has one part twice.
    """
    if not isinstance(text, str | Path) or text == "":
        raise WeightsError(
            f"{shown(text)} ({type(text).__name__}) is no source of weights: give a path, "
            "timm:NAME, torchvision:NAME or hf-hub:OWNER/NAME, or a network (torch.nn.Module) in "
            "memory; a state dict goes into its network, or to a file, first"
        )
    text = str(text)
    located = _file_of(text)
    if located is not None:
        path, kind = located
        return _of_files(text, path, kind)
    words = _joined(text)
    if len(words) > 1 and all(words):
        parts = tuple(parse_source(part) for part in words)
        if len({part.text for part in parts}) < len(parts):
            raise WeightsError(f"{text} joins one network with itself; give each another size")
        return Source(text, "join", parts=parts)
    sized = _SIZED.fullmatch(text)
    if sized is not None:
        whole = parse_source(sized[1])
        if whole.px is not None:
            raise WeightsError(f"{text} names two sizes; write one, as in {sized[1]}")
        return replace(whole, text=text, px=int(sized[2]))
    scheme, _, name = text.partition(":")
    if scheme in HUBS and name:
        return Source(text, scheme, name=name)  # type: ignore[arg-type]
    named = _NAMED.fullmatch(text)
    missing = Path((text if named is None else named[2]).removeprefix(LOCAL))
    is_name = re.fullmatch(r"\w[\w-]*", text) is not None
    by_name = f"; a network by its name is timm:{text} or torchvision:{text}" * is_name
    raise WeightsError(
        f"{text} is neither an export nor a run, nor other weights: there is no {missing}"
        f"{by_name}; a source of weights is {EXPECTED}"
    )


def _file_of(text: str) -> tuple[Path, str | None] | None:
    """Return the file or folder that FILE or KIND@FILE names, and KIND; None: it is not there."""
    named = _NAMED.fullmatch(text)
    for name, kind in ((text, None), *([] if named is None else [(named[2], named[1])])):
        path = name.removeprefix(LOCAL)
        if path and Path(path).exists():
            return Path(path), kind
    return None


def _of_files(text: str, path: Path, kind: str | None) -> Source:
    """Return the source of a file or folder that exists, of the `kind` of network that is named.

    Raises:
        WeightsError: It holds no weights, or is a part of a run or an export.
    """
    if kind is None:
        _check_whole(path)
    if path.suffix == ".npz" and kind is not None:
        raise WeightsError(
            f"{path}: weights of JAX are not read; timm reads them, timm.create_model(NAME, "
            "checkpoint_path=FILE), and safetensors.torch.save_file(model.state_dict(), "
            "'weights.safetensors') saves them"
        )
    if path.suffix in (".npy", ".npz"):
        raise WeightsError(f"{text} {VECTORS}")
    if path.is_dir():
        return _of_folder(text, path, kind)
    check_file(path)
    if path.name == INDEX or (path.suffix == ".tar" and (path.parent / INDEX).is_file()):
        raise WeightsError(_of_images(path, "is of a data set of shards"))
    if path.suffix == ".onnx":
        raise WeightsError(
            f"{path} is an ONNX file, a program without named tensors; name the export or the "
            "weights that it was made from"
        )
    if _is_of_library(path):  # its config.json says what the images are
        path = path.parent
    return Source(text, "path", path, kind)


def _is_of_library(file: Path) -> bool:
    """Return whether a file is the weights of a folder that timm or transformers wrote."""
    config = file.parent / "config.json"
    if file.name not in PREFERRED or not config.is_file() or weights_file(file.parent) != file:
        return False
    return bool(_keys_of(config) & _OF_OTHERS)


def _check_whole(path: Path) -> None:
    """Raise WeightsError where a path leads inside a run or an export, which has more to tell."""
    for run in path.absolute().parents[:3]:
        inside = path.absolute().relative_to(run).parts
        if inside[0] == "checkpoints" and (run / "recipe.json").is_file():
            step = next((name for name in inside if name.startswith("step-")), "")
            named = f", with --checkpoint={step!r}" if step else ""
            raise WeightsError(f"{path} is a part of a run: name the run, {run}{named}")
    if path.name == "model.safetensors" and (path.parent / "SHA256SUMS").is_file():
        raise WeightsError(f"{path} is a part of an export: name its folder, {path.parent}")


def _of_folder(text: str, path: Path, kind: str | None) -> Source:
    """Return the source of a run, of an export or what holds one, or of another program's folder.

    Where its kind is named, it is another program's.
    """
    if kind is None:
        config = path / "config.json"
        if (path / "recipe.json").is_file() or (config.exists() and is_export(config)):
            return Source(text, "sslpipe", path)
        inside = path / INSIDE / "config.json"
        if inside.is_file() and is_export(inside):
            return Source(text, "sslpipe", inside.parent)
    weights_file(path)  # or refused
    return Source(text, "path", path, kind)


def _joined(text: str) -> list[str]:
    """Take a join apart at each +, but for those inside of a path that exists."""
    words = text.split("+")
    parts = []
    while words:
        counts = range(len(words), 0, -1)
        count = next((n for n in counts if _is_path("+".join(words[:n]))), 1)
        parts.append("+".join(words[:count]))
        words = words[count:]
    return parts


def _is_path(text: str) -> bool:
    """Return whether a source, or one without its size, is a path that exists."""
    sized = _SIZED.fullmatch(text)
    return _file_of(text) is not None or (sized is not None and _file_of(sized[1]) is not None)


def check_file(path: Path, most_bytes: int | None = None) -> None:
    """Check that a file of others is a regular one, or a link to one: no pipe, no device.

    Raises:
        WeightsError: It is not such a file, or larger than `most_bytes`.
    """
    if not path.is_file():
        raise WeightsError(f"{path} is no regular file (a pipe or a device?); copy it into one")
    if most_bytes is not None and path.stat().st_size > most_bytes:
        raise WeightsError(
            f"{path} has {path.stat().st_size:,} bytes, more than the {most_bytes:,} that are read"
        )


def _of_images(path: Path, what: str) -> str:
    return f"{path} {what}, not weights; --data names it, and a source of weights is {EXPECTED}"


def is_export(config: Path) -> bool:
    """Return whether a config.json is of an export of sslpipe; a damaged one may be, too."""
    keys = _keys_of(config)
    return "sslpipe" in keys or not keys & _OF_OTHERS


def _keys_of(config: Path) -> set[str]:
    """Return the keys of a config.json; none of a damaged one."""
    check_file(config, MOST_JSON_BYTES)
    try:
        return {*parse_object(config.read_bytes())}
    except (OSError, ValueError):
        return set()


def weights_file(folder: Path) -> Path:
    """Find the weights of a folder of another program: a file, or the index of its parts.

    Raises:
        WeightsError: There are none, or several and no rule says which.
    """
    for name in PREFERRED:
        if (folder / name).is_file():
            return folder / name
    if (folder / INDEX).is_file():
        raise WeightsError(_of_images(folder, f"is a data set of shards (it has {INDEX})"))
    if (folder / "adapter_config.json").is_file():
        raise WeightsError(
            f"{folder} holds an adapter of PEFT, without its network: load both there, and save "
            "model.merge_and_unload().save_pretrained(FOLDER)"
        )
    for suffix in SUFFIXES:
        files = sorted(p for p in folder.glob(f"*{suffix}") if p.is_file())
        if len(files) > 1:
            names = listed([p.name for p in files], 5)
            raise WeightsError(f"{folder} holds several files of weights ({names}); name one")
        if files:
            return files[0]
    if any(folder.glob("*.distcp")):
        raise WeightsError(
            f"{folder} holds a checkpoint in parts; make one file of it: python -m "
            f"torch.distributed.checkpoint.format_utils dcp_to_torch {folder} weights.pth"
        )
    raise WeightsError(
        f"{folder} is neither an export nor a run: it has no {' and no '.join(OF_SSLPIPE)}; and it "
        f"has no weights of another program ({', '.join(PREFERRED[:3])}, ...)"
    )


def fetch(source: Source) -> Source:
    """Download what a source names, unless it is there: the source as files on this machine.

    Raises:
        WeightsError: There is no such name, or no network and no earlier download.
    """
    if source.scheme == "torchvision":
        return _of_torchvision(source)
    if source.scheme == "timm":
        return _of_timm(source)
    name, _, revision = source.name.partition("@")
    local = parse_source(_snapshot(source, name, revision or None))
    return Source(source.text, local.scheme, local.path)


def _of_timm(source: Source) -> Source:
    import timm

    architecture = source.name.partition(".")[0]
    if not timm.is_model(architecture):
        hint = did_you_mean(architecture, timm.list_models())
        raise WeightsError(f"{source.text}: timm has no {architecture!r}{hint}")
    names = timm.list_pretrained(f"{architecture}.*")
    if not names or source.name not in (architecture, *names):
        raise WeightsError(
            f"{source.text}: timm has no such weights; it has: {', '.join(names) or 'none'}"
        )
    config = timm.get_pretrained_cfg(source.name)
    assert config is not None
    name = f"{architecture}.{config.tag}" if config.tag else architecture
    if hub_id := config.hf_hub_id:
        # an id without its name is that of a collection
        path = _snapshot(source, hub_id + name if hub_id[-1] == "/" else hub_id)
    else:
        path = _download(source, config.url)
    return Source(source.text, "path", path, f"timm/{name}")


def _of_torchvision(source: Source) -> Source:
    import torchvision

    name, _, release = source.name.partition(".")
    known = torchvision.models.list_models(module=torchvision.models)
    if name not in known:
        raise WeightsError(f"{source.text}: torchvision has no {name!r}{did_you_mean(name, known)}")
    releases = torchvision.models.get_model_weights(name)
    if release and release not in releases.__members__:
        raise WeightsError(
            f"{source.text}: torchvision has no such weights; it has: "
            f"{', '.join(releases.__members__)}"
        )
    weights = releases[release] if release else releases.DEFAULT
    return Source(source.text, "path", _download(source, weights.url), f"torchvision/{name}")


def _snapshot(source: Source, name: str, revision: str | None = None) -> Path:
    from huggingface_hub import snapshot_download

    folder = Path()
    with _reaching(source):
        for patterns in (SAFE, PICKLED):
            folder = Path(snapshot_download(name, revision=revision, allow_patterns=patterns))
            if any(path.suffix != ".json" for path in folder.iterdir()):
                break
    return folder


def _download(source: Source, url: str) -> Path:
    """Download a file whose URL ends with the first digits of its sha256, once."""
    from torch import hub

    path = Path(hub.get_dir()) / "checkpoints" / url.rpartition("/")[2]
    digits = path.stem.rpartition("-")[2]
    start = digits if len(digits) >= 8 else None
    with _reaching(source):
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            hub.download_url_to_file(url, os.fspath(path), start, progress=False)
    return path


@contextmanager
def _reaching(source: Source) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # whatever requests, urllib and the disk raise, or another hash
        text = one_line(str(error), 200) or type(error).__name__
        raise WeightsError(
            f"{source.text} cannot be had: {text}; without a network, download it elsewhere and "
            "name the folder or the file"
        ) from error
