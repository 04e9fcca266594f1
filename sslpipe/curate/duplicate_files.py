"""Write duplicates down: rows of groups.csv, the sheet of doubtful pairs, the data set's column."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray
from PIL import Image

from sslpipe.curate.duplicates import Doubt
from sslpipe.curate.grouping import Groups, Integers
from sslpipe.curate.image_scan import Samples
from sslpipe.data.index import DERIVED_COLUMN, DatasetIndex, load_index
from sslpipe.data.storage import scheme
from sslpipe.errors import DataError
from sslpipe.sharding.columns import replace_columns
from sslpipe.sharding.show import BAD, INK, Cell, draw_sheet, fitted

COLUMN = DERIVED_COLUMN
FIELDS = ("split", "id", "key", "group", "score", "nearest")  # of groups.csv
COLUMNS = 4  # of the sheet of doubtful pairs
MOST_EACH = 60  # accepted pairs on it, and refused ones


def group_rows(samples: Samples, groups: Groups) -> list[dict[str, Any]]:
    """Return a row a sample of a group, by group; nearest: SPLIT:ID of the most similar one."""
    places = np.flatnonzero(groups.group >= 0)
    return [
        {
            "split": samples.splits[samples.split[row]],
            "id": int(samples.ids[row]),
            "key": samples.keys[row],
            "group": int(groups.group[row]),
            "score": round(float(groups.score[row]), 6),
            "nearest": samples.name(groups.nearest[row]),
        }
        for row in places[np.argsort(groups.group[places], kind="stable")].tolist()
    ]


def shared_sentences(samples: Samples, groups: Groups) -> list[str]:
    """Return how many images of each other split are in train, too; [] where train is not there."""
    if "train" not in samples.splits:
        return []
    train = samples.split == samples.splits.index("train")
    shared = (groups.group >= 0) & np.isin(groups.group, groups.group[train])
    sentences = []
    for number, name in enumerate(samples.splits):
        is_inside = samples.split == number
        if name != "train":
            count = int((shared & is_inside).sum())
            total = int(is_inside.sum())
            percent = 100 * count / total
            digits = ".0f" if percent >= 10 else ".2g"  # not 1e+02
            share = f" ({percent:{digits}} %)" if count else ""
            images = f"{count:,} of {total:,}" if count else f"None of {total:,}"
            sentences.append(f"{images} {name} images are also in train{share}")
    return sorted(sentences, key=lambda text: " test images" not in text)


def doubt_sheet(
    samples: Samples,
    doubt: Doubt,
    pictures_of: Callable[[Integers], dict[int, NDArray[np.uint8]]],
) -> Image.Image | None:
    """Draw the most doubtful pairs side by side: those accepted, then, in red, those refused.

    Args:
        samples: As scanned.
        doubt: Of `duplicates.find_duplicates`.
        pictures_of: Decodes the images of some rows, (h, w, 3) each, by row.

    Returns:
        An RGB image; None where no pair is doubtful.
    """
    places = [np.flatnonzero(same)[:MOST_EACH] for same in (doubt.accepted, ~doubt.accepted)]
    chosen = np.concatenate(places)
    decoded = pictures_of(np.unique(doubt.pairs[chosen]))
    pictures = {row: fitted(pixels) for row, pixels in decoded.items()}
    cells = []
    for place in chosen.tolist():
        same = bool(doubt.accepted[place])
        pair = doubt.pairs[place].tolist()
        words = f"{'one picture' if same else 'refused'}, score {doubt.score[place]:.4f}"
        names = ", ".join(map(samples.name, pair))
        cells.append(Cell([pictures[row] for row in pair], words, INK if same else BAD, names))
    return draw_sheet(cells, COLUMNS) if cells else None


def check_place(index: DatasetIndex) -> None:
    """Check that the column can be written beside a data set.

    Raises:
        DataError: It is remote, or read-only, or has a column of that name that is another's.
    """
    folder = index.folder
    otherwise = ", or leave the column out with --no-column"
    entry = index.manifest.columns.get(COLUMN)
    if entry is not None and entry.kind != "integer":
        raise DataError(
            f"{folder} has a column {COLUMN} of kind {entry.kind}, which would be lost; build the "
            f"data set with another name for it{otherwise}"
        )
    if scheme(folder) or not os.access(folder, os.W_OK):
        raise DataError(
            f"{folder} is {'remote' if scheme(folder) else 'read-only'}, and the column {COLUMN} "
            f"is written beside dataset.json; copy the data set{otherwise}"
        )


def write_column(folder: str, samples: Samples, groups: Groups) -> None:
    """Write the column of numbers of groups beside a data set; shards stay.

    A sample in no group has no value. Other splits lose theirs: their numbers would stand for other
    groups.

    Args:
        folder: Of dataset.json.
        samples: As scanned.
        groups: Of these samples.

    Raises:
        DataError: As `check_place`.
    """
    index = load_index(folder)
    check_place(index)
    columns = {}
    for number, split in enumerate(samples.splits):
        is_inside = samples.split == number
        values = np.full(len(index.split(split)), -1, np.int64)
        values[samples.ids[is_inside]] = groups.group[is_inside]
        columns[split] = pa.table({COLUMN: pa.array(values, mask=values < 0)})
    replace_columns(Path(folder), columns)
