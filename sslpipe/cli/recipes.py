"""What every command that takes a recipe has in common."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from sslpipe.errors import UserError

if TYPE_CHECKING:
    from sslpipe.recipe.finetune import FinetuneRecipe
    from sslpipe.recipe.pretrain import Recipe

RecipePath = Annotated[Path, typer.Argument(help="A recipe, a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings instead of the recipe's."),
]
Data = Annotated[str, typer.Option("--data", help="The data set's dataset.json: a path or a URL.")]


def read_recipe(path: Path, overrides: list[str] | None) -> "Recipe | FinetuneRecipe":
    """Return the recipe, of either kind. Raises: RecipeError."""
    from sslpipe.recipe.base import read_tree
    from sslpipe.recipe.finetune import is_finetune, load_finetune_recipe
    from sslpipe.recipe.pretrain import load_recipe

    if is_finetune(read_tree(path, overrides or [])):
        return load_finetune_recipe(path, overrides or [])
    return load_recipe(path, overrides or [])


def check_backbone(recipe: "Recipe | FinetuneRecipe", backbone: Path | None) -> None:
    """Raise UserError where a --backbone is given to what starts from none."""
    from sslpipe.recipe.finetune import FinetuneRecipe

    if backbone is not None and not isinstance(recipe, FinetuneRecipe):
        raise UserError(f"--backbone is for a fine-tuning, and {recipe.name} has no [sampler]")
