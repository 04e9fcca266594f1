"""Columns: what is known of each sample besides its label, memory-mapped, read value by value.

Files of a column, in the folder columns/NAME beside dataset.json, which holds their sha256:

    SPLIT.values.npy    (samples,) by sample id; dtypes and missing values are in STORED below
    SPLIT.groups.npy    (2, G) int64: the values that occur, ascending, and where the ids of each
                        begin in members; not for floats
    SPLIT.members.npy   (present,) int32 or int64: ids that have a value, by (value, id)
    strings-HASH.npy    (bytes,) uint8, text only, shared by all splits: n + 1 little-endian int64,
                        where in this array each string begins and the last ends; then UTF-8

A missing value knows nothing: it equals no other, and its sample is in no group.
"""

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from sslpipe.data.storage import join, read_array
from sslpipe.errors import DataError, did_you_mean, shown

# a new kind: STORED and CONVERT below, gather._TYPES and `_plain`, `ColumnValues.cell`; then what
# compares a `kind`, and the texts that list all of them
Kind = Literal["text", "integer", "float", "time"]
MISSING_INTEGER = -(2**63)
COLUMN_NAME = r"[A-Za-z][A-Za-z0-9_.-]{0,63}"  # it names a folder, and stands in recipes
_CHECKED = 2**20  # samples at a time
REWRITE = "copy it again, or write the data set again"
LARGEST_INTEGER = 2**63 - 1  # -2**63 stands for no value
EXACT_FLOAT = 2**53  # integers up to it are floats, too
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
# of the years 1 to 9999
_FIRST_SECOND = -62_135_596_800
_END_SECOND = 253_402_300_800
_EXIF_DATE = re.compile(r"(\d{4}):(\d\d):(\d\d)(?!\d)")
_INTEGER = re.compile(r"[+-]?[0-9]+")
_NUMBER = re.compile(r"[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)([eE][+-]?[0-9]+)?|nan", re.IGNORECASE)
_SECONDS = re.compile(r"([+-]?)(\d{1,20})(?:\.(\d*))?", re.ASCII)

Value = str | int | float | datetime


class Stored(NamedTuple):
    """How the values of a kind are stored; of floats, any that is no number stands for no value."""

    dtype: np.dtype[Any]
    missing: float


STORED: dict[str, Stored] = {
    "text": Stored(np.dtype("<i4"), -1),  # a place in the table of strings
    "integer": Stored(np.dtype("<i8"), MISSING_INTEGER),
    "float": Stored(np.dtype("<f8"), math.nan),
    "time": Stored(np.dtype("<i8"), MISSING_INTEGER),  # microseconds since 1970, UTC
}


class ColumnFile(BaseModel):
    """A file of a column: relative to dataset.json, or a URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    bytes: int = Field(ge=1, le=2**53)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class SplitColumn(BaseModel):
    """A column's files of one split; floats have no groups and no members."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    values: ColumnFile
    groups: ColumnFile | None = None
    members: ColumnFile | None = None


class ColumnEntry(BaseModel):
    """A column in dataset.json; `splits` lacks those without any value; only texts have strings."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Kind
    strings: ColumnFile | None = None
    splits: dict[str, SplitColumn]

    def files(self) -> list[ColumnFile]:
        """List the files of all splits, with the table of strings."""
        own = [file for each in self.splits.values() for _, file in each]  # values, groups, ...
        return [file for file in (self.strings, *own) if file is not None]


def find_column(columns: dict[str, ColumnEntry], name: str, where: str) -> ColumnEntry:
    """Look up a column by its name. Raises: DataError with the nearest name where there is none."""
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
    """Return which stored values stand for none."""
    missing: NDArray[np.bool_] = (
        np.isnan(values) if kind == "float" else values == STORED[kind].missing
    )
    return missing


def members_dtype(samples: int) -> np.dtype[Any]:
    """Return the type that ids of so many samples are stored as."""
    return np.dtype("<i4") if samples < 2**31 else np.dtype("<i8")


@dataclass(eq=False)
class Column:
    """One column of one split of `samples`, `entry` in the manifest.

    A file is opened when it is needed, and compared with its sha256; a remote one is held in
    memory.
    """

    folder: str
    split: str
    name: str
    entry: ColumnEntry
    samples: int

    def __post_init__(self) -> None:
        self.kind = self.entry.kind

    def __len__(self) -> int:
        return self.samples

    @cached_property
    def values(self) -> NDArray[Any]:
        """All values as they are stored, (samples,), read-only and memory-mapped."""
        own, (dtype, missing) = self.entry.splits.get(self.split), STORED[self.kind]
        if own is None:
            return np.broadcast_to(np.array(missing, dtype), self.samples)
        return self._open(own.values, dtype, (self.samples,))

    def values_of(self, ids: ArrayLike) -> NDArray[Any]:
        """Look up stored values. (n,) ids -> (n,) of the kind's dtype."""
        found: NDArray[Any] = np.asarray(self.values[np.asarray(ids, np.int64)])
        return found

    def missing(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Return which samples have no value. (n,) -> (n,)."""
        return is_missing(self.kind, self.values_of(ids))

    def show(self, ids: ArrayLike) -> list[str | None]:
        """Write values for people: strings as they are, times in ISO 8601; None where missing."""
        values = self.values_of(ids)
        rows = zip(values.tolist(), is_missing(self.kind, values).tolist(), strict=True)
        return [None if missing else self.show_value(value) for value, missing in rows]

    def show_value(self, value: int | float) -> str:
        """Write one stored value that is not missing."""
        if self.kind == "text":
            return self.strings[int(value)]
        return show_time(int(value)) if self.kind == "time" else str(value)

    def parse(self, text: str) -> int | float | None:
        """Read a value as it is stored, such as one that a query compares with; times as `to_time`.

        Returns None for a string that no sample of any split has.

        Raises: DataError where the text is no value of this kind.
        """
        if self.kind == "text":
            return self.strings.codes.get(text)
        try:
            return CONVERT[self.kind](text)
        except ValueError as error:
            raise DataError(
                f"column {self.name!r} is of kind {self.kind}, and {shown(text)} {error}"
            ) from None

    @cached_property
    def strings(self) -> "Strings":
        """The table of strings. Raises: DataError where the column is no text."""
        if self.entry.strings is None:
            raise DataError(f"{self._place}: its kind is {self.kind}; only a text has strings")
        raw = self._open(self.entry.strings, np.dtype("u1"), (None,))
        return Strings(raw, join(self.folder, self.entry.strings.file))

    @cached_property
    def groups(self) -> "Groups":
        """Samples that share a value. Raises: DataError for floats."""
        own = self.entry.splits.get(self.split)
        if self.kind == "float":
            raise DataError(
                f"{self._place} holds floats, which make no groups; give a text, integer or time"
            )
        if own is None:
            return Groups(self, np.zeros((2, 0), np.int64), np.zeros(0, np.int32))
        if own.groups is None or own.members is None:
            raise DataError(f"{self._place}: dataset.json names no group files; {REWRITE}")
        table = self._open(own.groups, np.dtype("<i8"), (2, None))
        members = self._open(own.members, members_dtype(self.samples), (None,))
        groups = Groups(self, table, members)
        groups.check()
        return groups

    @property
    def _place(self) -> str:
        return f"column {self.name!r} of {self.folder}, split {self.split!r}"

    def _open(
        self, file: ColumnFile, dtype: np.dtype[Any], shape: tuple[int | None, ...]
    ) -> NDArray[Any]:
        """Map a .npy file of this type, or hold a remote one; None stands for any size."""
        url = join(self.folder, file.file)
        return read_array(url, file.sha256, dtype, shape, REWRITE, size=file.bytes)


class Groups:
    """The samples of a split by value; codes 0 to G - 1 count the values that occur, ascending.

    `groups` are (2, G) int64, values and first places in `members`: (present,) ids by (value, id).
    """

    def __init__(
        self, column: Column, groups: NDArray[np.int64], members: NDArray[np.integer[Any]]
    ) -> None:
        self.column = column
        self.ids = members
        # (G,) each
        self.values = groups[0]
        self.starts = groups[1]

    def __len__(self) -> int:
        return len(self.values)

    def check(self) -> None:
        """Raise DataError unless the groups hold each sample with a value once, by (value, id)."""
        values = self.column.values
        column = self.column
        if len(self) and (self.starts[0] != 0 or (np.diff(self.values) <= 0).any()):
            raise self._damaged()
        sizes = self.sizes()
        present = 0
        seen = -1
        if (sizes <= 0).any() or (not len(self) and len(self.ids)):
            raise self._damaged()
        for begin in range(0, max(len(values), len(self.ids)), _CHECKED):
            present += int((~is_missing(column.kind, values[begin : begin + _CHECKED])).sum())
            ids = self.ids[begin : begin + _CHECKED].astype(np.int64)
            if not len(ids):
                continue
            if ids.min() < 0 or ids.max() >= column.samples:
                raise self._damaged()
            codes = np.searchsorted(self.starts, np.arange(begin, begin + len(ids)), "right") - 1
            first = self.starts[codes] == np.arange(begin, begin + len(ids))
            ascending = np.diff(ids, prepend=seen) > 0
            if (values[ids] != self.values[codes]).any() or not (first | ascending).all():
                raise self._damaged()
            seen = int(ids[-1])
        if present != len(self.ids):
            raise self._damaged()

    def code_of(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Find the group of each sample, -1 where its value is missing. (n,) -> (n,)."""
        values = self.column.values_of(ids)
        present = ~is_missing(self.column.kind, values)
        return np.where(present, np.searchsorted(self.values, values), -1)

    def whole_split(self) -> NDArray[np.int64]:
        """Number all samples by group, (samples,); a missing value has a number of its own."""
        codes = np.empty(self.column.samples, np.int64)
        codes[self.ids] = np.repeat(np.arange(len(self)), self.sizes())
        alone = is_missing(self.column.kind, self.column.values)
        codes[alone] = len(self) + np.arange(alone.sum())
        return codes

    def spans(self, codes: ArrayLike) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Find where groups begin in `ids`, and their sizes; 0 for code -1. (n,) -> (n,), (n,)."""
        known = np.asarray(codes, np.int64) >= 0
        codes = np.maximum(codes, 0)
        begin = self.begin_of(codes)
        return begin * known, (self.begin_of(codes + 1) - begin) * known

    def begin_of(self, codes: NDArray[np.int64]) -> NDArray[np.int64]:
        """Find where groups begin in `ids`; of code G, where the last one ends. (n,) -> (n,)."""
        begin = np.full(codes.shape, len(self.ids), np.int64)
        inside = codes < len(self)
        begin[inside] = self.starts[codes[inside]]
        return begin

    def sizes(self) -> NDArray[np.int64]:
        """Count the samples of every group, (G,)."""
        sizes: NDArray[np.int64] = np.diff(self.starts, append=len(self.ids))
        return sizes

    def _damaged(self) -> DataError:
        return DataError(f"column {self.column.name!r}: its groups are damaged; {REWRITE}")


class Strings:
    """A table of strings by number, decoded one by one; `url` is for messages."""

    def __init__(self, raw: NDArray[np.uint8], url: str) -> None:
        first = int.from_bytes(raw[:8].tobytes(), "little")
        if len(raw) < 8 or first % 8 or not 8 <= first <= len(raw):
            raise DataError(f"{url} is no table of strings; {REWRITE}")
        self.starts = raw[:first].view("<i8")
        self._raw = raw
        self._url = url

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, code: int) -> str:
        if not 0 <= code < len(self):
            raise DataError(f"{self._url} has {len(self)} strings, none with number {code}")
        begin, end = self.starts[code : code + 2].tolist()
        try:
            return bytes(self._raw[max(begin, 0) : max(end, 0)]).decode("utf-8", "surrogatepass")
        except UnicodeDecodeError as error:
            raise DataError(f"{self._url}: string {code} is no UTF-8: {error}; {REWRITE}") from None

    def all(self) -> list[str]:
        """Decode the whole table."""
        return [self[code] for code in range(len(self))]

    @cached_property
    def codes(self) -> dict[str, int]:
        """The number of each string; decodes the whole table."""
        return {text: code for code, text in enumerate(self.all())}


# one value -> an integer, a number or a moment, as columns store them


def to_integer(value: Value) -> int:
    """Convert to an integer of 64 bits. Raises: ValueError, such as "is not an integer"."""
    if isinstance(value, str) and _INTEGER.fullmatch(value.strip()):
        value = int(value) if len(value) < 100 else LARGEST_INTEGER + 1
    if isinstance(value, float) and value.is_integer() and abs(value) <= EXACT_FLOAT:
        value = int(value)  # pandas makes floats of integers with gaps
    if not isinstance(value, int):
        raise ValueError("is not an integer")
    if abs(value) > LARGEST_INTEGER:
        raise ValueError("does not fit 64 bits")
    return value


def to_float(value: Value) -> float:
    """Convert to a number; "nan" is none. Raises: ValueError, such as "is not finite"."""
    text = isinstance(value, str)
    if isinstance(value, datetime) or (text and not _NUMBER.fullmatch(str(value).strip())):
        raise ValueError("is not a number")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if math.isinf(number):
        raise ValueError("is not finite")
    return number


def to_time(value: Value) -> int:
    """Convert to microseconds since 1970, UTC; what is finer is cut off.

    Args:
        value: Seconds since 1970, ISO 8601 or EXIF's 2024:05:01 12:00:00, with an offset from UTC
            (Z, +02:00), or in UTC where none is written.

    Raises:
        ValueError: Such as "is no time".
    """
    if isinstance(value, int | float):
        to_float(value)  # which is finite
        micros = value * 10**6 if isinstance(value, int) else round(value * 10**6)
    elif isinstance(value, str) and (match := _SECONDS.fullmatch(value.strip())):
        micros = int(match[2]) * 10**6 + int(f"{match[3] or '':0<6.6}")
        micros = -micros if match[1] == "-" else micros
    else:
        moment = _moment(value.strip()) if isinstance(value, str) else value
        aware = moment if moment.tzinfo else moment.replace(tzinfo=UTC)
        return (aware - _EPOCH) // timedelta(microseconds=1)
    if not _FIRST_SECOND * 10**6 <= micros < _END_SECOND * 10**6:
        raise ValueError("is no time of the years 1 to 9999 in seconds since 1970")
    return micros


def has_offset(text: str) -> bool:
    """Return whether a text that `to_time` reads tells its offset from UTC."""
    return bool(_SECONDS.fullmatch(text.strip())) or _moment(text.strip()).tzinfo is not None


def _moment(text: str) -> datetime:
    try:
        return datetime.fromisoformat(_EXIF_DATE.sub(r"\1-\2-\3", text, count=1))
    except ValueError:
        raise ValueError("is no time, such as 2024-05-01T12:00:00+02:00") from None


CONVERT: Mapping[str, Callable[[Value], int | float]] = {
    "integer": to_integer,
    "float": to_float,
    "time": to_time,
}
