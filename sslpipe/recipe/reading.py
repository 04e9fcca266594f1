"""From a TOML file and overrides to a tree of plain values; nothing is validated yet."""

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from sslpipe.errors import RecipeError, check_list, shown

RECORDED = "recipe.json"  # of a run directory
MOST_BYTES = 2**18  # of a recipe; the shipped ones have under 2**12


def read_tree(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Read a recipe's TOML and apply the overrides; nothing is validated yet.

    Raises:
        RecipeError: No such file (says where recipes are), no TOML, or a wrong override.
    """
    path = Path(path)
    if path.name == RECORDED or (path / RECORDED).is_file():
        raise RecipeError(
            f"{path} is what a run has recorded, not a recipe: name the TOML file that it was "
            "trained with; `check` and `preview` take the run's directory, too"
        )
    if not path.is_file():
        folder = path if path.is_dir() else path.parent
        files = folder.glob("*.toml") if folder.is_dir() else ()
        known = sorted(file.stem for file in files if file.name != "pyproject.toml")
        hint = (
            f"; recipes in {folder}: {', '.join(known)}"
            if known
            else "; the recipes of the documentation are in the folder recipes/ of sslpipe's "
            "repository, not in the installed package: copy one from there"
        )
        raise RecipeError(f"no recipe at {path}{hint}")
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
        tree = _parse(raw.decode("utf-8"), str(path))
    except RecipeError:
        raise
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
    except ValueError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    apply_overrides(tree, overrides)
    return tree


def apply_overrides(tree: dict[str, Any], overrides: Sequence[str]) -> None:
    """Put `section.key=value` overrides into a tree. Raises: RecipeError for any other word."""
    check_list(overrides, "overrides", RecipeError)
    for override in overrides:
        _apply(tree, override)


def leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield ("section.key", value) for all that is no table inside of tables."""
    for key, value in tree.items():
        if isinstance(value, dict) and value:
            yield from leaves(value, f"{prefix}{key}.")
        else:
            yield prefix + key, value


def _apply(tree: dict[str, Any], override: str) -> None:
    key, equals, text = override.partition("=")
    parts = [part.strip() for part in key.split(".")]
    if not equals or not all(parts):
        raise RecipeError(f"override {shown(override)} is not section.key=value")
    origin = f"override {shown(key)}"
    try:
        value = _parse(f"value = {text}", origin)["value"]
    except RecipeError:
        raise
    except ValueError:
        value = text  # a bare word is a string, as on any command line
    *parents, leaf = parts
    for parent in parents:
        if tree.get(parent) is None:  # a run's record has null for a section that is not there
            tree[parent] = {}
        tree = tree[parent]
        if not isinstance(tree, dict):
            raise RecipeError(f"override {shown(override)}: {parent} is a value, not a section")
    if leaf in ("steps", "epochs") and not parents:  # one replaces the other
        tree.pop("epochs" if leaf == "steps" else "steps", None)
    tree[leaf] = value


def _parse(text: str, origin: str) -> dict[str, Any]:
    """Parse TOML. Raises: RecipeError where it is too large, ValueError where it is not TOML."""
    if len(text.encode("utf-8", "surrogatepass")) > MOST_BYTES:
        raise RecipeError(f"{origin} is longer than {MOST_BYTES:,} bytes: no recipe")
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise RecipeError(
            f"{origin} is nested too deeply; a recipe is section.key = value"
        ) from None
