"""Index tars made by others, and verify a data set sample by sample."""

import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np

from sslpipe.data.decode import BadSample, decode
from sslpipe.data.index import ARRAY_SUFFIXES, IMAGE_SUFFIXES, DatasetIndex, Manifest, ShardFile
from sslpipe.data.storage import join, read_range
from sslpipe.errors import DataError
from sslpipe.portable import sha256_of
from sslpipe.sharding.columns import save_columns
from sslpipe.sharding.gather import columns_of_tars
from sslpipe.sharding.record import merge_classes, open_manifest
from sslpipe.sharding.scan import index_tar, measure, offset_rows, scan_tar
from sslpipe.sharding.sources import SourceOptions
from sslpipe.sharding.writer import Advance

_TAR_SUFFIX = re.compile(r"\.(tar|tgz|tbz2|txz|tar\.[a-z0-9]+)$", re.IGNORECASE)
_SPLIT_NAME = re.compile(r"(.*?)[-_.]*\d*")  # train-000000 -> train; 00000 -> ''
DECODE_PX = 256


class Fault(NamedTuple):
    """Something wrong with a shard, or with the sample of a key."""

    shard: str
    key: str
    reason: str


def find_tars(folder: Path, split: str | None) -> dict[str, list[Path]]:
    """Group a folder's tars by split: `split`, else how their names begin. Raises: DataError."""
    if not folder.is_dir():
        raise DataError(f"{folder} is not a folder")
    groups: dict[str, list[Path]] = {}
    for path in sorted(folder.glob("[!.]*")):
        if not _TAR_SUFFIX.search(path.name):
            continue
        if path.suffix != ".tar":
            raise DataError(f"{path} is compressed; offsets need plain tars: unpack it first")
        match = _SPLIT_NAME.fullmatch(path.stem)
        groups.setdefault(split or (match[1] if match else "") or "train", []).append(path)
    if not groups:
        raise DataError(f"{folder} has no .tar files")
    return groups


def index_folder(
    folder: Path,
    groups: dict[str, list[Path]],
    classes: tuple[str, ...],
    *,
    columns: SourceOptions = SourceOptions(),  # noqa: B008  # frozen
    workers: int = 2,
    advance: Advance = lambda count: None,
    channels: tuple[str, ...] | None = None,
    value_range: tuple[float, float] | None = None,
) -> Manifest:
    """Write sidecars for all tars, then dataset.json; its other splits stay as they are.

    The type of `channels` is measured; None: as dataset.json says. Columns that the splits have and
    that are not read again are forgotten. `advance` takes 1 for each tar done.

    Raises: DataError where a tar is compressed, cut, or not laid out for webdataset; it is named.
    """
    if value_range and not channels:
        raise DataError("--range is of images that --channels names; give both, or neither")
    manifest = open_manifest(folder)
    is_array = bool(channels) or manifest.image is not None
    suffixes = ARRAY_SUFFIXES if is_array else IMAGE_SUFFIXES
    if channels and manifest.image is None and set(manifest.splits) - set(groups):
        raise DataError(f"{folder / 'dataset.json'} has splits of 8-bit RGB: index all at once")

    def index(path: Path) -> ShardFile:
        entry = index_tar(path, suffixes)
        advance(1)
        return entry

    with ThreadPoolExecutor(workers) as pool:
        splits = {name: tuple(pool.map(index, paths)) for name, paths in groups.items()}
    update: dict[str, object] = {
        "classes": merge_classes(manifest.classes, classes),
        "splits": {**manifest.splits, **splits},
    }
    if channels:
        first = "train" if "train" in groups else next(iter(groups))
        measured = measure(groups[first], channels, value_range)
        if measured.image.is_rgb8:
            raise DataError("these are 8-bit RGB: store them as PNG or JPEG, or name channels else")
        for name, paths in groups.items():
            other = measured if name == first else measure(paths, channels, value_range)
            if (dtype := other.image.dtype) != measured.image.dtype:
                raise DataError(f"split {name!r} is of {dtype}, and others {measured.image.dtype}")
        update |= {"image": measured.image, "mean": measured.mean, "std": measured.std}
    found = columns_of_tars(groups, columns, workers=workers, suffixes=suffixes)
    return save_columns(folder, manifest.model_copy(update=update), found)


def check_columns(folder: Path, splits: Iterable[str], columns: SourceOptions) -> None:
    """Raise DataError where splits are to be indexed again without the columns that they have."""
    fields = [
        f"{name}:{entry.kind}"
        for name, entry in open_manifest(folder).columns.items()
        if set(splits) & set(entry.splits)
    ]
    if fields and not (columns.columns or columns.name_pattern):
        raise DataError(
            f"{folder / 'dataset.json'} has columns of these splits: give --json-fields "
            f"{','.join(fields)} to read them again, or --no-columns to drop them"
        )


def verify_columns(index: DatasetIndex, split: str) -> list[Fault]:
    """List the files of a split's columns that are missing or damaged."""
    faults = []
    for name, entry in index.manifest.columns.items():
        column = index.split(split).column(name)
        try:
            values = column.values
            if entry.kind == "text" and values.max(initial=-1) >= len(column.strings):
                raise DataError("a value is no string of its table")
            if entry.kind != "float":
                _ = column.groups  # which are checked where they are opened
        except DataError as error:
            faults.append(Fault(f"column {name} of {split}", "", str(error)))
    return faults


def verify_shard(index: DatasetIndex, split: str, shard: int) -> list[Fault]:
    """List everything wrong with one shard: size, sha256, offsets, labels, images that fail."""
    # the file
    entry = index.manifest.splits[split][shard]
    path = Path(join(index.folder, entry.file))
    if not path.is_file():
        return [Fault(entry.file, "", "is missing")]
    faults = []
    if path.stat().st_size != entry.bytes:
        size = path.stat().st_size
        faults.append(Fault(entry.file, "", f"has {size} bytes, the index says {entry.bytes}"))
    elif sha256_of(path) != entry.sha256:
        faults.append(Fault(entry.file, "", "its sha256 is not the one in dataset.json"))
    # the sidecar
    try:
        rows = index.split(split).offsets(shard)
        samples = scan_tar(path, index.split(split).suffixes)
    except DataError as error:
        return [*faults, Fault(entry.file, "", str(error))]
    if not np.array_equal(rows, offset_rows(samples)):
        faults.append(Fault(entry.file, "", f"{entry.offsets} does not describe this tar"))
    # each sample: its label, and its image decoded
    classes = len(index.manifest.classes)
    for sample in samples:
        if classes and sample.label >= classes:
            reason = f"label {sample.label}, but dataset.json names {classes} classes"
            faults.append(Fault(entry.file, sample.key, reason))
        start, size = sample.image
        try:
            raw = read_range(str(path), start, start + size)
            decode(raw, DECODE_PX, image_type=index.stored_type)
        except BadSample as error:
            faults.append(Fault(entry.file, sample.key, str(error)))
    return faults
