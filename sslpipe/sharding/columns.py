"""Write columns beside the shards: values, groups, tables of strings, and their manifest entries.

Files come before the dataset.json that names them, and what the old one names stays until then.
"""

import hashlib
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.columns import (
    COLUMN_NAME,
    STORED,
    Column,
    ColumnEntry,
    ColumnFile,
    Kind,
    SplitColumn,
    is_missing,
    members_dtype,
    show_time,
)
from sslpipe.data.index import Manifest, load_index
from sslpipe.data.storage import npy_bytes
from sslpipe.errors import DataError, did_you_mean
from sslpipe.portable import one_at_a_time, remove_abandoned, write_atomically
from sslpipe.sharding.record import save_manifest

FOLDER = "columns"
_OWN_FILE = re.compile(r".+\.(values|groups|members)\.npy|strings-[0-9a-f]{16}\.npy")


# typed: "12" is a text (JSON, parquet); table: it may be a number (CSV); name: so, and where one
# cell is a text, all are (folders, names of files)
Origin = Literal["typed", "table", "name"]


class ColumnSpec(NamedTuple):
    """A column that is asked for: its name here and in the source; kind None: inferred."""

    name: str
    field: str
    kind: Kind | None


class ColumnValues(NamedTuple):
    """One column of some samples, in memory."""

    kind: Kind
    values: NDArray[Any]  # (n,), as `sslpipe.data.columns.STORED` says; of a text, places in:
    strings: Sequence[str] = ()  # the distinct texts

    @property
    def missing(self) -> NDArray[np.bool_]:
        """Which samples have no value, (n,)."""
        return is_missing(self.kind, self.values)

    def cell(self, row: int) -> str | int | float | None:
        """Return a value as JSON holds it, a time in ISO 8601; None where it is missing."""
        value = self.values[row]
        if is_missing(self.kind, value):
            return None
        if self.kind == "text":
            return self.strings[int(value)]
        plain: int | float = value.item()
        return show_time(int(plain)) if self.kind == "time" else plain

    def groups(self) -> NDArray[np.int64]:
        """Number the samples by value, (n,), each missing one on its own. Raises: DataError."""
        if self.kind == "float":
            raise DataError("floats make no groups; give a text, an integer or a time")
        codes: NDArray[np.int64] = np.unique(self.values, return_inverse=True)[1].reshape(-1)
        missing = self.missing
        codes[missing] = len(codes) + np.arange(missing.sum())
        return codes


Columns = Mapping[str, ColumnValues]  # by name


def texts(values: Sequence[str]) -> ColumnValues:
    """Make a column of texts, of which none is missing."""
    strings, codes = np.unique(np.array(values, object), return_inverse=True)
    return ColumnValues("text", codes.reshape(-1), strings.tolist())


def find_groups(columns: Columns, name: str, option: str) -> NDArray[np.int64]:
    """Number samples by the column that an option names. Raises: DataError with the option."""
    if name not in columns:
        known = ", ".join(columns) or "none; name it with --columns"
        raise DataError(
            f"{option} {name!r} is no column that is read{did_you_mean(name, columns)}; "
            f"columns: {known}"
        )
    try:
        return columns[name].groups()
    except DataError as error:
        raise DataError(f"{option} {name!r}: {error}") from None


def check_kinds(manifest: Manifest, columns: Mapping[str, Columns]) -> None:
    """Raise DataError where a split's column has another kind in the manifest's other splits."""
    for split, own in columns.items():
        for name, column in own.items():
            known = manifest.columns.get(name)
            if known is not None and known.kind != column.kind:
                raise DataError(
                    f"column {name!r} is {column.kind} in {split}, but {known.kind} in "
                    f"{' and '.join(known.splits)}; give its kind, as in {name}:{known.kind}"
                )


def write_columns(
    folder: Path,
    manifest: Manifest,
    columns: Mapping[str, Columns],
    named: Mapping[str, str] = MappingProxyType({}),
) -> Manifest:
    """Write the columns of whole splits, by split and name; return the manifest with them.

    What the manifest had of these splits is forgotten, columns of its other splits stay. `named`
    files (-> sha256) stay as they are, for a dataset.json that names them.

    Raises: DataError where a name is no column's, or another split has it of another kind.
    """
    others = without_splits(manifest, columns)
    check_kinds(others, columns)
    entries = others.columns
    for name in sorted({name for own in columns.values() for name in own}):
        check_name(name, entries)
        by_split = {split: own[name] for split, own in columns.items() if name in own}
        entries[name] = _write_column(folder, name, by_split, entries.get(name), named)
    return manifest.model_copy(update={"columns": entries})


def save_columns(folder: Path, manifest: Manifest, columns: Mapping[str, Columns]) -> Manifest:
    """Write columns as `write_columns` does, then dataset.json; remove what it names no more."""
    manifest = write_columns(folder, manifest, columns)
    save_manifest(folder, manifest)
    remove_unnamed(folder, manifest)
    return manifest


def add_columns(folder: Path, columns: Mapping[str, Columns], *, alone: bool = False) -> Manifest:
    """Give splits of a data set that is there columns, and write its dataset.json anew.

    A column of the same name is replaced in these splits; with `alone` other splits lose it. Raises
    DataError as `write_columns`.
    """
    with one_at_a_time(folder):
        manifest = load_index(folder).manifest
        names = {name for own in columns.values() for name in own}
        known = {} if alone else {n: e for n, e in manifest.columns.items() if n in names}
        replaced = manifest.model_copy(update={"columns": known})
        # a kill before dataset.json is written leaves the old one and all that it names
        named = {file.file: file.sha256 for e in manifest.columns.values() for file in e.files()}
        entries = write_columns(folder, replaced, columns, named).columns
        # in the order that they had: a dataset.json without new values is the same, byte for byte
        for name, entry in entries.items():
            check_name(name, manifest.columns)
            own = {split: entry.splits[split] for split in manifest.splits if split in entry.splits}
            entries[name] = entry.model_copy(update={"splits": own})
        manifest = manifest.model_copy(update={"columns": {**manifest.columns, **entries}})
        save_manifest(folder, manifest)
        remove_unnamed(folder, manifest)
        return manifest


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


def without_splits(manifest: Manifest, splits: Iterable[str]) -> Manifest:
    """Return the manifest whose columns know nothing of these splits."""
    gone = set(splits)
    entries = {}
    for name, entry in manifest.columns.items():
        kept = {split: own for split, own in entry.splits.items() if split not in gone}
        if kept:
            entries[name] = entry.model_copy(update={"splits": kept})
    return manifest.model_copy(update={"columns": entries})


def remove_unnamed(folder: Path, manifest: Manifest) -> None:
    """Remove column files that dataset.json does not name any more, and folders left empty."""
    named = {
        (folder / file.file).resolve()
        for entry in manifest.columns.values()
        for file in entry.files()
    }
    own = sorted((folder / FOLDER).glob("*/"))
    for path in own:
        remove_abandoned(path)
        for file in sorted(path.glob("*.npy")):
            if _OWN_FILE.fullmatch(file.name) and file.resolve() not in named:
                file.unlink()
    for path in [*own, folder / FOLDER]:
        if path.is_dir() and not any(path.iterdir()):
            path.rmdir()


def group_rows(column: ColumnValues) -> tuple[NDArray[np.int64], NDArray[np.integer[Any]]]:
    """Sort samples: (2, G) values that occur and where each begins in the rows by value, (n,)."""
    present = np.flatnonzero(~column.missing)
    members = present[np.argsort(column.values[present], kind="stable")]
    values = column.values[members].astype(np.int64)
    starts = np.flatnonzero(np.diff(values, prepend=values[:1] - 1)) if len(values) else members
    groups = np.stack([values[starts], starts]).astype("<i8")  # (2, G)
    return groups, members.astype(members_dtype(len(column.values)))


def _write_column(
    folder: Path,
    name: str,
    by_split: Mapping[str, ColumnValues],
    known: ColumnEntry | None,
    named: Mapping[str, str],
) -> ColumnEntry:
    """Write one column of some splits; `known` is its entry of other splits."""
    kind = next(iter(by_split.values())).kind
    # one table for all splits: codes that are on disk stay what they are
    strings = None
    table: list[str] = []
    if kind == "text":
        if known is not None:
            table = Column(str(folder), "", name, known, 0).strings.all()
        held = set(table)
        table += sorted({text for own in by_split.values() for text in own.strings} - held)
        strings = _save(folder, name, "strings", _pack(table), named)
    number = {text: code for code, text in enumerate(table)}
    # values, and samples by value
    splits = dict(known.splits) if known else {}
    for split, column in by_split.items():
        values = column.values
        if kind == "text":
            places = np.array([*(number[text] for text in column.strings), -1], np.int32)
            column = column._replace(values=places[values])  # a missing one, -1, reads the last
        own = {"values": column.values.astype(STORED[kind].dtype)}
        if kind != "float":
            own["groups"], own["members"] = group_rows(column)
        files = {part: _save(folder, name, f"{split}.{part}", own[part], named) for part in own}
        splits[split] = SplitColumn(**files)
    return ColumnEntry(kind=kind, strings=strings, splits=splits)


def _pack(strings: Sequence[str]) -> NDArray[np.uint8]:
    """Lay strings out as a table: n + 1 starts, then UTF-8."""
    encoded = [text.encode("utf-8", "surrogatepass") for text in strings]
    sizes = np.array([8 * (len(strings) + 1), *map(len, encoded)], np.int64)
    head = np.cumsum(sizes).astype("<i8").tobytes()
    return np.frombuffer(head + b"".join(encoded), np.uint8)


def _save(
    folder: Path, name: str, part: str, array: NDArray[Any], named: Mapping[str, str]
) -> ColumnFile:
    raw = npy_bytes(array)
    sha256 = hashlib.sha256(raw).hexdigest()
    if part == "strings":  # its own name, as an older dataset.json may still name another table
        part = f"strings-{hashlib.sha256(array.tobytes()).hexdigest()[:16]}"
    file = f"{FOLDER}/{name}/{part}.npy"
    split, dot, kind = part.rpartition(".")
    other = f"{FOLDER}/{name}/{split}-{sha256[:16]}{dot}{kind}.npy"
    if dot and (other in named or named.get(file, sha256) != sha256):
        file = other
    (folder / FOLDER / name).mkdir(parents=True, exist_ok=True)
    write_atomically(folder / file, raw, fsync=True)
    return ColumnFile(file=file, bytes=len(raw), sha256=sha256)
