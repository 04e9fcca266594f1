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
        index: The data set whose mean and std are used otherwise, and whose channels the images
            have; None: 0 and 1, and red, green and blue.
        compiled: On a CPU, compile the colour operations at their first use.

    Raises:
        RecipeError: A preset, key or value of [augment] is wrong.
    """
    statistics: dict[str, Any] = {}
    channels: dict[str, Any] = {}
    if index is not None:
        statistics = {"mean": index.manifest.mean, "std": index.manifest.std}
        channels = {"channels": index.image_type.channels}
    augment = build(AUGMENTS, recipe.augment, section="augment", fixed=channels, **statistics)
    if compiled and isinstance(augment, FusedViews):
        augment.compile_colours()
    return augment
