"""What tables of all kinds have that list images: columns, of which some hold images."""

from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import compute, types

from sslpipe.errors import DataError, did_you_mean
from sslpipe.sharding.build_report import Group
from sslpipe.sharding.sources import PLACE, SourceOptions

ROW = "row"  # column of the rows of several images, for [pairs]


def image_columns(wanted: str, column_names: Sequence[str]) -> list[str]:
    """Return the column of the images, or several, between which are commas: front,back."""
    return [wanted] if wanted in column_names else [name.strip() for name in wanted.split(",")]


def wanted_columns(
    options: SourceOptions, images: Sequence[str], column_names: Sequence[str]
) -> dict[str, str]:
    """Return the columns to read, but for ROW, which rows of several images get; by option."""
    is_added = len(images) > 1 and ROW not in column_names
    fields = [name for name in options.fields if not (is_added and name == ROW)]
    wanted = {name: "--columns" for name in fields}
    wanted |= dict.fromkeys(images, "--image-column")
    if options.labels:
        wanted[options.label_column] = "--label-column"
    return wanted


def unread_columns(names: Sequence[str], read: Collection[str | None]) -> list[Group]:
    """Count the columns, or keys of JSON, that are not among those read, for the report."""
    others = [name for name in names if name not in read]
    what = "columns that no option names"
    return [Group(what=what, count=len(others), example=others[0])] if others else []


def a_row_an_image(table: Any, columns: Sequence[str], name: str) -> Any:
    """Repeat the rows for each column of images, which becomes the column `name`.

    A row without an image in a column is not repeated for it. All have the number of their row in
    ROW, unless the table has such a column. Raises: pyarrow.ArrowException where columns differ in
    their types.
    """
    if len(columns) < 2:
        return table
    parts = []
    for column in columns:
        cells = table.column(column)
        places = pa.array(range(len(table)))
        part = table.append_column(name, cells).append_column(PLACE, places)
        if ROW not in table.column_names:
            part = part.append_column(ROW, places)
        is_there = cells.is_valid()
        if types.is_string(cells.type):
            is_there = compute.and_kleene(is_there, compute.not_equal(cells, ""))
        parts.append(part.filter(is_there))
    return pa.concat_tables(parts)


def check_column(path: Path, column: str, columns: Sequence[str], option: str) -> None:
    """Raise DataError unless a table has one column of this name."""
    if column not in columns:
        raise DataError(
            f"{path} has no column {column!r}{did_you_mean(column, columns)}; it has: "
            f"{', '.join(columns) or 'none'}; name one with {option}"
            + ", or give --no-labels"
            * (option == "--label-column")
        )
    if columns.count(column) > 1:
        raise DataError(
            f"{path} has {columns.count(column)} columns {column!r}, and {option} reads one; "
            "rename the others"
        )
