"""`sslpipe check --explain KEY`: what a setting means, the arguments of a section's `kind` too."""

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sslpipe.augment.presets import setting_docs
from sslpipe.augment.two_views import AUGMENTS
from sslpipe.cli.options import documentation
from sslpipe.errors import RecipeError, did_you_mean_key
from sslpipe.losses import LOSSES
from sslpipe.models.backbones import BACKBONES
from sslpipe.recipe import explain_key, setting_keys
from sslpipe.satellites import offered

SECTIONS: dict[str, tuple[tuple[str, Mapping[str, Callable[..., Any]]], ...]] = {
    "augment": (("view", AUGMENTS),),
    "backbone": (("backbone", BACKBONES),),
    "loss": (("objective", LOSSES),),
}
"""Section with a `kind` -> the tables that the kind is looked up in; satellites add theirs."""
for _satellite in offered("settings"):
    for _section, _tables in _satellite.SETTINGS.items():
        SECTIONS[_section] = (*SECTIONS.get(_section, ()), *_tables)

_ANY_BACKBONE = {
    "channels": "Of the images; the data decide, and it need not be given.",
    "embedding_dim": "Width of a linear layer behind the pooled features; none without it.",
    "embedding_taps": "Modules of the network whose outputs have an embedding layer each, beside "
    "the pooled features: HDC's branches, embedding_dim wide together; none without it.",
    "normalize": "Whether features have length 1 (default false).",
    "pool": "Of the last map of features: avg (default), max or gem "
    "(generalised mean with a learned power, at first 3); for networks that average.",
    "pool_power": "Sets the power of gem, instead of learning it; 2: L2 pooling.",
}


def explain(key: str) -> str:
    """Return what a setting means: "data.micro_batch", "loss.temperature", "miner.kind", a section.

    Returns:
        Of an argument, one line for each meaning, with the names of the kinds that take it.

    Raises:
        RecipeError: There is no such setting; names the nearest.
    """
    section, _, name = key.removeprefix("also.").partition(".")  # further losses are as [loss]
    meanings = _meanings(section) if section in SECTIONS else {}
    if meanings and name == "kind":
        known = (f"{title}: {', '.join(_names(table))}" for title, table in SECTIONS[section])
        described = (explain_key(key.removesuffix(".kind")) or "").splitlines()
        about = [line for line in described[1:] if not line.startswith(("A section: ", section))]
        return "\n".join([key, *filter(None, about), *known, "no default: it has to be given"])
    if name in meanings:
        return "\n".join([key, *meanings[name]])
    text = None if meanings and name else explain_key(key)
    if text is None:
        kinds = (f"{name}.{each}" for name in SECTIONS for each in ("kind", *_meanings(name)))
        near = did_you_mean_key(key, [*setting_keys(), *kinds])
        raise RecipeError(f"there is no setting {key!r}{near}")
    if meanings:
        text += f"\nArguments of one kind or another: {', '.join(meanings)}."
    return text


def _meanings(section: str) -> dict[str, list[str]]:
    """Argument -> its meanings, each after the names of the kinds that take it."""
    kinds: dict[str, dict[str, list[str]]] = {}
    for title, table in SECTIONS[section]:
        for kind in _names(table):
            known = kind if len(SECTIONS[section]) == 1 else f"{kind} ({title})"
            for name, text in _arguments(table[kind]):
                kinds.setdefault(name, {}).setdefault(text, []).append(known)
    meanings = {
        name: [f"{', '.join(names)}: {text}" for text, names in texts.items()]
        for name, texts in kinds.items()
    }
    if section == "augment":
        meanings |= {name: [text] for name, text in setting_docs().items() if name not in meanings}
    if section == "backbone":
        del meanings["architecture"]  # the part of `kind` behind the slash
        meanings |= {name: [text] for name, text in _ANY_BACKBONE.items()}
    return meanings


def _names(table: Any) -> list[str]:
    """List the kinds of a table; one with patterns names examples."""
    return [*(table.names() if hasattr(table, "names") else table)]


def _arguments(constructor: Callable[..., Any]) -> Iterator[tuple[str, str]]:
    """Yield name and meaning of each keyword that a constructor takes from a recipe."""
    if hasattr(constructor, "fields"):  # a Part
        yield from _fields(constructor)
        return
    source = constructor
    for name, parameter in inspect.signature(constructor).parameters.items():
        if parameter.kind in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL):
            continue
        text = _documented(source, name) or "not documented"
        if parameter.default is not parameter.empty:
            text = f"{text.rstrip('.')} (default {parameter.default!r})"
        yield name, text


def _fields(part: Any) -> Iterator[tuple[str, str]]:
    """Yield name and meaning of each setting of a part."""
    settings = part.settings_class("")
    for name, field in settings.model_fields.items():
        if name != "kind":
            text = " ".join((field.description or "not documented").split())
            if not field.is_required():
                text = f"{text.rstrip('.')} (default {field.default!r})"
            yield name, text


def _documented(source: Any, name: str) -> str:
    """Return what the `Args:` block of a class, of a base of it, or of a function says of a name.

    "as in NTXentLoss" and "The arguments are those of `SphereFace`" are followed.
    """
    entries = (entry for tables in SECTIONS.values() for _, t in tables for entry in t.values())
    classes = {getattr(entry, "__name__", ""): entry for entry in entries}
    for owner in getattr(source, "__mro__", (source,)):
        summary, helps = documentation(owner)
        if (text := helps.get(name)) is not None:
            other = re.match(r"as in (\w+)\.?$", text, re.IGNORECASE)
            return (_documented(classes.get(other[1]), name) if other else "") or text
        if same := re.search(r"arguments are those of `(\w+)`", summary):
            return _documented(classes.get(same[1]), name)
    return ""
