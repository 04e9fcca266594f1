"""Hugging Face parquet files: one row an image, as `datasets` stores its Image feature."""

import json
from pathlib import Path
from typing import Any

import numpy as np

from sslpipe.errors import DataError, did_you_mean
from sslpipe.sharding.sources import Images, SourceOptions, read_file, root_folder


def read_parquet(options: SourceOptions) -> dict[str, Images]:
    """Read SPLIT*.parquet anywhere under --root; the image and label columns by name.

    The encoded images of a split are held in memory while its shards are written. Class names come
    from the ClassLabel feature in the files' metadata, else they are the numbers.
    """
    try:
        from pyarrow import ArrowException, concat_tables, parquet
    except ImportError as error:
        raise DataError("--source parquet needs pyarrow: pip install 'sslpipe[parquet]'") from error
    # files by split
    root = root_folder(options)
    groups: dict[str, list[Path]] = {}
    for path in sorted(root.rglob("*.parquet")):
        split = path.name.removesuffix(".parquet").split("-")[0]  # train-00000-of-00002-HASH
        groups.setdefault(split, []).append(path)
    if options.split is not None:
        if options.split not in groups:
            hint = did_you_mean(options.split, groups)
            raise DataError(
                f"{root} has no file {options.split}*.parquet{hint}; "
                f"splits there: {', '.join(groups) or 'none'}"
            )
        groups = {options.split: groups[options.split]}
    if not groups:
        raise DataError(f"{root} has no *.parquet file")
    # the columns that are needed, all rows of a split as one table
    column = options.image_column if options.image_column != "path" else "image"
    images = {}
    for split, paths in groups.items():
        wanted = [column] + ([options.label_column] if _labelled(options) else [])
        try:
            schema = parquet.read_schema(paths[0])
            for name in wanted:
                if name not in schema.names:
                    raise DataError(
                        f"{paths[0]} has no column {name!r}{did_you_mean(name or '', schema.names)}"
                        f"; it has: {', '.join(schema.names)}; see --image-column, --label-column"
                    )
            table = concat_tables([parquet.read_table(path, columns=wanted) for path in paths])
        except (OSError, ArrowException) as error:
            raise DataError(f"cannot read {paths[0]}: {error}") from error
        images[split] = _images(root, split, table, schema.metadata, column, options)
    return images


def _labelled(options: SourceOptions) -> bool:
    return options.labels and options.label_column is not None


def _images(
    root: Path,
    split: str,
    table: Any,
    metadata: dict[bytes, bytes] | None,
    column: str,
    options: SourceOptions,
) -> Images:
    """Describe a table as one split. Raises DataError where its labels are not integers."""
    # labels and class names
    cells = table.column(column)
    labels = np.full(len(table), -1, np.int64)
    classes: tuple[str, ...] = ()
    if _labelled(options):
        values = table.column(options.label_column).to_numpy()
        if not np.issubdtype(values.dtype, np.integer):
            raise DataError(
                f"{root}, {split}: column {options.label_column!r} holds {values.dtype}, no "
                "integer labels; give --no-labels to go without"
            )
        labels = values.astype(np.int64)
        classes = _class_names(metadata, options.label_column or "")
        highest = int(labels.max(initial=-1))
        classes = classes or tuple(str(k) for k in range(highest + 1))
        if highest >= len(classes):
            raise DataError(f"{root}, {split}: label {highest}, but only {len(classes)} names")

    def read(i: int) -> bytes:
        cell = cells[i].as_py()
        if isinstance(cell, dict):  # Image feature: the bytes, or where they lie
            raw = cell.get("bytes")
            return raw if raw is not None else read_file(root / str(cell.get("path")))
        if isinstance(cell, bytes):
            return cell
        raise DataError(f"{root}, {split}[{i}]: column {column!r} holds {type(cell).__name__}")

    size = table.nbytes // max(1, len(table))
    names = [f"{split}[{i}]" for i in range(len(table))]
    return Images(names, labels, np.full(len(table), size, np.int64), classes, read)


def _class_names(metadata: dict[bytes, bytes] | None, column: str) -> tuple[str, ...]:
    """Read the names of a ClassLabel feature, as `datasets` writes it into the schema."""
    text = (metadata or {}).get(b"huggingface")
    if text is None:
        return ()
    feature = json.loads(text).get("info", {}).get("features", {}).get(column, {})
    return tuple(feature.get("names", ()))
