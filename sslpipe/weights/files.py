"""Read files of tensors without running anything that is in them."""

import argparse
import hashlib
import zipfile
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from sslpipe.errors import WeightsError, listed, one_line
from sslpipe.files import Stored, read_json
from sslpipe.portable import memory_is_short, sha256_lines, sha256_of
from sslpipe.weights.source import MOST_JSON_BYTES, check_file, weights_file

_POINTER = b"version https://git-lfs.github.com/spec/"  # what a clone without git LFS holds

# what training scripts put beside their weights. Torch's restricted reader calls nothing but these
# names, and each of them gives a stand-in of ours: nothing of another library is called
_VALUES = {
    "builtins": "bool bytearray bytes complex dict float frozenset int list range set slice "
    "str tuple",
    "datetime": "date datetime time timedelta timezone",
    "decimal": "Decimal",
    "fractions": "Fraction",
    "numpy": "bool bool_ dtype float16 float32 float64 int16 int32 int64 int8 ndarray uint8",
    "numpy._core.multiarray": "_reconstruct scalar",
    "numpy._core.numeric": "_frombuffer",
    "numpy.core.multiarray": "_reconstruct scalar",
    "numpy.core.numeric": "_frombuffer",
    "numpy.random._mt19937": "MT19937",
    "numpy.random._pcg64": "PCG64",
    "numpy.random._pickle": "__bit_generator_ctor __generator_ctor __randomstate_ctor",
    "numpy.random.bit_generator": "SeedSequence __pyx_unpickle_SeedSequence",
    "pathlib": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "pathlib._local": "Path PosixPath PurePath PurePosixPath PureWindowsPath WindowsPath",
    "typing": "Any",
    "uuid": "SafeUUID UUID",
    # of Hydra's configurations
    "omegaconf.base": "ContainerMetadata Metadata",
    "omegaconf.dictconfig": "DictConfig",
    "omegaconf.listconfig": "ListConfig",
    "omegaconf.nodes": "AnyNode BooleanNode FloatNode IntegerNode StringNode",
}
_TABLES = {
    "collections": "ChainMap UserDict defaultdict",
    "easydict": "EasyDict",
    "lightning.fabric.utilities.data": "AttributeDict",
    "lightning_fabric.utilities.data": "AttributeDict",
    "mmengine.config.config": "ConfigDict",
    "pytorch_lightning.utilities.parsing": "AttributeDict",
    "types": "SimpleNamespace",
    "yacs.config": "CfgNode",
}
_LISTS = {"collections": "UserList deque"}

_OF_PROGRAMS = ("/constants.pkl", "/archive_format")  # files in their archives
MOST_EXPANDED = 4  # bytes of tensors for each byte of a file
MOST_NESTED = 8  # tables in tables that are looked into
Tree = dict[str, Any]  # of tensors, tables and plain values, as a checkpoint nests them


class _Index(Stored):
    """What lists the parts of weights that are cut into several files."""

    weight_map: dict[str, str]  # key of a tensor -> name of the file that has it


def read_tree(path: Path) -> tuple[Tree, str]:
    """Read a file, or the weights of a folder.

    Returns:
        What is in it, and a sha256: the file's, or of the lines "sha256  name" of all parts.

    Raises:
        WeightsError: It is damaged, of no known kind, or a pickle that needs more than tensors.
    """
    file = weights_file(path) if path.is_dir() else path
    is_index = file.name.endswith(".index.json")
    check_file(file, MOST_JSON_BYTES if is_index else None)
    if not is_index:
        return _read_file(file), sha256_of(file)
    index = read_json(file, _Index, remedy="copy it again", error=WeightsError)
    names = sorted(set(index.weight_map.values()))
    tree: Tree = {}
    for name in names:
        part = file.parent / name
        if Path(name).name != name or not part.is_file():
            raise WeightsError(f"{file} names {name!r}, which is not beside it; copy the folder")
        tree |= _read_file(part)
    lines = sha256_lines(file.parent, [file.parent / name for name in names])
    return tree, hashlib.sha256(lines.encode()).hexdigest()


def _read_file(path: Path) -> Tree:
    """Read the table of a file. Raises: WeightsError."""
    try:
        tree = _load(path)
    except WeightsError:
        raise
    except OSError as error:
        raise WeightsError(f"cannot read {path}: {error.strerror or error}") from error
    except SafetensorError as error:
        raise WeightsError(f"{path} is damaged: {error}; copy it again") from error
    except Exception as error:  # torch's readers fail in every way on a file that is not theirs
        if memory_is_short(error):
            raise
        if type(error).__name__ == "UnpicklingError":  # its module is imported nowhere here
            raise WeightsError(_refusal(path)) from error
        text = one_line(str(error), 200) or type(error).__name__
        raise WeightsError(
            f"{path} is damaged, or no file of tensors (.safetensors, or torch.save's): {text}"
        ) from error
    if isinstance(tree, list | tuple) and any(isinstance(each, Mapping) for each in tree):
        tree = dict(enumerate(tree))
    if not isinstance(tree, Mapping):
        raise WeightsError(f"{path} holds a {type(tree).__name__}, not a table of named tensors")
    # a view of stride 0 claims more numbers than the file has
    dense = sum(t.numel() * t.element_size() for t in _dense(tree))
    size = path.stat().st_size
    if dense > MOST_EXPANDED * size + 2**28:
        raise WeightsError(
            f"{path} claims {dense:,} bytes of tensors in {size:,}: views repeat their numbers; "
            "save contiguous tensors"
        )
    return {str(key): value for key, value in tree.items()}


def _load(path: Path) -> Any:
    """Read a file as its kind is read; raises whatever its reader does."""
    with path.open("rb") as file:
        head = file.read(len(_POINTER))
    if head == _POINTER:
        raise WeightsError(
            f"{path} is a pointer of git LFS, not the file itself; in that repository run: "
            "git lfs pull"
        )
    if path.suffix == ".safetensors" or head[8:9] == b"{":
        return load_file(path)
    is_zip = zipfile.is_zipfile(path)
    if is_zip and _is_program(path):
        raise WeightsError(
            f"{path} is a program, of TorchScript or torch.export, and nothing is run; name "
            "the export or the state dict that it was made from"
        )
    with torch.serialization.safe_globals([argparse.Namespace, *_stand_ins()]):
        return torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)


class _Value:
    """Stands for a value beside the tensors, whatever made or filled it."""

    def __init__(self, *arguments: object, **named: object) -> None:
        pass

    def __setstate__(self, state: object) -> None:
        """Drop what it would be filled with."""


class _Table:
    """Stands for a table with items: makes an OrderedDict, which torch's reader fills."""

    def __new__(cls, *arguments: object) -> Any:
        """Return an empty table, whatever it is made from."""
        return OrderedDict()


class _List:
    """Stands for a list with items: makes a list, which torch's reader fills."""

    def __new__(cls, *arguments: object) -> Any:
        """Return an empty list, whatever it is made from."""
        return []


def _stand_ins() -> list[Any]:
    """Return pairs (stand-in, name) for torch's restricted reader."""
    pairs: list[Any] = []
    for stand_in, modules in ((_Value, _VALUES), (_Table, _TABLES), (_List, _LISTS)):
        for module, names in modules.items():
            pairs += [(stand_in, f"{module}.{name}") for name in names.split()]
    return pairs


def _is_program(path: Path) -> bool:
    """Return whether a zip file is one of TorchScript, or of torch.export."""
    with zipfile.ZipFile(path) as archive:
        return any(name.endswith(_OF_PROGRAMS) for name in archive.namelist())


def _dense(value: Any, depth: int = 0) -> Iterator[Tensor]:
    if isinstance(value, Tensor):
        if value.layout == torch.strided and not value.is_meta:
            yield value
    elif isinstance(value, Mapping | list | tuple) and depth < MOST_NESTED:
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _dense(inner, depth + 1)


def _refusal(path: Path) -> str:
    """Return what of a pickle was not run, and what to do."""
    try:
        known = {name for _, name in _stand_ins()} | {"argparse.Namespace"}
        names = sorted({*torch.serialization.get_unsafe_globals_in_checkpoint(path)} - known)
    except Exception:  # not even its list of names can be read
        names = []
    if not names:
        return (
            f"{path} is not a file of tensors, or is damaged: torch.load(weights_only=True) "
            "refuses it; copy it again, or save a state dict as .safetensors"
        )
    return (
        f"{path} asks to run code when it is read ({listed(names, 3)}), and nothing is run; "
        "where you trust it, load it with the program that wrote it and save the weights alone: "
        "safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')"
    )
