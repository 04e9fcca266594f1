"""Cells of a table, members of a JSON object, parts of a name -> the values of a column.

A cell is missing where it is empty, null or no number (NaN). A kind that is not named is inferred:
it is the one of all cells, and cells of different kinds are an error that names two of them.
"""

import math
import re
from collections.abc import Callable, Iterable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.columns import STORED, Kind
from sslpipe.data.values import (
    CONVERT,
    EXACT_FLOAT,
    Value,
    has_offset,
    to_float,
    to_integer,
    to_time,
)
from sslpipe.errors import DataError, did_you_mean, shown
from sslpipe.sharding.columns import ColumnValues, check_name

KINDS: tuple[Kind, ...] = get_args(Kind)
_CODE = re.compile(r"0[0-9]+")  # 007: digits that are no number
_DIGITS = re.compile(r"[+-]?[0-9]+")
_CODES = ("code", "long integer")  # the latter: beyond 64 bits; as floats, two would become one
_DATE = re.compile(r"\d{4}[-:]\d\d[-:]\d\d", re.ASCII)  # 20240501 may be anything
_NOTES = {"in UTC", "with an offset", "large integer"}  # of cells, beside their kinds
_TYPES: dict[type, Kind] = {int: "integer", float: "float", datetime: "time", str: "text"}

# typed: "12" is a text (JSON, parquet); table: it may be a number (CSV); name: so, and where one
# cell is a text, all are (folders, names of files)
Origin = Literal["typed", "table", "name"]


class ColumnSpec(NamedTuple):
    """A column that is asked for: its name here and in the source; kind None: inferred."""

    name: str
    field: str
    kind: Kind | None


def parse_columns(text: str, option: str) -> tuple[ColumnSpec, ...]:
    """Read "patient,age:integer,sku=Product id:text". Raises: DataError with the option's name."""
    specs: list[ColumnSpec] = []
    for part in text.split(","):
        name, renamed, field = part.strip().partition("=")
        rest, colon, kind = (field if renamed else name).rpartition(":")
        if colon and kind not in KINDS and not renamed:
            raise DataError(
                f"{option} {part.strip()!r}: {kind!r} is no kind{did_you_mean(kind, KINDS)}; "
                f"kinds: {', '.join(KINDS)}"
            )
        known = next((each for each in KINDS if colon and each == kind), None)
        field = rest if known else field if renamed else name
        name = name.strip() if renamed else field
        if not field:
            raise DataError(f"{option} {text!r} is no list of names, as in patient,age:integer")
        for spec in specs:
            if name == spec.name or field == spec.field:
                raise DataError(f"{option} {text!r} names {name!r} twice")
        check_name(name, [spec.name for spec in specs])
        specs.append(ColumnSpec(name, field, known))
    return tuple(specs)


class CellReader:
    """Collects the cells of one column, of any splits, and gives their values.

    Args:
        spec: Name and kind of the column.
        origin: What a cell that is a text may mean.

    Raises:
        DataError: From `add` and `finish`, for a cell that is of another kind; it is named.
    """

    def __init__(self, spec: ColumnSpec, origin: Origin) -> None:
        self.spec, self.origin = spec, origin
        self._chunks: list[tuple[str, NDArray[Any]]] = []  # split, values or codes
        self._codes: dict[str, int] = {}  # of the distinct texts
        self._first: dict[str, tuple[str, object]] = {}  # what was met -> where first, and the cell

    def add(self, split: str, cells: Iterable[object], names: Sequence[str]) -> None:
        """Add the cells of some samples, whose names are for messages."""
        rows = [self._plain(cell, name) for cell, name in zip(cells, names, strict=True)]
        kind = self.spec.kind
        if kind == "text" or (kind is None and all(r is None or type(r) is str for r in rows)):
            self._chunks.append((split, self._encode(rows, names)))
            return
        if kind is None:
            kind = self._kind_of(rows, names)
        values = np.full(len(rows), STORED[kind].missing, STORED[kind].dtype)
        for place, row in enumerate(rows):
            if row is not None:
                try:
                    values[place] = CONVERT[kind](row)
                except ValueError as error:
                    raise self._wrong(names[place], row, f"{error}", text_helps=True) from None
                if kind == "time" and isinstance(row, str):
                    self._meet_offset(row, names[place], row)
        self._chunks.append((split, values))

    def finish(self) -> dict[str, ColumnValues]:
        """Give the values by split, in the order in which they were added."""
        kind = self.spec.kind or self._inferred()
        if kind == "time" and "in UTC" in self._first and "with an offset" in self._first:
            raise self._mixed("in UTC", "with an offset", "write the offset of all")
        texts = list(self._codes)
        ranked = sorted(range(len(texts)), key=texts.__getitem__)
        table = np.full(len(texts) + 1, STORED[kind].missing, STORED[kind].dtype)
        if kind == "text":
            table[ranked] = np.arange(len(texts))
        elif self.spec.kind is None:
            table[:-1] = [CONVERT[kind](text) for text in texts]
        values: dict[str, list[NDArray[Any]]] = {}
        for split, chunk in self._chunks:
            if chunk.dtype == np.int32:  # codes of texts: no kind may be stored so
                chunk = table[chunk]  # a missing one, -1, reads the last
            elif kind == "float" and chunk.dtype != np.float64:
                chunk = np.where(chunk == STORED["integer"].missing, np.nan, chunk.astype(float))
            values.setdefault(split, []).append(chunk)
        strings = [texts[code] for code in ranked] if kind == "text" else []
        return {
            split: ColumnValues(kind, np.concatenate(chunks), strings)
            for split, chunks in values.items()
        }

    def _plain(self, cell: object, name: str) -> Value | None:
        """Return what a cell means whatever its library; None where it is missing."""
        if isinstance(cell, np.generic):
            cell = cell.item()
        if isinstance(cell, bytes):
            try:
                cell = cell.decode()
            except UnicodeDecodeError:
                raise self._wrong(name, cell, "is bytes that are no text in UTF-8") from None
        if isinstance(cell, str):
            return cell if cell.strip() else None
        if isinstance(cell, bool):
            return str(cell).lower()
        if cell is None or isinstance(cell, int | datetime):
            return cell
        if isinstance(cell, float | Decimal):
            cell = float(cell)
            return None if math.isnan(cell) else cell
        if isinstance(cell, date):
            return datetime(cell.year, cell.month, cell.day)
        raise self._wrong(name, cell, f"is a {type(cell).__name__}, no value of a column")

    def _encode(self, rows: Sequence[Any], names: Sequence[str]) -> NDArray[np.int32]:
        """Number texts by first appearance, -1 where one is missing."""
        codes = np.full(len(rows), -1, np.int32)
        for place, row in enumerate(rows):
            if row is not None:
                text = row.isoformat() if isinstance(row, datetime) else str(row)
                code = self._codes.get(text)
                if code is None:
                    code = self._codes[text] = len(self._codes)
                    if self.spec.kind is None:
                        self._look_at(text, names[place])
                codes[place] = code
        return codes

    def _look_at(self, text: str, name: str) -> None:
        """Note what a text may be, where its kind is to be inferred."""
        plain, found = text.strip(), "text"
        if _DATE.match(plain) and _reads(to_time, plain):
            found = "time"
            self._meet_offset(plain, name, text)
        elif self.origin != "typed":
            if plain.lower() == "nan":
                return
            if _CODE.fullmatch(plain):
                found = "code"
            elif _reads(to_integer, plain):
                found = "integer"
                self._meet_large(to_integer(plain), name)
            elif _DIGITS.fullmatch(plain):
                found = "long integer"
            elif _reads(to_float, plain):
                found = "float"
        self._meet(found, name, text)

    def _kind_of(self, rows: Sequence[Any], names: Sequence[str]) -> Kind:
        """Note the types of some cells and return the kind that holds those of this chunk."""
        found = set[Kind]()
        for row, name in zip(rows, names, strict=True):
            if row is not None:
                kind = _TYPES[type(row)]
                found.add(kind)
                if type(row) is int:
                    self._meet_large(row, name)
                self._meet(kind if kind != "time" else "moment", name, row)
        self._inferred()  # refuses a mixture
        return "float" if found == {"integer", "float"} else found.pop()

    def _inferred(self) -> Kind:
        """Return the kind of all that was met. Raises: DataError where there is more than one."""
        met = set(self._first) - _NOTES
        if {"long integer", "float"} <= met and self.origin != "name":
            raise self._mixed("long integer", "float", f"give {self.spec.name}:float to round")
        if met.intersection(_CODES):  # with 007, 12 is a text, too
            met = met - {*_CODES, "integer", "float"} | {"text"}
        if not met or met == {"text"}:
            return "text"
        if met == {"integer", "float"} and "large integer" in self._first:
            raise self._mixed("large integer", "float", f"give {self.spec.name}:float to round")
        if met <= {"integer", "float"}:
            return "float" if "float" in met else "integer"
        if met <= {"time", "moment"}:
            return "time"
        if self.origin == "name":
            return "text"
        one, *_, other = sorted(met, key=lambda kind: (kind == "text", kind))
        raise self._mixed(one, other, f"mend them, or give {self.spec.name}:text")

    def _meet(self, what: str, name: str, cell: object) -> None:
        self._first.setdefault(what, (name, cell))

    def _meet_large(self, number: int, name: str) -> None:
        if abs(number) > EXACT_FLOAT:
            self._meet("large integer", name, number)

    def _meet_offset(self, text: str, name: str, cell: object) -> None:
        self._meet("with an offset" if has_offset(text) else "in UTC", name, cell)

    def _wrong(
        self, name: str, cell: object, reason: str, *, text_helps: bool = False
    ) -> DataError:
        remedy = f", or give {self.spec.name}:text" if text_helps else ""
        return DataError(
            f"{name}: {self.spec.field} = {shown(cell)} {reason}; mend it, or "
            f"leave it empty{remedy}"
        )

    def _mixed(self, one: str, other: str, remedy: str) -> DataError:
        words = {"code": "text", "moment": "time"}
        (name, cell), (other_name, other_cell) = (
            next(self._first[each] for each in (what, *_CODES) if each in self._first)
            for what in (one, other)
        )
        return DataError(
            f"column {self.spec.name!r} mixes kinds: {name} holds {shown(cell)} "
            f"({words.get(one, one)}), {other_name} {shown(other_cell)} "
            f"({words.get(other, other)}); {remedy}"
        )


def _reads(convert: Callable[[Value], object], text: str) -> bool:
    try:
        convert(text)
    except ValueError:
        return False
    return True
