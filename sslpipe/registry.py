"""Tables of names and constructors, parts of the user's own in them, and `build`.

A package adds a part by an entry point, here an objective that recipes call "mine":

    [project.entry-points."sslpipe.losses"]
    mine = "my_package.losses:MyLoss"

It is imported when a recipe or an option names it, never before. `--plugin MODULE` of any command
imports a module that is not installed, or a .py file; it adds to the tables itself:
`sslpipe.losses.LOSSES["mine"] = MyLoss`. A recipe alone imports nothing that is not installed.

What decides trained weights (installed losses, augmentations and backbones, and every module of
`--plugin`) has the sha256 of its package's source, or its file's, in the run's digest: a run is not
resumed after that code has changed. A part that Python code puts into a table itself is not hashed.
"""

import hashlib
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from types import ModuleType, UnionType
from typing import Any, Protocol, TypeVar, Union, get_args, get_origin

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError

from sslpipe.errors import RecipeError, UserError, did_you_mean, shown

T = TypeVar("T")

GROUPS = {
    "sslpipe.losses": "sslpipe.losses.LOSSES",
    "sslpipe.augmentations": "sslpipe.augment.ops.OPS",
    "sslpipe.backbones": "sslpipe.models.backbones.BACKBONES",
    "sslpipe.sources": "sslpipe.sharding.SOURCES",
    "sslpipe.evaluations": "sslpipe.evaluation.EVALS",
    "sslpipe.trackers": "sslpipe.run.log.TRACKERS",
}
"""Entry point group -> the table that it adds to; ops are registered by `register_op`."""

DECIDE_WEIGHTS = ("sslpipe.losses", "sslpipe.augmentations", "sslpipe.backbones")
VARIABLE = "SSLPIPE_PLUGINS"  # modules of --plugin, for processes that this one starts

_EMPTY = inspect.Parameter.empty
# what a constructor raises for arguments that it cannot work with
_REFUSALS = (
    TypeError,
    ValueError,
    ArithmeticError,
    AssertionError,
    AttributeError,
    LookupError,
    MemoryError,
    RuntimeError,
)
_tables: dict[str, "Table[Any]"] = {}  # group -> the table, once its module is imported
_fingerprints: dict[str, str] = {}


class Entry(Protocol):
    """A recipe's section that names an entry of a table and the arguments of its constructor."""

    @property
    def kind(self) -> str:
        """The entry's name."""

    @property
    def arguments(self) -> dict[str, Any]:
        """The constructor's keyword arguments."""


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
        group: Of entry points, see GROUPS; None: packages cannot add to this table.

    Raises:
        UnknownName: By `table[name]`; says which name is near.
    """

    def __init__(self, what: str, entries: Mapping[str, T], group: str | None = None) -> None:
        super().__init__(entries)
        self.what, self.group = what, group
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
                f"no {self.what} is named {name!r}{did_you_mean(str(name), known)}; "
                f"known: {', '.join(known)}{plugin_hint()}"
            )
        self[name] = load(self.group, name)
        return self[name]

    def names(self) -> list[str]:
        """List all names, those of installed packages too, without loading these."""
        return list(dict.fromkeys([*self, *installed(self.group)]))


def build(
    table: Mapping[str, Callable[..., T]],
    component: Entry,
    *,
    section: str,
    fixed: Mapping[str, Any] | None = None,
    **defaults: Any,
) -> T:
    """Call the constructor that `component.kind` names with the recipe's arguments.

    Args:
        table: names and constructors.
        component: the recipe's section.
        section: its name ("loss"), for messages.
        fixed: arguments that other settings decide (the length of an embedding). Where the
            constructor takes one, the recipe may give no other value.
        defaults: arguments that come from the program (mean and std of the data, say). The recipe's
            own value wins; one that the constructor does not take is dropped.

    Returns:
        What the constructor returns.

    Raises:
        RecipeError: naming the key, its value and the nearest valid one.
    """
    if component.kind not in table:
        known = table.names() if isinstance(table, Table) else list(table)
        raise RecipeError(
            f"{section}.kind = {component.kind!r} is unknown{did_you_mean(component.kind, known)}; "
            f"known: {', '.join(sorted(known))}{plugin_hint()}"
        )
    constructor = table[component.kind]
    parameters = inspect.signature(constructor).parameters
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters.values())
    arguments = component.arguments
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
    except _REFUSALS as error:
        what = "" if isinstance(error, TypeError | ValueError) else f"{type(error).__name__}: "
        raise RecipeError(f"[{section}] kind = {component.kind!r}: {what}{error}") from error


def alternatives(annotation: Any) -> tuple[Any, ...]:
    """Take a type A | B apart into (A, B), however it was written."""
    is_union = get_origin(annotation) in (Union, UnionType)
    return get_args(annotation) if is_union else (annotation,)


def typed(annotation: Any, value: Any, key: str) -> Any:
    """Return a recipe's value as a constructor's annotation has it; no annotation takes any.

    Args:
        annotation: a type, as `inspect.signature` gives it.
        value: what the recipe says.
        key: "loss.temperature", for messages.

    Raises:
        RecipeError: it is no such value.
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
        raise RecipeError(f"{key} = {shown(value)}: {first['msg'].lower()}") from None


def installed(group: str | None) -> dict[str, EntryPoint]:
    """Return the entry points of a group by name; nothing is imported."""
    return {} if group is None else {entry.name: entry for entry in entry_points(group=group)}


def added(group: str) -> list[str]:
    """Return the names of a group's table without importing its module.

    Those of installed packages, of modules of `--plugin` and, where it is imported, the built-in.
    """
    return _tables[group].names() if group in _tables else list(installed(group))


def load(group: str, name: str) -> Any:
    """Import what an entry point names.

    Raises:
        UserError: The import fails; names package and module.
    """
    entry = installed(group)[name]
    try:
        part = entry.load()
    except Exception as error:  # a plug-in may fail in any way
        package = entry.dist.name if entry.dist else "a package"
        raise UserError(
            f"{package}'s {entry.value} ({group}, {name!r}) cannot be loaded: "
            f"{type(error).__name__}: {error}"
        ) from error
    if group in DECIDE_WEIGHTS:
        _remember(sys.modules[entry.module])
    return part


def load_module(name: str) -> ModuleType:
    """Import a module of `--plugin`: by its name, also from the working directory, or a .py file.

    Raises:
        UserError: There is no such module, or its import fails.
    """
    try:
        if name.endswith(".py"):
            module = _load_file(Path(name))
        else:
            if os.getcwd() not in sys.path:
                sys.path.append(os.getcwd())
            module = importlib.import_module(name)
    except Exception as error:  # a plug-in may fail in any way
        raise UserError(
            f"--plugin {name} cannot be imported: {type(error).__name__}: {error}"
        ) from error
    _remember(module)
    return module


def take_from(arguments: Iterable[str]) -> list[str]:
    """Import every `--plugin MODULE` among a command line's words, and return the other words.

    Raises:
        UserError: A module is missing or fails.
    """
    words, rest, names = iter(arguments), [], []
    for word in words:
        if word == "--plugin":
            names.append(next(words, ""))
        elif word.startswith("--plugin="):
            names.append(word.removeprefix("--plugin="))
        else:
            rest.append(word)
    for name in names:
        if not name:
            raise UserError("--plugin needs a module's name or a .py file")
        load_module(name)
    if names:  # files as absolute paths: a process may start in another directory
        paths = (str(Path(name).resolve()) if name.endswith(".py") else name for name in names)
        os.environ[VARIABLE] = os.pathsep.join(paths)
    return rest


def requested() -> list[str]:
    """Return the modules of `--plugin`, of this process or of the one that started it."""
    return [name for name in os.environ.get(VARIABLE, "").split(os.pathsep) if name]


def plugin_hint() -> str:
    """Say, at the end of an error, where an unknown name may come from; "" with `--plugin`."""
    return "" if requested() else "; is it a part of your own? name its module with --plugin"


def fingerprints() -> dict[str, str]:
    """Return package or module -> sha256 of its source, of all loaded that decide weights."""
    return dict(sorted(_fingerprints.items()))


def _load_file(path: Path) -> ModuleType:
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


def _remember(module: ModuleType) -> None:
    """Hash the source of the outermost package that the module is of, namespaces aside."""
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
