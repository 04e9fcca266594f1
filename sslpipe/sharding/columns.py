"""Write what is known of each sample beside the shards: a parquet file a split (`data.columns`).

A file comes before the dataset.json that names it, by its sha256; what the old one names stays
until then.
"""

import hashlib
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import parquet

from sslpipe.data.columns import (
    COLUMN_NAME,
    KINDS,
    Column,
    ColumnEntry,
    MetadataFile,
    digest,
    kind_of,
    show_cells,
)
from sslpipe.data.index import PATH_COLUMN, Manifest, load_index
from sslpipe.errors import DataError, did_you_mean
from sslpipe.portable import one_at_a_time, remove_abandoned, write_atomically
from sslpipe.sharding.record import open_manifest, save_manifest
from sslpipe.sharding.sources import ColumnSpec

_OWN_FILE = re.compile(r".+\.metadata-[0-9a-f]{16}\.parquet")

Columns = Any  # pyarrow.Table: a row a sample, columns of KINDS by name


def parse_columns(columns: str | Sequence[str] | None) -> tuple[ColumnSpec, ...]:
    """Read --columns, "patient,age:integer,sku=Product id:text", or a list. Raises: DataError."""
    if columns is None:
        return ()
    text = columns if isinstance(columns, str) else ",".join(columns)
    specs: list[ColumnSpec] = []
    for part in text.split(","):
        name, renamed, field = part.strip().partition("=")
        if not renamed:
            field = name
        rest, colon, kind = field.rpartition(":")
        if colon and kind not in KINDS and not renamed:
            raise DataError(
                f"--columns {part.strip()!r}: {kind!r} is no kind{did_you_mean(kind, KINDS)}; "
                f"kinds: {', '.join(KINDS)}"
            )
        known = next((each for each in KINDS if colon and each == kind), None)
        if known:
            field = rest
        name = name.strip() if renamed else field
        if not field:
            raise DataError(f"--columns {text!r} is no list of names, as in patient,age:integer")
        for spec in specs:
            if name == spec.name or field == spec.field:
                raise DataError(f"--columns {text!r} names {name!r} twice")
        check_name(name, [spec.name for spec in specs])
        specs.append(ColumnSpec(name, field, known))
    return tuple(specs)


def check_name(name: str, known: Iterable[str] = ()) -> None:
    """Raise DataError for what is no name of a column, or differs from a known one in case only."""
    if not re.fullmatch(COLUMN_NAME, name):
        raise DataError(
            f"column {name!r}: a name is a letter, then letters, digits and . - _, at most 64; "
            f"to rename it write NAME={name}"
        )
    twins = [other for other in known if other != name and other.lower() == name.lower()]
    if twins:
        raise DataError(f"columns {twins[0]!r} and {name!r} differ in case only; rename one")


def find_groups(columns: Columns, name: str, option: str) -> NDArray[np.int64]:
    """Number samples by the column that an option names, each missing one on its own.

    Raises: DataError with the option.
    """
    known = columns.column_names
    if name not in known:
        raise DataError(
            f"{option} {name!r} is no column that is read{did_you_mean(name, known)}; columns: "
            f"{', '.join(known) or 'none'}; name it with --columns"
        )
    try:
        return Column(name, columns.column(name)).groups.whole_split()
    except DataError as error:
        raise DataError(f"{option} {name!r}: {error}") from None


def with_paths(
    columns: Mapping[str, Columns], names: Mapping[str, Sequence[str] | None], manifest: Manifest
) -> dict[str, Columns]:
    """Add the column of the files that samples were built from, unless one has such a name.

    Args:
        columns: By split.
        names: By split, of the files; None or (): they are no files.
        manifest: Of the other splits.
    """
    read = {name for table in columns.values() for name in table.column_names}
    known = manifest.columns.get(PATH_COLUMN)
    alike = {name for name in (*read, *manifest.columns) if name.lower() == PATH_COLUMN}
    is_ours = PATH_COLUMN not in read and (known is None or known.kind == "text")
    added = dict(columns)
    if is_ours and alike <= {PATH_COLUMN}:
        for split, table in columns.items():
            if file_names := names[split]:
                paths = pa.table({PATH_COLUMN: pa.array(file_names, pa.string())})
                added[split] = side_by_side(table, paths)
    return added


def to_json(columns: Columns, samples: int) -> list[bytes]:
    """Write each sample's values as its KEY.json: missing ones are left out; b"" where all are."""
    trees: list[dict[str, object]] = [{} for _ in range(samples)]
    for name in columns.column_names:
        cells = columns.column(name)
        is_time = kind_of(cells) == "time"
        for tree, value in zip(
            trees, show_cells(cells) if is_time else cells.to_pylist(), strict=True
        ):
            if value is not None:
                tree[name] = value
    return [json.dumps(tree, separators=(",", ":")).encode() if tree else b"" for tree in trees]


def check_kinds(manifest: Manifest, columns: Mapping[str, Columns]) -> None:
    """Raise DataError where a split's column has another kind in the manifest's other splits."""
    for split, table in columns.items():
        for name in table.column_names:
            kind = kind_of(table.column(name))
            known = manifest.columns.get(name)
            if known is not None and known.kind != kind:
                raise DataError(
                    f"column {name!r} is {kind} in {split}, but {known.kind} in "
                    f"{' and '.join(known.splits)}; give its kind, as in {name}:{known.kind}"
                )


# --- files


def write_columns(folder: Path, manifest: Manifest, columns: Mapping[str, Columns]) -> Manifest:
    """Write the columns of whole splits, by split; return the manifest with them.

    What the manifest had of these splits is forgotten, columns of its other splits stay.

    Raises: DataError where a name is no column's, or another split has it of another kind.
    """
    manifest = without_splits(manifest, columns)
    check_kinds(manifest, columns)
    entries = dict(manifest.columns)
    files = dict(manifest.metadata)
    for split, table in columns.items():
        for name in table.column_names:
            check_name(name, entries)
            cells = table.column(name)
            known = entries.get(name, ColumnEntry(kind=kind_of(cells), splits={}))
            splits = {**known.splits, split: digest(cells)}
            entries[name] = known.model_copy(update={"splits": splits})
        if table.column_names:
            files[split] = _write_table(folder, split, table.select(sorted(table.column_names)))
    # in one order, whoever wrote what first: dataset.json names the data by its sha256
    for name, entry in entries.items():
        splits = {split: entry.splits[split] for split in sorted(entry.splits)}
        entries[name] = entry.model_copy(update={"splits": splits})
    update = {
        "columns": {name: entries[name] for name in sorted(entries)},
        "metadata": {split: files[split] for split in sorted(files)},
    }
    return manifest.model_copy(update=update)


def _write_table(folder: Path, split: str, table: Columns) -> MetadataFile:
    sink = pa.BufferOutputStream()
    # as `data.columns` takes it: what is read is no larger than the file
    parquet.write_table(table, sink, compression="none", use_dictionary=False)
    raw = sink.getvalue()
    sha256 = hashlib.sha256(raw).hexdigest()
    file = f"{split}.metadata-{sha256[:16]}.parquet"
    write_atomically(folder / file, raw, fsync=True)
    return MetadataFile(file=file, bytes=len(raw), sha256=sha256)


def save_columns(folder: Path, manifest: Manifest, columns: Mapping[str, Columns]) -> Manifest:
    """Write columns as `write_columns` does, then dataset.json; return what it has now.

    Files that it names no more are removed.
    """
    manifest = write_columns(folder, manifest, columns)
    save_manifest(folder, manifest)
    remove_abandoned(folder)
    named = {file.file for file in manifest.metadata.values()}
    for path in sorted(folder.glob("*.parquet")):
        if _OWN_FILE.fullmatch(path.name) and path.name not in named:
            path.unlink()
    return open_manifest(folder)


def replace_columns(folder: Path, columns: Mapping[str, Columns]) -> Manifest:
    """Give splits of a data set that is there columns, and write its dataset.json anew.

    A column of the same name goes, in all splits. Raises: DataError as `write_columns`.
    """
    with one_at_a_time(folder):
        index = load_index(folder)
        names = {name for table in columns.values() for name in table.column_names}
        tables = {}
        for split in index.manifest.splits:
            samples = index.split(split)
            known = [name for name in index.manifest.columns if samples.has_values(name)]
            before = pa.table({name: samples.column(name).cells for name in known})
            new = columns.get(split)
            lost = names & {*before.column_names}
            if not lost and new is None:
                continue
            kept = before.drop_columns([*lost])
            tables[split] = kept if new is None else side_by_side(kept, new)
        return save_columns(folder, index.manifest, tables)


def side_by_side(left: Columns, right: Columns) -> Columns:
    """Return the columns of two tables of the same samples as one."""
    sides = (left, right)
    return pa.table({name: side.column(name) for side in sides for name in side.column_names})


def without_splits(manifest: Manifest, splits: Iterable[str]) -> Manifest:
    """Return the manifest whose columns know nothing of these splits."""
    gone = set(splits)
    entries = {}
    for name, entry in manifest.columns.items():
        kept = {split: digest for split, digest in entry.splits.items() if split not in gone}
        if kept:
            entries[name] = entry.model_copy(update={"splits": kept})
    files = {split: file for split, file in manifest.metadata.items() if split not in gone}
    return manifest.model_copy(update={"columns": entries, "metadata": files})
