"""Columns: cells of tables, keys of JSON, parts of names -> values, from images and from shards.

A cell is missing where it is empty, null or no number (NaN). A kind that is not named is inferred:
it is the one of all cells, and cells of different kinds are an error that names two of them. The
digits of a code (007, or more than fit 64 bits) are a text, and so is then each number beside them.

A sample's values are in its KEY.json in the shard. So whatever wrote a shard (this build, one that
was stopped, another machine, another program), its columns are read from it.
"""

import json
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import date, datetime
from decimal import Decimal
from pathlib import Path
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.columns import CONVERT, EXACT_FLOAT, STORED, Kind, Value, has_offset
from sslpipe.data.index import IMAGE_SUFFIXES
from sslpipe.errors import DataError, did_you_mean, shown
from sslpipe.files import Tree, parse_object
from sslpipe.portable import read_at
from sslpipe.sharding.columns import Columns, ColumnSpec, ColumnValues, Origin, check_name
from sslpipe.sharding.scan import Sample, scan_tar
from sslpipe.sharding.sources import Images, SourceOptions, open_file, readable

KINDS: tuple[Kind, ...] = get_args(Kind)
_DIGITS = re.compile(r"[+-]?[0-9]+")
_DATE = re.compile(r"\d{4}[-:]\d\d[-:]\d\d", re.ASCII)  # 20240501 may be anything
_TYPES: dict[type, Kind] = {int: "integer", float: "float", datetime: "time"}

MOST_JSON_BYTES = 2**24  # of a member; what is larger is no description of an image


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
        self.spec = spec
        self.origin = origin
        # numbers, times of a kind that is named are stored at once, all else by the cell's number
        self._stored = None if spec.kind in (None, "text") else STORED[str(spec.kind)]
        self._chunks: dict[str, list[NDArray[Any]]] = {}  # by split
        self._numbers: dict[tuple[type, Value], int] = {}  # of the distinct cells
        self._first: dict[str, tuple[Value, str]] = {}  # what an inferred one met -> where first
        self._offsets: dict[str, tuple[Value, str]] = {}  # of times: where first

    def add(self, split: str, cells: Iterable[object], names: Sequence[str]) -> None:
        """Add the cells of some samples, whose names are for messages."""
        chunk = np.full(len(names), -1, np.int64)  # -1: missing
        if self._stored:
            chunk = np.full(len(names), self._stored.missing, self._stored.dtype)
        for place, (cell, name) in enumerate(zip(cells, names, strict=True)):
            if (plain := self._plain(cell, name)) is None:
                continue
            if self._stored:
                chunk[place] = self._convert(str(self.spec.kind), plain, name)
                continue
            count = len(self._numbers)
            chunk[place] = self._numbers.setdefault((type(plain), plain), count)
            if self.spec.kind is None and chunk[place] == count:
                self._meet(plain, name)
        self._chunks.setdefault(split, []).append(chunk)

    def finish(self) -> dict[str, ColumnValues]:
        """Give the values by split, in the order in which they were added."""
        kind = self.spec.kind or self._inferred()
        if kind == "time" and len(self._offsets) == 2:
            raise self._mixed(self._offsets, "in UTC", "with an offset", "write the offset of all")
        values = list[Any]()
        strings = list[str]()
        if kind == "text":
            texts = [c.isoformat() if isinstance(c, datetime) else str(c) for _, c in self._numbers]
            strings = sorted(set(texts))
            ranks = {text: rank for rank, text in enumerate(strings)}
            values = [ranks[text] for text in texts]
        elif not self._stored:
            values = [CONVERT[kind](cell) for _, cell in self._numbers]
        # a missing one, -1, reads the last
        table = np.array([*values, STORED[kind].missing], STORED[kind].dtype)
        found = {split: np.concatenate(chunks) for split, chunks in self._chunks.items()}
        return {
            split: ColumnValues(kind, own if self._stored else table[own], strings)
            for split, own in found.items()
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
            return readable(cell) if cell.strip() else None
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
            value = CONVERT[kind](cell)
        except ValueError as error:
            remedy = f", or give {self.spec.name}:text"
            raise self._wrong(cell, name, f"{error}", remedy) from None
        if kind == "time" and isinstance(cell, str):
            what = "with an offset" if has_offset(cell) else "in UTC"
            self._offsets.setdefault(what, (cell, name))
        return value

    def _kind_of(self, cell: Value) -> str:
        """Return what a cell is: a kind, "code", or "nan" of a number or a name."""
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

    def _meet(self, cell: Value, name: str) -> None:
        """Remember who has a cell of its kind first."""
        kind = self._kind_of(cell)
        self._first.setdefault(kind, (cell, name))
        value = self._convert(kind, cell, name) if kind in CONVERT else 0
        if kind == "integer" and abs(value) > EXACT_FLOAT:
            self._first.setdefault("large integer", (cell, name))

    def _inferred(self) -> Kind:
        """Return the kind of all cells. Raises: DataError where there is more than one."""
        first = self._first
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


# --- columns of images and of shards


def columns_of_images(images: Mapping[str, Images], options: SourceOptions) -> dict[str, Columns]:
    """Read the columns of all splits of a source, so that each has one kind.

    Raises: DataError for a column that is not there, a name without a match, a value of another
    kind; all are named.
    """
    known = [*{name: None for own in images.values() for name in own.cells}, *options.in_names]
    for name in options.fields:
        if name not in known:
            raise DataError(
                f"--columns {name!r}: the source has no such column{did_you_mean(name, known)}; "
                f"it has: {', '.join(known) or 'none'}"
            )
    readers = _readers(options, next(iter(images.values())).origin)
    for split, own in images.items():
        matched = match_names(own.names, options.name_pattern)
        for field, reader in readers.items():
            reader.add(split, (matched if field in matched else own.cells)[field], own.names)
    return _by_split(images, readers)


def columns_of_tars(
    shards: Mapping[str, Sequence[Path]],
    options: SourceOptions,
    *,
    required: bool = True,
    workers: int = 2,
    suffixes: Sequence[str] = IMAGE_SUFFIXES,
) -> dict[str, Columns]:
    """Read columns from the samples of tars, by split, in order; nothing else of them is read.

    They are keys of KEY.json, and named groups of an image's name. Raises: DataError as
    `columns_of_images`, where a KEY.json is no object, and with `required` for a key in none.
    """
    fields = options.fields
    readers = _readers(options, "typed")

    def read(path: Path) -> tuple[list[str], dict[str, list[object]], set[str]]:
        samples = scan_tar(path, suffixes).samples
        trees = _read_json(path, samples) if fields else []
        cells = {field: [tree.get(field) for tree in trees] for field in fields}
        return [sample.name for sample in samples], cells, {k for tree in trees for k in tree}

    seen = set[str]()
    with ThreadPoolExecutor(workers) as pool:
        for split, paths in shards.items() if readers else ():
            for path, (names, cells, keys) in zip(paths, pool.map(read, paths), strict=True):
                matched = match_names(names, options.name_pattern)
                told = [f"{path.name} {name}" for name in names]
                for field, reader in readers.items():
                    reader.add(split, matched[field] if field in matched else cells[field], told)
                seen |= keys
    for field in fields:
        if required and field not in seen:
            raise DataError(
                f"--json-fields {field!r}: no sample has it{did_you_mean(field, seen)}; in their "
                f"JSON is: {', '.join(sorted(seen)[:20]) or 'nothing'}"
            )
    return _by_split(shards, readers)


def match_names(
    names: Sequence[str], pattern: re.Pattern[str] | None
) -> dict[str, list[str | None]]:
    """Match whole names; returns the named groups' texts, None where a group took no part.

    Raises: DataError for a name without a match.
    """
    if pattern is None:
        return {}
    matches = [pattern.fullmatch(name) for name in names]
    failed = [name for name, match in zip(names, matches, strict=True) if match is None]
    if failed:
        raise DataError(
            f"--name-pattern {pattern.pattern!r} does not match {len(failed):,} of {len(names):,} "
            f"names, such as {failed[0]!r}; a pattern matches the whole name, and |.* at its end "
            "lets others pass without values"
        )
    return {name: [match[name] for match in matches if match] for name in pattern.groupindex}


def parse_pattern(text: str) -> re.Pattern[str]:
    """Read --name-pattern. Raises: DataError where it is no pattern, or names no column."""
    try:
        pattern = re.compile(text, re.DOTALL)
    except re.error as error:
        raise DataError(f"--name-pattern {text!r} is no regular expression: {error}") from error
    if not pattern.groupindex:
        raise DataError(
            f"--name-pattern {text!r} names no column; a group with a name is one: (?P<theme>[^/]+)"
        )
    for name in pattern.groupindex:
        check_name(name)
    return pattern


def _read_json(path: Path, samples: Sequence[Sample]) -> list[Tree]:
    """Read the KEY.json of samples of a tar; {} where there is none. Raises: DataError."""
    trees = []
    with open_file(path) as file:
        for sample in samples:
            tree: Tree = {}
            if sample.json is not None:
                start, size = sample.json
                if size > MOST_JSON_BYTES:
                    raise DataError(f"{path}: {sample.key}.json has {size:,} bytes, too many")
                try:
                    tree = parse_object(read_at(file.fileno(), size, start) or b"{}")
                except ValueError as error:
                    raise DataError(f"{path}: {sample.key}.json: {error}") from None
            trees.append(tree)
    return trees


def to_json(columns: Columns, number: int) -> bytes:
    """Write a sample's values as its KEY.json; missing ones are left out; b'' where all are."""
    values = {name: column.cell(number) for name, column in columns.items()}
    tree = {name: value for name, value in values.items() if value is not None}
    return json.dumps(tree, separators=(",", ":")).encode() if tree else b""


def describe(columns: Mapping[str, Columns]) -> list[str]:
    """Return what was read, a line a column: name, kind, how many values are missing."""
    lines = []
    for name in {name: None for own in columns.values() for name in own}:
        own = [each[name] for each in columns.values() if name in each]
        missing = sum(int(c.missing.sum()) for c in own)
        total = sum(len(c.values) for c in own)
        rest = f", missing in {missing:,} of {total:,} samples" if missing else ""
        lines.append(f"column {name}: {own[0].kind}{rest}")
    return lines


def _readers(options: SourceOptions, origin: Origin) -> dict[str, CellReader]:
    """Make a reader for each column, by its field: those asked for, then all that names hold."""
    wanted = {spec.field: spec for spec in options.columns}
    for name in options.in_names:
        wanted.setdefault(name, ColumnSpec(name, name, None))
    for name in (names := [spec.name for spec in wanted.values()]):
        check_name(name, names)
        if names.count(name) > 1:
            raise DataError(f"two columns are named {name!r}; rename one")
    return {
        field: CellReader(spec, "name" if field in options.in_names else origin)
        for field, spec in wanted.items()
    }


def _by_split(splits: Iterable[str], readers: Mapping[str, CellReader]) -> dict[str, Columns]:
    finished = [(reader.spec.name, reader.finish()) for reader in readers.values()]
    return {
        split: {name: values[split] for name, values in finished if split in values}
        for split in splits
    }
