"""Write duplicates down: rows of groups.csv, the sheet of doubtful pairs, the data set's column."""

import os
from pathlib import Path

import numpy as np
from PIL import Image

from sslpipe.curate.duplicates import Doubt
from sslpipe.curate.groups import KINDS, Groups
from sslpipe.curate.scan import Samples
from sslpipe.curate.tables import write_table
from sslpipe.data.columns import MISSING_INTEGER
from sslpipe.data.index import DERIVED_COLUMN, DatasetIndex, load_index
from sslpipe.data.storage import scheme
from sslpipe.errors import DataError
from sslpipe.sharding.columns import ColumnValues, add_columns
from sslpipe.sharding.show import BAD, CELL_PX, INK, Cell, draw_sheet

COLUMN = DERIVED_COLUMN
FIELDS = ("split", "id", "key", "group", "kind", "score", "nearest")  # of groups.csv
COLUMNS, MOST_PAIRS = 4, 120  # of the sheet of doubtful pairs


def write_groups(path: Path, samples: Samples, groups: Groups) -> int:
    """Write a row a sample of a group, by group; nearest: SPLIT:ID of the most similar one.

    Returns:
        How many rows.
    """
    places = np.flatnonzero(groups.group >= 0)
    table = []
    for row in places[np.argsort(groups.group[places], kind="stable")].tolist():
        kind, score = KINDS[groups.kind[row]], round(float(groups.score[row]), 6)
        near, group = samples.name(groups.nearest[row]), int(groups.group[row])
        split, sample_id = samples.splits[samples.split[row]], int(samples.ids[row])
        values = split, sample_id, samples.keys[row], group, kind, score, near
        table.append(dict(zip(FIELDS, values, strict=True)))
    write_table(path, table, FIELDS)
    return len(table)


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
            images = f"{count:,} of {total:,}" if count else f"None of {total:,}"
            sentences.append(f"{images} {name} images are also in train{share}")
    return sorted(sentences, key=lambda text: " test images" not in text)


def doubt_sheet(samples: Samples, doubt: Doubt, most: int = MOST_PAIRS) -> Image.Image | None:
    """Draw thumbnails of the most doubtful pairs side by side, with red words if refused.

    Args:
        samples: As scanned.
        doubt: Of `duplicates.find_duplicates`.
        most: Pairs drawn.

    Returns:
        An RGB image; None where no pair is doubtful.
    """
    pairs, scores, verdicts = (column[:most] for column in doubt)
    cells = []
    for pair, score, same in zip(pairs.tolist(), scores, verdicts, strict=True):
        pictures = []
        for thumb, (height, width) in zip(
            samples.thumbs.read(pair), samples.sizes[pair].tolist(), strict=True
        ):  # thumbnails are square, whatever the picture's shape
            scale = CELL_PX / max(height, width)
            shape = max(1, round(width * scale)), max(1, round(height * scale))
            pictures.append(Image.fromarray(thumb).resize(shape))
        words = f"{'one picture' if same else 'refused'}, score {score:.4f}"
        names = ", ".join(map(samples.name, pair))
        cells.append(Cell(pictures, words, INK if same else BAD, names))
    return draw_sheet(cells, COLUMNS) if cells else None


def check_place(
    index: DatasetIndex,
    column: str = COLUMN,
    otherwise: str = ", or leave the column out with --no-column",
) -> None:
    """Check that a column can be written beside a data set; `otherwise` ends the remedy.

    Raises:
        DataError: It is remote, or read-only, or has a column of that name that is another's.
    """
    folder, entry = index.folder, index.manifest.columns.get(column)
    if entry is not None and entry.kind != "integer":
        raise DataError(
            f"{folder} has a column {column} of kind {entry.kind}, which would be lost; build the "
            f"data set with another name for it{otherwise}"
        )
    if scheme(folder) or not os.access(folder, os.W_OK):
        raise DataError(
            f"{folder} is {'remote' if scheme(folder) else 'read-only'}, and the column {column} "
            f"is written beside dataset.json; copy the data set{otherwise}"
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
