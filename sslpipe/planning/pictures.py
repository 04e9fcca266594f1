"""Pictures of a run for people: its views, and what lies nearest to some held-out images.

They draw no random number from a generator, and are small.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image, ImageDraw
from torch import Tensor

from sslpipe.data.loader import one_pass
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.monitor import Watched
from sslpipe.run.contract import Plan
from sslpipe.sharding.show import choose_ids

QUERIES = 8  # held-out images of a sheet, the same ones at each evaluation
NEAREST = 5  # shown beside each
_CELL_PX = 72
_FRAME_PX = 3
_PAPER = (250, 250, 248)
_SAME = (40, 150, 70)  # the frame of a neighbour of the query's class
_OTHER = (200, 50, 40)
_UNKNOWN = (160, 160, 156)


def preview(
    plan: Plan[Any],
    *,
    images: int = 8,
    ids: Sequence[int] | None = None,
    epoch: int | None = None,
) -> tuple[Image.Image, list[int]]:
    """Draw images of the plan's split beside the views that training makes of them.

    Args:
        plan: Its recipe's seed decides the views and, without `ids`, the images.
        images: How many, at most.
        ids: These samples instead.
        epoch: Whose views are shown, alone; None: those of the first two.

    Returns:
        The picture, and the ids of the images on it, ascending.
    """
    recipe = plan.recipe
    split = plan.index.split(recipe.data.split)
    chosen = choose_ids(split, ids, count=images, seed=recipe.seed)
    grid = plan.draw_views(chosen, epoch=epoch or 0, num_epochs=2 if epoch is None else 1)
    return grid, chosen.tolist()


def nearest_ids(queries: Embeddings, searched: Embeddings) -> NDArray[np.int64]:
    """Find the nearest samples of some queries by cosine, without the queries themselves.

    Args:
        queries: Rows of which QUERIES are taken, evenly spread.
        searched: Rows, among which they may be.

    Returns:
        (Q, 1 + K) ids: of the query, then of its K <= NEAREST nearest.

    Raises:
        DataError: Features are not finite: the run has diverged.
    """
    if not (torch.isfinite(queries.features).all() and torch.isfinite(searched.features).all()):
        raise DataError("the features of held-out images are not finite")
    count = min(QUERIES, len(queries.ids))
    places = torch.linspace(0, len(queries.ids) - 1, count).round().long()
    some = queries.rows(places.to(queries.ids.device))
    cosines = _unit(some.features) @ _unit(searched.features).T  # (Q, N)
    itself = some.ids[:, None] == searched.ids
    nearest = min(NEAREST, int((~itself).sum(1).min()))
    order = cosines.masked_fill(itself, -torch.inf).topk(nearest).indices
    ids: NDArray[np.int64] = torch.cat([some.ids[:, None], searched.ids[order]], 1).cpu().numpy()
    return ids


def _unit(rows: Tensor) -> Tensor:
    return torch.nn.functional.normalize(rows.float(), dim=1)


def neighbours_picture(watched: Watched, ids: NDArray[np.int64]) -> Image.Image:
    """Draw a contact sheet: a row for each query, itself first, then its nearest.

    A green frame is an image of the query's class, a red one of another; grey: without labels.

    Args:
        watched: The samples, and how they are read.
        ids: From `nearest_ids`.
    """
    thumbnails = _thumbnails(watched, ids)
    labels = watched.split.labels_of(ids.ravel()).reshape(ids.shape)
    side = _CELL_PX + 2 * _FRAME_PX
    sheet = Image.new("RGB", (ids.shape[1] * side + side // 3, len(ids) * side), _PAPER)
    pen = ImageDraw.Draw(sheet)
    for row, samples in enumerate(ids.tolist()):
        for column, sample in enumerate(samples):
            left = column * side + (side // 3 if column else 0)  # the query stands apart
            top = row * side
            if column:
                colour = _UNKNOWN
                if labels[row, 0] >= 0 and labels[row, column] >= 0:
                    colour = _SAME if labels[row, 0] == labels[row, column] else _OTHER
                pen.rectangle((left, top, left + side - 1, top + side - 1), colour)
            if sample in thumbnails:  # not one that cannot be read
                picture = thumbnails[sample]
                x = left + (side - picture.width) // 2
                y = top + (side - picture.height) // 2
                sheet.paste(picture, (x, y))
    return sheet


def _thumbnails(watched: Watched, ids: NDArray[np.int64]) -> dict[int, Image.Image]:
    """Read samples, by id, in the size of a cell; bad ones are omitted."""
    thumbnails = {}
    batches = one_pass(
        watched.split,
        ids=np.unique(ids),
        canvas_px=watched.canvas_px,
        batch_size=QUERIES,
        num_workers=0,
        on_bad=lambda bad: None,
        reader=watched.reader,
    )
    for batch in batches:
        for sample, image, size in zip(batch.ids.tolist(), batch.images, batch.sizes, strict=True):
            height, width = size.tolist()
            units = image[:, :height, :width].numpy()
            picture = Image.fromarray(watched.split.image_type.picture(units))
            factor = _CELL_PX / max(height, width)
            sides = (max(1, round(width * factor)), max(1, round(height * factor)))
            smooth = Image.Resampling.LANCZOS if factor < 1 else Image.Resampling.NEAREST
            thumbnails[sample] = picture.resize(sides, smooth)
    return thumbnails
