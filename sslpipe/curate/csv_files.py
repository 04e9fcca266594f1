"""Tables of samples as CSV; each row names its split and its id."""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from sslpipe.errors import DataError
from sslpipe.portable import write_atomically


def write_table(path: Path, rows: Iterable[Mapping[str, Any]], columns: Sequence[str]) -> None:
    """Write these columns of rows as CSV; what is None or not there is an empty cell."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = io.StringIO()
    writer = csv.DictWriter(file, columns, lineterminator="\n", extrasaction="ignore")
    writer.writeheader()
    writer.writerows(rows)
    write_atomically(path, file.getvalue())


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Read rows of a CSV with these columns: all cells are text, an empty one is None.

    Raises:
        DataError: It cannot be read, a column is missing or there twice, or a row has more cells
            than columns have names.
    """
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = []
            for row in reader:
                if any(row.get(None) or ()):
                    raise csv.Error(f"line {reader.line_num} has more cells than columns")
                rows.append({name: cell or None for name, cell in row.items() if name})
            known = list(reader.fieldnames or ())
    except (OSError, ValueError, csv.Error) as error:
        text = f"cannot read the table {path}: {error}; save it as a CSV in UTF-8"
        raise DataError(text) from error
    if missing := ", ".join(name for name in columns if name not in known):
        names = ", ".join(known) or "none"
        raise DataError(f"{path} has no column {missing}; it has: {names}; separate them by commas")
    if twice := [name for name in known if name and known.count(name) > 1]:
        raise DataError(f"{path} has two columns {twice[0]!r}; rename one of them")
    return rows


def labelled_ids(path: Path, split: str, samples: int) -> set[int]:
    """Read which samples of a split have a label in a table with the columns split, id and label.

    Args:
        path: The table; an empty label is no label.
        split: Its name; "" where the samples are of none.
        samples: How many it has.

    Raises:
        DataError: As `read_table`, an id is not one of the split's samples, or none has a label.
    """
    labelled = set[int]()
    for number, row in enumerate(read_table(path, ("split", "id", "label")), 2):  # 1: the names
        if (row["split"] or "") != split or not (row["label"] or "").strip():
            continue
        try:
            value = float(row["id"])  # a spreadsheet may have made 7.0 of 7
        except (TypeError, ValueError):
            value = -1.0
        if not (0 <= value < samples and value.is_integer()):
            known = f"id {row['id']!r} is no sample; ids end at {samples - 1}"
            raise DataError(f"{path}, row {number}: {known}")
        labelled.add(int(value))
    if not labelled:
        raise DataError(f"{path}: its column label is empty for split {split!r}; fill it in first")
    return labelled
