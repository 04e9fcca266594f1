"""From a recipe's [augment] to the views of a run."""

from typing import Any

from sslpipe.augment.two_views import AUGMENTS, FusedViews, Views
from sslpipe.data.index import DatasetIndex
from sslpipe.recipe.base import RunRecipe
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
        RecipeError: A preset, key or value of [augment] is wrong.
    """
    statistics: dict[str, Any] = {}
    if index is not None:
        statistics = {"mean": index.manifest.mean, "std": index.manifest.std}
    augment = build(AUGMENTS, recipe.augment, section="augment", **statistics)
    if compiled and isinstance(augment, FusedViews):
        augment.compile_colours()
    return augment
