"""Satellites: what the core does not import, and works without.

A satellite `sslpipe/NAME/` offers what it brings in modules of fixed names, and the core imports
those of whichever folders are there. An installed package does the same by entry points, a group a
name: `"sslpipe.commands".mine = "my_package.commands"`. The modules, and what each has:

- `commands`, without heavy imports: COMMANDS, {name: (module with `app`, first line of its help)},
  and NEXT, {"name" or "name sub-command": what is typed after it}, which may lack some of them;
- `names`: NAMES, {what is `sslpipe.NAME`, too: its module};
- `recipes`, without heavy imports: RECIPES, {kind: `sslpipe.recipe.reading.RecipeKind`}, the
  settings of a kind of recipe and the section that makes a TOML file one;
- `runs`: RUNS, {class of a recipe: `sslpipe.kinds.RunKind`};
- `image_files`: SUFFIXES and `read_image`, for files of images that are not 8-bit RGB;
- `leaks`: `find_leaks`, which `sslpipe evaluate suite` asks for test samples that are in train.
"""

import os
import pkgutil
import sys
from collections.abc import Iterator, Mapping
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from sslpipe.errors import one_line

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

NEEDED = {
    "commands": ("COMMANDS", "NEXT"),
    "names": ("NAMES",),
    "recipes": ("RECIPES",),
    "runs": ("RUNS",),
    "image_files": ("SUFFIXES", "read_image"),
    "leaks": ("find_leaks",),
}

_packages: dict[str, "EntryPoint"] = {}  # of modules that installed packages offer, by their names


@cache
def offered(name: str) -> tuple[ModuleType, ...]:
    """Import the modules of this name that folders of sslpipe and installed packages offer.

    A package's module that cannot be imported, or lacks what it should have, is reported.
    """
    import sslpipe

    modules = [
        import_module(f"sslpipe.{folder.name}.{name}")
        for folder in pkgutil.iter_modules(sslpipe.__path__)
        if folder.ispkg and name in _modules_in(folder.name)
    ]
    return (*modules, *_installed(name))


def gather(name: str, table: str, core: Mapping[str, Any]) -> dict[str, Any]:
    """Return a table of the core with what satellites add to it.

    A name stands for one thing: that of the core or the first satellite. Others are reported.

    Args:
        name: Of the modules that are asked for.
        table: Its name in them.
        core: The core's own entries.
    """
    entries = dict(core)
    for module in offered(name):
        for key, value in getattr(module, table).items():
            if key in entries:
                _warn(f"{module.__name__}: {table} has {key!r}, which is taken; it is not used")
            else:
                entries[key] = value
    return entries


def entry_of(module: ModuleType) -> "EntryPoint | None":
    """Return the entry point by which an installed package offers a module; None: a folder's."""
    return _packages.get(module.__name__)


def _modules_in(folder: str) -> set[str]:
    import sslpipe

    places = [os.path.join(path, folder) for path in sslpipe.__path__]
    return {module.name for module in pkgutil.iter_modules(places)}


def _installed(name: str) -> Iterator[ModuleType]:
    """Import what installed packages offer."""
    if not _has_entry_points():
        return
    from importlib.metadata import entry_points

    for entry in entry_points(group=f"sslpipe.{name}"):
        package = entry.dist.name if entry.dist else "a package"
        try:
            module = entry.load()
            lacks = [each for each in NEEDED[name] if not hasattr(module, each)]
            if lacks:
                raise AttributeError(f"it has no {' and no '.join(lacks)}")
        except Exception as error:  # others' code may fail in any way
            _warn(
                f"{package}'s {entry.value} (sslpipe.{name}) is not used: "
                f"{type(error).__name__}: {error}"
            )
            continue
        _packages[module.__name__] = entry
        yield module


@cache
def _has_entry_points() -> bool:
    """Return whether an installed package may have entry points for sslpipe.

    `importlib.metadata` takes longer than all else that `sslpipe --help` imports.
    """
    groups = [f"[sslpipe.{name}]".encode() for name in NEEDED]
    for place in sys.path:
        if os.path.isfile(place):  # a zip
            return True
        for name in os.listdir(place or ".") if os.path.isdir(place or ".") else ():
            file = os.path.join(place, name, "entry_points.txt")
            if name.endswith((".dist-info", ".egg-info")) and os.path.isfile(file):
                with open(file, "rb") as stream:
                    text = stream.read()
                if any(group in text for group in groups):
                    return True
    return False


def _warn(text: str) -> None:
    print(one_line(f"warning: {text}"), file=sys.stderr, flush=True)
