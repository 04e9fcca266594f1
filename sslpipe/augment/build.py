"""From a recipe's [augment] to the views of a run."""

from typing import Any

from sslpipe.augment.two_views import AUGMENTS, FusedViews, Views
from sslpipe.data.index import DatasetIndex
from sslpipe.errors import RecipeError
from sslpipe.recipe.base import RunRecipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.registry import build


def build_augment(
    recipe: RunRecipe, index: DatasetIndex | None = None, *, compiled: bool = False
) -> Views:
    """Build the recipe's views, on the CPU.

    Args:
        recipe: Its own mean and std win.
        index: The data set whose mean and std are used otherwise; None: 0 and 1.
        compiled: On a CPU, compile the colour operations at their first use.

    Raises:
        RecipeError: A preset, key or value of [augment] is wrong, or small views do not go with
            the rest of the recipe.
    """
    statistics: dict[str, Any] = {}
    if index is not None:
        statistics = {"mean": index.manifest.mean, "std": index.manifest.std}
    augment = build(AUGMENTS, recipe.augment, section="augment", **statistics)
    _check_small_views(recipe, *augment.small_size)
    if compiled and isinstance(augment, FusedViews):
        augment.compile_colours()
    return augment


def _check_small_views(recipe: RunRecipe, views: int, side: int) -> None:
    """Refuse small views that a recipe's images, or what else it asks for, do not go with."""
    if not views:
        return
    reason = ""
    if not isinstance(recipe, Recipe):
        reason = "a fine-tuning has no objective for them"
    elif recipe.data.micro_batch is not None:
        reason = "data.micro_batch embeds views of one size; leave either out"
    elif side > recipe.data.canvas_px:
        reason = f"they are of {side} px, and images of data.canvas_px = {recipe.data.canvas_px}; "
        reason += "set a smaller augment.small_px"
    if reason:
        raise RecipeError(f"augment.small_views = {views}: {reason}")
