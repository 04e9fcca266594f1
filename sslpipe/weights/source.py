"""What a SOURCE of weights is, told from its words and from names of files: torch is not needed."""

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from sslpipe.errors import WeightsError
from sslpipe.run.records import parse_object

Scheme = Literal["sslpipe", "path", "onnx", "timm", "torchvision", "hf-hub", "join"]
HUBS = ("timm", "torchvision", "hf-hub")  # need a network, or what was downloaded before

# weights of a folder, the first that is there; then the only file of these kinds
PREFERRED = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
    "pytorch_model.pth",
    "model.pth",
)
SUFFIXES = (".safetensors", ".pth", ".pt", ".bin", ".ckpt", ".tar")
INDEX = "dataset.json"  # of a folder of shards
OF_SSLPIPE = ("recipe.json", "config.json")
MOST_JSON_BYTES = 2**26
_OF_OTHERS = {"architecture", "architectures", "model_type"}  # keys of timm and transformers
_SIZED = re.compile(r"(.+)@([0-9]{1,5})", re.DOTALL)
_NAMED = re.compile(r"([A-Za-z][\w.-]*(?:/[\w.-]+)?)@(.+)", re.DOTALL)
EXPECTED = (
    "an export or a run, a folder or file of weights, KIND@FILE as in "
    "timm/vit_small_patch16_224@weights.pth, model.onnx, or, with a network, timm:NAME, "
    "torchvision:NAME, hf-hub:OWNER/NAME; SOURCE@PX sets the size, A+B joins two"
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

    What is a path is one; else A+B is a join, and a number behind the last @ a size in px.

    Raises:
        WeightsError: It is none, its file is missing, or a join has one part twice.
    """
    path, text = Path(text), str(text)
    named = _NAMED.fullmatch(text)
    file = None if named is None else Path(named[2].removeprefix("local-dir:"))
    scheme, _, rest = text.partition(":")
    kind = None
    if not path.exists():
        if file is not None and named is not None and file.exists():
            kind, path = named[1], file
        elif "+" in text and all(text.split("+")):
            parts = tuple(parse_source(part) for part in text.split("+"))
            if len({part.text for part in parts}) < len(parts):
                raise WeightsError(f"{text} joins one network with itself; give each another size")
            return Source(text, "join", parts=parts)
        elif (sized := _SIZED.fullmatch(text)) is not None:
            whole = parse_source(sized[1])
            if whole.px is not None:
                raise WeightsError(f"{text} names two sizes; write one, as in {sized[1]}")
            return replace(whole, text=text, px=int(sized[2]))
        elif scheme in HUBS and rest:
            return Source(text, scheme, name=rest)  # type: ignore[arg-type]
        elif scheme == "local-dir":
            path = Path(rest)
        elif file is not None:
            path = file
    if not path.exists():
        raise WeightsError(
            f"{text} is neither an export nor a run, nor other weights: there is no {path}; a "
            f"source of weights is {EXPECTED}"
        )
    if path.is_dir():
        ours = kind is None and (
            (path / "recipe.json").is_file()
            or ((path / "config.json").exists() and is_export(path / "config.json"))
        )
        if not ours:
            weights_file(path)
        return Source(text, "sslpipe" if ours else "path", path, kind)
    check_file(path)
    if path.name == INDEX or (path.suffix == ".tar" and (path.parent / INDEX).is_file()):
        raise WeightsError(_of_images(path, "is of a data set of shards"))
    if path.suffix == ".onnx" and kind is not None:
        raise WeightsError(f"{text}: an ONNX file is its own network; write {path}")
    return Source(text, "onnx" if path.suffix == ".onnx" else "path", path, kind)


def check_file(path: Path, most_bytes: int | None = None) -> None:
    """Check that a file of others is a regular one, or a link to one: no pipe, no device.

    Raises:
        WeightsError: It is none, or larger than `most_bytes`.
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
    """Say whether a config.json is of an export of sslpipe; a damaged one may be, too."""
    check_file(config, MOST_JSON_BYTES)
    try:
        tree = parse_object(config.read_bytes())
    except (OSError, ValueError):
        return True
    return "sslpipe" in tree or not tree.keys() & _OF_OTHERS


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
    for suffix in SUFFIXES:
        found = sorted(p for p in folder.glob(f"*{suffix}") if p.is_file())
        if len(found) > 1:
            names = ", ".join(p.name for p in found[:5])
            raise WeightsError(f"{folder} holds several files of weights ({names}); name one")
        if found:
            return found[0]
    raise WeightsError(
        f"{folder} is neither an export nor a run: it has no {' and no '.join(OF_SSLPIPE)}; and it "
        f"has no weights of another program ({', '.join(PREFERRED[:3])}, ...)"
    )
