"""Settings: TOML in, one frozen tree out, for every kind of run.

`load_recipe` is what everybody calls; `kinds` decides by a recipe's sections which kind it is: a
pretraining, whose settings stand in `pretrain`, or one that a satellite brings. What all kinds
share stands in `base`; `reading` takes TOML and overrides, `messages` says what a setting means.
Start reading at `base.RunRecipe`.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sslpipe.errors import RecipeError, shown
from sslpipe.recipe.base import RunRecipe
from sslpipe.recipe.kinds import is_finetune, model_for, recipe_models
from sslpipe.recipe.messages import describe_key, explain_errors, known_keys
from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.reading import apply_overrides, read_tree

__all__ = [
    "Recipe",
    "RunRecipe",
    "explain_key",
    "is_finetune",
    "load_recipe",
    "parse_recipe",
    "recipe_models",
    "setting_keys",
]


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> RunRecipe:
    """Read a TOML recipe, apply `section.key=value` overrides, validate everything.

    Raises:
        RecipeError: Names the key, its value, the remedy and the nearest valid key.
    """
    if not isinstance(path, str | Path):
        raise RecipeError(
            f"a recipe is the path of a TOML file, or what sslpipe.load_recipe returns, not "
            f"{shown(path)} ({type(path).__name__})"
        )
    return parse_recipe(read_tree(path, overrides), str(path), overrides=overrides)


def parse_recipe(
    tree: dict[str, Any], origin: str, *, recorded: bool = False, overrides: Sequence[str] = ()
) -> RunRecipe:
    """Validate a tree of plain values, of any kind. Raises: RecipeError, as `load_recipe`.

    Args:
        tree: As TOML or JSON gives it.
        origin: Where it came from, for messages.
        recorded: It is of a run that is there: its trackers need not be installed here.
        overrides: What was put into the tree.
    """
    model = model_for(tree, origin)
    try:
        recipe = model.model_validate(tree, context="recorded" if recorded else None)
    except ValidationError as error:
        raise RecipeError(explain_errors(error, model, origin, tree)) from None
    named: dict[str, Any] = {}
    apply_overrides(named, [each for each in overrides if each.lstrip().startswith("backbone")])
    recipe._backbone_overrides = frozenset(named.get("backbone") or ())
    return recipe


def setting_keys() -> list[str]:
    """List "section.key" of the settings of every kind of run, and the sections themselves."""
    return list(
        dict.fromkeys(name for model in recipe_models().values() for name in known_keys(model))
    )


def explain_key(key: str) -> str | None:
    """Return what a setting means, its type and default, for each kind of run; None: none has it.

    Args:
        key: As in a recipe or an override: "data.micro_batch", or a section's name.
    """
    texts: dict[str, list[str]] = {}
    for kind, model in recipe_models().items():
        text = describe_key(model, key)
        if text is not None:
            texts.setdefault(text, []).append(kind)
    said = (f"{key} ({' and '.join(kinds)})\n{text}" for text, kinds in texts.items())
    return "\n\n".join(said) or None
