"""Satellites: folders of this package that the core does not import, and works without.

A satellite `sslpipe/NAME/` offers what it brings in modules of fixed names, and the core imports
those of whichever folders are there:

- `commands.py`, without heavy imports: COMMANDS, {name: (module with `app`, first line of its
  help)}, and NEXT, {"name" or "name sub-command": what is typed after it};
- `names.py`: NAMES, {what is `sslpipe.NAME`, too: its module};
- `recipes.py`, without heavy imports: RECIPES, {kind: `sslpipe.recipe.kinds.RecipeKind`}, the
  settings of a kind of recipe and the section that makes a TOML file one;
- `runs.py`: RUNS, {class of a recipe: `sslpipe.kinds.RunKind`};
- `settings.py`: SETTINGS, {section with a `kind`: ((what it is, table), ...)}, for --explain;
- `image_files.py`: SUFFIXES and `read_image`, for files of images that are not 8-bit RGB;
- `leaks.py`: `find_leaks`, which `sslpipe evaluate suite` asks for test samples that are in train.
"""

import os
import pkgutil
from functools import cache
from importlib import import_module
from types import ModuleType


@cache
def offered(name: str) -> tuple[ModuleType, ...]:
    """Import the module of this name of every folder of sslpipe that has one."""
    import sslpipe

    return tuple(
        import_module(f"sslpipe.{folder.name}.{name}")
        for folder in pkgutil.iter_modules(sslpipe.__path__)
        if folder.ispkg and name in _modules_in(folder.name)
    )


def _modules_in(folder: str) -> set[str]:
    import sslpipe

    places = [os.path.join(path, folder) for path in sslpipe.__path__]
    return {module.name for module in pkgutil.iter_modules(places)}
