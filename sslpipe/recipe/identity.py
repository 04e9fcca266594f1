"""Which settings make a run the one it is: all that decides the trained weights, and its digest."""

import copy
import hashlib
import json
from collections.abc import Mapping
from functools import reduce
from typing import Any

from sslpipe import registry
from sslpipe.recipe.base import RunRecipe

# What changes no weight beyond the rounding by which devices differ.
_NOT_IN_THE_DIGEST: dict[str, Any] = {"run": True, "name": True, "augment": {"kernels"}}


def identity(recipe: RunRecipe, index_sha256: str, order_version: int) -> dict[str, Any]:
    """Return everything that decides the trained weights, as plain values.

    That is the recipe without [run], name and augment.kernels, the data, the order's algorithm and,
    where parts of plug-ins are loaded, the hashes of their source: call it when all parts are
    built.
    """
    settings = recipe.model_dump(mode="json", exclude=_NOT_IN_THE_DIGEST)
    _leave_out(settings, recipe.ADDED_LATER)
    tree = {
        "recipe": settings,
        "index_sha256": index_sha256,
        "order_version": order_version,
    }
    loaded = registry.fingerprints()
    return {**tree, "plugins": loaded} if loaded else tree


def _leave_out(settings: dict[str, Any], defaults: Mapping[str, Any]) -> None:
    """Remove each "section.key" that has its default; a section may be missing."""
    for path, default in defaults.items():
        *sections, key = path.split(".")
        table = reduce(lambda tree, name: tree.get(name) or {}, sections, settings)
        if table.get(key) == default:
            table.pop(key, None)


def same_run(
    stored: Mapping[str, Any], ours: Mapping[str, Any], defaults: Mapping[str, Any]
) -> bool:
    """Say whether two identities are of one run.

    A run may have been recorded with a default written out that stands in no digest today.

    Args:
        stored: The tree of `identity`, and its digest.
        ours: As `stored`, of today.
        defaults: `ADDED_LATER` of the recipe.
    """
    if stored["digest"] == ours["digest"]:
        return True
    tree = copy.deepcopy({key: value for key, value in stored.items() if key != "digest"})
    _leave_out(tree.get("recipe") or {}, defaults)
    return tree == {key: value for key, value in ours.items() if key != "digest"}


def digest(recipe: RunRecipe, index_sha256: str, order_version: int) -> str:
    """Hash everything that decides the trained weights; see `identity`."""
    tree = identity(recipe, index_sha256, order_version)
    return hashlib.sha256(json.dumps(tree, sort_keys=True).encode()).hexdigest()


def differing_keys(old: dict[str, Any], new: dict[str, Any], prefix: str = "") -> list[str]:
    """List `key: old -> new` for every leaf in which two trees of plain values differ."""
    lines = []
    for key in sorted({*old, *new}):
        a, b = old.get(key), new.get(key)
        if isinstance(a, dict) and isinstance(b, dict):
            lines += differing_keys(a, b, f"{prefix}{key}.")
        elif a != b:
            lines.append(f"{prefix}{key}: {a!r} -> {b!r}")
    return lines
