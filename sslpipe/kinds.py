"""Kinds of runs that satellites bring.

Pretraining is the core's own, `sslpipe.plan`; a satellite's `runs.py` says which class of recipe it
plans, checks and carries out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

from sslpipe.data.index import DatasetIndex
from sslpipe.errors import RecipeError
from sslpipe.recipe.pretrain import Recipe
from sslpipe.registry.plugins import remember_version
from sslpipe.run.contract import Plan
from sslpipe.satellites import entry_of, offered


class RunKind(NamedTuple):
    """How the runs of a kind of recipe are planned, checked and carried out."""

    make: Callable[..., Plan[Any]]
    # recipe, index -> batches; where the data set is too small the error has `settings` that fit
    order: Callable[[Any, DatasetIndex], Any]
    check: Callable[[Any], Any]  # plan -> `sslpipe.check.outcome.Check`
    run: Callable[[Any, Path], int]  # plan, run directory -> the last step done


def is_pretraining(recipe: object) -> TypeGuard[Recipe]:
    """Return whether the core itself plans, checks and runs a recipe.

    One of a class derived from `Recipe` may be planned as a pretraining, and is its satellite's.
    """
    return type(recipe) is Recipe


def run_kind(recipe: object) -> RunKind:
    """Look up the kind of a recipe that the core cannot run. Raises: RecipeError where none is."""
    for satellite in offered("runs"):
        for of_recipe, kind in satellite.RUNS.items():
            if isinstance(recipe, of_recipe):
                known: RunKind = kind
                if (entry := entry_of(satellite)) is not None:  # its code decides the weights
                    remember_version(entry)
                return known
    raise RecipeError(
        f"this installation cannot run a {type(recipe).__name__}: nothing brings it; "
        "install sslpipe as a whole, or the package that does"
    )
