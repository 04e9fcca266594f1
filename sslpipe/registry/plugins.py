"""Code of the user's own: modules of `--plugin`, what they and packages hash to, their errors.

What decides trained weights (installed losses, augmentations and backbones, and every module of
`--plugin`) has the sha256 of its package's source, or its file's, in the run's digest: a run is not
resumed after that code has changed. A part that Python code puts into a table itself is not hashed.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import re
import shlex
import sys
import traceback
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from operator import attrgetter
from pathlib import Path
from types import ModuleType

from sslpipe.errors import UserError

VARIABLE = "SSLPIPE_PLUGINS"  # modules of --plugin, for processes that this one starts

_fingerprints: dict[str, str] = {}
_places: dict[str, Path] = {}  # of each plug-in by its name: its file, or its package's folder
_recorded: list[object] = []  # what the run that is being read was made with


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
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "importlib" not in f.filename and f.filename != __file__]
        # its own line, if it came so far; the text of a SyntaxError has file and line
        said = describe_error(error, [] if isinstance(error, SyntaxError) else own[:1])
        raise UserError(f"--plugin {name} cannot be imported: {said}") from error
    remember(module, decides_weights=True)
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


# a forgotten --plugin


@contextmanager
def made_with(names: object) -> Iterator[None]:
    """Let an error about an unknown name name the plug-ins (`requested`) a run was made with."""
    before = [*_recorded]
    _recorded[:] = [name for name in (names if isinstance(names, list) else []) if name]
    try:
        yield
    except UserError as error:
        hint, text = plugin_hint(), str(error)
        if not (_forgotten() and hint in text):
            raise
        first = hint.removeprefix("; ")
        raise type(error)(f"{first}; without it: {text.replace(hint, '')}") from error
    finally:
        _recorded[:] = before


def _forgotten() -> list[str]:
    return [str(name) for name in _recorded if name not in requested()]


def plugin_hint() -> str:
    """Say where an unknown name may come from; "" with `--plugin`."""
    if forgotten := _forgotten():
        flags = " ".join(f"--plugin {shlex.quote(name)}" for name in forgotten)
        return (
            f"; the run was made with parts of your own: add {flags} (in Python, first: "
            f"sslpipe.load_plugins({', '.join(map(repr, forgotten))}))"
        )
    return "" if requested() else "; is it a part of your own? name its module with --plugin"


# an error inside of a plug-in


def remember(module: ModuleType, *, decides_weights: bool) -> None:
    """Remember where a plug-in's source is and, where it decides weights, what it hashes to.

    Both are of the outermost package that the module is of, namespaces aside.
    """
    parts = module.__name__.split(".")
    outer = [sys.modules[".".join(parts[:depth])] for depth in range(1, len(parts) + 1)]
    top = next((package for package in outer if getattr(package, "__file__", None)), None)
    if top is None and decides_weights:
        raise UserError(f"the plug-in {module.__name__} has no source file that could be hashed")
    if top is None:
        return
    path = Path(str(top.__file__))
    is_package = path.name == "__init__.py"
    _places[top.__name__] = path.parent if is_package else path
    if not decides_weights:
        return
    files = sorted(path.parent.rglob("*.py")) if is_package else [path]
    sha256 = hashlib.sha256()
    for file in files:
        sha256.update(f"{file.relative_to(path.parent).as_posix()}\0".encode())
        sha256.update(file.read_bytes())
    _fingerprints[top.__name__] = sha256.hexdigest()


def plugin_frames(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the lines of plug-ins through which an error came, the innermost last."""
    frames = traceback.extract_tb(error.__traceback__)
    return [frame for frame in frames if _is_plugin(frame.filename)] or _miscalled(error)


def describe_error(
    error: BaseException, frames: Sequence[traceback.FrameSummary] | None = None
) -> str:
    """Say an error in one line, with the line of the plug-in that it comes from, if any.

    `frames` are those of the plug-in; None: found in the error's trace.
    """
    text = f"{type(error).__name__}: {error}"
    if isinstance(error, SystemExit):
        text = f"sys.exit({error.code!r}) was called"
    for last in (plugin_frames(error) if frames is None else frames)[-1:]:
        text += f" ({last.filename}, line {last.lineno}, in {last.name})"
    return text


def _miscalled(error: BaseException) -> list[traceback.FrameSummary]:
    """Return the line of a plug-in's function that was called with arguments it does not take."""
    called = re.match(r"([\w.]+)\(\) (?:takes|missing|got)\b", str(error))
    if called is None or not isinstance(error, TypeError):
        return []
    for module in [*sys.modules.values()]:
        file = getattr(module, "__file__", None)
        if file and _is_plugin(file):
            with suppress(AttributeError):
                code = inspect.unwrap(attrgetter(called[1])(module)).__code__
                name = code.co_name
                return [traceback.FrameSummary(code.co_filename, code.co_firstlineno, name)]
    return []


def _is_plugin(file: str) -> bool:
    return any(place in (Path(file), *Path(file).parents) for place in _places.values())


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
