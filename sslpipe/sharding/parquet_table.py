"""Read parquet and Arrow files of images, a row an image, as Hugging Face has them."""

import json
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from os.path import isfile
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from pyarrow import compute, ipc, parquet, types

from sslpipe.data.decode import first_line
from sslpipe.errors import DataError, listed
from sslpipe.files import Tree, read_json
from sslpipe.portable import open_regular
from sslpipe.sharding.listed_files import (
    check_missing,
    listed_again,
    missing_files,
    place_of,
    read_place,
)
from sslpipe.sharding.sources import (
    PLACE,
    Images,
    SourceOptions,
    chosen_splits,
    distinct_names,
    merged_classes,
    number_labels,
    readable,
    reported,
    root_folder,
    unnamed_split,
)
from sslpipe.sharding.split_names import GENERIC, missing_shards, split_of, without_number
from sslpipe.sharding.tables import (
    a_row_an_image,
    check_column,
    image_columns,
    unread_columns,
    wanted_columns,
)
from sslpipe.sharding.walk import fetch_hint

_SAY_NOTHING = GENERIC | {"", "part", "parts", "shard", "chunk", "file"}  # beginnings of names
MOST_UNNAMED = 2**20  # classes without names; a higher label is an id, not the number of a class

Labels = NDArray[np.int64] | list[str | None]  # numbers of classes (-1: none), or their names


def read_parquet(options: SourceOptions) -> dict[str, Images]:
    """Read parquet or .arrow files under --root, or one; the image and label columns by name.

    The split of a file is how its name begins (train-00000-of-00002.parquet), else the folder that
    is named like one (default/train/0000.parquet; train/data-00000-of-00001.arrow of
    `save_to_disk`). An image is bytes, a path from --root, or a
    struct of both. The encoded images of a split are held in memory while its shards are written.
    Labels are integers, named by the ClassLabel feature in the files' metadata where there is one,
    or texts, which are the names.
    """
    root, files = _files_by_split(options)
    groups = {split: [file.path for file in of_split] for split, of_split in files.items()}
    if not groups:
        raise DataError(f"{root} has no .parquet or .arrow file")
    chosen = {split: groups[split] for split in chosen_splits(options, groups, root)}
    _check_one_configuration(root, [file for split in chosen for file in files[split]])
    column = options.image_column if options.image_column != "path" else "image"
    tables = {split: _read_split(paths, column, options) for split, paths in chosen.items()}
    labels = _labels_by_split(root, groups, tables, options)
    cells = {split: _ImageCells(table, column, root, split) for split, table in tables.items()}
    all_texts = [name for each in labels.values() if isinstance(each, list) for name in each]
    images = {
        split: _images(
            root=root,
            split=split,
            table=table,
            cells=cells[split],
            labels=labels.get(split),
            all_texts=all_texts,
            options=options,
        )
        for split, table in tables.items()
    }
    of_files = {
        split: each for split, each in images.items() if each.are_places and cells[split].is_listed
    }
    images |= listed_again(of_files)
    firsts = [paths[0] for paths in chosen.values()]
    column_names = [*dict.fromkeys(name for path in firsts for name in _columns(path))]
    read = {*image_columns(column, column_names), options.label_column, *options.fields}
    skipped = [*missing_files(images), *unread_columns(column_names, read)]
    return reported(images, skipped, missing_shards(chain.from_iterable(chosen.values())))


# --- which files there are


class _File(NamedTuple):
    """A parquet file and the folder of its data set, below --root: a configuration of the hub."""

    path: Path
    configuration: str


def _files_by_split(options: SourceOptions) -> tuple[Path, dict[str, list[_File]]]:
    """Return the folder of --root, and the files below it by split. Raises: DataError."""
    if options.root is None:
        raise DataError(
            "this source needs --root DIR, a folder of .parquet or .arrow files; of a data set of "
            "the hub: `hf download USER/NAME --repo-type dataset --local-dir DIR`"
        )
    if options.root.is_file():
        root = options.root.parent
        files = {split_of(without_number(options.root.stem)) or "train": [_File(options.root, "")]}
    else:
        root = root_folder(options)
        files = _find_files(root)
    return root, unnamed_split(files, options)


def _find_files(root: Path) -> dict[str, list[_File]]:
    """Find the files below a folder by split, none in hidden folders."""
    groups: dict[str, list[_File]] = {}
    for path in sorted([*root.rglob("*.parquet"), *_arrow_files(root)]):
        folders = path.relative_to(root).parts[:-1]
        is_ours = (path.parent / "dataset.json").exists()  # columns of a data set
        if is_ours or any(name.startswith(".") for name in (*folders, path.name)):
            continue
        begin = without_number(path.stem)
        split = split_of(begin)
        named = [k for k, folder in enumerate(folders) if split_of(folder)]
        if split is None and named:
            split = split_of(folders[named[-1]])
            folders = folders[: named[-1]]
        elif split is None and begin.lower() not in _SAY_NOTHING:
            split = begin
        elif split is None and folders:
            split = folders[-1]
            folders = folders[:-1]
        groups.setdefault(split or "train", []).append(_File(path, "/".join(folders)))
    return groups


def _arrow_files(root: Path) -> list[Path]:
    """Find .arrow files; beside a state.json of `save_to_disk` those that it names.

    Others beside it are caches of `Dataset.map`.

    Raises: DataError where a file is missing, or the rows are chosen by a file of indices.
    """
    arrow_files = set(root.rglob("*.arrow"))
    for state in sorted(root.rglob("state.json")):
        tree = read_json(state, Tree, remedy="save the data set again")
        files = tree.get("_data_files")
        if not isinstance(files, list):
            continue  # of another program
        if tree.get("_indices_data_files") or tree.get("_indices_files"):
            raise DataError(
                f"{state}: rows are chosen by a file of indices, which is not read; save "
                "dataset.flatten_indices()"
            )
        named = {state.parent / str(_get(file, "filename")) for file in files}
        if lost := sorted(named - arrow_files):
            raise DataError(f"{state} names {lost[0].name}, which is missing; copy it, too")
        arrow_files -= {
            path for path in arrow_files if path.parent == state.parent and path not in named
        }
    return sorted(arrow_files)


def _check_one_configuration(root: Path, files: Sequence[_File]) -> None:
    """Raise DataError where files are of several data sets, as a repository of the hub may have."""
    configurations = sorted({file.configuration for file in files})
    if len(configurations) > 1:
        places = [str(root / name) for name in configurations]
        raise DataError(
            f"{root} has files of several data sets, which are not merged: "
            f"{listed(places, 3)}; give one of them as --root, or put all files of one "
            "data set into one folder"
        )


# --- tables


def _columns(path: Path) -> list[str]:
    try:
        with open_regular(path) as file:
            if path.suffix == ".arrow":
                return list(_open_arrow(path).schema.names)
            return list(parquet.read_schema(file).names)
    except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: no UTF-8
        raise DataError(f"cannot read {path}: {error}{fetch_hint(path)}") from error


def _open_arrow(path: Path) -> Any:
    """Open an .arrow file where it lies: a stream, as `datasets` writes it, or Arrow's file."""
    with open_regular(path) as file:
        is_file = file.read(6) == b"ARROW1"
    source = pa.memory_map(str(path))
    return ipc.open_file(source) if is_file else ipc.open_stream(source)


def _read_table(paths: list[Path], wanted: Mapping[str, str]) -> Any:
    """Read some columns of all files, by their options; dictionaries are decoded.

    Raises: DataError.
    """
    columns = list(wanted)
    tables = []
    for path in paths:
        column_names = _columns(path)
        for name, option in wanted.items():
            check_column(path, name, column_names, option)
        try:
            if path.suffix == ".arrow":
                table = _open_arrow(path).read_all().select(columns)
                table.validate(full=True)
            else:
                table = parquet.read_table(path, columns=columns)
            for place, field in enumerate(table.schema):
                if types.is_dictionary(field.type):
                    plain = table.column(place).cast(field.type.value_type)
                    table = table.set_column(place, field.name, plain)
            tables.append(table)
        except (OSError, ValueError, pa.ArrowException) as error:  # ValueError: no UTF-8
            raise DataError(f"cannot read {path}: {error}") from error
    try:
        return pa.concat_tables(tables, promote_options="permissive")
    except pa.ArrowException as error:
        raise DataError(f"{paths[0]} and the other files of its split differ: {error}") from error


def _read_split(paths: list[Path], column: str, options: SourceOptions) -> Any:
    """Read the columns that are needed of a split: one table, a row an image. Raises: DataError."""
    column_names = _columns(paths[0])
    columns = image_columns(column, column_names)
    table = _read_table(paths, wanted_columns(options, columns, column_names))
    try:
        return a_row_an_image(table, columns, column)
    except pa.ArrowException as error:
        raise DataError(f"--image-column={column!r}: {first_line(error)}") from error


# --- labels


def _labels_by_split(
    root: Path,
    groups: Mapping[str, list[Path]],
    tables: Mapping[str, Any],
    options: SourceOptions,
) -> dict[str, Labels]:
    """Return the labels of the splits that have some, also of those that are not read.

    Texts are numbered by those of all splits.
    """
    labels: dict[str, Labels] = {}
    column = options.label_column
    if not options.labels:
        return labels
    for split, paths in groups.items():
        table = tables.get(split)
        if table is None and column in _columns(paths[0]):
            table = _read_table(paths, {column: "--label-column"})
        if table is not None:
            labels[split] = _labels(table.column(column), f"{root}, {split}")
    return labels


def _labels(cells: Any, where: str) -> Labels:
    """Convert a column; null and '' are no label, whole floats integers, as pandas has gaps."""
    kind = cells.type
    texts = types.is_string, types.is_large_string, types.is_string_view
    if any(is_kind(kind) for is_kind in (*texts, types.is_boolean, types.is_null)):
        return [None if cell in (None, "") else str(cell) for cell in cells.to_pylist()]
    if types.is_integer(kind):
        try:
            numbers: NDArray[np.int64] = cells.cast("int64").fill_null(-1).to_numpy()
        except pa.ArrowException as error:
            raise DataError(
                f"{where}: the label column holds {kind} beyond 64 bits with a sign: "
                f"{first_line(error)}; these are ids: store them as texts, or give --no-labels to "
                "go without"
            ) from error
        return numbers
    if types.is_floating(kind):
        values = cells.cast("float64").fill_null(-1).to_numpy()
        values = np.where(np.isnan(values), -1, values)
        if (values == np.rint(values)).all() and (np.abs(values) < 2**53).all():
            return values.astype(np.int64)
    raise DataError(
        f"{where}: the label column holds {kind}, neither integers nor texts; name another with "
        "--label-column, or give --no-labels to go without"
    )


def _numbered(
    labels: Labels | None,
    all_texts: list[str | None],
    rows: int,
    names: tuple[str, ...],
    where: str,
) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """Return the number of each row's class, (rows,), -1 for none, and the classes' names.

    Args:
        labels: Of the rows; None: there are none.
        all_texts: Those of all splits, by which texts are numbered.
        rows: Their number.
        names: What the files call numbered classes; (): nothing.
        where: The split, for messages.

    Raises:
        DataError: A number is not that of a class.
    """
    if labels is None:
        return np.full(rows, -1, np.int64), ()
    if isinstance(labels, list):
        return number_labels(labels, all_texts)
    highest = int(labels.max(initial=-1))
    lowest = int(labels.min(initial=-1))
    if lowest < -1:
        raise DataError(
            f"{where}: label {lowest} is neither the number of a class nor -1, for "
            "none; mend it, store the classes as texts, or give --no-labels to go without"
        )
    if not names and highest >= max(MOST_UNNAMED, rows):
        raise DataError(
            f"{where}: label {highest} of {rows:,} images is not the number of a "
            "class; number the classes from 0, or store them as texts"
        )
    names = names or tuple(str(k) for k in range(highest + 1))
    if highest >= len(names):
        raise DataError(
            f"{where}: label {highest}, but only {len(names)} names; mend the labels or the names "
            "of the feature, or give --no-labels to go without"
        )
    return labels, names


# --- images


class _ImageCells:
    """A column of images: the bytes of each, or a file's path from the root, or a struct of both.

    `is_listed` says that the column lists files, which may name one again, and holds no images.
    """

    def __init__(self, table: Any, column: str, root: Path, split: str) -> None:
        cells = table.column(column)
        names = [field.name for field in cells.type] if types.is_struct(cells.type) else []
        is_text = types.is_string(cells.type) or types.is_large_string(cells.type)
        self.column = column
        self._root = root
        self._split = split
        self._bytes = None if names or is_text else cells
        self._paths = cells if is_text else None
        if "bytes" in names:
            self._bytes = compute.struct_field(cells, "bytes")
        if "path" in names:
            self._paths = compute.struct_field(cells, "path")
        self._count = len(cells)
        self.is_listed = self._bytes is None or self._bytes.null_count == self._count

    def missing(self) -> dict[int, str | None]:
        """Find the rows without an image: an empty cell, None, or a path that leads to no file."""
        rows: Iterable[int] = range(self._count)
        if self._bytes is not None:
            rows = np.flatnonzero(compute.is_null(self._bytes).to_numpy()).tolist()
        missing: dict[int, str | None] = {}
        for row in rows:
            path = None if self._paths is None else self._paths[row].as_py()
            if path is None:
                missing[row] = None
            elif isinstance(place := place_of(self._root, path), Path) and not isfile(place):
                missing[row] = path
        return missing

    def read(self, row: int) -> bytes:
        """Return the image of a row that is not missing. Raises: DataError."""
        raw = None if self._bytes is None else self._bytes[row].as_py()
        if raw is None and self._paths is not None:
            return read_place(place_of(self._root, self._paths[row].as_py()))
        if not isinstance(raw, bytes):
            raise DataError(
                f"{self._root}, {self._split}[{row}]: column {self.column!r} holds "
                f"{type(raw).__name__}, no image; see --image-column"
            )
        return raw

    def names(self, rows: Sequence[int]) -> list[str]:
        """Return the path of each image's file, or beside it; [] where that is not one's own."""
        if self._paths is None:
            return []
        texts = [self._paths[row].as_py() or "" for row in rows]
        if not all(texts) or (len({*texts}) < len(texts) and not self.is_listed):
            return []
        return [readable(text) for text in texts]


def _images(
    root: Path,
    split: str,
    table: Any,
    cells: _ImageCells,
    labels: Labels | None,
    all_texts: list[str | None],
    options: SourceOptions,
) -> Images:
    """Describe a table as one split. Raises DataError where files are missing."""
    named = _class_names(table.schema.metadata, options.label_column)
    numbers, classes = _numbered(labels, all_texts, len(table), named, f"{root}, {split}")
    paths = cells.missing()
    missing = [path or f"{split}[{row}]" for row, path in paths.items()]
    if missing and not any(paths.values()) and not options.skip_missing:
        raise DataError(
            f"{root}, {split}: {len(missing):,} of {len(table):,} rows have no image in column "
            f"{cells.column!r}, such as {missing[0]}; name another one with --image-column, or "
            "give --skip-missing to build without them"
        )
    check_missing(missing, len(table), options.skip_missing, beside=root)
    kept = np.setdiff1d(np.arange(len(table)), list(paths)).tolist()
    names = cells.names(kept)
    columns = {
        name: table.column(name).take(kept)
        for name in (*options.fields, PLACE)
        if name in table.column_names
    }
    return Images(
        names=names or [f"{split}[{row}]" for row in kept],
        labels=numbers[kept],
        sizes=np.full(len(kept), table.nbytes // max(1, len(table)), np.int64),
        classes=classes,
        read=lambda number: cells.read(kept[number]),
        missing=missing,
        cells=columns,
        together=columns[PLACE].to_numpy() if PLACE in columns else None,  # of one row
        origin="typed",
        are_places=bool(names),
        doubts=merged_classes(all_texts),
    )


def _class_names(metadata: dict[bytes, bytes] | None, column: str) -> tuple[str, ...]:
    """Read the names of a ClassLabel feature, as `datasets` writes it into the schema.

    In the schema features are a dict by column, in the card of a data set a list of them. () where
    there are no names, or the metadata is something else.
    """
    try:
        tree = json.loads((metadata or {}).get(b"huggingface", b"{}"))
    except (ValueError, RecursionError):
        return ()
    features = _get(_get(tree, "info"), "features")
    if isinstance(features, list):
        feature = next((each for each in features if _get(each, "name") == column), None)
    else:
        feature = _get(features, column)
    names = _get(feature, "names") or _get(_get(_get(feature, "dtype"), "class_label"), "names")
    if isinstance(names, dict) and all(key.isdecimal() and len(key) < 10 for key in names):
        names = [names[key] for key in sorted(names, key=int)]
    return distinct_names([str(name) for name in names]) if isinstance(names, list) else ()


def _get(tree: Any, key: str) -> Any:
    return tree.get(key) if isinstance(tree, dict) else None
