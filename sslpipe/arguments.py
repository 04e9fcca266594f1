"""Arguments of the public functions: checked by their annotations, and kinds that many take."""

from __future__ import annotations

import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache, wraps
from pathlib import Path
from types import NoneType, SimpleNamespace, UnionType
from typing import Any, Literal, ParamSpec, TypeVar, Union, get_args, get_origin, get_type_hints

from pydantic import TypeAdapter, ValidationError

from sslpipe.errors import UserError, check_list, did_you_mean, shown

P = ParamSpec("P")
T = TypeVar("T")

Say = Callable[[str], None]
Advance = Callable[[int], None]  # takes how much was done since the last call
Progress = Callable[[str, int], AbstractContextManager[Advance]]  # of a title and a total


def silent(title: str, total: int) -> AbstractContextManager[Advance]:
    """Show no progress."""
    return nullcontext(lambda count: None)


# annotations that are checked, and what a message calls them
_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    Path: "a path",
    NoneType: "None",
}
_LISTS = (Sequence, list, tuple)


def checked(function: Callable[P, T]) -> Callable[P, T]:
    """Refuse arguments whose name or type does not fit, each in one line.

    Checked are annotations of texts, numbers, paths, names (`Literal`) and lists of them; the
    function judges tensors, models and other values. numpy's numbers become Python's.

    Raises:
        TypeError: The function does not take a name, which it gives with the nearest, or lacks one.
        UserError: A value is not of its annotation's type.
    """
    signature = inspect.signature(function)
    name = function.__qualname__.removesuffix(".__init__")

    @wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> T:
        _check_names(name, signature, kwargs)
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:  # which does not say of what
            raise TypeError(f"{name}: {error}") from None
        adapters = _adapters(function)
        for argument, value in list(bound.arguments.items()):
            value = _at_home(value)
            if argument in adapters:
                value = _checked_value(argument, value, adapters[argument])
            bound.arguments[argument] = value
        with _defaults_of_torch():
            return function(*bound.args, **bound.kwargs)

    return call


def _defaults_of_torch() -> AbstractContextManager[object]:
    """Lift inside what a notebook has set of torch's default dtype and device, if it has torch."""
    if sys.modules.get("torch") is None:
        return nullcontext()
    from sslpipe.precision import torch_defaults

    return torch_defaults()


def _at_home(value: Any) -> Any:
    """Replace the ~ of "~/data" by the user's folder, as torchvision does; in a list, too."""
    if isinstance(value, str | Path) and str(value).startswith("~/"):
        return type(value)(os.path.expanduser(value))
    if isinstance(value, list) and value and isinstance(value[0], str | Path):
        return [_at_home(each) for each in value]
    return value


@cache
def _adapters(function: Callable[..., Any]) -> dict[str, tuple[Any, TypeAdapter[Any]]]:
    """Return what checks each argument that has a plain annotation."""
    parameters = inspect.signature(function).parameters.values()
    # without the return value, whose type may be known to a type checker alone
    annotations = {
        each.name: each.annotation
        for each in parameters
        if each.annotation is not each.empty and each.kind is not each.VAR_POSITIONAL
    }
    holder = SimpleNamespace(__annotations__=annotations)
    hints = get_type_hints(holder, vars(inspect.getmodule(function)))
    return {name: (hint, TypeAdapter(hint)) for name, hint in hints.items() if _is_plain(hint)}


def _is_plain(hint: Any) -> bool:
    origin = get_origin(hint)
    if origin is Literal:
        return True
    if origin in (Union, UnionType, *_LISTS):
        return all(_is_plain(each) for each in get_args(hint) if each is not ...)
    return hint in _WORDS


def _check_names(function: str, signature: inspect.Signature, arguments: Mapping[str, Any]) -> None:
    known = [name for name in signature.parameters if name != "self"]
    for name in arguments:
        if name not in known:
            raise TypeError(
                f"{function} takes no {name}{did_you_mean(name, known)}; it takes: "
                f"{', '.join(known)}"
            )


def _checked_value(name: str, value: Any, known: tuple[Any, TypeAdapter[Any]]) -> Any:
    hint, adapter = known
    wanted = [each for each in get_args(hint) if each is not NoneType]
    if value is not None and len(wanted) == 1 and _is_list(wanted[0]):
        hint = wanted[0]  # a list, or None
    if _is_list(hint) and getattr(value, "ndim", None) == 1:  # of numpy or torch
        value = value.tolist()
    # pydantic takes True for 1, and "5" for 5: here a slip, in a list, too
    if not _is_list(hint):
        _check_kind(name, value, hint)
    else:
        check_list(value, name)
        for place, each in enumerate(value if isinstance(value, Sequence) else ()):
            _check_kind(f"{name}[{place}]", each, get_args(hint)[0])
    try:
        return adapter.validate_python(value)
    except ValidationError as error:
        places = [place for place in error.errors()[0]["loc"] if isinstance(place, int)]
        if _is_list(hint) and places:
            item = get_args(hint)[0]
            wrong = value[places[0]]
            raise UserError(f"{name}[{places[0]}] = {shown(wrong)} is not {_words(item)}") from None
        near = did_you_mean(value, _names(hint)) if isinstance(value, str) else ""
        raise UserError(f"{name} = {shown(value)} is not {_words(hint)}{near}") from None


def _check_kind(name: str, value: Any, hint: Any) -> None:
    """Raise UserError for a text, or True or False, where another type is wanted."""
    if isinstance(value, bool | str) and not _takes(hint, type(value)):
        raise UserError(f"{name} = {shown(value)} is not {_words(hint)}")


def _takes(hint: Any, kind: type) -> bool:
    """Return whether an annotation takes texts, or True and False."""
    origin = get_origin(hint)
    if origin is Literal:
        return any(isinstance(each, kind) for each in get_args(hint))
    if origin in (Union, UnionType):
        return any(_takes(each, kind) for each in get_args(hint))
    return hint is kind or (hint is Path and kind is str)


def _is_list(hint: Any) -> bool:
    return get_origin(hint) in _LISTS


def _names(hint: Any) -> list[str]:
    """Return the names that an annotation allows."""
    if get_origin(hint) is Literal:
        return [str(each) for each in get_args(hint)]
    return [name for each in get_args(hint) for name in _names(each)]


def _words(hint: Any) -> str:
    """Return an annotation as a message calls it."""
    origin = get_origin(hint)
    if origin is Literal:
        return " or ".join(repr(each) for each in get_args(hint))
    if origin in (Union, UnionType):
        return " or ".join(_words(each) for each in get_args(hint))
    if origin in _LISTS:
        return f"a list, each {_words(get_args(hint)[0])}"
    return _WORDS[hint]
