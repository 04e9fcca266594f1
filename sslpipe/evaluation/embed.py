"""A backbone and a split -> one row of features a sample, in the order of their ids."""

import hashlib
import os
import zipfile
import zlib
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np
import safetensors
import torch
from numpy.typing import ArrayLike
from safetensors.torch import save_file
from torch import Tensor, nn

from sslpipe.data.index import Split
from sslpipe.data.loader import one_pass
from sslpipe.data.pipeline import Batch
from sslpipe.data.reader import OnBad, Reader
from sslpipe.data.storage import load_array
from sslpipe.distributed import Rank, all_gather_rows
from sslpipe.errors import DataError, UserError, as_path
from sslpipe.files import Stored, json_text, parse_json, parse_object
from sslpipe.models.state import (
    check_finite,
    evaluating,
    hash_tensors,
    module_sha256,
    weights_dtype,
)
from sslpipe.portable import memory_is_short, open_regular, replacing
from sslpipe.precision import wide_dtype


class Embeddings(NamedTuple):
    """Features (N, F) float32, not normalised; labels (N,) int64, -1: none; ids (N,) in a split."""

    features: Tensor
    labels: Tensor
    ids: Tensor

    def __repr__(self) -> str:
        labelled = self.labels[self.labels >= 0]
        return (
            f"Embeddings(features={(*self.features.shape,)} {self.features.dtype}, labels of "
            f"{len(labelled)} in {len(torch.unique(labelled))} classes)"
        )

    def rows(self, index: Tensor) -> "Embeddings":
        """Select some rows, by numbers or by a mask, in the order of `index`."""
        return Embeddings(self.features[index], self.labels[index], self.ids[index])

    def to(self, device: torch.device | str) -> "Embeddings":
        """Move to a device; to the CPU where it has no float64 (MPS), which evaluations need."""
        target = torch.device(device)
        if wide_dtype(target) != torch.float64:
            target = torch.device("cpu")
        return Embeddings(*(tensor.to(target) for tensor in self))

    @staticmethod
    def joined(parts: "Sequence[Embeddings]") -> "Embeddings":
        """Put rows behind one another, those of the first part first."""
        return Embeddings(
            features=torch.cat([part.features for part in parts]),
            labels=torch.cat([part.labels for part in parts]),
            ids=torch.cat([part.ids for part in parts]),
        )


class SplitEmbeddings(Embeddings):
    """Embeddings that say of which split and network they are, as a features file does."""

    facts: Mapping[str, Any] = MappingProxyType({})

    @classmethod
    def of(cls, rows: Embeddings, facts: Mapping[str, Any]) -> "SplitEmbeddings":
        """Add to rows what their file says, or would say."""
        known = cls(features=rows.features, labels=rows.labels, ids=rows.ids)
        known.facts = facts
        return known


class FeaturesOrigin(Stored):
    """Where the features in a file come from; their file also has `view`, `left_out` and more."""

    data: str | None = None  # name of the data set
    data_sha256: str | None = None
    split: str | None = None
    backbone_sha256: str | None = None


class View(Protocol):
    """Makes a batch's images, (n B, 3, S, S), and of their features (n B, F) one row a sample."""

    def to(self, device: torch.device | str) -> Any: ...  # noqa: D102
    def make_views(self, batch: Batch) -> Tensor: ...  # noqa: D102
    def reduced(self, features: Tensor) -> Tensor: ...  # noqa: D102


def embed(
    backbone: nn.Module,
    view: View,
    split: Split,
    *,
    process: Rank = Rank(),  # noqa: B008 (immutable)
    device: torch.device | str = "cpu",
    rows_on: torch.device | str = "cpu",
    network: str | None = "the backbone",
    ids: ArrayLike | None = None,
    batch_size: int = 256,
    canvas_px: int = 256,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
    reader: Reader | None = None,
    progress: Callable[[int], None] | None = None,
) -> Embeddings:
    """Compute features of each sample, exactly once, in id order. Collective.

    Args:
        backbone: Images (B, 3, S, S) -> (B, F). Used in eval mode without gradient; its train mode
            is restored, and neither its parameters nor its buffers change (checked by hash).
        view: Makes its images.
        split: Where the samples are.
        process: This process, which embeds its share; every process returns all rows.
        device: Where the backbone is.
        rows_on: Where the rows are wanted: the CPU, or `device` for an evaluation there.
        network: Names the backbone where features are not finite, a DataError; None: they may be.
        ids: (n,) the samples wanted, sorted; None: all of the split.
        batch_size: Images of a forward pass, at most.
        canvas_px: Images with a longer side are reduced to it before the view is made.
        num_workers: Threads that decode; 0: the caller does.
        on_bad: Called for each sample that cannot be decoded, which is skipped; None: a DataError.
        reader: Of this split; None: one that runs no command and keeps nothing on disk.
        progress: Called with the size of each batch that this process has done.
    """
    local = embed_here(
        backbone,
        view,
        split,
        ids=ids,
        device=device,
        rows_on=rows_on,
        process=process,
        batch_size=batch_size,
        canvas_px=canvas_px,
        num_workers=num_workers,
        on_bad=on_bad,
        reader=reader,
        progress=progress,
    )
    widths = torch.tensor([local.features.shape[1]], device=device)
    width = int(all_gather_rows(widths).max())  # a process without rows does not know it
    if len(local.ids) == 0:
        local = local._replace(features=local.features.new_zeros(0, width))
    together = Embeddings(*(all_gather_rows(each.to(device)).to(rows_on) for each in local))
    if not bool((together.ids[1:] > together.ids[:-1]).all()):
        together = together.rows(torch.argsort(together.ids))
    check_all(together, split)
    if network is not None:
        check_rows(together, split.name, network)
    return together


def check_all(rows: Embeddings, split: Split) -> None:
    """Check that a split has rows, each sample once. Raises: DataError where none could be read."""
    if len(rows.ids) == 0:
        raise DataError(f"split {split.name!r}: no sample of it could be read")
    assert bool((rows.ids[1:] > rows.ids[:-1]).all()), "a sample was embedded twice"


def check_rows(rows: Embeddings, split: str, network: str) -> None:
    """Check that a network's features of a split are finite. Raises: DataError."""
    if not bool(torch.isfinite(rows.features.sum())):  # else no row needs a name
        names = [f"sample {number} of split {split!r}" for number in rows.ids.tolist()]
        check_finite(rows.features, names, network)


def embed_here(
    backbone: nn.Module,
    view: View,
    split: Split,
    *,
    ids: ArrayLike | None = None,
    device: torch.device | str = "cpu",
    rows_on: torch.device | str = "cpu",
    progress: Callable[[int], None] | None = None,
    process: Rank = Rank(),  # noqa: B008 (immutable)
    batch_size: int = 256,
    canvas_px: int = 256,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
    reader: Reader | None = None,
) -> Embeddings:
    """Compute this process's rows of `embed`; (0, 0) features where it has none. Not collective."""
    before = module_sha256(backbone)
    wanted = None if ids is None else np.asarray(ids, dtype=np.int64)
    batches = one_pass(
        split,
        ids=wanted,
        process=process,
        batch_size=batch_size,
        canvas_px=canvas_px,
        num_workers=num_workers,
        on_bad=on_bad,
        reader=reader,
    )
    share = process.share(len(split) if wanted is None else len(wanted))
    nobody = torch.zeros(0, dtype=torch.int64)
    made = Embeddings(features=torch.zeros(0, 0), labels=nobody, ids=nobody)
    done = 0
    view = view.to(device)
    dtype = weights_dtype(backbone)
    with evaluating(backbone), torch.no_grad():
        for batch in batches:
            batch = batch.to(torch.device(device))
            images = view.make_views(batch).to(dtype)  # (B, 3, S, S)
            features = view.reduced(forward_in_parts(backbone, images))  # (B, F)
            rows = Embeddings(features.float(), batch.labels, batch.ids)
            if not done:  # one piece of memory: joining parts takes it twice
                made = _space_for(len(share), rows, rows_on)
            for whole, part in zip(made, rows, strict=True):
                whole[done : done + len(part)] = part
            done += len(rows.ids)
            if progress is not None:
                progress(len(rows.ids))
    assert module_sha256(backbone) == before, "evaluation changed the backbone"
    return Embeddings(*(tensor[:done].to(rows_on) for tensor in made))


def _space_for(count: int, like: Embeddings, device: torch.device | str) -> Embeddings:
    """Return `count` rows to be written, of the widths and types of others."""
    return Embeddings(*(each.new_empty((count, *each.shape[1:]), device=device) for each in like))


# Of one forward on a CPU: the activations of more images leave its caches, which takes
# EfficientNet-Lite0 twice as long for 256 images of 128 px.
CPU_PX = 16 * 128 * 128
CPU_IMAGES = 16  # at least; below, some convolutions round otherwise


def forward_in_parts(backbone: nn.Module, images: Tensor) -> Tensor:
    """Compute features, (N, C, S, S) -> (N, F): of all at once but on a CPU."""
    if images.device.type != "cpu":
        features: Tensor = backbone(images)
        return features
    at_once = max(CPU_IMAGES, CPU_PX // (images.shape[-2] * images.shape[-1]))
    return torch.cat([backbone(some) for some in torch.split(images, at_once)])


WRITTEN = (".safetensors", ".npz")  # files of features


def features_file(out: str | Path) -> Path:
    """Return the file that features are written to. Raises: UserError for one of another kind."""
    file = as_path(out, "out")
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
    tensors[CHECKSUM] = torch.tensor([*content_sha256(tensors, text)], dtype=torch.uint8)
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
    facts: dict[str, Any] = {}
    text = None
    try:
        open_regular(path).close()
        if path.suffix == ".npy":
            tensors = {"features": torch.from_numpy(load_array(str(path)))}
        elif path.suffix == ".npz":
            tensors, text, facts = _read_npz(path)
        else:
            tensors, text = _read_safetensors(path)
    except DataError:
        raise
    except UNREADABLE as error:
        if memory_is_short(error):
            raise
        remedy = "embed again, or save them by numpy.savez('X.npz', features=..., labels=...)"
        if "Object arrays" in str(error):
            remedy = "save texts as texts, as in numpy.asarray(labels, dtype=str)"
        if path.suffix not in FILES:
            remedy = f"it is none of {', '.join(FILES)}; {remedy}"
        raise DataError(f"cannot read embeddings from {path}: {error}; {remedy}") from error
    if text is None and CHECKSUM not in tensors:
        return _from_elsewhere(path, tensors), facts
    missing = ", ".join(sorted({*Embeddings._fields} - {*tensors}))
    if missing or text is None:
        write = "write one with `sslpipe embed`"
        raise DataError(f"{path} holds no embeddings (no {missing or 'facts'}); {write}")
    checksum = tensors.pop(CHECKSUM, None)
    if checksum is None or checksum.tolist() != [*content_sha256(tensors, text)]:
        raise DataError(f"{path} is damaged: its sha256 is another one; embed again")
    rows = Embeddings(*(tensors[name] for name in Embeddings._fields))
    try:
        parse_json(text, FeaturesOrigin)
        metadata = parse_object(text)
    except ValueError as error:
        raise DataError(f"{path}: its metadata are damaged ({error}); embed again") from None
    return rows, metadata


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
FILES = (".safetensors", ".npz", ".npy")  # that features are read from
CLASSES = "classes"  # facts of a .npz whose labels and ids are texts: the names of their numbers
NAMES = "names"
COMPARED = ("backbone_sha256", "view", "whitening_sha256", "canvas_px")


def check_comparable(train: dict[str, Any], test: dict[str, Any], *, itself: bool = True) -> None:
    """Check, from the facts of two files, that their features were made alike. Raises: DataError.

    Unless `itself`, both may not be of one split.
    """
    for key in COMPARED:
        if train.get(key) != test.get(key):
            raise DataError(
                f"the two files differ in {key}: {train.get(key)} and {test.get(key)}; embed both "
                "splits with one backbone and the same options"
            )
    source = train.get("data_sha256"), train.get("split")
    if not itself and None not in source and source == (test.get("data_sha256"), test.get("split")):
        raise DataError(
            f"both files are of split {train['split']!r}: every sample would find itself; "
            "name the files of two splits"
        )


def content_sha256(tensors: Mapping[str, Tensor], facts: str) -> bytes:
    """Compute a sha256 over the facts and the tensors' names, types, shapes and bytes."""
    state = hashlib.sha256(facts.encode("utf-8", "surrogatepass"))
    hash_tensors(state, tensors)
    return state.digest()


_NAMES = frozenset({*Embeddings._fields, CHECKSUM})


def _from_elsewhere(path: Path, tensors: Mapping[str, Tensor]) -> Embeddings:
    """Make rows of what another program wrote; its rows are samples 0, 1, ... without ids."""
    features = tensors.get("features")
    if features is None:
        raise DataError(
            f"{path} holds no features; write it with `sslpipe embed`, or as a .npy of floats "
            "(rows, features), or a .npz with features and, where known, labels and ids"
        )
    if features.ndim != 2 or not features.dtype.is_floating_point:
        dtype = str(features.dtype).removeprefix("torch.")
        shape = f"{dtype} {tuple(features.shape)}"
        raise DataError(
            f"{path}: features are {shape}, not floats (rows, features); convert them, as in "
            "features.astype('float32')"
        )
    integers = {
        "labels": torch.full((len(features),), -1),
        "ids": torch.arange(len(features)),
    }
    for name in integers.keys() & tensors.keys():
        given = tensors[name]
        if given.shape != features.shape[:1] or given.dtype.is_floating_point:
            dtype = str(given.dtype).removeprefix("torch.")
            shape = f"{dtype} {tuple(given.shape)}"
            raise DataError(f"{path}: {name} are {shape}, not integers ({len(features)},)")
        integers[name] = given.to(torch.int64)
    return Embeddings(features.float(), integers["labels"], integers["ids"])


def _read_safetensors(path: Path) -> tuple[dict[str, Tensor], str | None]:
    with safetensors.safe_open(str(path), framework="pt") as file:
        metadata = file.metadata() or {}
        names = {*file.keys()} & _NAMES
        return {name: file.get_tensor(name) for name in names}, metadata.get("facts")


def _read_npz(path: Path) -> tuple[dict[str, Tensor], str | None, dict[str, Any]]:
    """Read numbers, the text of our facts, and the facts that another program's texts are."""
    # opened here: numpy leaves a file open that it cannot read
    with open(path, "rb") as raw, np.load(raw, allow_pickle=False) as file:
        names = {*file.files} & _NAMES
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
    return {name: torch.from_numpy(array) for name, array in arrays.items()}, text, facts


def check_embeddings(rows: Embeddings, name: str, *, labelled: bool = True) -> None:
    """Check shapes, types, that features are finite and, if `labelled`, that labels are there."""
    features, labels, ids = rows
    if features.dtype != torch.float32 or features.ndim != 2 or features.shape[1] == 0:
        described = f"features are {features.dtype} {tuple(features.shape)}"
        raise DataError(f"{name}: {described}, not float32 (N, F)")
    for key, tensor in (("labels", labels), ("ids", ids)):
        if tensor.dtype != torch.int64 or tensor.shape != features.shape[:1]:
            described = f"{key} are {tensor.dtype} {tuple(tensor.shape)}"
            raise DataError(f"{name}: {described}, not int64 ({len(features)},)")
    if len(features) == 0:
        raise DataError(f"{name}: has no rows")
    check_finite_rows(features, f"{name}: features")
    unlabelled = int((labels < 0).sum())
    if labelled and unlabelled:
        raise DataError(
            f"{name}: {unlabelled} of {len(labels)} rows have no label (-1); "
            "leave them out, give the split labels, or save them beside the features: "
            "numpy.savez(FILE, features=..., labels=...)"
        )


def check_finite_rows(features: Tensor, name: str) -> None:
    """Raise DataError where a number of features (N, F) is not finite, with the first such row."""
    # where a number is not finite, the sum is not: that is read in a fifth of the time
    if bool(torch.isfinite(features.sum())):
        return
    bad = torch.nonzero((~torch.isfinite(features)).any(dim=1)).flatten().tolist()
    if bad:
        raise DataError(
            f"{name}[{bad[0]}] is not finite, as are {len(bad):,} of {len(features):,} rows; leave "
            "them out (of a network of yours: did its training diverge?)"
        )
