"""Cells of a table, members of a JSON object, parts of a name -> the values of a column.

A cell is missing where it is empty, null or no number (NaN). A kind that is not named is inferred:
it is the one of all cells, and cells of different kinds are an error that names two of them. The
digits of a code (007, or more than fit 64 bits) are a text, and so is then each number beside them.
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
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

    Raises: DataError, from `add` and `finish`, for a cell that is of another kind; it is named.
    """

    def __init__(self, spec: ColumnSpec, origin: Origin) -> None:
        self.spec, self.origin = spec, origin
        self._chunks: dict[str, list[NDArray[np.int64]]] = {}  # numbers of cells, by split
        self._numbers: dict[tuple[type, Value], int] = {}  # of the distinct ones
        self._cells: list[tuple[Value, str]] = []  # these, and who has each first

    def add(self, split: str, cells: Iterable[object], names: Sequence[str]) -> None:
        """Add the cells of some samples, whose names are for messages."""
        numbers = np.full(len(names), -1, np.int64)  # -1: missing
        for place, (cell, name) in enumerate(zip(cells, names, strict=True)):
            if (plain := self._plain(cell, name)) is not None:
                numbers[place] = self._numbers.setdefault((type(plain), plain), len(self._cells))
                if numbers[place] == len(self._cells):
                    self._cells.append((plain, name))
        self._chunks.setdefault(split, []).append(numbers)

    def finish(self) -> dict[str, ColumnValues]:
        """Give the values by split, in the order in which they were added."""
        kind = self.spec.kind or self._inferred()
        strings: list[str] = []
        if kind == "text":
            texts = [c.isoformat() if isinstance(c, datetime) else str(c) for c, _ in self._cells]
            strings = sorted(set(texts))
            ranks = {text: rank for rank, text in enumerate(strings)}
            values: list[Any] = [ranks[text] for text in texts]
        else:
            values = [self._convert(kind, *cell) for cell in self._cells]
        if kind == "time":
            first: dict[str, tuple[Value, str]] = {}
            for cell in self._cells:
                if isinstance(cell[0], str):
                    first.setdefault("with an offset" if has_offset(cell[0]) else "in UTC", cell)
            if len(first) == 2:
                raise self._mixed(first, "in UTC", "with an offset", "write the offset of all")
        # a missing one, -1, reads the last
        table = np.array([*values, STORED[kind].missing], STORED[kind].dtype)
        return {
            split: ColumnValues(kind, table[np.concatenate(chunks)], strings)
            for split, chunks in self._chunks.items()
        }

    def _plain(self, cell: object, name: str) -> Value | None:
        """Return what a cell means whatever its library; None where it is missing."""
        if isinstance(cell, np.generic):
            cell = cell.item()
        if isinstance(cell, bytes):
            try:
                cell = cell.decode()
            except UnicodeDecodeError:
                raise self._wrong(cell, name, "is bytes that are no text in UTF-8") from None
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
        raise self._wrong(cell, name, f"is a {type(cell).__name__}, no value of a column")

    def _convert(self, kind: str, cell: Value, name: str) -> int | float:
        try:
            return CONVERT[kind](cell)
        except ValueError as error:
            remedy = f", or give {self.spec.name}:text"
            raise self._wrong(cell, name, f"{error}", remedy) from None

    def _kind_of(self, cell: Value) -> str:
        """Say what a cell is: a kind, "code", or "nan" of a number or a name."""
        if not isinstance(cell, str):
            return _TYPES.get(type(cell), "text")
        plain = cell.strip()
        if _DATE.match(plain) and _reads("time", plain):
            return "time"
        if self.origin == "typed":
            return "text"
        if plain.lower() == "nan":
            return "nan"
        if _DIGITS.fullmatch(plain):
            padded = plain.startswith("0") and len(plain) > 1
            return "code" if padded or not _reads("integer", plain) else "integer"
        return "float" if _reads("float", plain) else "text"

    def _inferred(self) -> Kind:
        """Return the kind of all cells. Raises: DataError where there is more than one."""
        first: dict[str, tuple[Value, str]] = {}  # what is met -> where first
        for cell, name in self._cells:
            kind = self._kind_of(cell)
            first.setdefault(kind, (cell, name))
            value = self._convert(kind, cell, name) if kind in CONVERT else 0
            if kind == "integer" and abs(value) > EXACT_FLOAT:
                first.setdefault("large integer", (cell, name))
        met = {*first} - {"large integer"}
        if "code" in met:
            met = met - {"code", "nan", "integer", "float"} | {"text"}
        elif met & {"integer", "float"} and "nan" in met:
            met |= {"float"}
        elif "nan" in met:
            met |= {"text"}
        met -= {"nan"}
        if met == {"integer", "float"}:
            if "large integer" in first:
                remedy = f"give {self.spec.name}:float to round"
                raise self._mixed(first, "large integer", "float", remedy)
            return "float"
        if len(met) > 1 and self.origin != "name":
            one, *_, other = sorted(met, key=lambda kind: (kind == "text", kind))
            raise self._mixed(first, one, other, f"mend them, or give {self.spec.name}:text")
        return next((kind for kind in KINDS if met == {kind}), "text")

    def _wrong(self, cell: object, name: str, reason: str, remedy: str = "") -> DataError:
        return DataError(
            f"{name}: {self.spec.field} = {shown(cell)} {reason}; mend it, or "
            f"leave it empty{remedy}"
        )

    def _mixed(
        self, first: Mapping[str, tuple[Value, str]], one: str, other: str, remedy: str
    ) -> DataError:
        met = []
        for what in (one, other):  # no text may have been met, but what stands for one
            cell, name = next(first[each] for each in (what, "code", "nan") if each in first)
            met.append(f"{name} holds {shown(cell)} ({what})")
        return DataError(f"column {self.spec.name!r} mixes kinds: {', '.join(met)}; {remedy}")


def _reads(kind: str, text: str) -> bool:
    try:
        CONVERT[kind](text)
    except ValueError:
        return False
    return True
