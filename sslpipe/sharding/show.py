"""Draw samples of a data set, as `sslpipe shards show` does."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw

from sslpipe.data.decode import BadSample, decode, header_size
from sslpipe.data.image_type import Colour
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.lettering import draw_text, lettering
from sslpipe.data.reader import Reader
from sslpipe.errors import UserError, one_line
from sslpipe.portable import replacing
from sslpipe.random import permutation

SHOWN = 48  # samples, unless ids name them
IN_A_ROW = 8
CELL_PX = 128
GAP_PX = 12
LINE_PX = 16
LETTERS_PX = 12
MARGIN_PX = 20
BACKGROUND = (250, 250, 248)
INK = (34, 34, 34)
FAINT = (120, 120, 116)
BAD = (190, 30, 30)


def choose_ids(
    split: Split, ids: Sequence[int] | None, *, count: int = SHOWN, seed: int = 0
) -> NDArray[np.int64]:
    """Return samples in ascending order, each once: those of `ids`, or `count` drawn at random.

    Raises: UserError for an id that is not in the split.
    """
    wrong = [i for i in ids or [] if not 0 <= i < len(split)]
    if wrong:
        raise UserError(f"--ids={wrong[0]} is not in the split's 0 to {len(split) - 1}")
    chosen: NDArray[np.int64] = np.unique(ids or permutation(len(split), (seed,))[:count])
    return chosen


def sample_lines(index: DatasetIndex, split_name: str, ids: Sequence[int]) -> list[str]:
    """Name samples, a line each: id, path or else key in its shard, class."""
    split = index.split(split_name)
    reader = Reader(split)
    names = split.names_of(ids) or [reader.one(sample_id).key for sample_id in ids]
    return [
        f"id {sample_id}: {one_line(name)}, {one_line(own_class)}"
        for sample_id, name, own_class in zip(ids, names, _classes(split, ids), strict=True)
    ]


def _classes(split: Split, ids: ArrayLike) -> list[str]:
    return [split.class_name(label) or "no label" for label in split.labels_of(ids).tolist()]


def sample_sheet(
    index: DatasetIndex,
    split_name: str,
    *,
    ids: Sequence[int] | None = None,
    all_channels: bool = False,
) -> Image.Image:
    """Draw a grid of samples, each with its id, path or else key, class and size.

    Of a bad one stands there what is wrong. Letters that the font lacks lose their accent or are
    "?"; `is_drawable`. At most SHOWN are drawn at random, unless `ids` names them. With
    `all_channels` each sample is a strip of grey pictures.
    """
    split = index.split(split_name)
    kind = index.stored_type
    reader = Reader(split)
    cells = []
    chosen = choose_ids(split, ids)
    classes = _classes(split, chosen)
    names = split.names_of(chosen)
    for place, (sample_id, words) in enumerate(zip(chosen.tolist(), classes, strict=True)):
        raw = reader.one(sample_id)
        colour = INK
        try:
            units = decode(raw.image, 2 * CELL_PX, image_type=kind)
            shown = kind.strip(units) if all_channels else kind.picture(units)[None]
            pictures = [fitted(pixels) for pixels in shown]
            width, height = header_size(raw.image)
            words = f"{words}  {width}x{height}"
        except BadSample as error:
            words = str(error)
            colour = BAD
            pictures = [Image.new("RGB", (CELL_PX + 1, CELL_PX + 1), BACKGROUND)]
            ImageDraw.Draw(pictures[0]).rectangle((0, 0, CELL_PX, CELL_PX), outline=BAD)
        path = raw.key if names is None else names[place]
        name = _short_path(f"id {sample_id}  ", path, len(pictures) * CELL_PX)
        cells.append(Cell(pictures, words, colour, name))
    return draw_sheet(cells, max(1, IN_A_ROW // (len(kind.channels) if all_channels else 1)))


class Cell(NamedTuple):
    """Pictures of at most CELL_PX, side by side, and two lines below them."""

    pictures: Sequence[Image.Image]
    words: str
    colour: Colour
    name: str


def draw_sheet(cells: Sequence[Cell], columns: int) -> Image.Image:
    """Draw cells of as many pictures each, `columns` in a row."""
    columns = min(columns, len(cells))
    wide = max(len(cell.pictures) for cell in cells)
    wide = wide * (CELL_PX + 2) - 2
    step_x = wide + GAP_PX
    step_y = CELL_PX + 2 * LINE_PX + GAP_PX
    size = (columns * step_x - GAP_PX, -(-len(cells) // columns) * step_y - GAP_PX)
    sheet = Image.new("RGB", (size[0] + 2 * MARGIN_PX, size[1] + 2 * MARGIN_PX), BACKGROUND)
    pen = ImageDraw.Draw(sheet)
    for place, cell in enumerate(cells):
        left = MARGIN_PX + place % columns * step_x
        top = MARGIN_PX + place // columns * step_y
        for number, picture in enumerate(cell.pictures):
            sheet.paste(picture, (left + number * (CELL_PX + 2), top))
        for line, (text, fill) in enumerate(((cell.words, cell.colour), (cell.name, FAINT))):
            y = top + CELL_PX + 1 + line * LINE_PX
            draw_text(pen, (left, y), text, fill=fill, size_px=LETTERS_PX, most_px=wide)
    return sheet


def save_sheet(sheet: Image.Image, path: Path) -> None:
    """Write the picture, and the folders above it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as temporary:
        sheet.save(temporary, "PNG")


def fitted(pixels: np.ndarray) -> Image.Image:
    """Scale to a cell; small images are enlarged by a whole factor, unsmoothed."""
    image = Image.fromarray(pixels)
    longer = max(image.size)
    if longer <= CELL_PX:
        factor = CELL_PX // longer
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    image.thumbnail((CELL_PX, CELL_PX), Image.Resampling.LANCZOS)
    return image


def _short_path(before: str, path: str, px: int) -> str:
    """Leave leading folders out while a path is too long to stand under a cell."""
    words = before + path
    while "/" in path and _width(words) > px:
        path = path.partition("/")[2]
        words = f"{before}…/{path}"
    return words


def _width(words: str) -> float:
    letters, font = lettering(words, LETTERS_PX)
    return font.getlength(letters)
