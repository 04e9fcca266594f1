"""Tables of samples: CSV or parquet, by the name's end; each row names its split and its id."""

import csv
from collections.abc import Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from sslpipe.errors import DataError
from sslpipe.portable import replacing, write_atomically

Kinds = Mapping[str, type]  # column -> str, int or float
SUFFIXES = (".csv", ".parquet")


def can_parquet() -> bool:
    """Say whether pyarrow is installed."""
    return find_spec("pyarrow") is not None


def write_table(path: Path, rows: Sequence[Mapping[str, Any]], kinds: Kinds) -> None:
    """Write rows as CSV or parquet; None is an empty cell.

    Args:
        path: Ends in .csv or .parquet.
        rows: By column.
        kinds: Of the columns, in their order.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".csv":
        lines = _Lines()
        # with this line end the writer quotes cells that hold either character, a lone \r, too
        writer = csv.DictWriter(lines, list(kinds), lineterminator="\r\n")
        writer.writeheader()
        writer.writerows(rows)
        write_atomically(path, "".join(lines))
        return
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {str: pa.string(), int: pa.int64(), float: pa.float64()}
    schema = pa.schema([(name, types[kind]) for name, kind in kinds.items()])
    with replacing(path) as temporary:
        pq.write_table(pa.Table.from_pylist(list(rows), schema=schema), temporary)


class _Lines(list[str]):
    """What a CSV writer writes, a call a row; each ends in one newline."""

    def write(self, line: str) -> None:
        self.append(line.removesuffix("\r\n") + "\n")


def write_tables(stem: Path, rows: Sequence[Mapping[str, Any]], kinds: Kinds) -> bool:
    """Write STEM.csv; with pyarrow STEM.parquet, too: return whether it is there."""
    write_table(stem.with_suffix(".csv"), rows, kinds)
    parquet = stem.with_suffix(".parquet")
    if can_parquet():
        write_table(parquet, rows, kinds)
        return True
    parquet.unlink(missing_ok=True)  # of other rows
    return False


def read_table(path: Path, columns: Sequence[str]) -> list[dict[str, Any]]:
    """Read rows; of a CSV all cells are text, separated by commas, an empty one is None.

    Args:
        path: Ends in .csv or .parquet.
        columns: Which must be there.

    Raises:
        DataError: It cannot be read, a column is missing or there twice, or a row of a CSV has more
            cells than columns have names.
    """
    if path.suffix not in SUFFIXES:
        raise DataError(f"{path}: a table is named .csv or .parquet; give it one of these ends")
    if path.suffix == ".parquet" and not can_parquet():
        raise DataError(f"{path} needs pyarrow: pip install 'sslpipe[parquet]', or name a .csv")
    try:
        known, rows = _read_csv(path) if path.suffix == ".csv" else _read_parquet(path)
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is no text in UTF-8 ({error}); save it as a CSV in UTF-8"
        ) from error
    except (OSError, ValueError, csv.Error) as error:
        raise DataError(f"cannot read the table {path}: {error}") from error
    missing = ", ".join(name for name in columns if name not in known)
    if missing:
        other = len(known) == 1 and next((sign for sign in ";\t" if sign in known[0]), "")
        hint = f"it has: {', '.join(known) or 'none'}"
        if other:
            hint = f"its cells are separated by {other!r}: save it with commas"
        raise DataError(f"{path} has no column {missing}; {hint}")
    twice = [name for name in known if name and known.count(name) > 1]
    if twice:
        raise DataError(f"{path} has two columns {twice[0]!r}; rename one of them")
    return rows


def _read_csv(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader, rows = csv.DictReader(file), []
        for row in reader:
            if any(row.get(None) or ()):
                raise csv.Error(
                    f"line {reader.line_num} has more cells than columns have names; put a cell "
                    "that holds a comma in double quotes"
                )
            rows.append({name: cell or None for name, cell in row.items() if name})
        return list(reader.fieldnames or ()), rows


def _read_parquet(path: Path) -> tuple[list[str], list[dict[str, Any]]]:
    import pyarrow.parquet as pq

    table = pq.read_table(path)
    return table.column_names, table.to_pylist()


def sample_id(path: Path, number: int, cell: Any, samples: int) -> int:
    """Read the cell `id` of a table's row `number` (the first below the header is 2).

    Raises:
        DataError: It is none of the split's `samples` ids.
    """
    try:
        value = float(cell)  # a spreadsheet may have made 7.0 of 7
    except (TypeError, ValueError):
        value = -1.0
    if not (0 <= value < samples and value.is_integer()):
        raise DataError(f"{path}, row {number}: id {cell!r} is no sample; ids end at {samples - 1}")
    return int(value)


def read_labels(path: Path, split: str, samples: int) -> dict[int, int]:
    """Read the labels of a split: sample id -> number of its class, by the names in order.

    Args:
        path: A table with the columns split, id and label; an empty label is none, and spaces
            around one are no part of it.
        split: Its name.
        samples: How many it has.

    Raises:
        DataError: A sample has two labels, or none of the split has one.
    """
    labels: dict[int, str] = {}
    for number, row in enumerate(read_table(path, ("split", "id", "label")), 2):
        label = row["label"]
        label = "" if label is None else str(label).strip()
        if row["split"] != split or not label:
            continue
        key = sample_id(path, number, row["id"], samples)
        if labels.setdefault(key, label) != label:
            raise DataError(f"{path}, row {number}: sample {key} is {labels[key]!r} and {label!r}")
    if not labels:
        raise DataError(f"{path}: its column label is empty for split {split!r}; fill it in first")
    codes = {name: code for code, name in enumerate(sorted({*labels.values()}))}
    return {key: codes[name] for key, name in labels.items()}
