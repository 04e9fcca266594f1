"""Hand samples to FiftyOne and LightlyStudio, as plain files that neither has to be installed for.

Both get a folder of pictures and what tables of `sslpipe curate` say of each. FiftyOne reads
`samples.json` and `metadata.json` as a `fiftyone.types.FiftyOneDataset`; LightlyStudio has a
Python interface only, which `open_lightly_studio.py` of the folder calls.
"""

import json
import math
import re
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.curate.images import write_images
from sslpipe.curate.tables import read_table, sample_id
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.portable import replacing, write_atomically

IMAGES = "images"  # the folder of the pictures
OWN_COLUMNS = ("split", "id", "key", "path")  # of a table; not what it says of a sample

LIGHTLY_SCRIPT = '''"""Show this folder in LightlyStudio: pip install lightly-studio; python {name}.

Written by `sslpipe curate export`; made for lightly-studio 1.2.
"""

import json
from pathlib import Path

import lightly_studio as ls
import numpy as np
from lightly_studio.core.annotation.annotation_create import CreateClassification
from lightly_studio.resolvers import annotation_resolver, tag_resolver
from lightly_studio_serve.embedder import ImagePathEmbedder

FOLDER = Path(__file__).absolute().parent
SAMPLES = json.loads((FOLDER / "samples.json").read_text(encoding="utf-8"))["samples"]
FEATURES = np.load(FOLDER / "embeddings.npy")
ROWS = {{(FOLDER / one["filepath"]).as_posix(): row for row, one in enumerate(SAMPLES)}}


class SavedFeatures(ImagePathEmbedder):
    """Looks up what sslpipe embedded."""

    def embedding_space_spec(self):
        return ls.EmbeddingSpaceSpec(space_key="{space}", dimension=FEATURES.shape[1])

    def embed_images(self, paths):
        kept = [place for place, path in enumerate(paths) if path in ROWS]
        rows = [ROWS[paths[place]] for place in kept]
        return ls.EmbeddingResult(embeddings=FEATURES[rows], kept_indices=kept)


ls.register_default_embedder(embedder=SavedFeatures())
dataset = ls.ImageDataset.create("{title}")
dataset.add_images_from_path(path=FOLDER / "images")
rows = {{sample.sample_id: SAMPLES[ROWS[sample.file_path_abs]] for sample in dataset}}
dataset.update_metadata([(sample_id, one["fields"]) for sample_id, one in rows.items()])
# all at once: sample by sample, by its public methods, takes minutes for a few thousand
session, collection_id = dataset.session, dataset.collection_id
annotations = [
    CreateClassification(class_name=one["label"]).to_annotation_create(
        session=session, dataset_id=dataset.dataset_id, parent_sample_id=sample_id
    )
    for sample_id, one in rows.items()
    if one["label"] is not None
]
annotation_resolver.create_many(
    session=session, parent_collection_id=collection_id, annotations=annotations
)
for name in dict.fromkeys(name for one in rows.values() for name in one["tags"]):
    tag = tag_resolver.get_or_create_sample_tag_by_name(
        session=session, collection_id=collection_id, tag_name=name
    )
    tagged = [sample_id for sample_id, one in rows.items() if name in one["tags"]]
    tag_resolver.add_sample_ids_to_tag_id(session=session, tag_id=tag.tag_id, sample_ids=tagged)
ls.start_gui()
'''


class Sample(NamedTuple):
    """What is said of one sample."""

    path: str  # of its picture, below the folder
    label: str | None  # the name of its class
    tags: list[str]  # the tables that list it, and the reasons that they give
    fields: dict[str, Any]  # values by name: of a table's column, TABLE_COLUMN


def export(
    out: Path,
    tool: str,
    index: DatasetIndex,
    split: Split,
    rows: Embeddings,
    *,
    space: str,
    tables: Sequence[Path] = (),
    listed: bool = False,
    most_px: int = 0,
) -> int:
    """Write pictures, features and what is known of them for one of the two tools.

    Args:
        out: The folder; it must be empty or not there.
        tool: One of WRITERS.
        index: The data set.
        split: Of it.
        rows: Features of the split; every row is a sample.
        space: Names what made the features, for LightlyStudio: equal names, comparable features.
        tables: CSV or parquet with the columns split and id, and more to show.
        listed: Take only the samples that a table lists.
        most_px: See `write_images`.

    Returns:
        How many samples were written.

    Raises:
        DataError: The folder is not empty, or a table does not fit.
    """
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise DataError(f"{out} is there already and not empty; name another folder")
    read = [_Table.read(path, split) for path in tables]
    _check_names(read)
    rows = rows.rows(torch.argsort(rows.ids))
    if listed:
        wanted = torch.tensor([one for table in read for one in table.cells])
        rows = rows.rows(torch.isin(rows.ids, wanted.to(rows.ids)))
        if not len(rows.ids):
            raise DataError("no sample of the features is in a table: there is nothing to export")
    ids, was_there = rows.ids.cpu().numpy(), out.exists()
    try:
        files = write_images(split, ids, out / IMAGES, most_px=most_px)
        samples = []
        for file, label in zip(files, class_names(index, split, ids), strict=True):
            known = {"split": split.name, "source_id": file.id, "key": file.key}
            path = file.path.relative_to(out).as_posix()
            sample = Sample(path, label, [split.name], known)
            for table in read:
                _add(sample, table, table.cells.get(file.id, []))
            samples.append(sample)
        with replacing(out / "embeddings.npy") as temporary, temporary.open("wb") as stream:
            np.save(stream, rows.features.cpu().numpy(), allow_pickle=False)
        WRITERS[tool](out, index, space, samples)
    except BaseException:
        # else the same command would be refused, for a folder that is not empty
        shutil.rmtree(out, ignore_errors=True)
        if was_there:
            out.mkdir(exist_ok=True)
        raise
    return len(ids)


def class_names(index: DatasetIndex, split: Split, ids: NDArray[np.int64]) -> list[str | None]:
    """Look up the names of some samples' classes; None where a sample has none."""
    classes = index.manifest.classes
    return [
        None if label < 0 else (classes[label] if label < len(classes) else str(label))
        for label in split.labels_of(ids).tolist()
    ]


class _Table(NamedTuple):
    """A table by sample id."""

    name: str  # of the file, without its end; letters, digits and underscores
    columns: list[str]  # but OWN_COLUMNS
    cells: dict[int, list[dict[str, Any]]]  # sample id -> its rows, each column -> value
    several: bool  # whether a sample has several rows, so that values are lists

    @classmethod
    def read(cls, path: Path, split: Split) -> "_Table":
        """Read the rows of one split. Raises: DataError."""
        rows, cells = [], defaultdict[int, list[dict[str, Any]]](list)
        for number, row in enumerate(read_table(path, ("split", "id")), 2):
            if row["split"] == split.name:
                own = {k: v for k, v in row.items() if k not in OWN_COLUMNS and v is not None}
                cells[sample_id(path, number, row["id"], len(split))].append(own)
                rows.append(own)
        columns = list(dict.fromkeys(column for row in rows for column in row))
        for column in columns:
            kind = _kind([row[column] for row in rows if column in row])
            for row in rows:
                if column in row:
                    row[column] = kind(row[column])
        name = re.sub(r"\W", "_", path.stem).lstrip("_") or "table"
        return cls(name, columns, cells, any(len(own) > 1 for own in cells.values()))

    def field(self, column: str) -> str:
        return re.sub(r"\W", "_", f"{self.name}_{column}")


def _kind(values: Sequence[Any]) -> type:
    """The one type of a column: both tools take no other value of a field afterwards."""
    for kind in (int, float):
        with suppress(ValueError, TypeError):
            if all(math.isfinite(kind(value)) and kind(value) == float(value) for value in values):
                return kind
    return str


def _check_names(tables: Sequence[_Table]) -> None:
    """Raise DataError where a table or a column would hide another one, or the class or id."""
    names = [table.name for table in tables]
    twice = [name for name in names if names.count(name) > 1]
    if twice:
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


def _add(sample: Sample, table: _Table, rows: Sequence[Mapping[str, Any]]) -> None:
    """Add what a table says of a sample."""
    for column in table.columns:
        values = [row[column] for row in rows if column in row]
        if values:
            sample.fields[table.field(column)] = values if table.several else values[0]
    if rows:
        # of chosen.csv, which has an order, reasons are sentences
        reasons = [str(row["reason"]) for row in rows if row.get("reason") and "order" not in row]
        sample.tags.extend(dict.fromkeys([table.name, *reasons]))


def _write_json(path: Path, tree: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(tree, indent=1, ensure_ascii=False, allow_nan=False) + "\n")


def _fiftyone(out: Path, index: DatasetIndex, space: str, samples: Sequence[Sample]) -> None:
    """Write FiftyOne's JSON of samples, which its importer knows by the missing version.

    Source:
        fiftyone 1.22.1, utils/data/importers.py, LegacyFiftyOneDatasetImporter, to which
        FiftyOneDatasetImporter hands what has no version of its database.
    """
    info = {
        "source": index.manifest.source,
        "data_sha256": index.sha256,
        "features": space,
        "default_classes": list(index.manifest.classes),
    }
    metadata = {"name": index.manifest.name, "media_type": "image", "info": info}
    documents: list[dict[str, Any]] = []
    for one in samples:
        documents.append({"filepath": one.path, "tags": one.tags, **one.fields})
        if one.label is not None:
            documents[-1]["ground_truth"] = {"_cls": "Classification", "label": one.label}
    _write_json(out / "metadata.json", metadata)
    _write_json(out / "samples.json", {"samples": documents})


def _lightly(out: Path, index: DatasetIndex, space: str, samples: Sequence[Sample]) -> None:
    """Write samples.json and the script that hands them to LightlyStudio's Python interface."""
    documents = [
        {"filepath": one.path, "label": one.label, "tags": one.tags, "fields": one.fields}
        for one in samples
    ]
    _write_json(out / "samples.json", {"samples": documents})
    name = "open_lightly_studio.py"
    title, space = (
        json.dumps(text, ensure_ascii=False)[1:-1] for text in (index.manifest.name, space)
    )
    write_atomically(out / name, LIGHTLY_SCRIPT.format(name=name, title=title, space=space))


Writer = Callable[[Path, DatasetIndex, str, Sequence[Sample]], None]
WRITERS: dict[str, Writer] = {"fiftyone": _fiftyone, "lightly": _lightly}
