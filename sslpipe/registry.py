"""A table of names and constructors, and the one way from a recipe's section to an object."""

import inspect
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from sslpipe.errors import RecipeError, did_you_mean
from sslpipe.recipe.base import Component

T = TypeVar("T")


def build(
    table: Mapping[str, Callable[..., T]], component: Component, *, section: str, **defaults: Any
) -> T:
    """Call the constructor that `component.kind` names with the recipe's arguments.

    Args:
        table: names and constructors.
        component: the recipe's section.
        section: its name ("loss"), for messages.
        defaults: arguments that come from the program (mean and std of the data, say). The recipe's
            own value wins; one that the constructor does not take is dropped.

    Returns:
        What the constructor returns.

    Raises:
        RecipeError: naming the key, its value and the nearest valid one.
    """
    if component.kind not in table:
        hint = did_you_mean(component.kind, table)
        raise RecipeError(
            f"{section}.kind = {component.kind!r} is unknown{hint}; "
            f"known: {', '.join(sorted(table))}"
        )
    constructor = table[component.kind]
    parameters = inspect.signature(constructor).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = component.arguments
    for key in arguments:
        if key not in parameters and not takes_any:
            raise RecipeError(
                f"{section}.{key} is not an argument of {section}.kind = {component.kind!r}"
                f"{did_you_mean(key, parameters)}; it takes: {', '.join(parameters) or 'none'}"
            )
    defaults = {key: v for key, v in defaults.items() if key in parameters or takes_any}
    try:
        return constructor(**{**defaults, **arguments})
    except RecipeError:
        raise
    except (TypeError, ValueError) as error:
        raise RecipeError(f"[{section}] kind = {component.kind!r}: {error}") from error
