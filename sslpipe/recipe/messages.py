"""What a recipe's settings mean, and what is wrong with one: texts for users."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from types import NoneType
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from sslpipe.errors import did_you_mean, did_you_mean_key, listed, lost_quotes, shown
from sslpipe.registry import alternatives
from sslpipe.registry.schema import kinds_of

MOST_LINES = 10
_BOUNDS = {"gt": ">", "ge": ">=", "lt": "<", "le": "<="}


def explain_errors(
    error: ValidationError,
    model: type[BaseModel],
    origin: str,
    tree: Mapping[str, Any] | None = None,
) -> str:
    """Rewrite a pydantic error for users: key, value, what is wrong, nearest valid key.

    Args:
        error: Of `model`.
        model: Of the whole file.
        origin: The file; "" of none.
        tree: What was validated: the `kind` of a section says which keys are known in it.
    """
    items = sorted(error.errors(), key=lambda item: [str(part) for part in item["loc"]])
    mistakes = _Mistakes(model, tree or {}, items)
    lines = list(dict.fromkeys(map(mistakes.explain, items)))
    return (f"{origin}: " if origin else "") + listed(lines, MOST_LINES, "; ")


class _Mistakes:
    """All that is wrong with a file: `explain` makes a text of each."""

    def __init__(
        self, model: type[BaseModel], tree: Mapping[str, Any], items: list[ErrorDetails]
    ) -> None:
        self._model = model
        self._tree = tree
        self._items = items

    def explain(self, item: ErrorDetails) -> str:
        """Return key, value, what is wrong, and the nearest valid key or value."""
        loc = item["loc"]
        if (text := self._of_several_types(loc)) is not None:
            return text
        key = ".".join(map(str, loc))
        value = item["input"]
        match item["type"]:
            case "extra_forbidden":
                return self._unknown_key(loc)
            case "missing":
                place = loc[:-1] if loc[-1] == "kind" else loc  # a section says what it may be
                wanted = _what_to_give(self._field_at(place), ".".join(map(str, place)))
                return f"{key} is missing{wanted}"
            case "model_type" | "no_section":
                return self._no_section(loc, value)
            case "unknown_kind":
                return f"{key} = {shown(value)} {item['msg']}"
            case "literal_error" if loc[-1] == "kind":  # of one architecture, and a slash follows
                return f"{key} = {shown(value)}: write {item['ctx']['expected']}"
            case "literal_error":
                choices = re.findall(r"'([^']*)'", item["ctx"]["expected"])
                near = did_you_mean(str(value), choices)
                return f"{key} = {shown(value)}: {item['msg'].lower()}{near}"
            case "value_error":
                text = str(item["ctx"]["error"])
                return text if not key or text.startswith(f"{key}.") else f"{key}: {text}"
        wrong = item["msg"].lower().replace("a valid tuple", "a list")  # as TOML calls it
        wrong = wrong.replace("an instance of sequence", "a list")
        return f"{key} = {shown(value)}: {wrong}{lost_quotes(value)}"

    def _of_several_types(self, loc: Sequence[int | str]) -> str | None:
        """Explain what is inside a value that is of none of several types: each has its errors."""
        for depth in range(1, len(loc)):
            outer = self._field_at(loc[:depth])
            if outer is not None and len(kinds := _type_names(outer)) > 1:
                alike = [other for other in self._items if other["loc"][:depth] == loc[:depth]]
                whole = min(alike, key=lambda other: len(other["loc"]))["input"]
                neither = f"is neither {' nor '.join(kinds)}{lost_quotes(whole)}"
                return f"{'.'.join(map(str, loc[:depth]))} = {shown(whole)} {neither}"
        return None

    def _unknown_key(self, loc: Sequence[int | str]) -> str:
        key = ".".join(map(str, loc))
        known = list((self._section_at(loc[:-1]) or self._model).model_fields)
        near = did_you_mean(str(loc[-1]), known)
        if not near:
            settings = [each for each in known_keys(self._model) if not each.endswith(".kind")]
            near = did_you_mean_key(key, settings, most=1, cutoff=0.7)
        return f"unknown key {key}{near}; known here: {', '.join(known)}"

    def _no_section(self, loc: Sequence[int | str], value: Any) -> str:
        key = ".".join(map(str, loc))
        field = self._field_at(loc)
        usage = ""
        if field is not None and _has_kind(field):
            kind = value if isinstance(value, str) else (field.examples or ["..."])[0]
            usage = f"; write {key}.kind={json.dumps(kind)}"
        return f"{key} = {shown(value)} is no section{usage}"

    def _section_at(self, loc: Sequence[int | str]) -> type[BaseModel] | None:
        """Return the class that reads what stands at a place; None where no class does."""
        section: type[BaseModel] | None = self._model
        tree: Any = self._tree
        for part in loc:
            if isinstance(part, int):  # of a list of sections
                tree = tree[part] if isinstance(tree, list | tuple) and part < len(tree) else None
                continue
            field = None if section is None else section.model_fields.get(part)
            if field is None:
                return None
            tree = tree.get(part) if isinstance(tree, Mapping) else None
            section = _section_of(field)
            kinds = kinds_of(field)
            if kinds is not None and isinstance(tree, Mapping):
                section = kinds.find(tree.get("kind")) or section
        return section

    def _field_at(self, loc: Sequence[int | str]) -> FieldInfo | None:
        """Return the declaration of the setting at a place; None: there is none."""
        if not loc or isinstance(loc[-1], int):
            return None
        section = self._section_at(loc[:-1])
        return None if section is None else section.model_fields.get(loc[-1])


def _has_kind(field: FieldInfo) -> bool:
    return kinds_of(field) is not None


def _what_to_give(field: FieldInfo | None, key: str) -> str:
    """Return what a missing setting takes and an example; "" of what is no recipe's."""
    if field is None or not field.description:
        return ""
    text = f": {' '.join(field.description.split()).rstrip('.')}"
    section = _section_of(field)
    if field.examples:
        key += ".kind" if _has_kind(field) else ""
        usual = f"the usual one: {key}={json.dumps(field.examples[0])}"
        public = re.sub(r"\.\d+\b", "", key)
        return f"{text}; {usual}; all of them: `sslpipe check --explain {public}`"
    if section is None:
        return f"{text} ({written_type(field)})"
    fields = section.model_fields.items()
    needed = [f"{key.rpartition('.')[2]}.{name}" for name, each in fields if each.is_required()]
    return f"{text}; give {' and '.join(needed)}"


def known_keys(model: type[BaseModel]) -> list[str]:
    """List "section.key" of all settings, and the sections themselves."""
    return [name for name, _ in _all_fields(model)]


def describe_key(model: type[BaseModel], key: str) -> str | None:
    """Return what "section.key" means, with type, default and range; None: there is no such key."""
    fields = dict(_all_fields(model))
    if key not in fields:
        parent = fields.get(key.rpartition(".")[0])
        if parent is not None and _has_kind(parent):
            return "A setting of the part that `kind` names."
        return None
    field = fields[key]
    text = " ".join((field.description or "").split())
    section = _section_of(field)
    if section is not None:
        several = any(get_origin(kind) is tuple for kind in alternatives(field.annotation))
        names = ", ".join(section.model_fields)
        names = "kind, and settings of its kind" if _has_kind(field) else names
        return f"{text}\n{'Sections' if several else 'A section'}: {names}."
    default = "no default: it has to be given"
    if not field.is_required():
        value = None if field.default is PydanticUndefined else field.default
        default = f"default: {'none' if value is None else json.dumps(value)}"
    return "\n".join([text, f"type: {written_type(field)}", default])


def _all_fields(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, FieldInfo]]:
    for name, field in model.model_fields.items():
        yield prefix + name, field
        section = _section_of(field)
        if section is not None:
            yield from _all_fields(section, f"{prefix}{name}.")


def _section_of(field: FieldInfo) -> type[BaseModel] | None:
    for kind in alternatives(field.annotation):
        if get_origin(kind) is Annotated:
            kind = get_args(kind)[0]
        if get_origin(kind) is tuple:  # of sections
            kind = get_args(kind)[0]
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            return kind
    return None


def written_type(field: FieldInfo) -> str:
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
