"""The picture of a recipe's own views, as `sslpipe preview` and the report show it."""

from collections.abc import Sequence

from PIL import Image

from sslpipe.augment.preview import preview_grid
from sslpipe.augment.two_views import build_augment
from sslpipe.data.index import DatasetIndex
from sslpipe.data.plan import draw_partners
from sslpipe.recipe import FinetuneRecipe, Recipe
from sslpipe.sharding.show import choose_ids


def preview_recipe(
    recipe: Recipe | FinetuneRecipe,
    index: DatasetIndex,
    *,
    images: int = 8,
    ids: Sequence[int] | None = None,
    epoch: int | None = None,
) -> tuple[Image.Image, list[int]]:
    """Draw images of the recipe's split beside the views that training makes of them.

    Args:
        recipe: Of either kind; its seed decides the views and, without `ids`, the images.
        index: The data set.
        images: How many, at most.
        ids: These samples instead.
        epoch: Whose views are shown, alone; None: those of the first two.

    Returns:
        The picture, and the ids of the images on it, ascending.
    """
    index = index.with_channels(recipe.data.channels)
    split = index.split(recipe.data.split)
    chosen = choose_ids(split, ids, count=images, seed=recipe.seed)
    grid = preview_grid(
        index,
        split,
        build_augment(recipe, index),
        seed=recipe.seed,
        epoch=epoch or 0,
        num_epochs=2 if epoch is None else 1,
        ids=chosen,
        canvas_px=recipe.data.canvas_px,
        partners=draw_partners(recipe, index),
    )
    return grid, chosen.tolist()
