"""Kinds of runs: what their plans have in common, and those that satellites bring.

Pretraining is the core's own, `sslpipe.plan`; a satellite's `runs.py` says which class of recipe it
plans, checks and carries out.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from sslpipe.data.index import DatasetIndex
from sslpipe.errors import RecipeError
from sslpipe.export.start import Start
from sslpipe.satellites import offered


class Plan(Protocol):
    """All that is known of a run before its first step."""

    @property
    def recipe(self) -> Any:
        """Its settings, resolved."""

    @property
    def index(self) -> DatasetIndex:
        """The data set, of the channels that are read."""

    @property
    def start(self) -> Start:
        """The weights it starts from."""

    def identity(self) -> dict[str, Any]:
        """Return what decides the trained weights, with its digest."""


class RunKind(NamedTuple):
    """How the runs of a kind of recipe are planned, checked and carried out."""

    make: Callable[..., Plan]
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
