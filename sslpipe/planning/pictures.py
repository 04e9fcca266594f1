"""Pictures of a run for people: its views, and what lies nearest to some held-out images.

They draw no random number from a generator, and are small.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from sslpipe.data.loader import one_pass
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.monitor import Watched
from sslpipe.run.contract import Plan
from sslpipe.sharding.show import BACKGROUND, FAINT, INK, Cell, choose_ids, draw_sheet, fitted

QUERIES = 8  # held-out images of a sheet, the same ones at each evaluation
NEAREST = 5  # shown beside each
_SAME = (40, 150, 70)  # the class below a neighbour that is of the query's
_OTHER = (200, 50, 40)


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

    The class below an image is green where it is the query's, red where it is another one, grey
    where one of the two is not known.

    Args:
        watched: The samples, and how they are read.
        ids: From `nearest_ids`.
    """
    thumbnails = _thumbnails(watched, ids)
    unreadable = Image.new("RGB", (1, 1), BACKGROUND)
    cells = []
    for samples in ids:
        labels = watched.split.labels_of(samples).tolist()
        for place, (sample, label) in enumerate(zip(samples.tolist(), labels, strict=True)):
            colour = _SAME if label == labels[0] else _OTHER
            if place == 0:
                colour = INK
            elif min(label, labels[0]) < 0:
                colour = FAINT
            name = watched.split.class_name(label) or "no label"
            pictures = [thumbnails.get(sample, unreadable)]
            cells.append(Cell(pictures, words=name, colour=colour, name=f"id {sample}"))
    return draw_sheet(cells, columns=ids.shape[1])


def _thumbnails(watched: Watched, ids: NDArray[np.int64]) -> dict[int, Image.Image]:
    """Read samples, by id, in the size of a cell; bad ones are omitted."""
    canvas_px = watched.options.canvas_px
    assert canvas_px is not None  # the recipe's
    thumbnails = {}
    batches = one_pass(
        watched.split,
        ids=np.unique(ids),
        canvas_px=canvas_px,
        batch_size=QUERIES,
        num_workers=0,
        on_bad=lambda bad: None,
        reader=watched.options.reader,
    )
    for batch in batches:
        for sample, image, size in zip(batch.ids.tolist(), batch.images, batch.sizes, strict=True):
            height, width = size.tolist()
            units = image[:, :height, :width].numpy()
            thumbnails[sample] = fitted(watched.split.image_type.picture(units))
    return thumbnails
