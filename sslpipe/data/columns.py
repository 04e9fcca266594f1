"""Columns: what is known of each sample besides its label.

SPLIT.metadata-HASH.parquet beside dataset.json, which holds its sha256, has a row a sample, by id,
and columns of KINDS; null where the value is missing. A missing value knows nothing: it equals no
other, and its sample is in no group.
"""

import hashlib
import math
from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray
from pydantic import BaseModel, ConfigDict, Field

from sslpipe.data.storage import read_bytes, scheme, size_of
from sslpipe.errors import DataError, did_you_mean, shown

if TYPE_CHECKING:  # imported where a column is read: most runs read none
    import pyarrow as pa

Kind = Literal["text", "integer", "float", "time"]  # string, int64, float64, timestamp[us, UTC]
KINDS: tuple[Kind, ...] = get_args(Kind)
COLUMN_NAME = r"[A-Za-z][A-Za-z0-9_.-]{0,63}"  # it stands in recipes
MISSING_INTEGER = -(2**63)  # in `Column.values`
REWRITE = "copy it again, or write the data set again"
# of the years 1 to 9999
_FIRST_SECOND = -62_135_596_800
_END_SECOND = 253_402_300_800
# texts that are numbers or times; what pyarrow makes of others, such as 0x10, nobody means
INTEGER = r"^[+-]?[0-9]+$"
NUMBER = r"^(?i:[+-]?([0-9]+(\.[0-9]*)?|\.[0-9]+)(e[+-]?[0-9]+)?|nan)$"
_EXIF_DATE = r"^(\d{4}):(\d\d):(\d\d)\b"
# not seconds, of August 1970; .0 where a cell of the column is missing, as pandas writes it
_BASIC_DATE = r"^(19\d\d|20\d\d)(0[1-9]|1[0-2])([0-2]\d|3[01])(\.0)?$"
_FINER_THAN_MICROSECONDS = r"(\.\d{6})\d+"
# encodings whose pages are no larger in memory than in the file
_ENCODINGS = {"PLAIN", "RLE"}


class MetadataFile(BaseModel):
    """The table of a split's columns: relative to dataset.json, or a URL."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    file: str
    bytes: int = Field(ge=1, le=2**53)
    sha256: str = Field(pattern="^[0-9a-f]{64}$")


class ColumnEntry(BaseModel):
    """A column in dataset.json; `splits` has the `digest` of its values in each that has it."""

    model_config = ConfigDict(extra="forbid", frozen=True)
    kind: Kind
    splits: dict[str, str]


def find_column(columns: dict[str, ColumnEntry], name: str, where: str) -> ColumnEntry:
    """Look up a column by its name. Raises: DataError with the nearest name where there is none."""
    if name not in columns:
        writer = "--columns of `sslpipe shards build` adds those of a table"
        if name == "duplicate_group":
            writer = "`sslpipe curate duplicates` writes it"
        near = did_you_mean(name, columns)
        known = ", ".join(columns) or "none"
        raise DataError(f"{where} has no column {shown(name)}{near}; columns: {known}; {writer}")
    return columns[name]


def arrow_type(kind: str) -> "pa.DataType":
    """Return how pyarrow holds a kind."""
    import pyarrow as pa

    types = {
        "text": pa.string(),
        "integer": pa.int64(),
        "float": pa.float64(),
        "time": pa.timestamp("us", "UTC"),
    }
    return types[kind]


def kind_of(cells: "pa.ChunkedArray") -> Kind:
    """Return the kind of a column's cells."""
    return next(kind for kind in KINDS if arrow_type(kind) == cells.type)


def digest(cells: "pa.ChunkedArray") -> str:
    """Compute the sha256 of a column's values, whatever the version of the file that holds them."""
    present = cells.drop_null()
    if kind_of(cells) == "text":
        texts = [text.encode() for text in present.to_pylist()]
        parts = [np.array(list(map(len, texts)), "<i8").tobytes(), *texts]
    else:
        parts = [numbers(present).tobytes()]
    digest = hashlib.sha256(cells.is_null().to_numpy().tobytes())
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def numbers(cells: "pa.ChunkedArray") -> NDArray[Any]:
    """Return integers, floats or times (microseconds since 1970) by row, (n,); see MISSING."""
    if kind_of(cells) == "float":
        floats: NDArray[np.float64] = cells.fill_null(math.nan).to_numpy()
        return floats
    integers: NDArray[np.int64] = cells.cast("int64").fill_null(MISSING_INTEGER).to_numpy()
    return integers


def open_table(url: str, file: MetadataFile) -> "pa.Buffer":
    """Map the table of a split's columns, or hold a remote one, after comparing its sha256.

    Raises: DataError where it is missing, or another one.
    """
    import pyarrow as pa

    size = None if scheme(url) else size_of(url)
    if not scheme(url) and size is None:
        raise DataError(f"{url} is missing; {REWRITE}")
    try:
        raw = pa.memory_map(url).read_buffer() if size else pa.py_buffer(read_bytes(url))
    except OSError as error:
        raise DataError(f"cannot read {url}: {error}") from error
    if len(raw) != file.bytes:
        raise DataError(f"{url} has {len(raw)} bytes, not the index's {file.bytes}; {REWRITE}")
    if hashlib.sha256(raw).hexdigest() != file.sha256:
        raise DataError(f"{url}: its sha256 is not the one in dataset.json; {REWRITE}")
    return raw


def read_cells(
    url: str, raw: "pa.Buffer", *, name: str, kind: Kind, samples: int
) -> "pa.ChunkedArray":
    """Read a column of a split's table. Raises: DataError where it is not as `sslpipe` writes it.

    Args:
        url: Of the table, for messages.
        raw: The table, of `open_table`.
        name: Of the column.
        kind: Of the column.
        samples: Of the split.
    """
    import pyarrow as pa
    from pyarrow import parquet

    try:
        table = parquet.ParquetFile(pa.BufferReader(raw))
        _judge(url=url, table=table, name=name, kind=kind, samples=samples)
        cells = table.read(columns=[name]).column(name)
        cells.validate(full=True)
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"cannot read column {name!r} of {url}: {error}; {REWRITE}") from error
    return cells


def _judge(url: str, table: Any, name: str, kind: Kind, samples: int) -> None:
    """Raise DataError for another table than `sslpipe` writes, before anything is allocated."""
    fields = {field.name: field.type for field in table.schema_arrow}
    wanted = arrow_type(kind)
    if fields.get(name) != wanted or table.metadata.num_rows != samples:
        raise DataError(
            f"{url}: {table.metadata.num_rows} rows of {name!r}, {fields.get(name)}, not {samples} "
            f"of {wanted}; {REWRITE}"
        )
    for group in range(table.metadata.num_row_groups):
        for number in range(table.metadata.num_columns):
            chunk = table.metadata.row_group(group).column(number)
            if chunk.compression != "UNCOMPRESSED" or not _ENCODINGS.issuperset(chunk.encodings):
                raise DataError(
                    f"{url}: a column is {chunk.compression} of {', '.join(chunk.encodings)}, and "
                    f"could be any size; {REWRITE}"
                )


# --- one column of one split


class Column:
    """One column of one split; `cells` are its values by sample id, null where missing."""

    def __init__(self, name: str, cells: "pa.ChunkedArray") -> None:
        self.name = name
        self.kind = kind_of(cells)
        self.cells = cells
        self._is_missing = cells.is_null().to_numpy()

    def __len__(self) -> int:
        return len(self.cells)

    @cached_property
    def values(self) -> NDArray[Any]:
        """All values as numbers, (samples,): see `numbers`; of a text its group, -1 for none."""
        return self.groups.codes if self.kind == "text" else numbers(self.cells)

    def values_of(self, ids: ArrayLike) -> NDArray[Any]:
        """Look up values as numbers. (n,) ids -> (n,)."""
        values: NDArray[Any] = self.values[np.asarray(ids, np.int64)]
        return values

    def missing(self, ids: ArrayLike) -> NDArray[np.bool_]:
        """Return which samples have no value. (n,) -> (n,)."""
        is_missing: NDArray[np.bool_] = self._is_missing[np.asarray(ids, np.int64)]
        return is_missing

    def show(self, ids: ArrayLike) -> list[str | None]:
        """Write values for people: strings as they are, times in ISO 8601; None where missing."""
        return show_cells(self.cells.take(np.asarray(ids, np.int64)))

    def parse(self, text: str) -> int | float | None:
        """Read a text as one of `values`, such as one that a query compares with.

        Returns None for a string that no sample of this split has.

        Raises: DataError where the text is no value of this kind.
        """
        import pyarrow as pa

        if self.kind == "text":
            return self.groups.number.get(text)
        try:
            value: int | float = numbers(convert(pa.chunked_array([[text]]), self.kind))[0].item()
        except ValueError:
            reason = f"is of kind {self.kind}, and {shown(text)} {NO_VALUE[self.kind]}"
            raise DataError(f"column {self.name!r} {reason}") from None
        return value

    @cached_property
    def groups(self) -> "Groups":
        """Samples that share a value. Raises: DataError for floats."""
        if self.kind == "float":
            raise DataError(
                f"column {self.name!r} holds floats, which make no groups; give a text, integer or "
                f"time; whole numbers are read as such by --columns={self.name + ':integer'!r}"
            )
        return Groups(self.cells)


class Groups:
    """The samples of a split by value; codes 0 to G - 1 count the values that occur, ascending."""

    def __init__(self, cells: "pa.ChunkedArray") -> None:
        from pyarrow import compute

        values = compute.unique(cells.drop_null())
        self.values = values.take(compute.sort_indices(values))  # (G,)
        codes = compute.index_in(cells, value_set=self.values).fill_null(-1)
        self.codes: NDArray[np.int32] = codes.to_numpy()  # (samples,), -1 where missing

    def __len__(self) -> int:
        return len(self.values)

    @cached_property
    def number(self) -> dict[str, int]:
        """The code of each value, as people write it."""
        return {value: code for code, value in enumerate(self.show())}

    def show(self) -> list[str]:
        """Write the value of each group."""
        return [value for value in show_cells(self.values) if value is not None]

    def code_of(self, ids: ArrayLike) -> NDArray[np.int64]:
        """Find the group of each sample, -1 where its value is missing. (n,) -> (n,)."""
        return self.codes[np.asarray(ids, np.int64)].astype(np.int64)

    def shared_with(self, other: "Groups") -> NDArray[np.bool_]:
        """Return whose value occurs in another split, too, (G,)."""
        from pyarrow import compute

        shared: NDArray[np.bool_] = np.asarray(
            compute.is_in(self.values, value_set=other.values), bool
        )
        return shared

    def whole_split(self) -> NDArray[np.int64]:
        """Number all samples by group, (samples,); a missing value has a number of its own."""
        numbers = self.codes.astype(np.int64)
        alone = numbers < 0
        numbers[alone] = len(self) + np.arange(alone.sum())
        return numbers

    def sizes(self) -> NDArray[np.int64]:
        """Count the samples of every group, (G,)."""
        return np.bincount(self.codes[self.codes >= 0], minlength=len(self))


def show_cells(cells: Any) -> list[str | None]:
    """Write cells for people: strings as they are, times in ISO 8601; None where missing."""
    is_time = arrow_type("time") == cells.type
    values = cells.cast("int64").to_pylist() if is_time else cells.to_pylist()
    write: Callable[[Any], str] = show_time if is_time else str
    return [None if value is None else write(value) for value in values]


def show_time(micros: int) -> str:
    """Write microseconds since 1970 in ISO 8601."""
    return f"{np.datetime64(micros, 'us')}Z".replace(".000000Z", "Z")


# --- cells of any type -> those of a kind

# why a cell that is there is none of a kind
NO_VALUE: dict[str, str] = {
    "text": "is no text in UTF-8",
    "integer": "is not an integer of 64 bits",
    "float": "is not a finite number",
    "time": "is no time of the years 1 to 9999, such as 2024-05-01T12:00:00+02:00",
}


def plain(cells: "pa.ChunkedArray") -> "pa.ChunkedArray":
    """Decode dictionaries, and take strings, bytes, booleans and decimals as texts and floats.

    Raises: ValueError for bytes that are no text in UTF-8.
    """
    from pyarrow import types

    if types.is_dictionary(cells.type):
        cells = cells.cast(cells.type.value_type)
    if types.is_null(cells.type) or types.is_boolean(cells.type) or _is_text(cells.type):
        return cells.cast("string")  # true, false
    return cells.cast("float64") if types.is_decimal(cells.type) else cells


def _is_text(kind: "pa.DataType") -> bool:
    from pyarrow import types

    texts = types.is_string, types.is_large_string, types.is_string_view
    binaries = types.is_binary, types.is_large_binary, types.is_fixed_size_binary
    return any(is_one(kind) for is_one in (*texts, *binaries, types.is_binary_view))


def convert(cells: "pa.ChunkedArray", kind: Kind) -> "pa.ChunkedArray":
    """Convert cells to a kind; blank texts and NaN are missing values.

    A time is ISO 8601 (20240501, too) or EXIF's 2024:05:01 12:00:00, with an offset from UTC in all
    texts or in none, then it is in UTC; or seconds since 1970. What is finer than microseconds is
    cut off.

    Raises: ValueError where a cell is none of the kind.
    """
    import pyarrow as pa
    from pyarrow import compute, types

    try:
        cells = plain(cells)
        if types.is_floating(cells.type):
            cells = compute.if_else(compute.is_nan(cells), None, cells)
        if types.is_string(cells.type):
            trimmed = compute.utf8_trim_whitespace(cells)
            is_blank = compute.equal(trimmed, "")
            cells = compute.if_else(is_blank, None, cells if kind == "text" else trimmed)
        if kind == "text":
            return cells.cast("string")
        if kind == "integer":
            return _integers(cells)
        return _floats(cells) if kind == "float" else _times(cells)
    except (pa.ArrowNotImplementedError, pa.ArrowTypeError) as error:
        raise ValueError(str(error)) from error


def _integers(cells: "pa.ChunkedArray") -> "pa.ChunkedArray":
    from pyarrow import compute, types

    if types.is_string(cells.type):
        cells = compute.replace_substring_regex(cells, r"^([+-]?[0-9]+)\.0+$", r"\1")  # of pandas
        _check(compute.match_substring_regex(cells, INTEGER))
        cells = compute.replace_substring_regex(cells, r"^\+", "")
    cells = cells.cast("int64")
    _check(compute.greater(cells, MISSING_INTEGER))
    return cells


def _floats(cells: "pa.ChunkedArray") -> "pa.ChunkedArray":
    from pyarrow import compute, types

    if types.is_string(cells.type):
        _check(compute.match_substring_regex(cells, NUMBER))
    cells = cells.cast("float64", safe=False)  # large integers are rounded
    cells = compute.if_else(compute.is_nan(cells), None, cells)
    _check(compute.is_finite(cells))
    return cells


def _times(cells: "pa.ChunkedArray") -> "pa.ChunkedArray":
    import pyarrow as pa
    from pyarrow import compute, types

    if types.is_integer(cells.type) or types.is_floating(cells.type):
        cells = cells.cast("string")
    if types.is_string(cells.type):
        cells = compute.replace_substring_regex(cells, _BASIC_DATE, r"\1-\2-\3")
        if compute.all(compute.match_substring_regex(cells, NUMBER)).as_py():
            cells = cells.cast("float64")
        else:
            cells = compute.replace_substring_regex(cells, _EXIF_DATE, r"\1-\2-\3")
            cells = compute.replace_substring_regex(cells, _FINER_THAN_MICROSECONDS, r"\1")
            try:
                cells = cells.cast(pa.timestamp("us"))
            except pa.ArrowInvalid:  # an offset
                cells = cells.cast(pa.timestamp("us", "UTC"))
    if types.is_floating(cells.type):
        _check_years(cells)
        micros = compute.round(compute.multiply(cells, 10**6)).cast("int64")
        return micros.cast(arrow_type("time"))
    zone = cells.type.tz if types.is_timestamp(cells.type) else None
    _check_years(cells.cast(pa.timestamp("s", zone), safe=False).cast("int64"))
    return cells.cast(pa.timestamp("us", zone), safe=False).cast(arrow_type("time"))


def _check_years(seconds: "pa.ChunkedArray") -> None:
    from pyarrow import compute

    _check(compute.greater_equal(seconds, _FIRST_SECOND))
    _check(compute.less(seconds, _END_SECOND))


def _check(fine: "pa.ChunkedArray") -> None:
    """Raise ValueError where a row is False; null is fine."""
    from pyarrow import compute

    if compute.all(fine).as_py() is False:
        raise ValueError("a cell is of another kind")
