"""A picture of what training sees: images beside their views, with their parameters."""

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image, ImageDraw

from sslpipe.augment.op import Draws
from sslpipe.augment.ops import draws, ops_for
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.image_type import ImageType
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.lettering import draw_text, lettering
from sslpipe.data.loader import collate, one_pass
from sslpipe.data.pipeline import Batch, PairRows

_CELL_PX = 176  # about a cell's width; small views are enlarged by a whole factor, unsmoothed
_GAP_PX = 16
_ROW_GAP_PX = 26
_MARGIN_PX = 28
_LINE_PX = 17
_BACKGROUND = (250, 250, 248)
_INK = (34, 34, 34)
_FAINT = (120, 120, 116)
_MOST_ROWS = 16  # of samples below each other; further ones stand in blocks beside them
_VIEW_COLOURS = ((214, 92, 32), (32, 104, 190))  # first view, second view
_LETTERS_PX = 13
_TITLE_PX = 15


PartnersOf = Callable[[int, NDArray[np.int64]], NDArray[np.int64]]  # (epoch, ids (n,)) -> ids (n,)


class _Cell(NamedTuple):
    pixels: Image.Image
    lines: list[str]
    colour: tuple[int, int, int]


def preview_grid(
    index: DatasetIndex,
    split: Split,
    augment: FusedViews,
    *,
    seed: int,
    epoch: int,
    ids: ArrayLike,
    canvas_px: int,
    num_epochs: int = 2,
    partners: PartnersOf | None = None,
    half_size_steps: int = 0,
) -> Image.Image:
    """Draw a row per sample: the image with the first epoch's crops framed, then the views.

    The views are those of training, normalisation undone, in `num_epochs` epochs from `epoch` on.
    `ids` (n,) are sorted; `partners` are, by epoch and ids, the samples that second views show. So
    many first steps of the run as `half_size_steps` see the views at half the size: a line says it.

    Raises: DataError where a sample cannot be read.
    """
    ids = np.asarray(ids, dtype=np.int64)
    rows = []
    for batch in one_pass(split, ids=ids, canvas_px=canvas_px, batch_size=16, num_workers=0):
        paired = {
            number: _with_partners(
                batch=batch, partners=partners, epoch=number, split=split, canvas_px=canvas_px
            )
            for number in range(epoch, epoch + num_epochs)
        }
        rows += _rows(paired, augment, seed, index.image_type)
    for row, sample, label in zip(rows, ids.tolist(), split.labels_of(ids).tolist(), strict=True):
        row[0].lines.insert(0, f"id {sample}")
        row[0].lines.insert(1, split.class_name(label) or "no label")
    titles = ["image"] + [
        f"epoch {number}, view {view}"
        for number in range(epoch, epoch + num_epochs)
        for view in (1, 2)
    ]
    captions = [index.image_type.caption] if index.image_type.caption else []
    if half_size_steps:
        px = augment.crop_px
        text = f"the first {half_size_steps:,} steps see these views of {px} px at {px // 2} px"
        captions.append(text)
    return _draw_page(titles, rows, "; ".join(captions))


def _with_partners(
    batch: Batch, partners: PartnersOf | None, epoch: int, split: Split, canvas_px: int
) -> Batch:
    """Return the batch as an epoch has it: with the images that its second views show."""
    ids = batch.ids.numpy()
    shown = ids if partners is None else partners(epoch, ids)
    other = np.unique(shown[shown != ids])
    if not len(other):
        return batch
    read = one_pass(split, ids=other, canvas_px=canvas_px, batch_size=len(other), num_workers=0)
    rows = [
        (sample, image[:, :height, :width].numpy())
        for part in (batch, next(read))
        for sample, image, (height, width) in zip(
            part.ids.tolist(), part.images, part.sizes.tolist(), strict=True
        )
    ]
    whole = collate(split, ids, rows[: len(ids)], epoch, partners=rows[len(ids) :])
    image = np.where(shown != ids, len(ids) + np.searchsorted(other, shown), np.arange(len(ids)))
    both = np.stack([ids, shown], axis=1)
    pairs = PairRows(
        image=torch.from_numpy(image),
        ids=torch.from_numpy(both),
        labels=torch.from_numpy(both),
        groups=torch.zeros(len(ids), 2, 0, dtype=torch.int64),
        lonely=torch.zeros(len(ids), dtype=torch.bool),
    )
    return whole._replace(pairs=pairs)


def _rows(
    batches: dict[int, Batch], augment: FusedViews, seed: int, image_type: ImageType
) -> list[list[_Cell]]:
    """Draw the cells of some samples; batches: by epoch."""
    factor = max(1, round(_CELL_PX / augment.crop_px))
    first_epoch = next(iter(batches))
    count = len(next(iter(batches.values())).ids)
    rows: list[list[_Cell]] = [[] for _ in range(count)]
    scale = augment.std[:, None, None].cpu()
    shift = augment.mean[:, None, None].cpu()
    for epoch, batch in batches.items():
        params = draws(
            seed=seed, epoch=epoch, ids=batch.ids, sizes=batch.view_sizes, specs=augment.specs
        )
        views = augment(batch, params).cpu() * scale + shift  # (2B, C, S, S), units / 255
        shown = batch.view_images(len(augment.specs)).tolist()
        for row, cells in enumerate(rows):
            if epoch == first_epoch:
                picture = _original(
                    batch=batch,
                    row=row,
                    params=params,
                    cell_px=augment.crop_px * factor,
                    image_type=image_type,
                )
                cells.append(picture)
            for view, spec in enumerate(augment.specs):
                place = row + view * count
                draw = params.rows(slice(place, place + 1))
                height, width = batch.sizes[shown[place]].tolist()
                ops = ops_for(augment.specs)
                words = [word for op in ops for word in op.describe(draw, spec, (height, width))]
                if batch.pairs is not None and shown[place] != row:
                    words.insert(0, f"of id {int(batch.pairs.ids[row, 1])}")
                lines = _wrap(words, _CELL_PX)
                pixels = image_type.picture(views[place].mul(255).numpy())
                enlarged = pixels.repeat(factor, axis=0).repeat(factor, axis=1)
                cells.append(_Cell(Image.fromarray(enlarged), lines, _VIEW_COLOURS[view]))
    return rows


def _original(batch: Batch, row: int, params: Draws, cell_px: int, image_type: ImageType) -> _Cell:
    """The image, as large as a cell allows, with the box of each view."""
    height, width = batch.sizes[row].tolist()
    units = batch.images[row, :, :height, :width].cpu().numpy()
    image = Image.fromarray(image_type.picture(units))
    factor = cell_px / max(height, width)
    size = (max(1, round(width * factor)), max(1, round(height * factor)))
    image = image.resize(size, Image.Resampling.NEAREST if factor > 1 else Image.Resampling.LANCZOS)
    pen = ImageDraw.Draw(image)
    shown = batch.view_images(2).tolist()
    for view, colour in enumerate(_VIEW_COLOURS):
        if shown[row + view * len(batch.ids)] != row:
            continue
        top, left, box_h, box_w = (
            factor * side for side in params.boxes[row + view * len(batch.ids)].tolist()
        )
        corners = (left, top, left + box_w - 1, top + box_h - 1)
        pen.rectangle(corners, outline=(255, 255, 255), width=4)
        pen.rectangle(tuple(np.add(corners, (1, 1, -1, -1))), outline=colour, width=2)
    return _Cell(image, [f"{width} x {height} px"], _INK)


def _wrap(words: list[str], width_px: int) -> list[str]:
    lines = [words[0]]
    for word in words[1:]:
        longer = f"{lines[-1]}, {word}"
        letters, font = lettering(longer, _LETTERS_PX)
        if font.getlength(letters) <= width_px:
            lines[-1] = longer
        else:
            lines.append(word)
    return lines


def _draw_page(titles: list[str], rows: list[list[_Cell]], caption: str) -> Image.Image:
    """Draw the rows below their titles, in blocks side by side where there are many."""
    cell_px = max(_CELL_PX, *(cell.pixels.width for row in rows for cell in row))
    heights = [
        max(cell.pixels.height + len(cell.lines) * _LINE_PX for cell in row) + _ROW_GAP_PX
        for row in rows
    ]
    starts = range(0, len(rows), _MOST_ROWS)
    top = _MARGIN_PX + 26
    step_x = cell_px + _GAP_PX
    tallest = max(sum(heights[start : start + _MOST_ROWS]) for start in starts)
    width = len(starts) * (len(titles) * step_x - _GAP_PX + 2 * _MARGIN_PX)
    height = top + tallest + _GAP_PX
    page = Image.new("RGB", (width, height + _LINE_PX * bool(caption)), _BACKGROUND)
    pen = ImageDraw.Draw(page)
    below = (_MARGIN_PX, height - _GAP_PX)
    draw_text(pen, below, caption, fill=_INK, size_px=_LETTERS_PX)
    for number, start in enumerate(starts):
        left = number * width // len(starts) + _MARGIN_PX
        y = top
        for column, (title, cell) in enumerate(zip(titles, rows[start], strict=True)):
            place = (left + column * step_x, _MARGIN_PX - 4)
            draw_text(pen, place, title, fill=cell.colour, size_px=_TITLE_PX)
        block = slice(start, start + _MOST_ROWS)
        for row, height in zip(rows[block], heights[block], strict=True):
            for column, cell in enumerate(row):
                _draw_cell(page=page, pen=pen, cell=cell, x=left + column * step_x, y=y)
            y += height
    return page


def _draw_cell(page: Image.Image, pen: ImageDraw.ImageDraw, cell: _Cell, x: int, y: int) -> None:
    page.paste(cell.pixels, (x, y))
    for line, text in enumerate(cell.lines):
        below = y + cell.pixels.height + 5 + line * _LINE_PX
        ink = _INK if line == 0 else _FAINT
        draw_text(pen, (x, below), text, fill=ink, size_px=_LETTERS_PX)
