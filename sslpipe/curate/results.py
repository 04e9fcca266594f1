"""Write duplicates down: rows of groups.csv, the sheet of doubtful pairs, the data set's column."""

import os
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from sslpipe.curate.duplicates import Doubt
from sslpipe.curate.groups import KINDS, Groups
from sslpipe.curate.scan import Samples
from sslpipe.curate.tables import write_table
from sslpipe.data.columns import MISSING_INTEGER
from sslpipe.data.index import DERIVED_COLUMN, DatasetIndex, load_index
from sslpipe.data.storage import scheme
from sslpipe.errors import DataError
from sslpipe.sharding.columns import ColumnValues, add_columns

COLUMN = DERIVED_COLUMN
FIELDS = ("split", "id", "key", "group", "kind", "score", "nearest")  # of groups.csv
# of the sheet of doubtful pairs
CELL_PX, GAP_PX, LINE_PX, MARGIN_PX = 128, 10, 15, 20
BACKGROUND, INK, REFUSED = (250, 250, 248), (34, 34, 34), (176, 0, 32)
COLUMNS, MOST_PAIRS = 4, 120


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
            sentences.append(f"{count:,} of {total:,} {name} images are also in train{share}")
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
    if not len(pairs):
        return None
    font = ImageFont.load_default(size=11)
    step_x, step_y = 2 * CELL_PX + 2 + GAP_PX, CELL_PX + 2 * LINE_PX + GAP_PX
    columns = min(COLUMNS, len(pairs))
    rows = -(-len(pairs) // columns)
    size = columns * step_x - GAP_PX + 2 * MARGIN_PX, rows * step_y - GAP_PX + 2 * MARGIN_PX
    sheet = Image.new("RGB", size, BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    for place, pair in enumerate(pairs.tolist()):
        left = MARGIN_PX + place % columns * step_x
        top = MARGIN_PX + place // columns * step_y
        for side, thumb in enumerate(samples.thumbs.read(pair)):
            height, width = samples.sizes[pair[side]].tolist()
            # thumbnails are square, whatever the picture's shape
            scale = CELL_PX / max(height, width)
            shape = max(1, round(width * scale)), max(1, round(height * scale))
            sheet.paste(Image.fromarray(thumb).resize(shape), (left + side * (CELL_PX + 2), top))
        accepted = bool(verdicts[place])
        words = f"{'one picture' if accepted else 'refused'}, score {scores[place]:.4f}"
        pen.text((left, top + CELL_PX + 1), words, fill=INK if accepted else REFUSED, font=font)
        names = ", ".join(map(samples.name, pair))
        pen.text((left, top + CELL_PX + LINE_PX), names, fill=INK, font=font)
    return sheet


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
