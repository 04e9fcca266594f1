"""Kinds of recipes: a pretraining, and those that satellites bring."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from sslpipe.errors import RecipeError, did_you_mean, shown
from sslpipe.recipe.base import RunRecipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.satellites import gather


class RecipeKind(NamedTuple):
    """A kind of recipe: a TOML file that has its section is one of it."""

    section: str  # "sampler"; no recipe of another kind has it
    model: type[RunRecipe]  # its settings
    first: Path | None = None  # of a clone: the recipe to begin with, where images have labels


def labelled_recipes() -> list[Path]:
    """Return the recipes for labels that the working directory has, of a clone."""
    return [kind.first for kind in _brought().values() if kind.first and kind.first.is_file()]


def recipe_models() -> dict[str, type[RunRecipe]]:
    """Return the class of each kind of recipe by the kind's name, "pretraining" first."""
    return {"pretraining": Recipe, **{name: kind.model for name, kind in _brought().items()}}


def model_for(tree: Mapping[str, Any], origin: str) -> type[RunRecipe]:
    """Return which class the settings of a recipe have.

    Args:
        tree: As TOML or JSON gives it.
        origin: Where it came from, for messages.

    Raises:
        RecipeError: It has a section that no kind of recipe of this installation has.
    """
    for kind in _brought().values():
        if kind.section in tree:
            return kind.model
    known = [*Recipe.model_fields, *(kind.section for kind in _brought().values())]
    for key, value in tree.items():
        if isinstance(value, dict) and key not in known and not did_you_mean(key, known):
            raise RecipeError(
                f"{origin}: no kind of recipe of this installation has a section {shown(key)}; "
                "take it out, or install what brings it: sslpipe as a whole, or a package that "
                f"adds to it (known here: {', '.join(known)})"
            )
    return Recipe


def is_finetune(tree: Mapping[str, Any]) -> bool:
    """Return whether the recipe that a run recorded is one of a fine-tuning: has a [sampler]."""
    return "sampler" in tree


def _brought() -> dict[str, RecipeKind]:
    """Return the kinds that satellites bring, by name."""
    return gather("recipes", "RECIPES", {})
