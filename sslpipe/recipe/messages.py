"""What a recipe's settings mean, and what is wrong with one: texts for users."""

import json
import re
from collections.abc import Iterator
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from sslpipe.errors import did_you_mean, did_you_mean_key, lost_quotes, shown
from sslpipe.recipe.base import Component
from sslpipe.registry import alternatives

MOST_LINES = 10
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}

Loc = tuple[int | str, ...]


def explain_errors(error: ValidationError, model: type[BaseModel], origin: str) -> str:
    """Rewrite a pydantic error for users: key, value, what is wrong, nearest valid key."""
    items = sorted(error.errors(), key=lambda item: [str(part) for part in item["loc"]])
    lines = list(dict.fromkeys(_explain(item, items, model) for item in items))
    more = f"; and {len(lines) - MOST_LINES} more" if len(lines) > MOST_LINES else ""
    return f"{origin}: " + "; ".join(lines[:MOST_LINES]) + more


def _explain(item: ErrorDetails, items: list[ErrorDetails], model: type[BaseModel]) -> str:
    loc, key = item["loc"], _dotted(item["loc"])
    for depth in range(1, len(loc)):  # of several types, each has errors of its own: one line
        field = _field_at(model, loc[:depth])
        if field is not None and len(kinds := _type_names(field)) > 1:
            alike = [other for other in items if other["loc"][:depth] == loc[:depth]]
            whole = min(alike, key=lambda other: len(other["loc"]))["input"]
            neither = f"is neither {' nor '.join(kinds)}{lost_quotes(whole)}"
            return f"{_dotted(loc[:depth])} = {shown(whole)} {neither}"
    match item["type"]:
        case "extra_forbidden":
            known = list(_model_at(model, loc[:-1]).model_fields)
            near = did_you_mean(str(loc[-1]), known)
            near = near or did_you_mean_key(key, known_keys(model), most=1, cutoff=0.7)
            return f"unknown key {key}{near}; known here: {', '.join(known)}"
        case "missing":
            return f"{key} is missing{_what_to_give(model, loc)}"
        case "model_type":
            field, value = _field_at(model, loc), item["input"]
            usage = ""
            if field is not None and _section_of(field) is Component:
                kind = value if isinstance(value, str) else (field.examples or ["..."])[0]
                usage = f"; write {key}.kind={json.dumps(kind)}"
            return f"{key} = {shown(value)} is no section{usage}"
        case "value_error":
            return f"{key + ': ' if key else ''}{item['ctx']['error']}"
    wrong = item["msg"].lower().replace("a valid tuple", "a list")  # as TOML calls it
    return f"{key} = {shown(item['input'])}: {wrong}{lost_quotes(item['input'])}"


def _what_to_give(model: type[BaseModel], loc: Loc) -> str:
    """Say what a missing setting takes and an example; "" of what is no recipe's."""
    # of a component, whose kind is missing, the section that it is of says what it may be
    is_kind = _model_at(model, loc[:-1]) is Component
    loc = loc[:-1] if is_kind else loc
    field = _field_at(model, loc)
    if field is None or not field.description:
        return ""
    text, section = f": {' '.join(field.description.split()).rstrip('.')}", _section_of(field)
    if field.examples:
        key = _dotted(loc) + (".kind" if section is Component else "")
        usual = f"the usual one: {key}={json.dumps(field.examples[0])}"
        public = re.sub(r"\.\d+\b", "", key)
        return f"{text}; {usual}; all of them: sslpipe check --explain {public}"
    if section is None:
        return f"{text} ({_written_type(field)})"
    fields = section.model_fields.items()
    needed = [f"{loc[-1]}.{key}" for key, each in fields if each.is_required()]
    return f"{text}; give {' and '.join(needed)}"


def known_keys(model: type[BaseModel]) -> list[str]:
    """List "section.key" of all settings, and the sections themselves."""
    return [name for name, _ in _all_fields(model)]


def describe_key(model: type[BaseModel], key: str) -> str | None:
    """Say what "section.key" means, with type, default and range; None: there is no such key."""
    fields = dict(_all_fields(model))
    if key not in fields:
        parent = fields.get(key.rpartition(".")[0])
        if parent is not None and _section_of(parent) is Component:
            return "An argument of the constructor that `kind` names; see its documentation."
        return None
    field = fields[key]
    text, section = " ".join((field.description or "").split()), _section_of(field)
    if section is not None:
        several = any(get_origin(kind) is tuple for kind in alternatives(field.annotation))
        names = ", ".join(section.model_fields) + ", and arguments" * (section is Component)
        return f"{text}\n{'Sections' if several else 'A section'}: {names}."
    default = "no default: it has to be given"
    if not field.is_required():
        value = None if field.default is PydanticUndefined else field.default
        default = f"default: {'none' if value is None else json.dumps(value)}"
    return "\n".join([text, f"type: {_written_type(field)}", default])


def _all_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = _section_of(field)
        if section is not None and section is not Component:
            yield from _all_fields(section, f"{prefix}{name}.")


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    for kind in alternatives(field.annotation):
        if get_origin(kind) is tuple:  # of sections
            kind = get_args(kind)[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def _written_type(field: FieldInfo) -> str:
    """As a user would say it: "int (> 0), or none"; '"a" | "b"'; "list of float"."""
    text = " or ".join(_type_names(field))
    return text + (", or none" if NoneType in alternatives(field.annotation) else "")


def _type_names(field: FieldInfo) -> list[str]:
    """Name each type of a setting but None, with the bounds of its values."""
    kinds = [kind for kind in alternatives(field.annotation) if kind is not NoneType]
    of_all = field.metadata if len(kinds) == 1 else []
    return [_type_name(kind, of_all) for kind in kinds]


def _type_name(kind: Any, metadata: list[Any]) -> str:
    metadata = [*metadata]

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
    bounds = [
        f"{sign} {getattr(entry, key)}"
        for entry in metadata
        for key, sign in _BOUNDS.items()
        if getattr(entry, key, None) is not None
    ]
    return name + (f" ({', '.join(bounds)})" if bounds else "")


def _dotted(loc: Loc) -> str:
    return ".".join(map(str, loc))


def _field_at(model: type[BaseModel], loc: Loc) -> FieldInfo | None:
    return _model_at(model, loc[:-1]).model_fields.get(str(loc[-1])) if loc else None


def _model_at(model: type[BaseModel], parents: Loc) -> type[BaseModel]:
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
