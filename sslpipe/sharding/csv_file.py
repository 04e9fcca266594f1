"""Read a CSV file that lists images, a row an image."""

import csv
import io
from pathlib import Path
from typing import NamedTuple

from sslpipe.errors import DataError, did_you_mean
from sslpipe.portable import open_regular
from sslpipe.sharding.sources import Images, SourceOptions, from_files

# delimiter -> what it is called in a sentence, and how it is written after --delimiter
_DELIMITERS = {
    ",": ("commas", "','"),
    ";": ("semicolons", "';'"),
    "\t": ("tabs", "tab"),
    "|": ("vertical bars", "'|'"),
}
_NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";"}


class _Row(NamedTuple):
    """A row, as far as it is used: image's path, class (None: none), split and other columns."""

    path: str
    label: str | None
    split: str
    cells: dict[str, str | None]  # None: the row is too short


def read_csv(options: SourceOptions) -> dict[str, Images]:
    """Read a CSV file, a row an image: a path, and where they are named, a label and a split.

    Paths are relative to the CSV file, or to --root.
    """
    if options.csv is None:
        raise DataError("--source csv needs --csv FILE")
    rows = _read_rows(options, options.csv)
    if not rows:
        raise DataError(f"{options.csv} has no rows below its first line, which names the columns")
    # rows by split; labels of all splits together name the classes
    root = options.root or options.csv.parent
    groups: dict[str, list[_Row]] = {}
    for row in rows:
        groups.setdefault(row.split, []).append(row)
    if options.split_column and options.split:
        if options.split not in groups:
            raise DataError(f"{options.csv}: no row has {options.split_column} = {options.split!r}")
        groups = {options.split: groups[options.split]}
    all_labels = [row.label for row in rows]
    return {
        split: from_files(
            root,
            [root / row.path for row in members],
            [row.label for row in members],
            all_labels,
            skip_missing=options.skip_missing,
            cells={name: [row.cells[name] for row in members] for name in options.fields},
            origin="table",
        )
        for split, members in groups.items()
    }


def _read_rows(options: SourceOptions, path: Path) -> list[_Row]:
    """Read the columns that are asked for. Raises: DataError with file, line and remedy."""
    delimiter = _delimiter(options, path)
    label_column = options.label_column if options.labels else None
    wanted = [
        ("--image-column", options.image_column),
        ("--label-column", label_column),
        ("--split-column", options.split_column),
        *(("--columns", name) for name in options.fields),
    ]
    rows = []
    try:
        raw = open_regular(path, pipe=True)
        with io.TextIOWrapper(raw, encoding="utf-8-sig", newline="") as file:
            reader = csv.DictReader(file, delimiter=delimiter)
            columns = list(reader.fieldnames or ())
            for option, column in wanted:
                if column is not None and column not in columns:
                    raise DataError(_no_column(path, option, column, columns, delimiter))
                if column is not None and columns.count(column) > 1:
                    raise DataError(
                        f"{path} has {columns.count(column)} columns {column!r}, and {option} "
                        "reads one; rename the others"
                    )
            for cells in reader:
                for column in filter(None, (options.image_column, options.split_column)):
                    if not cells[column]:
                        where = f"{path}, line {reader.line_num}"
                        raise DataError(f"{where}: no value of {column!r}; fill it, or drop it")
                split = cells[options.split_column] if options.split_column else options.split
                label = cells[label_column] or None if label_column else None
                own = {name: cells[name] for name in options.fields}
                rows.append(_Row(cells[options.image_column], label, split or "train", own))
    except UnicodeDecodeError as error:
        raise DataError(f"cannot read {path}: {error}; save it as UTF-8") from error
    except (OSError, csv.Error) as error:
        raise DataError(f"cannot read {path}: {error}") from error
    return rows


def _delimiter(options: SourceOptions, path: Path) -> str:
    if options.delimiter is None:
        return "\t" if path.suffix.lower() == ".tsv" else ","
    delimiter = _NAMES.get(options.delimiter, options.delimiter)
    if len(delimiter) != 1 or delimiter in '"\r\n\0':
        raise DataError(
            f"--delimiter {options.delimiter!r} is not one character; for example ';' or tab"
        )
    return delimiter


def _no_column(path: Path, option: str, column: str, columns: list[str], delimiter: str) -> str:
    """Say that a column is not there and, where another delimiter is meant, which one."""
    first_line = delimiter.join(columns)
    for other, (name, argument) in _DELIMITERS.items():
        cells = [cell.strip('" ') for cell in first_line.split(other)]
        if other != delimiter and len(cells) > 1 and (column in cells or len(columns) == 1):
            return (
                f"{path} has no column {column!r}: its first line is separated by {name}; give "
                f"--delimiter {argument}, and its columns are: {', '.join(cells)}"
            )
    without = ", or give --no-labels" if option == "--label-column" else ""
    return (
        f"{path} has no column {column!r}{did_you_mean(column, columns)}; "
        f"it has: {', '.join(columns) or 'none'}; name one with {option}{without}"
    )
