"""`sslpipe check --explain KEY`: what a setting means, those of a section's `kind`, too."""

from pydantic.fields import FieldInfo

from sslpipe.augment.presets import setting_docs
from sslpipe.errors import RecipeError, did_you_mean_key
from sslpipe.recipe.messages import describe_key, known_keys, written_type
from sslpipe.recipe.reading import recipe_models
from sslpipe.registry.schema import Kinds, kinds_of, settings_class


def sections() -> dict[str, Kinds]:
    """Return the sections with a `kind`, of every recipe, and the tables of their kinds."""
    tables_of: dict[str, list[str]] = {}
    for model in recipe_models().values():
        for name, field in model.model_fields.items():
            if (kinds := kinds_of(field)) is not None:
                tables = tables_of.setdefault(name, [])
                tables += [each for each in kinds.names_of_tables if each not in tables]
    return {name: Kinds(*tables) for name, tables in tables_of.items()}


def explain(key: str) -> str:
    """Return what a setting means: "data.micro_batch", "loss.temperature", "miner.kind", a section.

    Returns:
        Of an argument, one line for each meaning, with the names of the kinds that take it.

    Raises:
        RecipeError: There is no such setting; names the nearest.
    """
    section, _, name = key.removeprefix("also.").partition(".")  # further losses are as [loss]
    known_sections = sections()
    kinds = known_sections.get(section)
    settings = meanings(section, kinds) if kinds is not None else {}
    if kinds is not None and name == "kind":
        described = (explain_key(key.removesuffix(".kind")) or "").splitlines()
        about = [line for line in described[1:] if not line.startswith(("A section: ", section))]
        lines = [key, *filter(None, about), *list_kinds(kinds), "no default: it has to be given"]
        return "\n".join(lines)
    if name in settings:
        return "\n".join([key, *settings[name], *_types(kinds, name)])
    text = None if settings and name else explain_key(key)
    if text is None:
        keys = (
            f"{each}.{setting}"
            for each, its_kinds in known_sections.items()
            for setting in ("kind", *meanings(each, its_kinds))
        )
        near = did_you_mean_key(key, [*setting_keys(), *keys])
        raise RecipeError(f"there is no setting {key!r}{near}")
    if kinds is not None:
        text = "\n".join([text, *list_kinds(kinds)])
        text += f"\nSettings of one kind or another: {', '.join(settings)}."
    return text


def list_kinds(kinds: Kinds) -> list[str]:
    """Return a line for each table of a section's kinds, with their names."""
    return [f"{table.what}: {', '.join(table.names())}" for table in kinds.tables]


def setting_keys() -> list[str]:
    """List "section.key" of the settings of every kind of run, and the sections themselves."""
    return list(
        dict.fromkeys(name for model in recipe_models().values() for name in known_keys(model))
    )


def explain_key(key: str) -> str | None:
    """Return what a setting means, its type and default, for each kind of run; None: none has it.

    Args:
        key: As in a recipe or an override: "data.micro_batch", or a section's name.
    """
    texts: dict[str, list[str]] = {}
    for kind, model in recipe_models().items():
        text = describe_key(model, key)
        if text is not None:
            texts.setdefault(text, []).append(kind)
    entries = (f"{key} ({' and '.join(kinds)})\n{text}" for text, kinds in texts.items())
    return "\n\n".join(entries) or None


def meanings(section: str, kinds: Kinds) -> dict[str, list[str]]:
    """Return setting -> its meanings, each after the names of the kinds that take it."""
    takers: dict[str, dict[str, list[str]]] = {}
    for table in kinds.tables:
        for kind in table.names():
            known = kind if len(kinds.tables) == 1 else f"{kind} ({table.what})"
            for name, field in settings_class(table, kind).model_fields.items():
                if name != "kind":
                    takers.setdefault(name, {}).setdefault(_meaning(field), []).append(known)
    every = sum(len(table.names()) for table in kinds.tables)
    settings: dict[str, list[str]] = {}
    for name, texts in takers.items():
        settings[name] = [
            text if len(names) == every else f"{', '.join(names)}: {text}"
            for text, names in texts.items()
        ]
    if section == "augment":  # the ops declare theirs
        settings |= {name: [text] for name, text in setting_docs().items() if name not in settings}
    return settings


def _types(kinds: Kinds | None, name: str) -> list[str]:
    """Return a line for each type that a setting has in some kind; none for a setting of an op."""
    types: dict[str, list[str]] = {}
    for table in kinds.tables if kinds is not None else ():
        for kind in table.names():
            field = settings_class(table, kind).model_fields.get(name)
            if field is not None:
                types.setdefault(written_type(field), []).append(f"{kind} ({table.what})")
    if len(types) == 1:
        return [f"type: {text}" for text in types]
    return [f"type for {' and '.join(names)}: {text}" for text, names in types.items()]


def _meaning(field: FieldInfo) -> str:
    """Return what a setting means, and its default."""
    text = " ".join((field.description or "not documented").split())
    if field.is_required():
        return f"{text.rstrip('.')} (no default: it has to be given)"
    return f"{text.rstrip('.')} (default {field.default!r})"
