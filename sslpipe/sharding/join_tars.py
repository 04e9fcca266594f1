"""Folders of tars, built or written apart -> one data set over all of them.

The tars stay where they are. Each folder numbers its classes on its own, so labels are numbered
anew in the sidecars; a sample is known by its tar, so that equal keys and names are no clash.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.image_type import ImageType
from sslpipe.data.index import (
    DERIVED_COLUMN,
    PATH_COLUMN,
    Manifest,
    ShardFile,
    Split,
    load_index,
)
from sslpipe.errors import DataError, shown
from sslpipe.sharding.record import open_manifest
from sslpipe.sharding.sources import ColumnSpec, number_labels

Numbers = NDArray[np.int64]  # (classes of a folder,), their numbers in the joined data set


class Joined(NamedTuple):
    """What the folders' own dataset.json say, as one."""

    classes: tuple[str, ...] = ()  # names by label; (): as dataset.json says
    numbers: Mapping[Path, Numbers] = {}  # by folder; none where labels stay as they are
    columns: tuple[ColumnSpec, ...] = ()  # keys of KEY.json
    fields: Mapping[str, object] = {}  # of dataset.json: image, mean, std, source, license


def join_folders(
    folders: Sequence[Path], classes: tuple[str, ...] = (), *, with_columns: bool = True
) -> Joined:
    """Join what the dataset.json of each folder says; a folder may have none.

    Classes are those of all, sorted. mean and std are pooled by the number of images in the first
    split; where a folder has no dataset.json they are left to the caller. Given `classes` name all
    labels, and the folders' own names do not count. Without `with_columns` theirs are not looked
    up.

    Raises: DataError where folders have images, or a column, of different types.
    """
    manifests = {folder: open_manifest(folder) for folder in folders}
    # classes are numbered over all folders; of one that names none no label is left, then
    numbers: dict[Path, Numbers] = {}
    if not classes:
        named = {folder: manifest.classes for folder, manifest in manifests.items()}
        classes = next(iter(named.values()))
        if len(set(named.values())) > 1:
            every = [name for names in named.values() for name in names]
            numbers = {folder: number_labels(names, every)[0] for folder, names in named.items()}
            classes = number_labels([], every)[1]
    fields: dict[str, object] = {}
    if all(manifest.splits for manifest in manifests.values()):
        fields = _join_images(manifests)
    columns = _join_columns(manifests) if with_columns else ()
    return Joined(classes, numbers, columns, fields)


def _join_columns(manifests: Mapping[Path, Manifest]) -> tuple[ColumnSpec, ...]:
    specs: dict[str, ColumnSpec] = {}
    for folder, manifest in manifests.items():
        for name, entry in manifest.columns.items():
            if name == DERIVED_COLUMN:
                continue  # computed from the images of one folder
            if name == PATH_COLUMN and entry.kind == "text":
                continue  # in no KEY.json, see `built_paths`
            spec = specs.setdefault(name, ColumnSpec(name, name, entry.kind))
            if spec.kind != entry.kind:
                as_text = f"{name}:text"
                raise DataError(
                    f"column {name!r} is {entry.kind} in {folder}, and {spec.kind} in others; give "
                    f"--columns={as_text!r}"
                )
    return tuple(specs.values())


def built_paths(tars: Sequence[Path], shards: Sequence[ShardFile]) -> list[str] | None:
    """Return the paths that the samples of some tars were built from, which only a build knows.

    They are in the dataset.json beside each tar; None where one of them has none, or other tars.
    """
    names = list[str]()
    known: dict[Path, dict[str, tuple[Split, int]]] = {}  # by folder
    for tar, shard in zip(tars, shards, strict=True):
        if tar.parent not in known:
            known[tar.parent] = _shards_in(tar.parent)
        if shard.sha256 not in known[tar.parent]:
            return None
        split, number = known[tar.parent][shard.sha256]
        of_shard = split.names_of(range(split.starts[number], split.starts[number + 1]))
        if of_shard is None:
            return None
        names += of_shard
    return names


def _shards_in(folder: Path) -> dict[str, tuple[Split, int]]:
    """Find the shards of a folder's dataset.json, by sha256: their split, and the place in it."""
    if not (folder / "dataset.json").exists():
        return {}
    index = load_index(folder)
    splits = [index.split(name) for name in index.manifest.splits]
    return {
        shard.sha256: (split, number)
        for split in splits
        for number, shard in enumerate(split.shards)
    }


def _join_images(manifests: Mapping[Path, Manifest]) -> dict[str, object]:
    first_folder, first = next(iter(manifests.items()))
    counts = []
    for folder, manifest in manifests.items():
        if _stored(manifest) != _stored(first):
            raise DataError(
                f"images of {folder} are {_type(manifest)}, and of {first_folder} {_type(first)}: "
                "a data set has one type; build all with equal --channels, --range, --background"
            )
        split = "train" if "train" in manifest.splits else next(iter(manifest.splits))
        counts.append(sum(shard.samples for shard in manifest.splits[split]))
    weights = np.array(counts)[:, None] / sum(counts)  # (folders, 1)
    means = np.array([manifest.mean for manifest in manifests.values()])  # (folders, channels)
    stds = np.array([manifest.std for manifest in manifests.values()])
    mean = (weights * means).sum(axis=0)
    variance = (weights * (stds**2 + (means - mean) ** 2)).sum(axis=0)
    is_read_alike = all(manifest.image == first.image for manifest in manifests.values())
    fields: dict[str, object] = {
        "image": first.image if is_read_alike else _stored(first),
        "mean": tuple(mean.round(6).tolist()),
        "std": tuple(np.sqrt(variance).round(6).tolist()),
    }
    for name in ("source", "license"):
        texts = {getattr(manifest, name): None for manifest in manifests.values()}
        fields[name] = "; ".join(text for text in texts if text)
    return fields


def _stored(manifest: Manifest) -> ImageType | None:
    """What the shards hold; files of several folders may have been read in several ways."""
    return manifest.image and manifest.image.read_as(None)


def _type(manifest: Manifest) -> str:
    image = manifest.image
    if image is None:
        return "8-bit RGB"
    ranges = f"{shown(image.low)} to {shown(image.high)}"
    return f"{image.dtype} of {', '.join(image.channels)}, {ranges}"
