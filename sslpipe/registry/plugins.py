"""Code of the user's own: modules of `--plugin`, and what they and packages hash to.

What decides trained weights (installed losses, augmentations and backbones, and every module of
`--plugin`) has the sha256 of its package's source, or its file's, in the run's digest: a run is not
resumed after that code has changed. A part that Python code puts into a table itself is not hashed.
"""

import hashlib
import importlib
import importlib.util
import os
import sys
import traceback
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType

from sslpipe.errors import UserError

VARIABLE = "SSLPIPE_PLUGINS"  # modules of --plugin, for processes that this one starts

_fingerprints: dict[str, str] = {}


def load_module(name: str) -> ModuleType:
    """Import a module of `--plugin`: by its name, also from the working directory, or a .py file.

    Raises:
        UserError: There is no such module, or its import fails; names file and line.
    """
    try:
        if name.endswith(".py"):
            module = _load_file(Path(name))
        else:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a plug-in may fail in any way
        raise UserError(f"--plugin {name} cannot be imported: {_at_import(error)}") from error
    remember(module)
    return module


def take_from(arguments: Iterable[str]) -> list[str]:
    """Import every `--plugin MODULE` among a command line's words, and return the other words."""
    words, rest, names = iter(arguments), [], []
    for word in words:
        if word == "--plugin":
            names.append(next(words, ""))
        elif word.startswith("--plugin="):
            names.append(word.removeprefix("--plugin="))
        else:
            rest.append(word)
    if "" in names:
        raise UserError("--plugin needs a module's name or a .py file")
    if names:
        os.environ.pop(VARIABLE, None)
        load_plugins(*names)
    return rest


def load_plugins(*names: str) -> None:
    """Do in Python what `--plugin` does for a command: import modules with parts of one's own.

    Their source is in the digest of runs; runs and exports name them; processes that this one
    starts load them, too. Call it before such a run is trained, resumed or loaded.

    Args:
        names: Of modules, also of the working directory; or .py files.

    Raises:
        UserError: There is no such module, or its import fails; names file and line.
    """
    for name in names:
        load_module(name)
    # files as absolute paths: a process may start in another directory
    paths = [str(Path(name).resolve()) if name.endswith(".py") else name for name in names]
    os.environ[VARIABLE] = os.pathsep.join(dict.fromkeys([*requested(), *paths]))


def requested() -> list[str]:
    """Return the modules of `--plugin`, of this process or of the one that started it."""
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def fingerprints() -> dict[str, str]:
    """Return package or module -> sha256 of its source, of all loaded that decide weights."""
    return dict(sorted(_fingerprints.items()))


def plugin_hint() -> str:
    """Say where an unknown name may come from; "" with `--plugin`."""
    return "" if requested() else "; is it a part of your own? name its module with --plugin"


def remember(module: ModuleType) -> None:
    """Remember the hash of a plug-in's source.

    It is of the outermost package that the module is of, namespaces aside.
    """
    parts = module.__name__.split(".")
    outer = [sys.modules[".".join(parts[:depth])] for depth in range(1, len(parts) + 1)]
    top = next((package for package in outer if getattr(package, "__file__", None)), None)
    if top is None:
        raise UserError(f"the plug-in {module.__name__} has no source file that could be hashed")
    path = Path(str(top.__file__))
    files = sorted(path.parent.rglob("*.py")) if path.name == "__init__.py" else [path]
    sha256 = hashlib.sha256()
    for file in files:
        sha256.update(f"{file.relative_to(path.parent).as_posix()}\0".encode())
        sha256.update(file.read_bytes())
    _fingerprints[top.__name__] = sha256.hexdigest()


def _at_import(error: BaseException) -> str:
    """Describe what a module raised while it was imported, with its own line, if it came so far."""
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        text = f"it calls sys.exit({error.code!r})"
    frames = traceback.extract_tb(error.__traceback__)
    own = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
    if not own or isinstance(error, SyntaxError):  # whose text has file and line
        return text
    return f"{text} ({own[0].filename}, line {own[0].lineno}, in {own[0].name})"


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    there = sys.modules.get(path.stem) or importlib.util.find_spec(path.stem)
    if there is not None:
        file = getattr(there, "__file__", None) or getattr(there, "origin", None)
        if file is None or not path.samefile(file):
            raise ImportError(f"there is a module {path.stem!r} already; rename the file")
        if isinstance(there, ModuleType):
            return there
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]  # half of it has run
        raise
    return module
