"""How columns are stored: what dataset.json says of them, their files, and missing values.

Files of a column, in the folder columns/NAME beside dataset.json, which holds their sha256:

    SPLIT.values.npy    (samples,) by sample id; dtypes and missing values are in STORED below
    SPLIT.groups.npy    (2, G) int64: the values that occur, ascending, and where the ids of each
                        begin in members; not for floats
    SPLIT.members.npy   (present,) int32 or int64: ids that have a value, by (value, id)
    strings-HASH.npy    (bytes,) uint8, text only, shared by all splits: n + 1 little-endian int64,
                        where in this array each string begins and the last ends; then UTF-8

A missing value knows nothing: it equals no other, and its sample is in no group.
"""

import hashlib
import io
import math
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, Field

from sslpipe.data.storage import load_array, read_bytes, scheme, size_of
from sslpipe.errors import DataError, did_you_mean, shown
from sslpipe.portable import sha256_of

Kind = Literal["text", "integer", "float", "time"]
MISSING_INTEGER = -(2**63)
COLUMN_NAME = r"[A-Za-z][A-Za-z0-9_.-]{0,63}"  # it names a folder, and stands in recipes
REWRITE = "copy it again, or write the data set again"


class Stored(NamedTuple):
    """How the values of a kind are stored.

    Args:
        dtype: Of the array.
        missing: Stands for no value; of floats, any that is no number.
    """

    dtype: np.dtype[Any]
    missing: float


STORED: dict[str, Stored] = {
    "text": Stored(np.dtype("<i4"), -1),  # a place in the table of strings
    "integer": Stored(np.dtype("<i8"), MISSING_INTEGER),
    "float": Stored(np.dtype("<f8"), math.nan),
    "time": Stored(np.dtype("<i8"), MISSING_INTEGER),  # microseconds since 1970, UTC
}


class ColumnFile(BaseModel):
    """A file of a column.

    Args:
        file: Relative to dataset.json, or a URL.
        bytes: Its size.
        sha256: Of the file.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    bytes: int = Field(ge=1, le=2**53)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class SplitColumn(BaseModel):
    """A column's files of one split.

    Args:
        values: One value a sample.
        groups: The values that occur; None for floats.
        members: The samples by value; None for floats.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    values: ColumnFile
    groups: ColumnFile | None = None
    members: ColumnFile | None = None


class ColumnEntry(BaseModel):
    """A column in dataset.json.

    Args:
        kind: Of its values.
        strings: The table of strings; text only.
        splits: Its files by split; a split that is not here has no value at all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Kind
    strings: ColumnFile | None = None
    splits: dict[str, SplitColumn]

    def files(self, split: str | None = None) -> list[ColumnFile]:
        """List the files of a split, or of all, with the table of strings."""
        files = [self.strings]
        for name, own in self.splits.items():
            if split in (None, name):
                files += [own.values, own.groups, own.members]
        return [file for file in files if file is not None]


def find_column(columns: dict[str, ColumnEntry], name: str, where: str) -> ColumnEntry:
    """Look up a column by its name.

    Args:
        columns: Of the manifest.
        name: Of the column.
        where: The data set, for the message.

    Raises:
        DataError: There is none; the nearest name is in the message.
    """
    if name not in columns:
        known = ", ".join(columns) or "none: see --columns of `sslpipe shards build`"
        writer = "; `sslpipe curate duplicates` writes it" if name == "duplicate_group" else ""
        near = did_you_mean(name, columns)
        raise DataError(f"{where} has no column {shown(name)}{near}{writer}; columns: {known}")
    return columns[name]


def show_time(micros: int) -> str:
    """Write microseconds since 1970 in ISO 8601."""
    return f"{np.datetime64(micros, 'us')}Z".replace(".000000Z", "Z")


def is_missing(kind: str, values: NDArray[Any]) -> NDArray[np.bool_]:
    """Say which stored values stand for none."""
    missing: NDArray[np.bool_] = (
        np.isnan(values) if kind == "float" else values == STORED[kind].missing
    )
    return missing


def members_dtype(samples: int) -> np.dtype[Any]:
    """Return the type that ids of so many samples are stored as."""
    return np.dtype("<i4") if samples < 2**31 else np.dtype("<i8")


def map_file(url: str, file: ColumnFile, *, verify: bool) -> NDArray[Any]:
    """Map a local .npy file, or hold a remote one. Raises: DataError where it is damaged."""
    remote = bool(scheme(url))
    raw = read_bytes(url) if remote else b""
    size = len(raw) if remote else size_of(url)
    if size is None:
        raise DataError(f"{url} is missing; {REWRITE}")
    if size != file.bytes:
        raise DataError(f"{url} has {size} bytes, not the index's {file.bytes}; {REWRITE}")
    if verify:
        digest = hashlib.sha256(raw).hexdigest() if remote else sha256_of(Path(url))
        if digest != file.sha256:
            raise DataError(f"{url}: its sha256 is not the one in dataset.json; {REWRITE}")
    try:
        return load_array(io.BytesIO(raw)) if remote else load_array(url, mapped=True)
    except Exception as error:  # numpy raises many kinds for a damaged header
        raise DataError(f"{url} is not a .npy file: {error}; {REWRITE}") from None
