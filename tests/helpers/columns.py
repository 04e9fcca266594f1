"""Give a data set that is there columns, without building it again."""

from collections.abc import Sequence
from pathlib import Path

import pyarrow as pa

from sslpipe.data.columns import arrow_type
from sslpipe.data.index import DatasetIndex, load_index
from sslpipe.sharding.columns import write_columns
from sslpipe.sharding.record import save_manifest


def table_of(times: Sequence[str] = (), **columns: Sequence[str | int | float | None]) -> pa.Table:
    """Columns of texts, integers or floats by their values; None is missing.

    times: names of those whose integers are microseconds since 1970.
    """
    types = {name: arrow_type("time") if name in times else None for name in columns}
    return pa.table({name: pa.array(columns[name], types[name]) for name in columns})


def add_columns(
    manifest: Path, split: str = "train", times: Sequence[str] = (), **columns: Sequence
) -> DatasetIndex:
    """Write the columns of one split into the data set of a dataset.json and open it again."""
    index = load_index(manifest)
    made = {split: table_of(times, **columns)}
    save_manifest(manifest.parent, write_columns(manifest.parent, index.manifest, made))
    return load_index(manifest)


def as_built(manifest: Path) -> Path:
    """Write a dataset.json anew, byte for byte as `sslpipe shards build` does."""
    save_manifest(manifest.parent, load_index(manifest).manifest)
    return manifest
