"""Settings: TOML in, one frozen tree out, for every kind of run.

`reading` takes TOML and overrides, and decides by a recipe's sections which kind it is: a
pretraining, whose settings stand in `pretrain`, or one that a satellite brings. What all kinds
share stands in `sections`; `messages` says what a setting means and what is wrong with one.
"""

from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.reading import is_finetune, load_recipe, parse_recipe, recipe_models
from sslpipe.recipe.sections import RunRecipe

__all__ = ["Recipe", "RunRecipe", "is_finetune", "load_recipe", "parse_recipe", "recipe_models"]
