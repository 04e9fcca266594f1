"""Tables of names and parts, those of installed packages in them.

A package adds a part by an entry point, here an objective that recipes call "mine":

    [project.entry-points."sslpipe.losses"]
    mine = "my_package.losses:MyLoss"

It is imported when a recipe or an option names it, never before. `--plugin MODULE` of any command
imports a module that is not installed, or a .py file; it adds to the tables itself:
`sslpipe.losses.LOSSES["mine"] = MyLoss`. A recipe alone imports nothing that is not installed.

`schema` has the settings that a recipe gives a part, `part` the modules whose fields are settings;
`plugins` imports modules of `--plugin`, and knows the versions of what decides trained weights.
"""

import os
import sys
from collections.abc import Mapping
from functools import lru_cache
from importlib.metadata import EntryPoint, EntryPoints, entry_points
from types import UnionType
from typing import Any, TypeVar, Union, get_args, get_origin

from sslpipe.errors import UserError, did_you_mean
from sslpipe.registry.plugins import plugin_hint, remember_version

T = TypeVar("T")

# groups whose parts do not decide trained weights; no run remembers the versions of these
NOT_TRAINED = ("sslpipe.sources", "sslpipe.evaluations", "sslpipe.trackers")

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


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Take a type A | B apart into (A, B), however it was written."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


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
