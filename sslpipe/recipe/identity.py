"""Which settings make a run the one it is: all that decides the trained weights, and its digest."""

import hashlib
import json
import re
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from sslpipe.errors import shown
from sslpipe.recipe.sections import RunRecipe
from sslpipe.registry.plugins import plugin_hint, versions

# What changes no weight beyond the rounding by which devices differ.
_NOT_IN_THE_DIGEST: dict[str, Any] = {
    "run": True,
    "name": True,
    "augment": {"kernels"},
    "teacher": {"features"},  # where the file is; its sha256 counts
}
OTHER_RUN = (  # what mends a difference
    "use another --run-dir, with --init of this run to train its weights on, or resume with what "
    "it began with"
)


def run_identity(recipe: RunRecipe, index: Any, order_version: int) -> dict[str, Any]:
    """Return the `identity` of a run on a data set.

    Args:
        recipe: Of the run, resolved.
        index: The `DatasetIndex`; where a setting names a column made from its images, the
            column's values are part of the run.
        order_version: Of the order's algorithm.
    """
    settings = json.dumps(_deciding(recipe))
    return identity(recipe, index.sha256_for(settings), order_version)


def identity(recipe: RunRecipe, index_sha256: str, order_version: int) -> dict[str, Any]:
    """Return everything that decides the trained weights, as plain values, with their `digest`.

    That is the recipe without [run], name, augment.kernels and teacher.features, the data, the
    order's algorithm and, where parts of plug-ins are loaded, their versions: call it
    when all parts are built.
    """
    tree: dict[str, Any] = {
        "recipe": _deciding(recipe),
        "index_sha256": index_sha256,
        "order_version": order_version,
    }
    if loaded := versions():
        tree["plugins"] = loaded
    digest = hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()
    return {"digest": digest, **tree}


def _deciding(recipe: RunRecipe) -> dict[str, Any]:
    return recipe.model_dump(mode="json", exclude=_NOT_IN_THE_DIGEST)


def differences(stored: Mapping[str, Any], current: Mapping[str, Any]) -> str:
    """Return in what the identities of a run, stored and today's, differ, and what mends it."""
    changes = []
    for key, old, new in differing_keys(stored, current):
        if key == "plugins":  # one of the two has none
            changes += differing_keys(old or {}, new or {}, prefix="plugins.")
        elif key != "digest":  # which differs with any other
            changes.append((key, old, new))
    texts = "; ".join(_difference(key, old, new) for key, old, new in changes)
    before = _settings_of_before(changes)
    return f"{texts or 'nothing that is stored differs'}; {OTHER_RUN}{before}"


def other_data(old: str, new: str) -> str:
    """Return that the data set is not the one that a run began with, by their sha256."""
    return (
        "the data set is not the one that the run began with, which its data.json describes: "
        f"another dataset.json, or one built anew ({_hashes(old, new)})"
    )


def _difference(key: str, old: Any, new: Any) -> str:
    if key == "index_sha256":
        return other_data(old, new)
    if key == "recipe.init":
        return f"the weights it starts from, --init, are others ({_hashes(old, new)})"
    if key.startswith("plugins."):
        return _plugin_difference(key.removeprefix("plugins."), old, new)
    then, now = ("not set" if each is None else shown(each) for each in (old, new))
    return f"{key.removeprefix('recipe.')} = {then} when it began, {now} now"


def _settings_of_before(changes: Sequence[tuple[str, Any, Any]]) -> str:
    """Return which overrides to add and which to omit, as the end of a sentence; "": none."""
    overrides = []
    added = []
    for key, old, _ in changes:
        name = key.removeprefix("recipe.")
        if name == key or name == "init":  # no setting
            continue
        if old is None:
            added.append(name)
        elif isinstance(old, dict):  # a section that is not there now
            settings = {f"{name}.{each}": value for each, value in old.items()}
            overrides += [
                _override(each, value)
                for each, value in settings.items()
                if value not in (None, [], {})
            ]
        else:
            overrides.append(_override(name, old))
    steps = [f"add {' '.join(overrides)}"] if overrides else []
    steps += [f"leave out {' '.join(added)}"] if added else []
    return f": {', and '.join(steps)}" if steps else ""


def differing_keys(
    old: Mapping[str, Any], new: Mapping[str, Any], prefix: str = ""
) -> list[tuple[str, Any, Any]]:
    """List (key, old, new) for every leaf in which two trees of plain values differ."""
    changes: list[tuple[str, Any, Any]] = []
    for key in sorted({*old, *new}):
        a = old.get(key)
        b = new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            changes += differing_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            changes.append((prefix + key, a, b))
    return changes


def _plugin_difference(name: str, old: Any, new: Any) -> str:
    if new is None:
        return f"the plug-in {name}, which it began with, is not there{plugin_hint()}"
    if old is None:
        return f"the plug-in {name} was not there when it began; leave its --plugin out"
    return f"the plug-in {name} is another version: {old} when it began, {new} now"


def _hashes(old: Any, new: Any) -> str:
    then, now = (str(each)[:12] if each else "none" for each in (old, new))
    return f"sha256 {then} when it began, {now} now"


def _override(key: str, value: Any) -> str:
    """Write a setting as it is typed; a word that TOML reads as no other type stays bare."""
    is_word = isinstance(value, str) and re.fullmatch(r"[a-z_]\w*", value)
    is_bare = is_word and value not in ("true", "false", "inf", "nan")
    return shlex.quote(f"{key}={value if is_bare else json.dumps(value)}")
