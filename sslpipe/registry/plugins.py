"""Code of the user's own: modules of `--plugin`, and what the digest of a run says of it.

Of what decides trained weights the digest has a package's version, or of a module of `--plugin` the
sha256 of its file: a run is not resumed after that has changed. A part that Python code puts into a
table itself is in no digest.
"""

import importlib
import importlib.util
import os
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

from sslpipe.errors import UserError
from sslpipe.portable import sha256_of

VARIABLE = "SSLPIPE_PLUGINS"  # modules of --plugin, for processes that this one starts

_versions: dict[str, str] = {}  # of each plug-in by its name: "1.0", or its file's "sha256:..."
_loaded: dict[str, tuple[ModuleType, str]] = {}  # of --plugin: what was executed, its version
_recorded: list[object] = []  # what the run that is being read was made with


def load_module(name: str) -> ModuleType:
    """Import a module of `--plugin`: by its name, also from the working directory, or a .py file.

    Raises:
        UserError: There is no such module, or its import fails; names file and line. Or it was
            imported before, and its file has changed.
    """
    try:
        if name.endswith(".py"):
            module = _load_file(Path(name))
        else:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())
            module = importlib.import_module(name)
    except (Exception, SystemExit) as error:  # a plug-in may fail in any way
        text = f"--plugin={name!r} cannot be imported: {describe_error(error)}"
        frames = traceback.extract_tb(error.__traceback__)
        of_plugin = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
        if of_plugin:  # it came so far; the text of a SyntaxError has file and line
            text += f" ({of_plugin[-1].filename}, line {of_plugin[-1].lineno})"
        raise UserError(text) from error
    if module.__file__ is None:
        raise UserError(f"--plugin={name!r} has no source file; name one of its modules that has")
    version = f"sha256:{sha256_of(Path(module.__file__))}"
    executed, executed_version = _loaded.get(module.__name__, (None, ""))
    if executed is module and executed_version != version:
        raise UserError(
            f"--plugin={name!r}: {module.__file__} was changed after its import, and the old code "
            "is still what runs; restart Python (in a notebook, its kernel)"
        )
    _loaded[module.__name__] = (module, version)
    _versions[module.__name__] = version
    return module


def take_from(arguments: Iterable[str]) -> list[str]:
    """Import every `--plugin MODULE` among a command line's words, and return the other words."""
    words = iter(arguments)
    rest = []
    names = []
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

    The sha256 of their files is in the digest of runs; runs and exports name them; processes that
    this one starts load them, too. Call it before such a run is trained, resumed or loaded.

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


def versions() -> dict[str, str]:
    """Return package -> version, or module -> sha256 of its file, of all that decide weights."""
    return dict(sorted(_versions.items()))


def remember_version(entry: EntryPoint) -> None:
    """Remember the version of the package of an entry point whose part decides weights."""
    if entry.dist is not None:
        _versions[entry.dist.name] = entry.dist.version


def describe_error(error: BaseException) -> str:
    """Return an error as one line."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}) was called"
    return f"{type(error).__name__}: {error}"


# a forgotten --plugin


@contextmanager
def made_with(names: object) -> Iterator[None]:
    """Let an error about an unknown name name the plug-ins (`requested`) a run was made with."""
    before = [*_recorded]
    _recorded[:] = [name for name in (names if isinstance(names, list) else []) if name]
    try:
        yield
    except UserError as error:
        hint = plugin_hint()
        text = str(error)
        if not (_forgotten() and hint in text):
            raise
        first = hint.removeprefix("; ")
        raise type(error)(f"{first}; without it: {text.replace(hint, '')}") from error
    finally:
        _recorded[:] = before


def _forgotten() -> list[str]:
    return [str(name) for name in _recorded if name not in requested()]


def plugin_hint() -> str:
    """Return where an unknown name may come from; "" with `--plugin`."""
    if forgotten := _forgotten():
        flags = " ".join(f"--plugin={shlex.quote(name)}" for name in forgotten)
        return f"; the run was made with parts of your own: add {flags}"
    return "" if requested() else "; is it a part of your own? name its module with --plugin"


def _load_file(path: Path) -> ModuleType:
    path = path.resolve()
    spec = importlib.util.spec_from_file_location(path.stem, path)
    if spec is None or spec.loader is None or not path.is_file():
        raise FileNotFoundError(f"there is no file {path}")
    present = sys.modules.get(path.stem) or importlib.util.find_spec(path.stem)
    if present is not None:
        file = getattr(present, "__file__", None) or getattr(present, "origin", None)
        if file is None or not path.samefile(file):
            raise ImportError(f"there is a module {path.stem!r} already; rename the file")
        if isinstance(present, ModuleType):
            return present
    module = importlib.util.module_from_spec(spec)
    sys.modules[path.stem] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[path.stem]  # half of it has run
        raise
    return module
