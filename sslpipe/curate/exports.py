"""Take pictures out of shards, and hand samples to FiftyOne as plain files without needing it.

FiftyOne gets a folder of pictures and what tables of `sslpipe curate` say of each; it reads
`samples.json` and `metadata.json` as a `fiftyone.types.FiftyOneDataset`.
"""

import io
import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike
from PIL import Image

from sslpipe.curate.scan import each_part
from sslpipe.curate.tables import split_rows
from sslpipe.data.decode import BadSample, decode, image_kind
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.reader import Raw
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.portable import replacing, write_atomically

OWN_COLUMNS = ("split", "id", "key", "path")  # of a table; not what it says of a sample


class Written(NamedTuple):
    """A picture in a folder: its sample, the key in its shard, the file."""

    id: int
    key: str
    path: Path


def raw_samples(split: Split, ids: ArrayLike) -> Iterator[tuple[int, Raw]]:
    """Read some samples by their ids, in ascending order. Raises: DataError."""
    wanted = np.unique(np.asarray(ids, np.int64))
    for part in each_part(split, lambda *sample: sample, list, ids=wanted, num_workers=0):
        yield from (sample for sample in part if sample is not None)


def keys_of(split: Split, ids: ArrayLike) -> dict[int, str]:
    """Look up the shards' keys of some samples."""
    return {sample_id: raw.key for sample_id, raw in raw_samples(split, ids)}


def write_images(split: Split, ids: ArrayLike, folder: Path, *, most_px: int = 0) -> list[Written]:
    """Write pictures as FOLDER/SPLIT-ID.jpg, .png or .webp, in the order of their ids.

    Args:
        split: Where they are.
        ids: Which.
        folder: Made where it is not there.
        most_px: Each becomes a JPEG whose longer side is at most this; 0: each is the file that the
            shard holds, byte by byte.

    Raises:
        DataError: A sample has no picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for sample_id, raw in raw_samples(split, ids):
        try:
            if isinstance(raw.image, BadSample):
                raise raw.image
            content, suffix = bytes(raw.image), image_kind(raw.image)
            if suffix is None:
                raise BadSample("it is no JPEG, PNG or WebP")
            if most_px:
                file, suffix = io.BytesIO(), "jpg"
                pixels = np.ascontiguousarray(decode(raw.image, most_px).transpose(1, 2, 0))
                Image.fromarray(pixels).save(file, "JPEG", quality=90)
                content = file.getvalue()
        except BadSample as error:
            raise DataError(
                f"split {split.name!r}, key {raw.key!r}: {error}; embed the split again, which "
                "leaves out what cannot be read"
            ) from error
        path = folder / f"{split.name}-{sample_id:09d}.{suffix}"
        write_atomically(path, content, sweep=False)
        written.append(Written(sample_id, raw.key, path))
    return written


def export(
    out: Path,
    index: DatasetIndex,
    split: Split,
    rows: Embeddings,
    *,
    space: str,
    tables: Sequence[Path] = (),
    listed: bool = False,
    most_px: int = 0,
) -> int:
    """Write pictures, features and what is known of them for FiftyOne.

    Args:
        out: The folder; it must be empty or not there.
        index: The data set.
        split: Of it.
        rows: Features of the split; every row is a sample.
        space: Names what made the features.
        tables: CSV with the columns split and id, and more to show.
        listed: Take only the samples that a table lists.
        most_px: See `write_images`.

    Returns:
        How many samples were written.

    Raises:
        DataError: The folder is not empty, or a table does not fit.

    Source:
        fiftyone 1.22.1, utils/data/importers.py, LegacyFiftyOneDatasetImporter, to which
        FiftyOneDatasetImporter hands what has no version of its database.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is there already and not empty; name another folder")
    read = [_Table(path, split) for path in tables]
    _check_names(read)
    rows = rows.rows(torch.argsort(rows.ids))
    if listed:
        wanted = torch.tensor([one for table in read for one in table.cells])
        rows = rows.rows(torch.isin(rows.ids, wanted.to(rows.ids)))
        if not len(rows.ids):
            raise DataError("no sample of the features is in a table: there is nothing to export")
    ids, was_there = rows.ids.cpu().numpy(), out.exists()
    classes = index.manifest.classes
    try:
        samples = []
        files = write_images(split, ids, out / "images", most_px=most_px)
        for file, label in zip(files, split.labels_of(ids).tolist(), strict=True):
            path, tags = file.path.relative_to(out).as_posix(), [split.name]
            sample: dict[str, Any] = {"filepath": path, "tags": tags, "split": split.name}
            sample |= {"source_id": file.id, "key": file.key}
            for table in read:
                table.add_to(sample, file.id)
            if label >= 0:
                name = classes[label] if label < len(classes) else str(label)
                sample["ground_truth"] = {"_cls": "Classification", "label": name}
            samples.append(sample)
        with replacing(out / "embeddings.npy") as temporary, temporary.open("wb") as stream:
            np.save(stream, rows.features.cpu().numpy(), allow_pickle=False)
        info: dict[str, Any] = {"source": index.manifest.source, "data_sha256": index.sha256}
        info |= {"features": space, "default_classes": list(classes)}
        metadata = {"name": index.manifest.name, "media_type": "image", "info": info}
        for name, tree in (("metadata", metadata), ("samples", {"samples": samples})):
            text = json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False)
            write_atomically(out / f"{name}.json", text + "\n")
    except BaseException:
        # else the same command would be refused, for a folder that is not empty
        shutil.rmtree(out, ignore_errors=True)
        if was_there:
            out.mkdir(exist_ok=True)
        raise
    return len(ids)


class _Table:
    """A table by sample id: what FiftyOne shows as fields TABLE_COLUMN. Raises: DataError."""

    def __init__(self, path: Path, split: Split) -> None:
        # letters, digits and underscores of the file's name
        self.name = re.sub(r"\W", "_", path.stem).lstrip("_") or "table"
        self.cells: dict[int, list[dict[str, Any]]] = defaultdict(list)
        rows = []
        for _, key, row in split_rows(path, split.name, len(split)):
            rows.append({k: v for k, v in row.items() if k not in OWN_COLUMNS and v is not None})
            self.cells[key].append(rows[-1])
        self.columns = list(dict.fromkeys(column for row in rows for column in row))
        for column in self.columns:
            kind = _kind([row[column] for row in rows if column in row])
            for row in rows:
                if column in row:
                    row[column] = kind(row[column])
        # a sample may have several rows: then values are lists
        self.several = any(len(own) > 1 for own in self.cells.values())

    def field(self, column: str) -> str:
        return re.sub(r"\W", "_", f"{self.name}_{column}")

    def add_to(self, sample: dict[str, Any], key: int) -> None:
        """Add what the table says of a sample: fields, and tags for it and for each reason."""
        rows = self.cells.get(key, [])
        for column in self.columns:
            values = [row[column] for row in rows if column in row]
            if values:
                sample[self.field(column)] = values if self.several else values[0]
        if rows:
            # of chosen.csv, which has an order, reasons are sentences
            reasons = [str(r["reason"]) for r in rows if r.get("reason") and "order" not in r]
            sample["tags"].extend(dict.fromkeys([self.name, *reasons]))


def _kind(values: Sequence[Any]) -> type:
    """The one type of a column: FiftyOne takes no other value of a field afterwards."""
    for kind in (int, float):
        with suppress(ValueError, TypeError):
            if all(math.isfinite(kind(value)) and kind(value) == float(value) for value in values):
                return kind
    return str


def _check_names(tables: Sequence[_Table]) -> None:
    """Raise DataError where a table or a column would hide another one, or the class or id."""
    names = [table.name for table in tables]
    if twice := [name for name in names if names.count(name) > 1]:
        raise DataError(f"two tables are named {twice[0]}; rename one of them")
    taken = {"ground_truth": "the class is", "source_id": "the id is"}
    for table in tables:
        for column in table.columns:
            name = table.field(column)
            if name in taken:
                raise DataError(
                    f"column {column!r} of table {table.name} would be the field {name}, which "
                    f"{taken[name]} already; rename the column or the table"
                )
            taken[name] = f"column {column!r} of table {table.name} is"
