"""The picture of a plan's own views, as `sslpipe preview` and the report show it."""

from collections.abc import Sequence
from typing import Any

from PIL import Image

from sslpipe.augment.preview import preview_grid
from sslpipe.augment.two_views import build_augment
from sslpipe.plan import Pretraining
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
    split = plan.index.split(recipe.data.split)  # with the data's own classes
    chosen = choose_ids(split, ids, count=images, seed=recipe.seed)
    pairing = plan.pairing if isinstance(plan, Pretraining) else None
    partners = None if pairing is None else pairing.partners
    grid = preview_grid(
        plan.index,
        split,
        build_augment(recipe, plan.index),
        seed=recipe.seed,
        epoch=epoch or 0,
        num_epochs=2 if epoch is None else 1,
        ids=chosen,
        canvas_px=recipe.data.canvas_px,
        partners=None if partners is None else partners.of_samples,
    )
    return grid, chosen.tolist()
