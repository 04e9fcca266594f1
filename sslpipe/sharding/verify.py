"""Verify a data set: its columns, and its shards sample by sample."""

import tempfile
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.columns import REWRITE, digest
from sslpipe.data.decode import BadSample, decode
from sslpipe.data.index import DatasetIndex
from sslpipe.data.storage import download, join, local_path, read_range, size_of
from sslpipe.errors import DataError
from sslpipe.portable import sha256_of
from sslpipe.sharding.scan import OFFSETS, offset_rows, scan_tar

DECODE_PX = 256


class Fault(NamedTuple):
    """Something wrong with a shard, or with the sample of a key."""

    shard: str
    key: str
    reason: str


def verify_columns(index: DatasetIndex, split: str) -> list[Fault]:
    """List the columns of a split that are missing or damaged."""
    faults = []
    for name, entry in index.manifest.columns.items():
        try:
            column = index.split(split).column(name)
            if split in entry.splits and digest(column.cells) != entry.splits[split]:
                raise DataError(f"its values are not those of dataset.json; {REWRITE}")
        except DataError as error:
            faults.append(Fault(f"column {name} of {split}", "", str(error)))
    return faults


def verify_shard(index: DatasetIndex, split: str, shard: int) -> list[Fault]:
    """List everything wrong with one shard: size, sha256, offsets, labels, images that fail.

    A shard that is not on this machine is fetched into a temporary file.
    """
    entry = index.manifest.splits[split][shard]
    url = join(index.folder, entry.file)
    try:
        size = size_of(url)
        if size is None:
            return [Fault(entry.file, "", "is missing")]
        path = local_path(url)
        if path is not None:
            return _verify_tar(index, split, shard, Path(path))
        with tempfile.TemporaryDirectory() as folder:
            copy = Path(folder) / "shard.tar"
            download(url, copy)
            return _verify_tar(index, split, shard, copy)
    except DataError as error:
        return [Fault(entry.file, "", str(error))]


def _verify_tar(index: DatasetIndex, split: str, shard: int, path: Path) -> list[Fault]:
    """List what is wrong with a shard that lies at a path."""
    # the file
    entry = index.manifest.splits[split][shard]
    faults = []
    size = path.stat().st_size
    if size != entry.bytes:
        faults.append(Fault(entry.file, "", f"has {size} bytes, the index says {entry.bytes}"))
    elif sha256_of(path) != entry.sha256:
        faults.append(Fault(entry.file, "", "its sha256 is not the one in dataset.json"))
    # the sidecar
    try:
        rows = index.split(split).offsets(shard)
        samples = scan_tar(path, index.split(split).suffixes).samples
    except DataError as error:
        return [*faults, Fault(entry.file, "", str(error))]
    renumbered = entry.offsets.startswith(f"{OFFSETS}/")
    if not _describes(rows, offset_rows(samples), renumbered):
        faults.append(Fault(entry.file, "", f"{entry.offsets} does not describe this tar"))
    # each sample: its label, and its image decoded
    classes = len(index.manifest.classes)
    labels = rows[:, 2].tolist() if len(rows) == len(samples) else [s.label for s in samples]
    for sample, label in zip(samples, labels, strict=True):
        if classes and label >= classes:
            reason = f"label {label}, but dataset.json names {classes} classes"
            faults.append(Fault(entry.file, sample.key, reason))
        start, size = sample.image
        try:
            raw = read_range(str(path), start, start + size)
            decode(raw, DECODE_PX, image_type=index.stored_type)
        except BadSample as error:
            faults.append(Fault(entry.file, sample.key, str(error)))
    return faults


def _describes(rows: NDArray[np.int64], actual: NDArray[np.int64], renumbered: bool) -> bool:
    """Return whether a sidecar has the samples that are there, each with its label.

    With `renumbered` each label of the tar stands for one of the data set, as of joined folders.
    """
    if not renumbered:
        return np.array_equal(rows, actual)
    if not np.array_equal(rows[:, :2], actual[:, :2]):
        return False
    pairs = np.unique(np.stack([rows[:, 2], actual[:, 2]]), axis=1)  # (2, pairs)
    unlabelled = pairs < 0
    is_one_to_one = all(len(np.unique(each)) == len(each) for each in pairs)
    return is_one_to_one and bool((unlabelled[0] == unlabelled[1]).all())
