"""Read and write dataset.json and sidecars: written last, and all at once or not at all."""

import hashlib
import io
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.index import SCHEMA_VERSIONS, Manifest, ShardFile, load_index, manifest_text
from sslpipe.errors import DataError
from sslpipe.portable import write_atomically


def load_manifest(folder: Path) -> Manifest | None:
    """Read the manifest of a folder; None where it has none yet."""
    if not (folder / "dataset.json").exists():
        return None
    return load_index(folder).manifest


def save_manifest(folder: Path, manifest: Manifest) -> None:
    """Write dataset.json into the folder, atomically, in the oldest schema that holds it."""
    write_atomically(folder / "dataset.json", manifest_text(manifest), fsync=True)


def new_manifest(name: str) -> Manifest:
    """Return a manifest without splits."""
    return Manifest(schema_version=SCHEMA_VERSIONS[0], name=name, splits={})


def shard_file(tar: Path, rows: NDArray[np.int64], sha256: str) -> ShardFile:
    """Write the sidecar of a finished tar and describe both.

    Args:
        tar: The shard.
        rows: (samples, 3) int64 of `scan.offset_rows`.
        sha256: Of the tar, hexadecimal.
    """
    buffer = io.BytesIO()
    np.save(buffer, rows, allow_pickle=False)
    raw = buffer.getvalue()
    sidecar = tar.with_suffix(".offsets.npy")
    write_atomically(sidecar, raw, fsync=True)
    return ShardFile(
        file=tar.name,
        samples=len(rows),
        bytes=tar.stat().st_size,
        sha256=sha256,
        offsets=sidecar.name,
        offsets_sha256=hashlib.sha256(raw).hexdigest(),
    )


def merge_classes(known: tuple[str, ...], new: tuple[str, ...]) -> tuple[str, ...]:
    """Return the data set's class names when a split is added; a label is an index into them.

    Raises:
        DataError: The new split has classes that the data set does not.
    """
    if not known or not new:
        return known or new
    extra = [name for name in new if name not in known]
    if extra:
        raise DataError(
            f"classes {', '.join(extra[:5])} are not among the {len(known)} of dataset.json; "
            "build all splits in one run, so that they share one list of classes"
        )
    return known
