"""Settings: TOML in, one frozen tree out, for both kinds of run.

`load_recipe` is what everybody calls; a recipe with a `[sampler]` fine-tunes, every other one
pretrains, and this is the one place that decides it. What the two kinds share stands in `base`,
what is their own in `pretrain` and `finetune`; `reading` takes TOML and overrides, `messages`
says what a setting means. Start reading at `base.RunRecipe`.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from sslpipe.errors import RecipeError
from sslpipe.recipe.base import RunRecipe
from sslpipe.recipe.finetune import FinetuneRecipe
from sslpipe.recipe.messages import describe_key, explain_errors, known_keys
from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.reading import apply_overrides, read_tree

__all__ = [
    "FinetuneRecipe",
    "Recipe",
    "explain_key",
    "is_finetune",
    "load_recipe",
    "parse_recipe",
    "setting_keys",
]

KINDS: dict[str, type[RunRecipe]] = {"pretraining": Recipe, "fine-tuning": FinetuneRecipe}


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> Recipe | FinetuneRecipe:
    """Read a TOML recipe, apply `section.key=value` overrides, validate everything.

    Raises:
        RecipeError: Names the key, its value, the remedy and the nearest valid key.
    """
    return parse_recipe(read_tree(path, overrides), str(path), overrides=overrides)


def parse_recipe(
    tree: dict[str, Any], origin: str, *, recorded: bool = False, overrides: Sequence[str] = ()
) -> Recipe | FinetuneRecipe:
    """Validate a tree of plain values, of either kind. Raises: RecipeError, as `load_recipe`.

    Args:
        tree: As TOML or JSON gives it; a table `sampler` makes it a fine-tuning.
        origin: Where it came from, for messages.
        recorded: It is of a run that is there: its trackers need not be installed here.
        overrides: What was put into the tree.
    """
    kind = FinetuneRecipe if is_finetune(tree) else Recipe
    try:
        recipe = kind.model_validate(tree, context="recorded" if recorded else None)
    except ValidationError as error:
        raise RecipeError(explain_errors(error, kind, origin)) from None
    named: dict[str, Any] = {}
    apply_overrides(named, [each for each in overrides if each.lstrip().startswith("backbone")])
    recipe._backbone_overrides = frozenset(named.get("backbone") or ())
    return recipe


def is_finetune(tree: Mapping[str, Any]) -> bool:
    """Whether a recipe's tree is one of fine-tuning: it has a [sampler]."""
    return "sampler" in tree


def setting_keys() -> list[str]:
    """List "section.key" of the settings of both kinds of run, and the sections themselves."""
    return list(dict.fromkeys(name for model in KINDS.values() for name in known_keys(model)))


def explain_key(key: str) -> str | None:
    """Return what a setting means, its type and default, for each kind of run; None: none has it.

    Args:
        key: As in a recipe or an override: "data.micro_batch", or a section's name.
    """
    texts: dict[str, list[str]] = {}
    for kind, model in KINDS.items():
        text = describe_key(model, key)
        if text is not None:
            texts.setdefault(text, []).append(kind)
    said = (f"{key} ({' and '.join(kinds)})\n{text}" for text, kinds in texts.items())
    return "\n\n".join(said) or None
