"""Columns: cells of tables, keys of JSON, parts of names -> values, from images and from shards.

A cell is missing where it is empty, null or no number (NaN). A kind that is not named is inferred:
it is the one of all cells, and cells of different kinds are an error that names two of them. The
digits of a code (007, 12e3 beside whole numbers, or more than a number holds) are a text, and so is
then each number beside them.

A sample's values are in its KEY.json in the shard, from which an index reads them, whatever program
wrote the shard; a build knows them.
"""

import json
import os
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute, types

from sslpipe.data.columns import INTEGER, NO_VALUE, NUMBER, Kind, convert, kind_of, plain
from sslpipe.errors import DataError, did_you_mean, shown
from sslpipe.files import Tree, parse_object
from sslpipe.sharding.build_report import GAPS
from sslpipe.sharding.columns import Columns, check_name
from sslpipe.sharding.scan import Sample
from sslpipe.sharding.sources import ColumnSpec, Images, Origin, SourceOptions, open_file, readable

# 20240501 may be anything
_DATE = r"^\d{4}[-:]\d\d[-:]\d\d([T ]\d\d(:\d\d(:\d\d(\.\d+)?)?)?(Z|[+-]\d\d(:?\d\d)?)?)?$"
_ZERO_PADDED = r"^[+-]?0[0-9]+$"
_LETTERED = r"^[0-9]+[eE][0-9]+$"  # no program writes a number so: 1.2e4, 12e+3
_LONG = r"^[+-]?[0-9]{16,}$"
_LARGEST_INTEGER = 2**63 - 1
_EXACT_FLOAT = 2**53  # integers up to it are floats, too

MOST_JSON_BYTES = 2**24  # of a member; what is larger is no description of an image


class RawColumn(NamedTuple):
    """The cells of one column in all splits, as their source has them."""

    spec: ColumnSpec
    origin: Origin
    cells: Any  # pyarrow.ChunkedArray of any type, or a list of what JSON may hold
    names: Sequence[str]  # of the samples, for messages

    def read(self) -> Any:
        """Return the values (pyarrow.ChunkedArray) of a kind: the one that is named, or inferred.

        Raises: DataError with a cell of another kind.
        """
        cells = self._as_arrow()
        if types.is_nested(cells.type) and self.spec.kind == "text":
            texts = [_text_of(value) for value in cells.to_pylist()]
            return pa.chunked_array([pa.array(texts, pa.string())])
        if types.is_nested(cells.type):
            row = int(np.flatnonzero(cells.is_valid())[0])
            raise self._wrong(row, _python(cells[row]), f"is a {cells.type}, no value of a column")
        kind = self.spec.kind or self._inferred(cells)
        try:
            return convert(cells, kind)
        except ValueError:
            row = _first_failure(len(cells), lambda end: convert(cells[:end], kind))
        try:
            convert(cells[row : row + 1], kind)
        except ValueError:
            raise self._wrong(row, _python(cells[row]), NO_VALUE[kind]) from None
        raise DataError(
            f"{self.names[row]}: {self.spec.field} = {shown(_python(cells[row]))} is written in "
            "another way than the times before it; write the offset of all from UTC, or of none"
        )

    def _as_arrow(self) -> Any:
        if not isinstance(self.cells, list):
            return self.cells
        values = [readable(value) if isinstance(value, str) else value for value in self.cells]
        try:
            return pa.chunked_array([pa.array(values)])
        except (pa.ArrowException, OverflowError):
            row = _first_failure(len(values), lambda end: pa.array(values[:end]))
        if self.spec.kind is not None:
            return pa.chunked_array([pa.array(list(map(_text_of, values)))])
        other = next(number for number in range(row + 1) if values[number] is not None)
        if other == row:
            raise self._wrong(row, values[row], "is too large, or of another type")
        raise self._mixed((other, values[other]), (row, values[row]))

    def _inferred(self, cells: Any) -> Kind:
        """Return the kind of all cells. Raises: DataError where there is more than one."""
        try:
            cells = plain(cells)
        except ValueError:
            return "text"  # which reading then refuses
        if types.is_integer(cells.type):
            return "integer"
        if types.is_floating(cells.type):
            return "float"
        if types.is_temporal(cells.type):
            return "time"
        if not types.is_string(cells.type):
            return "text"
        return self._kind_of_texts(compute.utf8_trim_whitespace(cells))

    def _kind_of_texts(self, cells: Any) -> Kind:
        """Return what all texts that are not blank can be read as."""
        rows = np.flatnonzero(compute.greater(compute.binary_length(cells), 0).fill_null(False))
        cells = cells.take(rows)

        def match(pattern: str) -> NDArray[np.bool_]:
            return np.asarray(compute.match_substring_regex(cells, pattern), bool)

        is_time = match(_DATE)
        is_whole = match(INTEGER)
        is_number = match(NUMBER)
        is_nan = is_number & match("^(?i:nan)$")
        most = _LARGEST_INTEGER if is_whole.sum() == is_number.sum() else _EXACT_FLOAT
        long = cells.filter(match(_LONG)).to_pylist()
        is_lettered = match(_LETTERED)
        is_code = match(_ZERO_PADDED).any() or any(
            len(text) > 20 or abs(int(text)) > most for text in long
        )
        if is_lettered.any() and is_whole.any():
            is_code |= (is_whole | is_lettered)[is_number].all()
        if self.origin == "typed" or is_code or not (is_number & ~is_nan).any():
            is_number[:] = False
        if len(rows) and is_time.all():
            return "time"
        if len(rows) and is_number.all():
            return "integer" if is_whole.all() else "float"
        is_odd = is_time if is_time.any() else is_number
        if is_odd.any() and self.origin != "name":
            pair = int(is_odd.argmax()), int(is_odd.argmin())
            one, other = ((int(rows[place]), cells[place].as_py()) for place in pair)
            raise self._mixed(one, other)
        return "text"

    def _mixed(self, one: tuple[int, object], other: tuple[int, object]) -> DataError:
        met = [f"{self.names[row]} holds {shown(value)}" for row, value in (one, other)]
        return DataError(
            f"column {self.spec.name!r} mixes kinds: {', '.join(met)}; mend them, or give "
            f"{self.spec.name}:text"
        )

    def _wrong(self, row: int, value: object, reason: str) -> DataError:
        return DataError(
            f"{self.names[row]}: {self.spec.field} = {shown(value)} {reason}; mend it, leave it "
            f"empty, or give {self.spec.name}:text"
        )


def _first_failure(count: int, attempt: Callable[[int], object]) -> int:
    """Find the row at which `attempt` of the rows before its argument begins to fail."""
    fine = 0
    failing = count
    while failing - fine > 1:
        middle = (fine + failing) // 2
        try:
            attempt(middle)
            fine = middle
        except (ValueError, pa.ArrowException, OverflowError):
            failing = middle
    return failing - 1


def _python(cell: Any) -> object:
    """Return a cell for a message."""
    try:
        return cell.as_py()
    except (ValueError, OverflowError):  # a time beyond Python's
        return f"{cell.value} of {cell.type}"


def _text_of(value: object) -> str | None:
    return value if value is None or isinstance(value, str) else json.dumps(value, default=str)


# --- columns of images and of shards


def columns_of_images(images: Mapping[str, Images], options: SourceOptions) -> dict[str, Columns]:
    """Read the columns of all splits of a source, so that each has one kind.

    Raises: DataError for a column that is not there, a name without a match, a value of another
    kind; all are named.
    """
    known = [*{name: None for split in images.values() for name in split.cells}, *options.in_names]
    for name in options.fields:
        if name not in known:
            raise DataError(
                f"--columns={name!r}: the source has no such column{did_you_mean(name, known)}; "
                f"it has: {', '.join(known) or 'none'}"
            )
    names = {key: split.names for key, split in images.items()}
    cells = {
        key: {**split.cells, **match_names(split.names, options.name_pattern)}
        for key, split in images.items()
    }
    origin = next(iter(images.values())).origin
    return _by_split(names, cells, options, origin)


class TarCells(NamedTuple):
    """What a tar has of the columns that are asked for."""

    names: list[str]  # of its samples, for messages
    cells: dict[str, list[Any]]  # of its samples, by column of the source
    keys: set[str]  # that any KEY.json has


def cells_of_tar(path: Path, samples: Sequence[Sample], options: SourceOptions) -> TarCells:
    """Read columns from samples: keys of KEY.json, and named groups of an image's name.

    Raises: DataError where a KEY.json is no object, or a name does not match.
    """
    if not options.fields and not options.in_names:  # no name of a million samples is kept
        return TarCells([], {}, set())
    names = [sample.name for sample in samples]
    trees = json_of_samples(path, samples) if options.fields else []
    cells: dict[str, list[Any]] = {
        field: [tree.get(field) for tree in trees] for field in options.fields
    }
    return TarCells(
        names=[f"{path.name} {name}" for name in names],
        cells={**cells, **match_names(names, options.name_pattern)},
        keys={key for tree in trees for key in tree},
    )


def columns_of_tars(
    tars: Mapping[str, Sequence[TarCells]], options: SourceOptions
) -> dict[str, Columns]:
    """Bring the cells of tars together, by split, in order. Raises: DataError for a key in none."""
    every = [tar for of_split in tars.values() for tar in of_split]
    seen = set[str]().union(*(tar.keys for tar in every))
    for field in options.fields:
        if field not in seen:
            raise DataError(
                f"--columns={field!r}: no sample has it{did_you_mean(field, seen)}; in their "
                f"JSON is: {', '.join(sorted(seen)[:20]) or 'nothing'}"
            )
    names = {
        split: [name for tar in of_split for name in tar.names] for split, of_split in tars.items()
    }
    fields = [*options.fields, *options.in_names]
    cells = {
        split: {field: [cell for tar in of_split for cell in tar.cells[field]] for field in fields}
        for split, of_split in tars.items()
    }
    return _by_split(names, cells, options, "typed")


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
            f"--name-pattern={pattern.pattern!r} does not match {len(failed):,} of {len(names):,} "
            f"names, such as {failed[0]!r}; a pattern matches the whole name, and |.* at its end "
            "lets others pass without values"
        )
    return {name: [match[name] for match in matches if match] for name in pattern.groupindex}


def parse_pattern(text: str | None) -> re.Pattern[str] | None:
    """Read --name-pattern. Raises: DataError where it is no pattern, or names no column."""
    if text is None:
        return None
    try:
        pattern = re.compile(text, re.DOTALL)
    except re.error as error:
        raise DataError(f"--name-pattern={text!r} is no regular expression: {error}") from error
    if not pattern.groupindex:
        raise DataError(
            f"--name-pattern={text!r} names no column; a group with a name is one: (?P<theme>[^/]+)"
        )
    for name in pattern.groupindex:
        check_name(name)
    return pattern


def json_of_samples(path: Path, samples: Sequence[Sample]) -> list[Tree]:
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
                    tree = parse_object(os.pread(file.fileno(), size, start) or b"{}")
                except ValueError as error:
                    raise DataError(f"{path}: {sample.key}.json: {error}") from None
            trees.append(tree)
    return trees


def describe(columns: Mapping[str, Columns]) -> list[str]:
    """Return what was read, a line a column: name, kind, how many values are missing."""
    lines = []
    for name in next(iter(columns.values())).column_names:
        cells_by_split = [each.column(name) for each in columns.values()]
        missing = sum(cells.null_count for cells in cells_by_split)
        total = sum(map(len, cells_by_split))
        rest = f", missing in {missing:,} of {total:,} samples" if missing else ""
        gaps = [gap for cells in cells_by_split for gap in _written_gaps(cells)]
        if gaps:
            rest += f"; {shown(gaps[0])} in {len(gaps):,} is a value like others, not a gap"
        lines.append(f"column {name}: {kind_of(cells_by_split[0])}{rest}")
    return lines


def _written_gaps(cells: Any) -> list[str]:
    """Return the texts of a column that mean that none is known; as groups they would be one."""
    if not types.is_string(cells.type):
        return []
    is_gap = compute.is_in(compute.utf8_lower(cells), pa.array([*GAPS, "unknown"]))
    gaps: list[str] = cells.filter(is_gap).to_pylist()
    return gaps


def _wanted(options: SourceOptions) -> list[ColumnSpec]:
    """List the columns to read: those asked for, then all that names hold."""
    asked = [spec.field for spec in options.columns]
    in_names = [ColumnSpec(name, name, None) for name in options.in_names if name not in asked]
    wanted = [*options.columns, *in_names]
    for name in (names := [spec.name for spec in wanted]):
        check_name(name, names)
        if names.count(name) > 1:
            raise DataError(f"two columns are named {name!r}; rename one")
    return wanted


def _joined(parts: Sequence[Any]) -> Any:
    """Join the cells of several splits: tables' own types, or a list of Python's."""
    if not all(isinstance(part, pa.ChunkedArray) for part in parts):
        return [cell for part in parts for cell in part]
    tables = [pa.table({"cells": part}) for part in parts]
    return pa.concat_tables(tables, promote_options="permissive").column("cells")


def _by_split(
    names: Mapping[str, Sequence[str]],
    cells: Mapping[str, Mapping[str, Any]],
    options: SourceOptions,
    origin: Origin,
) -> dict[str, Columns]:
    """Read each column over all splits, and cut it by split.

    Args:
        names: By split, of the samples, for messages.
        cells: By split and column of the source, what it has of the samples.
        options: Which columns are read.
        origin: What a text means that is in no name.
    """
    every = [name for of_split in names.values() for name in of_split]
    columns = {}
    for spec in _wanted(options):
        column = RawColumn(
            spec=spec,
            origin="name" if spec.field in options.in_names else origin,
            cells=_joined([of_split[spec.field] for of_split in cells.values()]),
            names=every,
        )
        columns[spec.name] = column.read()
    table = pa.table(columns)
    begin = 0
    tables = {}
    for split, of_split in names.items():
        tables[split] = table.slice(begin, len(of_split))
        begin += len(of_split)
    return tables
