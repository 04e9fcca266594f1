"""The picture of a plan's own views, as `sslpipe preview` and the report show it."""

from collections.abc import Sequence
from typing import Any

from PIL import Image

from sslpipe.run.contract import Plan
from sslpipe.sharding.show import choose_ids


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
