"""Kinds of runs that satellites bring.

Pretraining is the core's own, `sslpipe.plan`; a satellite's `runs.py` says which class of recipe it
plans, checks and carries out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from sslpipe.errors import RecipeError
from sslpipe.run.plan import Plan
from sslpipe.satellites import offered


class RunKind(NamedTuple):
    """How the runs of a kind of recipe are planned, checked and carried out."""

    make: Callable[..., Plan[Any]]
    check: Callable[[Any], Any]  # plan -> `sslpipe.check.result.Check`
    run: Callable[[Any, Path], int]  # plan, run directory -> the last step done


def kind_of(recipe: object) -> RunKind:
    """Look up the kind of a recipe that the core cannot run. Raises: RecipeError where none is."""
    for satellite in offered("runs"):
        for of_recipe, kind in satellite.RUNS.items():
            if isinstance(recipe, of_recipe):
                known: RunKind = kind
                return known
    raise RecipeError(
        f"this installation cannot run a {type(recipe).__name__}: no folder of sslpipe brings it; "
        "install sslpipe as a whole"
    )
