"""The kind of recipe that this folder brings."""

from pathlib import Path

from sslpipe.metric_learning.recipe import FinetuneRecipe
from sslpipe.recipe.reading import RecipeKind

RECIPES = {
    "fine-tuning": RecipeKind(
        section="sampler",
        model=FinetuneRecipe,
        first=Path("recipes/metric/my_images_mobile.toml"),
        column_key="sampler.column",
    )
}
