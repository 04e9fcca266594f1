"""What a recipe's settings mean, and what is wrong with one: texts for users."""

import json
import re
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sslpipe.errors import did_you_mean, shown
from sslpipe.recipe.base import Component
from sslpipe.registry import alternatives


def explain_errors(error: ValidationError, model: type[BaseModel], origin: str) -> str:
    """Rewrite a pydantic error for users: key, value, what is wrong, nearest valid key."""
    lines = []
    for item in sorted(error.errors(), key=lambda item: [str(part) for part in item["loc"]]):
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            known = _fields_at(model, item["loc"][:-1])
            lines.append(
                f"unknown key {key}{did_you_mean(str(item['loc'][-1]), known)}; "
                f"known here: {', '.join(known)}"
            )
        elif item["type"] == "missing":
            lines.append(f"{key} is missing{_what_to_give(model, item['loc'])}")
        elif item["type"] == "model_type":
            lines.append(f"{key} = {shown(item['input'])} is no section{_as_section(model, item)}")
        elif item["type"] == "value_error":
            lines.append(f"{key + ': ' if key else ''}{item['ctx']['error']}")
        else:
            wrong = item["msg"].lower().replace("a valid tuple", "a list")  # as TOML calls it
            lines.append(f"{key} = {shown(item['input'])}: {wrong}")
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


def _written_type(field: FieldInfo) -> str:
    """As a user would say it: "int, > 0, or none"; '"a" | "b"'; "list of float"."""
    kinds, metadata, texts = alternatives(field.annotation), list(field.metadata), []
    for kind in kinds:
        if get_origin(kind) is Annotated:
            kind, *more = get_args(kind)
            metadata += [m for entry in more for m in getattr(entry, "metadata", [entry])]
        if kind is NoneType:
            continue
        if get_origin(kind) is Literal:
            texts.append(" | ".join(json.dumps(value) for value in get_args(kind)))
        elif get_origin(kind) is tuple:
            (inner, *_) = get_args(kind)
            if get_origin(inner) is Annotated:
                inner, *more = get_args(inner)
                metadata += [m for entry in more for m in getattr(entry, "metadata", [entry])]
            names = " | ".join(map(json.dumps, get_args(inner)))  # of a Literal
            texts.append(f"list of {names or inner.__name__}")
        else:
            texts.append(getattr(kind, "__name__", str(kind)))
    bounds = [
        f"{sign} {getattr(entry, name)}"
        for entry in metadata
        for name, sign in _BOUNDS.items()
        if getattr(entry, name, None) is not None
    ]
    text = ", ".join([" or ".join(texts), *bounds])
    return text + (", or none" if NoneType in kinds else "")


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
