"""Files of features: written whole, read strictly, those of other programs, too."""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import torch
from safetensors.torch import save_file
from torch import Tensor

from sslpipe.data.storage import load_array
from sslpipe.errors import DataError, UserError, as_output, listed, shown
from sslpipe.evaluation.array_rows import as_tensor
from sslpipe.evaluation.embed import Embeddings, check_embeddings
from sslpipe.files import json_text, parse_object
from sslpipe.models.state import hash_tensors
from sslpipe.portable import memory_is_short, open_regular, replacing

WRITTEN = (".safetensors", ".npz")  # files of features


def features_file(out: str | Path) -> Path:
    """Return the file that features are written to. Raises: UserError for one of another kind."""
    file = as_output(out, "out")
    if file.suffix not in WRITTEN or file.is_dir():
        raise UserError(f"--out={str(file)!r}: features are written to {' or '.join(WRITTEN)}")
    return file


def save_embeddings(path: str | Path, embeddings: Embeddings, facts: dict[str, Any]) -> None:
    """Write a safetensors file, or numpy's npz where the name ends so.

    `facts` say where the rows come from.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    columns = embeddings._replace(features=embeddings.features.float())._asdict()
    tensors = {name: tensor.contiguous() for name, tensor in columns.items()}
    text = json_text(dict(sorted(facts.items())))
    # a tensor: metadata of two entries would be written in an order that changes
    tensors[CHECKSUM] = checksum_of(tensors, text)
    with replacing(path) as temporary:
        if path.suffix == ".npz":
            with temporary.open("wb") as file:
                arrays = {name: tensor.numpy() for name, tensor in tensors.items()}
                np.savez(file, allow_pickle=False, facts=np.array(text), **arrays)
        else:
            save_file(tensors, temporary, metadata={"facts": text})


def load_embeddings(path: str | Path) -> tuple[Embeddings, dict[str, Any]]:
    """Read rows, features as float32, and facts as they were saved; nothing is unpickled.

    A file that another program wrote is read, too: a .npy of (N, F) floats, or `features` in a .npz
    or .safetensors, beside them `labels` and `ids`, (N,) integers, where they are known. Without
    ids the rows are the samples 0, 1, ...; without labels none has one. In a .npz both may be
    texts, which are numbered, "" for no label, and are facts[CLASSES], sorted, and facts[NAMES]; a
    text `split` is a fact, too.

    Raises:
        DataError: The file holds no features, is damaged or empty, or features are not finite.
    """
    rows, metadata = read_embeddings(Path(path))
    check_embeddings(rows, str(path), labelled=False)
    return rows, metadata


def read_embeddings(path: Path) -> tuple[Embeddings, dict[str, Any]]:
    """Read as `load_embeddings`, without checking the numbers."""
    if os.path.isdir(path):  # False for a name that is too long, too
        raise DataError(f"{path} is a folder; name a file that `sslpipe embed` wrote")
    if not os.path.lexists(path):
        why = "there is no such file; write it with `sslpipe embed`"
        raise DataError(f"cannot read embeddings from {path}: {why}")
    try:
        tensors, text, facts = _read_tensors(path)
    except DataError:
        raise
    except UNREADABLE as error:
        if memory_is_short(error):
            raise
        remedy = "embed again, or save them by numpy.savez('X.npz', features=..., labels=...)"
        if "Object arrays" in str(error):
            remedy = "save texts as texts, as in numpy.asarray(labels, dtype=str)"
            if path.suffix == ".npy":
                remedy = "save floats (rows, features), as in numpy.stack(features)"
        if path.suffix not in FILES:
            remedy = f"it is none of {', '.join(FILES)}; {remedy}"
        raise DataError(f"cannot read embeddings from {path}: {error}; {remedy}") from error
    if text is None and CHECKSUM not in tensors:
        return _from_elsewhere(path, tensors), facts
    missing = ", ".join(sorted({*Embeddings._fields} - {*tensors}))
    if missing or text is None:
        write = "write one with `sslpipe embed`"
        raise DataError(f"{path} holds no embeddings (no {missing or 'facts'}); {write}")
    stored = tensors.pop(CHECKSUM, None)
    if stored is None or stored.tolist() != checksum_of(tensors, text).tolist():
        raise DataError(f"{path} is damaged: its sha256 is another one; embed again")
    return Embeddings(*(tensors[name] for name in Embeddings._fields)), parse_object(text)


CHECKSUM = "sha256"  # of the file's content, 32 bytes beside the columns
# what reading a damaged file raises
UNREADABLE = (
    OSError,
    ValueError,
    TypeError,
    KeyError,
    EOFError,
    NotImplementedError,  # a zip's compression that was flipped
    RuntimeError,
    SyntaxError,  # an npy header is a Python literal
    zlib.error,
    zipfile.BadZipFile,
    safetensors.SafetensorError,
)
MOST_ARRAYS = 10  # of a file that are named
FILES = (".safetensors", ".npz", ".npy")  # that features are read from
CLASSES = "classes"  # facts: the names of the labels' numbers, of a data set or of texts in a .npz
NAMES = "names"  # likewise of the ids, where they are texts in a .npz
COMPARED = ("backbone_sha256", "view", "whitening_sha256", "canvas_px")


def check_comparable(train: dict[str, Any], test: dict[str, Any]) -> None:
    """Raise DataError where two files, by their facts, have features that were not made alike."""
    for key in COMPARED:
        if train.get(key) != test.get(key):
            raise DataError(
                f"the two files differ in {key}: {train.get(key)} and {test.get(key)}; embed both "
                "splits with one backbone and the same options"
            )


def checksum_of(tensors: Mapping[str, Tensor], facts: str) -> Tensor:
    """Compute the sha256, (32,) uint8, of facts and of tensors' names, types, shapes and bytes."""
    state = hashlib.sha256(facts.encode("utf-8", "surrogatepass"))
    hash_tensors(state, tensors)
    return torch.tensor([*state.digest()], dtype=torch.uint8)


_NAMES = frozenset({*Embeddings._fields, CHECKSUM})


def _from_elsewhere(path: Path, tensors: Mapping[str, Tensor]) -> Embeddings:
    """Make rows of what another program wrote; its rows are samples 0, 1, ... without ids."""
    features = tensors["features"]
    if features.ndim != 2 or not features.dtype.is_floating_point:
        dtype = str(features.dtype).removeprefix("torch.")
        shape = f"{dtype} {tuple(features.shape)}"
        remedy = "convert them, as in features.astype('float32')"
        if features.ndim == 4:  # of a network without its pooling
            remedy = "average them over height and width, as in features.mean((2, 3))"
        elif features.ndim == 3:  # of each token of a ViT
            remedy = "take one row an image, as in features[:, 0] or features.mean(1)"
        elif features.ndim != 2:
            remedy = "reshape them, one row an image"
        raise DataError(f"{path}: features are {shape}, not floats (rows, features); {remedy}")
    integers = {
        "labels": torch.full((len(features),), -1),
        "ids": torch.arange(len(features)),
    }
    for name in integers.keys() & tensors.keys():
        tensor = tensors[name]
        if tensor.shape != features.shape[:1] or tensor.dtype.is_floating_point:
            dtype = str(tensor.dtype).removeprefix("torch.")
            shape = f"{dtype} {tuple(tensor.shape)}"
            remedy = f"convert them, as in {name}.astype('int64')"
            if tensor.ndim == 2:
                is_one_hot = bool((tensor.sum(dim=1) == 1).all())
                how = ".argmax(1)" if is_one_hot and tensor.shape[1] > 1 else "[:, 0]"
                remedy = f"convert them, as in {name}{how}"
            elif tensor.shape != features.shape[:1]:
                remedy = "save one of each row"
            expected = f"integers ({len(features)},)"
            raise DataError(f"{path}: {name} are {shape}, not {expected}; {remedy}")
        integers[name] = tensor.to(torch.int64)
    return Embeddings(features.float(), integers["labels"], integers["ids"])


def _known_names(path: Path, held: Sequence[str]) -> set[str]:
    """Return which of a file's arrays are read. Raises: DataError: none of them is features."""
    if "features" not in held:
        has = listed([shown(name) for name in sorted(held)], MOST_ARRAYS) or "nothing"
        raise DataError(
            f"{path} holds no features, but {has}; write it with `sslpipe embed`, or as a .npy of "
            "floats (rows, features), or a .npz with features and, where known, labels and ids, as "
            "in numpy.savez('X.npz', features=..., labels=...)"
        )
    return {*held} & _NAMES


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], str | None, dict[str, Any]]:
    """Read numbers, the text of our facts, and the facts that another program's texts are."""
    open_regular(path).close()
    if path.suffix == ".npy":
        return {"features": as_tensor(load_array(str(path)))}, None, {}
    if path.suffix == ".npz":
        return _read_npz(path)
    with safetensors.safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
        names = _known_names(path, file.keys())
        return {name: file.get_tensor(name) for name in names}, metadata.get("facts"), {}


def _read_npz(path: Path) -> tuple[dict[str, Tensor], str | None, dict[str, Any]]:
    """Do `_read_tensors` of a .npz."""
    # opened here: numpy leaves a file open that it cannot read
    with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
        names = _known_names(path, file.files)
        text = str(file["facts"]) if "facts" in file.files else None
        arrays = {name: file[name] for name in names}
        facts: dict[str, Any] = {"split": str(file["split"])} if "split" in file.files else {}
    labels = arrays.get("labels", np.empty(0))
    if labels.dtype.kind in "US":
        known, numbers = np.unique(labels.astype(np.str_), return_inverse=True)
        facts[CLASSES] = [name for name in known.tolist() if name]
        # "" is the first of them, and no class
        arrays["labels"] = numbers.reshape(labels.shape) - (len(known) - len(facts[CLASSES]))
    ids = arrays.get("ids", np.empty(0))
    if ids.dtype.kind in "US":
        facts[NAMES] = list(dict.fromkeys(ids.astype(np.str_).ravel().tolist()))
        number = {name: place for place, name in enumerate(facts[NAMES])}
        places = [number[name] for name in ids.astype(np.str_).ravel().tolist()]
        arrays["ids"] = np.array(places, np.int64).reshape(ids.shape)
    return {name: as_tensor(array) for name, array in arrays.items()}, text, facts
