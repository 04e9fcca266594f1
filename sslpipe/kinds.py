"""Kinds of runs: which class of recipe is planned, checked and carried out, and how.

Pretraining is the core's own; satellites bring others by their `runs.py`.
"""

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from sslpipe.data.holdout import (
    as_overrides,
    fitting,
    holdout_ids,
    plan_order,
    suggested_holdout,
    with_holdout,
)
from sslpipe.data.index import DatasetIndex
from sslpipe.data.order import Order
from sslpipe.errors import RecipeError
from sslpipe.plan import Pretraining
from sslpipe.recipe.pretrain import Recipe
from sslpipe.registry.plugins import remember_version
from sslpipe.run.contract import Plan
from sslpipe.satellites import entry_of, offered

if TYPE_CHECKING:
    from sslpipe.check.outcome import Check


class RunKind(NamedTuple):
    """How the runs of a kind of recipe are planned, checked and carried out."""

    make: Callable[..., Plan[Any]]
    # recipe, index -> batches; where the data set is too small the error has `settings` that fit
    order: Callable[[Any, DatasetIndex], Any]
    check: Callable[[Any], "Check"]  # of a plan
    run: Callable[[Any, Path], int]  # plan, run directory -> the last step done


def run_kind(recipe: object) -> RunKind:
    """Look up the kind of a recipe. Raises: RecipeError: nothing here can run it."""
    if type(recipe) is Recipe:  # one of a derived class is its satellite's
        return PRETRAINING
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


# the core's own; what a finished run needs not is imported where it is used


def _plan_batches(recipe: Recipe, index: DatasetIndex) -> Order:
    """Plan the batches, with images held out where the recipe evaluates them."""
    split = index.split(recipe.data.split)
    recipe = with_holdout(recipe, split)
    order = plan_order(recipe, index)
    wants = recipe.run.monitor_steps and recipe.data.holdout
    if wants and not len(holdout_ids(recipe, split)):
        settings = as_overrides(fitting(suggested_holdout(recipe, split)[0], recipe, split))
        raise RecipeError(f"no image is held out; set {settings}", settings)
    return order


def _check(plan: Pretraining) -> "Check":
    from sslpipe.check.pretraining import check_pretraining

    return check_pretraining(plan)


def _run(plan: Pretraining, run_dir: Path) -> int:
    from sslpipe.pretrain import pretrain

    return pretrain(plan, run_dir)


PRETRAINING = RunKind(make=Pretraining.make, order=_plan_batches, check=_check, run=_run)
