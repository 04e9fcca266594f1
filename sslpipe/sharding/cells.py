"""Cells of a table, members of a JSON object, parts of a name -> the values of a column.

A cell is missing where it is empty, null or no number (NaN). A kind that is not named is inferred:
it is the one of all cells, and cells of different kinds are an error that names two of them. The
digits of a code (007, or more than fit 64 bits) are a text, and so is then each number beside them.
"""

import math
import re
from collections.abc import Iterable, Sequence
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.columns import STORED, Kind
from sslpipe.data.values import CONVERT, EXACT_FLOAT, Value, has_offset
from sslpipe.errors import DataError, did_you_mean, shown
from sslpipe.sharding.columns import ColumnValues, check_name

KINDS: tuple[Kind, ...] = get_args(Kind)
_DIGITS = re.compile(r"[+-]?[0-9]+")
_DATE = re.compile(r"\d{4}[-:]\d\d[-:]\d\d", re.ASCII)  # 20240501 may be anything
_TYPES: dict[type, Kind] = {int: "integer", float: "float", datetime: "time"}

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
        self._chunks: list[tuple[str, NDArray[Any]]] = []  # split, values or numbers of cells
        self._cells: dict[tuple[type, Value], int] = {}  # the distinct ones -> their numbers
        self._first: dict[str, tuple[str, object]] = {}  # what was met -> where first, and the cell

    def add(self, split: str, cells: Iterable[object], names: Sequence[str]) -> None:
        """Add the cells of some samples, whose names are for messages."""
        rows = [self._plain(cell, name) for cell, name in zip(cells, names, strict=True)]
        kind = self.spec.kind
        stored = kind is not None and kind != "text"  # else by number, until all are there
        values = np.full(len(rows), -1, np.int64)
        if stored:
            values = np.full(len(rows), STORED[str(kind)].missing, STORED[str(kind)].dtype)
        for place, (row, name) in enumerate(zip(rows, names, strict=True)):
            if row is not None:
                number = self._convert(str(kind), row, name) if stored else self._number(row, name)
                values[place] = number
        self._chunks.append((split, values))

    def finish(self) -> dict[str, ColumnValues]:
        """Give the values by split, in the order in which they were added."""
        kind = self.spec.kind or self._inferred()
        if kind == "time" and {"in UTC", "with an offset"} <= self._first.keys():
            raise self._mixed("in UTC", "with an offset", "write the offset of all")
        strings: list[str] = []
        table = np.full(len(self._cells) + 1, STORED[kind].missing, STORED[kind].dtype)
        if kind == "text":
            texts = [_text(cell) for _, cell in self._cells]
            strings = sorted(set(texts))
            ranks = {text: rank for rank, text in enumerate(strings)}
            table[:-1] = [ranks[text] for text in texts]
        elif self.spec.kind is None:
            table[:-1] = [CONVERT[kind](cell) for _, cell in self._cells]
        values: dict[str, list[NDArray[Any]]] = {}
        for split, chunk in self._chunks:
            by_number = self.spec.kind in (None, "text")  # a missing one, -1, reads the last
            values.setdefault(split, []).append(table[chunk] if by_number else chunk)
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

    def _convert(self, kind: str, row: Value, name: str) -> int | float:
        try:
            value = CONVERT[kind](row)
        except ValueError as error:
            text = f", or give {self.spec.name}:text"
            raise self._wrong(name, row, f"{error}", text) from None
        if kind == "time" and isinstance(row, str):
            self._meet("with an offset" if has_offset(row) else "in UTC", name, row)
        return value

    def _number(self, row: Value, name: str) -> int:
        """Number a cell by first appearance; note its kind, where that is to be inferred."""
        number = self._cells.setdefault((type(row), row), len(self._cells))
        if self.spec.kind is None and number == len(self._cells) - 1:
            self._meet(self._kind_of(row, name), name, row)
        return number

    def _kind_of(self, row: Value, name: str) -> str:
        """Say what a cell is: a kind, "code", "large integer", or "nan" of a number or a name."""
        kind: str = _TYPES.get(type(row), "text")
        if isinstance(row, str):
            plain = row.strip()
            if _DATE.match(plain) and _reads("time", plain):
                kind = "time"
            elif self.origin != "typed":
                if plain.lower() == "nan":
                    kind = "nan"
                elif _DIGITS.fullmatch(plain):
                    padded = plain.startswith("0") and len(plain) > 1
                    kind = "code" if padded or not _reads("integer", plain) else "integer"
                elif _reads("float", plain):
                    kind = "float"
        if kind in CONVERT:
            value = self._convert(kind, row, name)
            if kind == "integer" and abs(value) > EXACT_FLOAT:
                self._meet("large integer", name, row)
        return kind

    def _inferred(self) -> Kind:
        """Return the kind of all that was met. Raises: DataError where there is more than one."""
        met = {*self._first} - {"in UTC", "with an offset", "large integer"}
        if "code" in met:
            met = met - {"code", "nan", "integer", "float"} | {"text"}
        elif met & {"integer", "float"} and "nan" in met:
            met |= {"float"}
        elif "nan" in met:
            met |= {"text"}
        met -= {"nan"}
        if met == {"integer", "float"}:
            if "large integer" in self._first:
                raise self._mixed("large integer", "float", f"give {self.spec.name}:float to round")
            return "float"
        if len(met) > 1 and self.origin != "name":
            one, *_, other = sorted(met, key=lambda kind: (kind == "text", kind))
            raise self._mixed(one, other, f"mend them, or give {self.spec.name}:text")
        return next((kind for kind in KINDS if met == {kind}), "text")

    def _meet(self, what: str, name: str, cell: object) -> None:
        self._first.setdefault(what, (name, cell))

    def _wrong(self, name: str, cell: object, reason: str, remedy: str = "") -> DataError:
        return DataError(
            f"{name}: {self.spec.field} = {shown(cell)} {reason}; mend it, or "
            f"leave it empty{remedy}"
        )

    def _mixed(self, one: str, other: str, remedy: str) -> DataError:
        met = []
        for what in (one, other):  # no text may have been met, but what stands for one
            found = next(each for each in (what, "code", "nan") if each in self._first)
            name, cell = self._first[found]
            met.append(f"{name} holds {shown(cell)} ({what})")
        return DataError(f"column {self.spec.name!r} mixes kinds: {', '.join(met)}; {remedy}")


def _text(cell: Value) -> str:
    return cell.isoformat() if isinstance(cell, datetime) else str(cell)


def _reads(kind: str, text: str) -> bool:
    try:
        CONVERT[kind](text)
    except ValueError:
        return False
    return True
