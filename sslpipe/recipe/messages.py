"""What a recipe's settings mean, and what is wrong with one: texts for users."""

import json
import re
from collections.abc import Iterable, Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sslpipe.errors import did_you_mean, did_you_mean_key, lost_quotes, shown
from sslpipe.recipe.base import Component
from sslpipe.registry import alternatives


def explain_errors(error: ValidationError, model: type[BaseModel], origin: str) -> str:
    """Rewrite a pydantic error for users: key, value, what is wrong, nearest valid key."""
    lines: list[str] = []
    items = sorted(error.errors(), key=lambda item: [str(part) for part in item["loc"]])
    unions: set[str] = set()
    for item in items:
        key = ".".join(str(part) for part in item["loc"])
        union = _union_at(model, item["loc"])
        if union is not None:  # each alternative has its own errors, of its own key
            depth, field = union
            key = ".".join(str(part) for part in item["loc"][:depth])
            if key not in unions:
                alike = [other for other in items if other["loc"][:depth] == item["loc"][:depth]]
                whole = min(alike, key=lambda other: len(other["loc"]))["input"]
                words = " nor ".join(_in_words(field))
                lines.append(f"{key} = {shown(whole)} is neither {words}{lost_quotes(whole)}")
            unions.add(key)
        elif item["type"] == "extra_forbidden":
            known = _fields_at(model, item["loc"][:-1])
            near = did_you_mean(str(item["loc"][-1]), known)
            near = near or did_you_mean_key(key, known_keys(model), most=1, cutoff=0.7)
            lines.append(f"unknown key {key}{near}; known here: {', '.join(known)}")
        elif item["type"] == "missing":
            lines.append(f"{key} is missing{_what_to_give(model, item['loc'])}")
        elif item["type"] == "model_type":
            lines.append(f"{key} = {shown(item['input'])} is no section{_as_section(model, item)}")
        elif item["type"] == "value_error":
            lines.append(f"{key + ': ' if key else ''}{item['ctx']['error']}")
        else:
            wrong = item["msg"].lower().replace("a valid tuple", "a list")  # as TOML calls it
            lines.append(f"{key} = {shown(item['input'])}: {wrong}{lost_quotes(item['input'])}")
    more = f"; and {len(lines) - 10} more" if len(lines) > 10 else ""
    return f"{origin}: " + "; ".join(lines[:10]) + more


def known_keys(model: type[BaseModel]) -> list[str]:
    """List "section.key" of all settings, and the sections themselves."""
    return [name for name, _ in _all_fields(model)]


def describe_key(model: type[BaseModel], key: str) -> str | None:
    """Say what a setting means, with its type, default and range; None where there is no such key.

    Args:
        model: The recipe class.
        key: "section.key", or a key or section of the top.
    """
    fields = dict(_all_fields(model))
    if key not in fields:
        parent = fields.get(key.rpartition(".")[0])
        if parent is not None and _section_of(parent) is Component:
            return "An argument of the constructor that `kind` names; see its documentation."
        return None
    field = fields[key]
    text = " ".join((field.description or "").split())
    section = _section_of(field)
    if section is not None:
        names = ", ".join(section.model_fields)
        what = "Sections" if _is_list(field) else "A section"
        return f"{text}\n{what}: {names}{', and arguments' if section is Component else ''}."
    lines = [text, f"type: {_written_type(field)}"]
    if field.is_required():
        lines.append("no default: it has to be given")
    else:
        default = None if field.default is PydanticUndefined else field.default
        lines.append(f"default: {'none' if default is None else json.dumps(default)}")
    return "\n".join(lines)


def _all_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = _section_of(field)
        if section is not None and section is not Component:
            yield from _all_fields(section, f"{prefix}{name}.")


def _what_to_give(model: type[BaseModel], loc: tuple[int | str, ...]) -> str:
    """Say what a missing setting takes and an example; "" of what is no recipe's."""
    *parents, name = loc
    owner = _model_at(model, tuple(parents))
    field = owner.model_fields.get(str(name))
    if owner is Component:  # its kind: what it may be, the section that it is of says
        field = _model_at(model, tuple(parents[:-1])).model_fields.get(str(parents[-1]))
    if field is None or not field.description:
        return ""
    text = f": {_sentence(field.description)}"
    if field.examples:
        key = ".".join(map(str, parents if owner is Component else loc))
        key += ".kind" if owner is Component or _section_of(field) is Component else ""
        text += f"; the usual one: {key}={json.dumps(field.examples[0])}"
        public = re.sub(r"\.\d+\b", "", key)
        text += f"; all of them: sslpipe check --explain {public}"
        return text
    section = _section_of(field)
    if section is None:
        return f"{text} ({_written_type(field)})"
    needed = [f"{name}.{key}" for key, each in section.model_fields.items() if each.is_required()]
    return f"{text}; give {' and '.join(needed)}"


def _as_section(model: type[BaseModel], item: Any) -> str:
    """Say how a section is written, where a plain value stands in its place."""
    *parents, name = item["loc"]
    field = _model_at(model, tuple(parents)).model_fields.get(str(name))
    if field is None or _section_of(field) is not Component:
        return ""
    value = item["input"] if isinstance(item["input"], str) else (field.examples or ["..."])[0]
    return f"; write {'.'.join(map(str, item['loc']))}.kind={json.dumps(value)}"


def _sentence(text: str) -> str:
    return " ".join(text.split()).rstrip(".")


def _is_list(field: FieldInfo) -> bool:
    return any(get_origin(kind) is tuple for kind in alternatives(field.annotation))


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    for kind in alternatives(field.annotation):
        if get_origin(kind) is tuple:  # of sections
            kind = get_args(kind)[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


_WORDS = {"float": "a number", "int": "a whole number", "str": "a text"}


def _written_type(field: FieldInfo) -> str:
    """As a user would say it: "int, > 0, or none"; '"a" | "b"'; "list of float"."""
    kinds = [_name_and_bounds(kind) for kind in _not_none(field)]
    if len(kinds) == 1:
        ((text, bounds),) = kinds
        text = ", ".join([text, *bounds])
    else:
        text = " or ".join(name + _bracketed(bounds) for name, bounds in kinds)
    text = ", ".join([text, *_bounds(field.metadata)])
    return text + (", or none" if NoneType in alternatives(field.annotation) else "")


def _in_words(field: FieldInfo) -> list[str]:
    """Say what each alternative of a union is: ["a whole number (>= 0)", "a list of texts"]."""
    texts = []
    for name, bounds in map(_name_and_bounds, _not_none(field)):
        many = name.removeprefix("list of ")
        word = _WORDS.get(many, many)
        word = word if many == name else f"a list of {word.removeprefix('a ')}s"
        texts.append(word + _bracketed(bounds))
    return texts


def _bracketed(bounds: list[str]) -> str:
    return f" ({', '.join(bounds)})" if bounds else ""


def _not_none(field: FieldInfo) -> list[Any]:
    return [kind for kind in alternatives(field.annotation) if kind is not NoneType]


def _name_and_bounds(kind: Any) -> tuple[str, list[str]]:
    """Name one type without a union, and list the bounds of its values."""
    metadata: list[Any] = []

    def bare(annotated: Any) -> Any:
        if get_origin(annotated) is not Annotated:
            return annotated
        inner, *more = get_args(annotated)
        metadata.extend(m for entry in more for m in getattr(entry, "metadata", [entry]))
        return inner

    kind = bare(kind)
    if get_origin(kind) is Literal:
        name = " | ".join(json.dumps(value) for value in get_args(kind))
    elif get_origin(kind) is tuple:
        inner = bare(get_args(kind)[0])
        names = " | ".join(map(json.dumps, get_args(inner)))  # of a Literal
        name = f"list of {names or inner.__name__}"
    else:
        name = getattr(kind, "__name__", str(kind))
    return name, _bounds(metadata)


def _bounds(metadata: Iterable[Any]) -> list[str]:
    return [
        f"{sign} {getattr(entry, name)}"
        for entry in metadata
        for name, sign in _BOUNDS.items()
        if getattr(entry, name, None) is not None
    ]


def _union_at(model: type[BaseModel], loc: tuple[int | str, ...]) -> tuple[int, FieldInfo] | None:
    """Find the setting of several types that an error is inside of: the depth of its key."""
    for depth in range(1, len(loc)):
        field = _model_at(model, loc[: depth - 1]).model_fields.get(str(loc[depth - 1]))
        if field is not None and len(_not_none(field)) > 1:
            return depth, field
    return None


def _fields_at(model: type[BaseModel], parents: tuple[int | str, ...]) -> list[str]:
    return list(_model_at(model, parents).model_fields)


def _model_at(model: type[BaseModel], parents: tuple[int | str, ...]) -> type[BaseModel]:
    """Return the model at a place of the tree: in a field, a dict or a tuple; else BaseModel."""
    at: Any = model
    for parent in parents:
        if isinstance(at, type) and issubclass(at, BaseModel):
            field = at.model_fields.get(str(parent))
            kinds: tuple[Any, ...] = (field.annotation,) if field is not None else ()
        else:  # dict[str, X] or tuple[X, ...]
            kinds = tuple(kind for kind in get_args(at) if kind is not Ellipsis)
        if not kinds:
            return BaseModel
        at = alternatives(kinds[-1])[0]  # a section may be optional
    return at if isinstance(at, type) and issubclass(at, BaseModel) else BaseModel
