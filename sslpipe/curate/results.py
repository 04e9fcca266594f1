"""Write groups of duplicates down: the rows of groups.csv, and the column of the data set."""

import os
from pathlib import Path
from typing import Any

import numpy as np

from sslpipe.curate.groups import KINDS, Groups
from sslpipe.curate.scan import Samples
from sslpipe.curate.tables import Kinds
from sslpipe.data.column_files import MISSING_INTEGER
from sslpipe.data.index import DERIVED_COLUMN, DatasetIndex, load_index
from sslpipe.data.storage import scheme
from sslpipe.errors import DataError
from sslpipe.sharding.columns import ColumnValues, add_columns

COLUMN = DERIVED_COLUMN
FIELDS: Kinds = {
    **{"split": str, "id": int, "key": str, "group": int, "kind": str},
    **{"score": float, "nearest": str},
}


def group_rows(samples: Samples, groups: Groups) -> list[dict[str, Any]]:
    """Return one row a sample of a group, by group, then as in `samples`.

    `nearest` is SPLIT:ID of the member that is most like it, `kind` and `score` how much.
    """
    places = np.flatnonzero(groups.group >= 0)
    ids, split = samples.ids.tolist(), [samples.splits[k] for k in samples.split.tolist()]
    rows = []
    for row in places[np.argsort(groups.group[places], kind="stable")].tolist():
        near = int(groups.nearest[row])
        values = (
            split[row],
            ids[row],
            samples.keys[row],
            int(groups.group[row]),
            KINDS[groups.kind[row]],
            round(float(groups.score[row]), 6),
            f"{split[near]}:{ids[near]}",
        )
        rows.append(dict(zip(FIELDS, values, strict=True)))
    return rows


def shared_sentences(samples: Samples, groups: Groups) -> list[str]:
    """Say how many images of each other split are in train, too; [] where train is not there."""
    if "train" not in samples.splits:
        return []
    train = samples.split == samples.splits.index("train")
    shared = (groups.group >= 0) & np.isin(groups.group, groups.group[train])
    sentences = []
    for number, name in enumerate(samples.splits):
        own = samples.split == number
        if name != "train":
            count, total = int((shared & own).sum()), int(own.sum())
            share = f" ({100 * count / total:.2g} %)" if count else ""
            sentences.append(f"{count:,} of {total:,} {name} images are also in train{share}")
    return sorted(sentences, key=lambda text: " test images" not in text)


def check_place(index: DatasetIndex) -> None:
    """Check that the column can be written beside a data set.

    Raises:
        DataError: It is remote, or read-only, or has a column of that name that is another's.
    """
    folder, entry = index.folder, index.manifest.columns.get(COLUMN)
    if entry is not None and entry.kind != "integer":
        raise DataError(
            f"{folder} has a column {COLUMN} of kind {entry.kind}, which would be lost; build the "
            "data set with another name for it, or leave the column out with --no-column"
        )
    if scheme(folder) or not os.access(folder, os.W_OK):
        raise DataError(
            f"{folder} is {'remote' if scheme(folder) else 'read-only'}, and the column {COLUMN} "
            "is written beside dataset.json; copy the data set, or leave the column out with "
            "--no-column"
        )


def write_column(folder: str, samples: Samples, groups: Groups) -> None:
    """Write the column `duplicate_group` of the splits beside their data set; shards stay.

    One number stands for one picture in all of these splits; a sample of no group has no value.
    Other splits lose theirs: their numbers would stand for other pictures.

    Args:
        folder: Of dataset.json.
        samples: All that could be read.
        groups: Theirs.

    Raises:
        DataError: As `check_place`.
    """
    index = load_index(folder)
    check_place(index)
    columns = {}
    for number, name in enumerate(samples.splits):
        here = samples.split == number
        values = np.full(len(index.split(name)), MISSING_INTEGER, np.int64)
        grouped = here & (groups.group >= 0)
        values[samples.ids[grouped]] = groups.group[grouped]
        columns[name] = {COLUMN: ColumnValues("integer", values)}
    add_columns(Path(folder), columns, alone=True)
