"""Tables of names and constructors, parts of the user's own in them, and `build`.

A package adds a part by an entry point, here an objective that recipes call "mine":

    [project.entry-points."sslpipe.losses"]
    mine = "my_package.losses:MyLoss"

It is imported when a recipe or an option names it, never before. `--plugin MODULE` of any command
imports a module that is not installed, or a .py file; it adds to the tables itself:
`sslpipe.losses.LOSSES["mine"] = MyLoss`. A recipe alone imports nothing that is not installed.

`plugins` imports modules of `--plugin`, and knows the versions of what decides trained weights.
"""

import inspect
import os
import sys
from collections.abc import Callable, Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from sslpipe.errors import RecipeError, UserError, did_you_mean, lost_quotes, shown
from sslpipe.portable import memory_is_short
from sslpipe.registry.plugins import describe_error, plugin_hint, remember_version

T = TypeVar("T")

# groups whose parts do not decide trained weights; no run remembers the versions of these
NOT_TRAINED = ("sslpipe.sources", "sslpipe.evaluations", "sslpipe.trackers")

_EMPTY = inspect.Parameter.empty
# what a constructor raises for arguments that it cannot work with
REFUSALS = (
    *(TypeError, ValueError, ArithmeticError, AssertionError),
    *(AttributeError, LookupError, MemoryError, RuntimeError),
)
_tables: dict[str, "Table[Any]"] = {}  # group -> the table, once its module is imported


class UnknownName(UserError, KeyError):
    """A table has no entry of that name."""

    def __str__(self) -> str:
        """Give the message as it is: KeyError's own would quote it."""
        return str(self.args[0])


class Table(dict[str, T]):
    """Names and what they stand for: built in, or added by an installed package.

    Args:
        what: "loss", "miner": for the message of an unknown name.
        entries: The built-in names.
        group: Of entry points; None: packages cannot add to this table.
    """

    def __init__(self, what: str, entries: Mapping[str, T], group: str | None = None) -> None:
        super().__init__(entries)
        self.what = what
        self.group = group
        if group is not None:
            _tables[group] = self

    def __contains__(self, name: object) -> bool:
        """Whether it is built in, was added, or an installed package has it."""
        return super().__contains__(name) or name in installed(self.group)

    def __missing__(self, name: str) -> T:
        """Load what an installed package calls so."""
        if self.group is None or name not in installed(self.group):
            known = self.names()
            raise UnknownName(
                f"no {self.what} is named {name!r}{did_you_mean(str(name), known)}"
                f"{plugin_hint()}; known: {', '.join(known)}"
            )
        self[name] = load(self.group, name)
        return self[name]

    def names(self) -> list[str]:
        """List all names, those of installed packages too, without loading these."""
        return list(dict.fromkeys([*self, *installed(self.group)]))


def build(
    table: Mapping[str, Callable[..., T]],
    component: Any,
    *,
    section: str,
    fixed: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> T:
    """Call the constructor that `component.kind` names with the recipe's arguments.

    Args:
        table: Names and constructors.
        component: The recipe's section, a `Component`.
        section: Its name ("loss"), for messages.
        fixed: Arguments that other settings decide (the length of an embedding). Where the
            constructor takes one, the recipe may give no other value.
        defaults: Arguments that come from the program (mean and std of the data, say). The recipe's
            own value wins; one that the constructor does not take is dropped.

    Raises:
        RecipeError: Naming the key, its value and the nearest valid one.
    """
    if component.kind not in table:
        known = table.names() if isinstance(table, Table) else list(table)
        raise RecipeError(
            f"{section}.kind = {component.kind!r} is unknown{did_you_mean(component.kind, known)}"
            f"{plugin_hint()}; known: {', '.join(sorted(known))}"
        )
    constructor = table[component.kind]
    parameters = inspect.signature(constructor).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments: dict[str, Any] = component.arguments
    for key, value in arguments.items():
        if key in parameters and parameters[key].kind is not inspect.Parameter.VAR_KEYWORD:
            arguments[key] = typed(parameters[key].annotation, value, f"{section}.{key}")
        elif not takes_any:
            raise RecipeError(
                f"{section}.{key} is not an argument of {section}.kind = {component.kind!r}"
                f"{did_you_mean(key, parameters)}; it takes: {', '.join(parameters) or 'none'}"
            )
    for key, value in (fixed or {}).items():
        if arguments.get(key, value) != value:
            raise RecipeError(
                f"{section}.{key} = {shown(arguments[key])}, and the other settings make it "
                f"{value}; leave the key out"
            )
    defaults = {**defaults, **(fixed or {})}
    defaults = {key: v for key, v in defaults.items() if key in parameters or takes_any}
    try:
        return constructor(**{**defaults, **arguments})
    except RecipeError:
        raise
    except REFUSALS as error:
        if memory_is_short(error):  # no fault of these settings
            raise
        is_plain = isinstance(error, TypeError | ValueError)
        what = str(error) if is_plain else describe_error(error)
        raise RecipeError(f"[{section}] kind = {component.kind!r}: {what}") from error


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Take a type A | B apart into (A, B), however it was written."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def typed(annotation: Any, value: Any, key: str) -> Any:
    """Return a recipe's value as a constructor's annotation has it; no annotation takes any.

    Raises:
        RecipeError: It is no such value; names the key ("loss.temperature").
    """
    try:
        adapter: TypeAdapter[Any] = TypeAdapter(Any if annotation is _EMPTY else annotation)
    except (PydanticUserError, NameError):  # a type of a plug-in's own that no recipe can hold
        return value
    try:
        takes_bool = annotation is _EMPTY or any(
            kind in str(annotation) for kind in ("bool", "Any")
        )
        values = value if isinstance(value, list) else [value]
        if not takes_bool and any(isinstance(each, bool) for each in values):
            raise RecipeError(f"{key} = {shown(value)}: true and false are no numbers")
        return adapter.validate_python(value)
    except ValidationError as error:
        first = error.errors()[0]
        wrong = first["msg"].lower().replace("an instance of sequence", "a list")
        raise RecipeError(f"{key} = {shown(value)}: {wrong}{lost_quotes(value)}") from None


def installed(group: str | None) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; nothing is imported."""
    if group is None:
        return {}
    # a pip install changes the time of its folder
    places = tuple((path, os.stat(path).st_mtime) for path in sys.path if os.path.isdir(path))
    return {entry.name: entry for entry in _entry_points(group, places)}


@lru_cache(maxsize=32)  # to read the metadata of all packages takes 20 ms
def _entry_points(group: str, places: tuple[tuple[str, float], ...]) -> EntryPoints:
    return entry_points(group=group)


def added(group: str) -> list[str]:
    """Return the names of a group's table, without importing its module."""
    return _tables[group].names() if group in _tables else list(installed(group))


def load(group: str, name: str) -> Any:
    """Import what an entry point names. Raises: UserError where that fails, with its package."""
    entry = installed(group)[name]
    try:
        part = entry.load()
    except Exception as error:  # a plug-in may fail in any way
        package = entry.dist.name if entry.dist else "a package"
        raise UserError(
            f"{package}'s {entry.value} ({group}, {name!r}) cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if group not in NOT_TRAINED:
        remember_version(entry)
    return part
