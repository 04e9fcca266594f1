"""dataset.json and the member offsets beside it: what is there, before anything is read.

Layout of a data set, in one folder (or under one URL):

    dataset.json                   the fields of `Manifest` below
    train-000000.tar               webdataset: KEY.jpg|png|webp + optional KEY.cls, members adjacent
                                   (images that are not 8-bit RGB: KEY.npy of (h, w, C))
    train-000000.offsets.npy       (samples, 3) int64: first byte of the sample's first tar header,
                                   one past its last padded member, label (-1: none)
    train.metadata-HASH.parquet    what else is known of each sample; see `columns.py`

A sample's id is its place in its split: shards in index order, samples in file order.
"""

from __future__ import annotations

import copy
import hashlib
import io
import json
import os
import re
import shlex
from collections.abc import Callable, Sequence
from functools import cached_property, lru_cache
from itertools import combinations
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator

from sslpipe.data.columns import (
    COLUMN_NAME,
    REWRITE,
    Column,
    ColumnEntry,
    MetadataFile,
    arrow_type,
    find_column,
    open_table,
    read_cells,
)
from sslpipe.data.image_type import RGB8, ImageType, Reading
from sslpipe.data.storage import join, load_array, local_path, read_bytes, size_of
from sslpipe.errors import DataError, did_you_mean, listed, shown
from sslpipe.files import parse_json

BLOCK = 512  # bytes of a tar header, and what members are padded to
IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
ARRAY_SUFFIXES = ("npy",)  # of all images of a data set that are not 8-bit RGB
IMAGENET_MEAN = (0.485, 0.456, 0.406)  # RGB in [0, 1], torchvision weights
IMAGENET_STD = (0.229, 0.224, 0.225)

# computed from the images, at any time: data with and without are the same to all that use none
DERIVED_COLUMN = "duplicate_group"
PATH_COLUMN = "path"  # of each image's file below --root; changes nothing of what a run computes
OPTIONAL_COLUMNS = (DERIVED_COLUMN, PATH_COLUMN)
SIDECARS_KEPT = 512  # sidecars in memory, 24 bytes a sample; a shard has one open a stream

Triple = tuple[float, float, float]
Level = Annotated[float, Field(ge=-1000, le=1000)]
Spread = Annotated[float, Field(ge=1e-6, le=1000)]  # images are divided by it


def check_split_name(name: str) -> str:
    """Refuse a split's name that would lead files that it begins into another folder."""
    if not name or re.search(r"[/\\\x00-\x1f]", name):
        raise ValueError("a split's name begins names of files, and has no slash in it; rename it")
    return name


def check_statistics(
    image: ImageType | None, mean: tuple[float, ...], std: tuple[float, ...]
) -> None:
    """Refuse a mean or std that is not of each channel; `image` None: of 8-bit RGB."""
    channels = len((image or RGB8).channels)
    for name, values in (("mean", mean), ("std", std)):
        if len(values) != channels:
            raise ValueError(f"{name} has {len(values)} numbers, and an image {channels} channels")


class ShardFile(BaseModel):
    """One shard of a split, and its sidecar; paths are relative to dataset.json, or URLs."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    samples: int = Field(ge=1, le=2**53)
    bytes: int = Field(ge=1, le=2**53)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")
    offsets: str
    offsets_sha256: str = Field(pattern="^[0-9a-f]{64}$")


class Manifest(BaseModel):
    """dataset.json; schema 2 has columns, 3 a type of images.

    mean and std are of each channel in [0, 1] of its range, of the train split.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    schema_version: Annotated[int, Field(ge=1, le=3, strict=True)]
    name: str
    source: str = ""  # free text, as `license`
    license: str = ""
    classes: tuple[str, ...] = ()  # names by label; empty where unlabelled
    mean: tuple[Level, ...] = IMAGENET_MEAN
    std: tuple[Spread, ...] = IMAGENET_STD
    splits: dict[Annotated[str, AfterValidator(check_split_name)], tuple[ShardFile, ...]]
    columns: dict[Annotated[str, Field(pattern=f"^{COLUMN_NAME}$")], ColumnEntry] = {}
    metadata: dict[str, MetadataFile] = {}  # the table of the columns of each split that has any
    image: ImageType | None = None  # None: 8-bit RGB, alpha dropped

    @model_validator(mode="after")
    def _check_statistics(self) -> Manifest:
        check_statistics(self.image, self.mean, self.std)
        return self


class Split:
    """One split's shards in index order, and where each sample lies in them; as in the manifest.

    The shards hold images of `stored_type`; who reads them gets `image_type`, the `channels` of it
    that were selected (None: all).
    """

    def __init__(self, index: DatasetIndex, name: str) -> None:
        self.name = name
        self.folder = index.folder
        self.shards = index.manifest.splits[name]
        self.columns = index.manifest.columns
        self.suffixes = IMAGE_SUFFIXES if index.stored_type.is_rgb8 else ARRAY_SUFFIXES
        self._select(index)
        sizes = np.array([shard.samples for shard in self.shards], dtype=np.int64)
        self.starts = np.concatenate([np.zeros(1, np.int64), np.cumsum(sizes)])  # (shards + 1,)

    def _select(self, index: DatasetIndex) -> None:
        self.index = index
        self.channels = index.channels
        self.stored_type = index.stored_type
        self.image_type = index.image_type

    def __len__(self) -> int:
        return int(self.starts[-1])

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.folder!r}, {self.name!r}, samples={len(self)})"

    def __getstate__(self) -> dict[str, Any]:
        """Return what a spawned process needs; it reads the files again."""
        caches = ("offsets", "column", "_table")
        return {name: value for name, value in vars(self).items() if name not in caches}

    def locate(self, ids: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find the shard number and the row within it of each sample id. (n,) -> (n,), (n,)."""
        ids = np.asarray(ids, dtype=np.int64)
        shard = np.searchsorted(self.starts, ids, side="right") - 1
        return shard, ids - self.starts[shard]

    def url(self, shard: int) -> str:
        """Return where a shard is: a path or a URL."""
        return join(self.folder, self.shards[shard].file)

    def with_channels(self, names: Sequence[str]) -> Split:
        """Return the same split, read as these of its stored channels, in this order."""
        split = copy.copy(self)
        split._select(self.index.with_channels(names))
        return split

    @cached_property
    def offsets(self) -> Callable[[int], NDArray[np.int64]]:
        """Read a shard's (samples, 3) int64: start, end, label; each once."""
        return lru_cache(maxsize=SIDECARS_KEPT)(self._read_offsets)

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """All labels, (samples,) int64, -1 for none; reads every sidecar, but no tar."""
        return np.concatenate([self.offsets(k)[:, 2] for k in range(len(self.shards))])

    def labels_of(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Look up the labels of some samples, in their shards' sidecars only. (n,) -> (n,)."""
        shards, rows = self.locate(ids)
        labels = np.empty(len(rows), np.int64)
        for shard in np.unique(shards).tolist():
            here = shards == shard
            labels[here] = self.offsets(shard)[rows[here], 2]
        return labels

    def class_name(self, label: int) -> str | None:
        """Name a label, by its number where the data set has no name for it; None for none."""
        return name_of_class(self.index.manifest.classes, label)

    def names_of(self, ids: ArrayLike) -> list[str] | None:
        """Return the paths that samples had below the folder they were built from, where known."""
        if not self.has_values(PATH_COLUMN) or self.columns[PATH_COLUMN].kind != "text":
            return None
        return [name or "" for name in self.column(PATH_COLUMN).show(ids)]

    def has_values(self, name: str) -> bool:
        """Return whether a column of this name has values of this split."""
        return name in self.columns and self.name in self.columns[name].splits

    @cached_property
    def column(self) -> Callable[[str], Column]:
        """Open a column by its name, each once. Raises: DataError for no such one."""
        return lru_cache(maxsize=None)(self._read_column)

    def _read_column(self, name: str) -> Column:
        import pyarrow as pa

        entry = find_column(self.columns, name, self.folder)
        if self.name not in entry.splits:
            return Column(name, pa.chunked_array([pa.nulls(len(self), arrow_type(entry.kind))]))
        url, raw = self._table
        return Column(name, read_cells(url, raw, name=name, kind=entry.kind, samples=len(self)))

    @cached_property
    def _table(self) -> tuple[str, Any]:
        """Where the table of the columns is, and what it holds (pyarrow.Buffer)."""
        file = self.index.manifest.metadata.get(self.name)
        if file is None:
            raise DataError(f"{self.folder}: dataset.json names no table of {self.name}; {REWRITE}")
        url = join(self.folder, file.file)
        return url, open_table(url, file)

    def _read_offsets(self, shard: int) -> NDArray[np.int64]:
        """(samples, 3) int64: start, end, label."""
        entry = self.shards[shard]
        url = join(self.folder, entry.offsets)
        raw = read_bytes(url)
        if hashlib.sha256(raw).hexdigest() != entry.offsets_sha256:
            raise DataError(f"{url}: its sha256 is not the one in dataset.json; {_REINDEX}")
        try:
            rows = load_array(io.BytesIO(raw))
        except Exception as error:  # numpy raises many kinds for a damaged header
            raise DataError(f"{url} is not a .npy file: {error}; {_REINDEX}") from None
        shape = (entry.samples, 3)
        if rows.dtype != np.int64 or rows.shape != shape:
            raise DataError(f"{url}: {rows.dtype} {rows.shape}, not int64 {shape}; {_REINDEX}")
        starts = rows[:, 0]
        ends = rows[:, 1]
        if (starts < 0).any() or (ends <= starts).any() or (ends > entry.bytes).any():
            raise DataError(f"{url}: offsets lie outside {entry.file}; {_REINDEX}")
        return rows


class RelabelledSplit(Split):
    """The same samples, whose labels number the values of a column, ascending; -1: missing.

    Raises: DataError where the column is of floats.
    """

    def __init__(self, split: Split, column: Column) -> None:
        super().__init__(split.index, split.name)
        self.original = split
        self._groups = column.groups

    @cached_property
    def labels(self) -> NDArray[np.int64]:
        """All labels, (samples,) int64."""
        return self.labels_of(np.arange(len(self)))

    def labels_of(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Look up the labels of some samples. (n,) -> (n,)."""
        return self._groups.code_of(ids)

    @cached_property
    def names(self) -> tuple[str, ...]:
        """What each label stands for, as people write it."""
        return tuple(self._groups.show())


def relabelled(split: Split, column: str | None) -> Split:
    """Return the split with the labels of a column; None: the split itself. Raises: DataError."""
    return split if column is None else RelabelledSplit(split, split.column(column))


_REINDEX = "write the index again with `sslpipe shards index`"


class DatasetIndex:
    """A data set's manifest and where it lies, a path or a URL.

    `sha256` names the data: part of the digest of every run that uses no column made from images.
    """

    def __init__(self, folder: str, manifest: Manifest) -> None:
        self.folder = folder
        self.manifest = manifest
        self.stored_type = manifest.image or RGB8
        self._stored = manifest
        self.channels: tuple[int, ...] | None = None  # those selected, by their place
        self.sha256 = self.sha256_for("")

    def __repr__(self) -> str:
        splits = {
            name: sum(file.samples for file in files)
            for name, files in self.manifest.splits.items()
        }
        classes = len(self.manifest.classes)
        return f"DatasetIndex({self.folder!r}, splits={splits}, classes={classes})"

    def sha256_for(self, settings: str) -> str:
        """Compute the sha256 of dataset.json, as `manifest_text` writes it.

        That is without paths and columns made from the images, unless a setting names them, and
        without the tables' own sha256, which depends on the version of pyarrow; columns have one.
        """
        unused = {name for name in OPTIONAL_COLUMNS if name not in settings}
        columns = {n: e for n, e in self._stored.columns.items() if n not in unused}
        text = manifest_text(self._stored.model_copy(update={"columns": columns, "metadata": {}}))
        return hashlib.sha256(text.encode()).hexdigest()

    @property
    def image_type(self) -> ImageType:
        """What the images are, as they are read: of the selected channels."""
        return self.manifest.image or RGB8

    def with_channels(self, names: Sequence[str] | None) -> DatasetIndex:
        """Return the same data set, of whose images some channels are read, in this order.

        None: all of them. Its sha256 stays. Raises: DataError for a channel that is not stored.
        """
        if names is None:
            return self
        kind = self.stored_type
        known = self.stored_type.channels
        for name in names:
            if name not in known:
                raise DataError(
                    f"{self.folder} has no channel {name!r}{did_you_mean(name, known)}; it has: "
                    f"{', '.join(known)}"
                )
        selected = copy.copy(self)
        stored = self._stored
        selected.channels = places = tuple(map(known.index, names))
        low, high, mean, std = (
            tuple(each[k] for k in places)
            for each in (kind.low, kind.high, stored.mean, stored.std)
        )
        image = ImageType(channels=tuple(names), dtype=kind.dtype, low=low, high=high)
        if image.is_rgb8:
            image = image.on(kind.background)
        elif image.channels == known:
            image = image.read_as(kind.reading)
        else:
            reading = kind.reading or Reading()
            image = image.read_as(reading.model_copy(update={"channels": known}))
        update = {"image": None if image == RGB8 else image, "mean": mean, "std": std}
        selected.manifest = self.manifest.model_copy(update=update)
        return selected

    def has_sha256(self, recorded: object) -> bool:
        """Return whether a recorded sha256 is this data set's, whichever columns it was for."""
        counts = range(len(OPTIONAL_COLUMNS) + 1)
        some = [names for count in counts for names in combinations(OPTIONAL_COLUMNS, count)]
        return any(recorded == self.sha256_for(" ".join(names)) for names in some)

    def split(self, name: str) -> Split:
        """Look up a split by its name. Raises: DataError where there is none."""
        if name not in self.manifest.splits:
            known = ", ".join(sorted(self.manifest.splits))
            raise DataError(
                f"{self.folder} has no split {name!r}; it has: {known}; name one of these by "
                "--split, or by data.split in a recipe"
            )
        return Split(self, name)

    def check_files(self, split: str) -> None:
        """Check that every shard is there with the index's size; nothing is read.

        Raises: DataError naming all that are not, or one that would run a command.
        """
        wrong = []
        for shard in self.manifest.splits[split]:
            size = size_of(join(self.folder, shard.file))
            if size is None:
                wrong.append(f"{shard.file} is missing")
            elif size != shard.bytes:
                wrong.append(f"{shard.file} has {size} bytes, not the index's {shard.bytes}")
        if wrong:
            raise DataError(
                f"{self.folder}, split {split!r}: {listed(wrong, 5, '; ')}. "
                "Copy the shards again, or `sslpipe shards verify` to see all damage"
            )


def name_of_class(names: Sequence[str], label: int) -> str | None:
    """Name a label, by its number where there is no name for it; None for -1, which is none."""
    if label < 0:
        return None
    return names[label] if label < len(names) else str(label)


def manifest_text(manifest: Manifest) -> str:
    """Return what dataset.json holds, in the oldest schema that can."""
    version = 1
    if manifest.columns:
        version = 2
    if manifest.image:
        version = 3
    tree = {**manifest.model_dump(mode="json"), "schema_version": version}
    for name in ("columns", "metadata", "image"):
        if not tree[name]:
            del tree[name]
    return json.dumps(tree, indent=1, ensure_ascii=False) + "\n"


def _check_has_index(location: str | Path, url: str) -> None:
    """Raise DataError where a path is nothing, a folder without dataset.json, or another file."""
    path = local_path(url)
    if path is None or os.path.lexists(path):
        return
    if os.path.isdir(location):
        root = str(location)
        raise DataError(
            f"{location} is a folder without dataset.json: of images, write shards first, `sslpipe "
            f"shards build OUT --root {shlex.quote(root)}` or sslpipe.build_dataset(OUT, root="
            f"{root!r}), and name OUT; of shards, write it with `sslpipe shards index`"
        )
    if os.path.isfile(location):
        raise DataError(
            f"{location} is a file, and no data set: name its dataset.json, or the folder of it; "
            "images are embedded as a list of paths, sslpipe.embed(model, [path])"
        )
    if url_scheme := re.match(r"[a-z][a-z0-9]+:(?=/[^/])", str(location)):
        raise DataError(
            f"cannot read {path}: it was given with one slash behind {url_scheme[0]!r}, as a Path "
            "has it; give the URL as a str, with two"
        )
    raise DataError(
        f"cannot read {path}: there is no such file; name the dataset.json, or the folder, that "
        "`sslpipe shards build` or `sslpipe shards index` wrote"
    )


def manifest_url(location: str | Path) -> str:
    """Return where dataset.json is: a path or a URL, of the file or of its folder."""
    url = str(location)
    return url if url.endswith(".json") else join(url, "dataset.json")


def load_index(location: DatasetIndex | str | Path) -> DatasetIndex:
    """Read dataset.json: the file or its folder, a path or a URL.

    Args:
        location: Where it is. An index that is loaded is returned as it is.

    Raises:
        DataError: It is missing, of another schema, or names a key that does not exist.
    """
    if isinstance(location, DatasetIndex):
        return location
    if not isinstance(location, str | Path) or location == "":
        raise DataError(
            f"a data set is named by the path or URL of its dataset.json, not by "
            f"{shown(location)} ({type(location).__name__})"
        )
    url = manifest_url(location)
    _check_has_index(location, url)
    raw = read_bytes(url)
    try:
        manifest = parse_json(raw, Manifest)
    except ValueError as error:
        raise DataError(f"{url}: {error}; {_REINDEX}") from None
    folder = url.rpartition("/")[0] or "."
    return DatasetIndex(folder, manifest)
