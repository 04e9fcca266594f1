"""Read a CSV file that lists images, a row an image; or a text file with a path a line."""

import codecs
import csv
import io
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import pyarrow as pa
from pyarrow import csv as arrow_csv
from pyarrow import types

from sslpipe.data.decode import first_line
from sslpipe.errors import DataError, shown
from sslpipe.portable import open_regular
from sslpipe.sharding.build_report import Group
from sslpipe.sharding.listed_files import Row, from_rows, place_of
from sslpipe.sharding.sources import (
    PLACE,
    Images,
    SourceOptions,
    SourceReader,
    is_image,
    readable,
    reported,
)
from sslpipe.sharding.split_names import name_splits
from sslpipe.sharding.tables import (
    a_row_an_image,
    check_column,
    image_columns,
    unread_columns,
    wanted_columns,
)
from sslpipe.sharding.walk import walk

_LABELLED = re.compile(r"(.+?)(?:\t\s*([^\t]+)|[\s,;]+(\S+))")  # a path and its class
LISTS_OF_PATHS = (".txt", ".lst")
_OTHER_TABLES = {  # what reads them
    (".json",): "pandas.read_json(FILE)",
    (".jsonl", ".ndjson"): "pandas.read_json(FILE, lines=True)",
    (".xlsx", ".xls", ".ods"): "pandas.read_excel(FILE)",
    (".feather",): "pandas.read_feather(FILE)",
    (".gz", ".zip", ".bz2", ".xz"): "pandas.read_csv(FILE)",
}
_BEGIN_BYTES = 512  # of a file, by which its kind is known
_PART_BYTES = 2**20  # read at a time
DELIMITERS = (",", ";", "\t", "|")
_SEP = re.compile(rb"\A(\xef\xbb\xbf)?\"?sep=.\"?(?=[\r\n])")  # first line of a table for Excel


def read_csv(options: SourceOptions) -> dict[str, Images]:
    """Read a CSV file, a row an image: a path or URL, and where they are named, label and split.

    Paths are relative to the CSV file, or to --root. A .txt file without such a header has a path a
    line; one that begins with the number of its rows is a table, as list_attr_celeba.txt.
    """
    if options.csv is None:
        raise DataError("--source=csv needs --csv FILE")
    _check_text(options.csv)
    root = options.root or options.csv.parent
    return _read_text(options, options.csv, root, _SEP.sub(b"", _read(options.csv), count=1))


def _read_text(options: SourceOptions, path: Path, root: Path, raw: bytes) -> dict[str, Images]:
    """Read what a CSV file or list holds, whose paths are relative to a folder."""
    by = options.split_column
    counted_table = _counted_table(raw, options.image_column)
    raw = counted_table or raw
    sign = _delimiter(raw, options.image_column)
    columns = _header(raw, sign)
    is_list = path.suffix.lower() in LISTS_OF_PATHS and not by and counted_table is None
    if is_list and options.image_column not in columns:
        text = raw.decode("utf-8-sig", errors="surrogateescape")  # Windows begins with a mark
        return _read_list(options, root, text)

    # the columns that are asked for, as texts, a row an image
    try:
        raw.decode()
    except UnicodeDecodeError as error:
        is_wide = raw[:2] in (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
        now = "utf-16" if is_wide else "cp1252"
        remedy = f"save it as UTF-8: iconv -f {now} -t utf-8 {path} > utf8.csv"
        raise DataError(f"cannot read {path}: {first_line(error)}; {remedy}") from error
    image_names = image_columns(options.image_column, columns)
    wanted = wanted_columns(options, image_names, columns)
    if by:
        wanted[by] = "--split-column"
    if options.image_column not in columns and any(is_image(Path(name)) for name in columns):
        raise DataError(
            f"{path} begins with {shown(columns[0])}, an image, and its first line names the "
            "columns: put one above it, such as path,label"
        )
    for column, option in wanted.items():
        check_column(path, column, columns, option)
    try:
        table = arrow_csv.read_csv(
            io.BytesIO(raw),
            # one block: a cell may have any size; one thread: it counts rows for messages
            arrow_csv.ReadOptions(block_size=len(raw) + 1, use_threads=False),
            arrow_csv.ParseOptions(delimiter=sign, newlines_in_values=True),
            arrow_csv.ConvertOptions(
                column_types=dict.fromkeys(wanted, pa.string()), include_columns=list(wanted)
            ),
        )
    except ValueError as error:
        remedy = ""
        if "columns" in str(error):
            remedy = "; give each row as many cells as the first has, with quotes around commas"
        raise DataError(f"cannot read {path}: {first_line(error)}{remedy}") from error
    table = a_row_an_image(table, image_names, options.image_column)
    if not len(table):
        raise DataError(f"{path} has no rows below its first line, which names the columns")

    # each row: its image, class and split
    paths = _filled(table, options.image_column, path)
    labels = [None] * len(table)
    if options.labels:
        labels = table.column(options.label_column).to_pylist()
    named = _filled(table, by, path) if by else [options.named_split or "train"] * len(table)
    splits = {name: name for name in named}
    where = ""
    if by:
        where = f"column {by!r} of {path}"
        splits = name_splits(splits, where)
    rows: dict[str, list[Row]] = {split: [] for split in splits.values()}
    places: dict[str, list[int]] = {split: [] for split in splits.values()}
    for place, (name, image, label) in enumerate(zip(named, paths, labels, strict=True)):
        rows[splits[name]].append((place_of(root, image), label))
        places[splits[name]].append(place)
    fields = [name for name in (*options.fields, PLACE) if name in table.column_names]
    cells = {split: table.take(numbers).select(fields) for split, numbers in places.items()}
    images = from_rows(options, root, rows, cells, where=where)
    read = {*image_names, *options.fields, by}
    unread = unread_columns(columns, {*read, options.label_column})
    return reported(images, [*unread, *_not_listed(options, images)])


def _not_listed(options: SourceOptions, images: Mapping[str, Images]) -> list[Group]:
    """Count the images below --root, where one is named, that no row lists, for the report."""
    root = options.root
    if root is None or options.split or not root.is_dir():
        return []
    listed = {name for split in images.values() for name in split.names}
    others = dict[str, str]()  # name of each, by its file, to which links may lead
    for entry in walk(root, suffixes=options.suffixes, without=options.out).entries:
        name = readable(os.path.relpath(entry.path, root))
        if not entry.reason and name not in listed:
            others.setdefault(os.path.realpath(entry.path), name)
    if others:  # but those that are listed by another path, which a link gives
        for split in images.values():
            for path in split.paths:
                others.pop(os.path.realpath(path), None)
    what = "images below --root that no row lists"
    names = others.values()
    return [Group(what=what, count=len(names), example=min(names))] if names else []


def _check_text(path: Path) -> None:
    """Raise DataError, with what reads it, where a table is no text by its name."""
    suffix = path.suffix.lower()
    if suffix == ".parquet":
        raise DataError(f"{path} is a parquet file; --source=parquet --root={str(path)!r} reads it")
    if suffix == ".xls" and path.is_file() and b"\0" not in _begin(path):
        return  # a table with tabs; Excel's own files begin with zero bytes
    if suffix == ".json" and path.is_file() and _holds(path, b'"annotations"'):
        is_list = _begin(path).lstrip(b"\xef\xbb\xbf \t\r\n").startswith(b"[")
        if is_list and _holds(path, b'"result"'):
            raise DataError(
                f"{path} is a list of tasks with annotations, as of Label Studio; export them as "
                "CSV, whose columns --image-column and --label-column name"
            )
        raise DataError(
            f"{path} has COCO's lists of images, annotations and categories; docs/your-data.md has "
            "the lines of Python that join them and build"
        )
    for suffixes, reads in _OTHER_TABLES.items():
        if suffix in suffixes:
            raise DataError(
                f"{path} is no CSV; give it as a DataFrame: sslpipe.build_dataset(OUT, {reads}, "
                f"root={str(path.parent)!r}, image_column=..., label_column=...)"
            )


def _begin(path: Path) -> bytes:
    """Return the first bytes of a file."""
    with path.open("rb") as file:
        return file.read(_BEGIN_BYTES)


def _holds(path: Path, word: bytes) -> bool:
    """Return whether a file has some bytes; reads it a part at a time, up to them."""
    end = b""
    with path.open("rb") as file:
        while part := file.read(_PART_BYTES):
            if word in end + part:
                return True
            end = part[-len(word) :]
    return False


@runtime_checkable
class Frame(Protocol):
    """A table in memory: a DataFrame of pandas (2.2 or newer) or polars, a Table of pyarrow."""

    def __arrow_c_stream__(self, requested_schema: object = None) -> object: ...


def frame_reader(frame: Frame) -> SourceReader:
    """Return what reads a table in memory, as `read_csv` a file; paths are relative to `root`."""

    def read(options: SourceOptions) -> dict[str, Images]:
        try:
            table = pa.table(frame)
        except (pa.ArrowInvalid, pa.ArrowTypeError) as error:  # objects, such as Paths
            remedy = "make a text of each, as in frame[column].astype(str)"
            raise DataError(f"the DataFrame: {error.args[0]}; {remedy}") from error
        text = io.BytesIO()
        arrow_csv.write_csv(_writable(table, options), text)
        name = Path("the DataFrame")  # in messages
        return _read_text(options, name, options.root or Path(), text.getvalue())

    return read


def _writable(table: Any, options: SourceOptions) -> Any:
    """Empty the columns that CSV has no text for. Raises: DataError for one that is asked for."""
    images = image_columns(options.image_column, table.column_names)
    asked = {*images, *options.fields, options.split_column}
    if options.labels:
        asked.add(options.label_column)
    for place, field in enumerate(table.schema):
        kind = field.type
        if not (types.is_nested(kind) or types.is_binary(kind) or types.is_large_binary(kind)):
            continue
        if field.name in asked:
            raise DataError(
                f"the DataFrame's column {field.name!r} holds {kind}, no texts or numbers; name "
                "another column, or write files and name their paths"
            )
        table = table.set_column(place, field.name, pa.nulls(len(table)))
    return table


def _read_list(options: SourceOptions, root: Path, text: str) -> dict[str, Images]:
    """Read a path a line, or in each a path and a class: `n01440764/1.JPEG 0`."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    named = [pair for line in lines if (pair := _path_and_class(line))]
    others = [line for line in lines if not _path_and_class(line)]
    if options.fields:
        raise DataError(f"--columns={options.fields[0]!r}: a list of paths has no columns")
    if others and not options.skip_missing:
        _check_plain(root, others[-1])  # the first may be a header
    rows: list[Row] = [(place_of(root, line), None) for line in lines]
    if not others:
        rows = [(place_of(root, path), label if options.labels else None) for path, label in named]
    images = from_rows(options, root, {options.named_split or "train": rows})
    return reported(images, _not_listed(options, images))


def _path_and_class(line: str) -> tuple[str, str] | None:
    """Return the path of an image and its class; None for another line, such as a path alone."""
    match = _LABELLED.fullmatch(line)
    if match is None or not is_image(Path(match[1])) or is_image(Path(line)):
        return None
    return match[1], match[2] or match[3]


def _check_plain(root: Path, line: str) -> None:
    """Raise DataError for a line of a list that is no path, and a word of which is one."""
    words = re.split(r"[\s,;]+", line)
    if len(words) == 1 or os.path.exists(root / line):
        return
    for word in words:
        if is_image(Path(word)) and os.path.isfile(root / word):
            raise DataError(
                f"{shown(line)} is neither a path nor a path and its class, and {shown(word)} of "
                "it is there; put commas between the words, and the names of the columns above, as "
                "in id,path, and name them with --image-column and --label-column"
            )


def _filled(table: Any, column: str, path: Path) -> list[str]:
    """Return the texts of a column that has one in each row. Raises: DataError with the row."""
    texts: list[str] = table.column(column).to_pylist()
    if "" in texts:
        row = texts.index("") + 2  # the first has the names
        raise DataError(f"{path}, row {row}: no value of {column!r}; fill it, or drop the row")
    return texts


def _read(path: Path) -> bytes:
    try:
        with open_regular(path, pipe=True) as file:
            return file.read()
    except OSError as error:
        reason = error.strerror or error
        raise DataError(f"cannot read {path}: {reason}; name the table with --csv") from error


def _counted_table(raw: bytes, image_column: str) -> bytes | None:
    """Return a table as CelebA's lists are, as CSV; None: it is another.

    Its first line is the number of its rows, the second one names the columns, in which the column
    of the images may be left out; blanks stand between cells. Fewer rows are the head of such a
    list.
    """
    first, _, rest = raw.partition(b"\n")
    if not re.fullmatch(rb"\s*\d{1,9}\s*", first) or re.search(rb"[,;\"]", rest):
        return None
    lines = [b",".join(line.split()) for line in rest.splitlines() if line.strip()]
    is_headless = len(lines) == int(first)
    if is_headless or not 2 <= len(lines) <= 1 + int(first):
        return None
    commas = {line.count(b",") for line in lines[1:]}
    if 0 in commas:  # a list of numbers, one a line
        return None
    if commas == {lines[0].count(b",") + 1}:
        lines[0] = image_column.encode() + b"," + lines[0]
    elif commas != {lines[0].count(b",")}:
        return None
    return b"\n".join(lines)


def _delimiter(raw: bytes, image_column: str) -> str:
    """Return the sign between columns: the one by which the header names those of the images.

    Where none does, the one that gives most columns.
    """
    headers = {sign: _header(raw, sign) for sign in DELIMITERS}
    several = {name.strip() for name in image_column.split(",")}
    naming = [
        sign
        for sign, names in headers.items()
        if image_column in names or several.issubset(names)  # front,back may be all columns
    ]
    return naming[0] if naming else max(DELIMITERS, key=lambda sign: len(headers[sign]))


def _header(raw: bytes, sign: str) -> list[str]:
    """Return the names of the columns between which stands this sign; [] where there are none."""
    text = io.TextIOWrapper(io.BytesIO(raw), "utf-8-sig", errors="replace", newline="")
    try:
        names = next((row for row in csv.reader(text, delimiter=sign) if row), [])
    except csv.Error:  # a cell of many letters: no name
        return []
    # a quote that nothing closes takes the rows, too
    return [] if any(name.count("\n") > 1 for name in names) else names
