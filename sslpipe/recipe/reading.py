"""From a TOML file and overrides to a frozen recipe of its kind; start reading at `load_recipe`."""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from pydantic import ValidationError

from sslpipe.errors import RecipeError, check_list, did_you_mean, did_you_mean_key, shown
from sslpipe.recipe.messages import explain_errors, known_keys
from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.sections import RunRecipe, leaves
from sslpipe.satellites import gather

# of recipes/: a clone, where commands are typed; an installed package; the clone of an editable one
_ROOTS = (Path(), Path(__file__).parents[1], Path(__file__).parents[2])
RECORDED = "recipe.json"  # of a run directory
MOST_BYTES = 2**18  # of a recipe; the shipped ones have under 2**12
Overrides = Sequence[str] | Mapping[str, Any]  # "section.key=value", or {"section.key": value}


def load_recipe(path: str | Path, overrides: Overrides = ()) -> RunRecipe:
    """Read a TOML recipe, set values in place of the file's, validate everything.

    >>> recipe = sslpipe.load_recipe("recipe.toml", {"steps": 2000, "data.batch_size": 64})

    Args:
        path: Of the TOML file.
        overrides: {"section.key": value}; or "section.key=value" texts, as a command has them.

    Raises:
        RecipeError: Names the key, its value, the remedy and the nearest valid key.
    """
    if not isinstance(path, str | Path):
        raise RecipeError(
            f"a recipe is the path of a TOML file, or what sslpipe.load_recipe returns, not "
            f"{shown(path)} ({type(path).__name__})"
        )
    return parse_recipe(read_tree(path, overrides), str(path), overrides=overrides)


def parse_recipe(
    tree: dict[str, Any], origin: str, *, recorded: bool = False, overrides: Overrides = ()
) -> RunRecipe:
    """Validate a tree of plain values, of any kind. Raises: RecipeError, as `load_recipe`.

    Args:
        tree: As TOML or JSON gives it.
        origin: Where it came from, for messages.
        recorded: It is of a run that is there: its trackers need not be installed here.
        overrides: What was put into the tree.
    """
    named: dict[str, Any] = {}
    apply_overrides(named, overrides)
    model = model_for(tree, origin, named)
    try:
        recipe = model.model_validate(tree, context="recorded" if recorded else None)
    except ValidationError as error:
        places = [item["loc"] for item in error.errors()]
        text = explain_errors(error, model, _blamed(origin, named, tree, places), tree)
        as_texts = isinstance(overrides, Mapping)
        raise RecipeError(text + _of_other_kind(error, named, as_texts=as_texts)) from None
    backbone = named.get("backbone")
    recipe._backbone_overrides = frozenset(backbone if isinstance(backbone, dict) else ())
    return recipe


def _blamed(
    origin: str,
    named: Mapping[str, Any],
    tree: Mapping[str, Any],
    places: Sequence[tuple[int | str, ...]],
) -> str:
    """Return where all wrong settings were written: "overrides", or the file, too.

    Args:
        origin: The file.
        named: The tree of the overrides alone.
        tree: Of the file and the overrides.
        places: Keys of each wrong setting, from the outermost section inwards.
    """
    for place in places:
        section: Any = named
        whole: Any = tree
        for key in place:
            if section == whole:  # a value, or a section of which nothing is the file's
                break
            if key not in section:
                return origin
            section = section[key]
            whole = whole[key]
        if section != whole:  # several settings are wrong together, some of the file
            return origin
    return "overrides"


def _of_other_kind(error: ValidationError, named: Mapping[str, Any], *, as_texts: bool) -> str:
    """Return how to replace sections of which another kind was named, and whose old keys stay.

    `as_texts`: the overrides are a mapping, which changes sections and replaces none.
    """
    remedies = {}
    unknown = [item["loc"] for item in error.errors() if item["type"] == "extra_forbidden"]
    for section, *key in unknown:
        override = named.get(str(section))
        if isinstance(override, dict) and "kind" in override and not set(key) & set(override):
            remedies[section] = f"'{section}={{kind={json.dumps(override['kind'])}}}'"
    if not remedies:
        return ""
    how = ", with all overrides as such texts in a list" if as_texts else ""
    return f"; without the other kind's keys{how}: {' '.join(remedies.values())}"


def read_tree(path: str | Path, overrides: Overrides = ()) -> dict[str, Any]:
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
        raise RecipeError(f"no recipe at {path}{_name_recipes(path)}")
    try:
        with open(path, "rb") as file:
            raw = file.read(MOST_BYTES + 1)
        tree = _parse(raw.decode("utf-8-sig"), str(path))  # editors of Windows begin with a mark
    except RecipeError:
        raise
    except OSError as error:
        raise RecipeError(f"{path} cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}; save it in UTF-8") from error
    except ValueError as error:
        raise RecipeError(f"{path} is not valid TOML: {error}") from error
    apply_overrides(tree, overrides)
    return tree


def _name_recipes(path: Path) -> str:
    """Return which recipes are there, in a path's folder and among the shipped ones."""
    folder = path if path.is_dir() else path.parent
    beside = _recipes_in(folder)
    places = [root / "recipes" for root in _ROOTS if (root / "recipes").is_dir()]
    shipped = {file.stem: file for place in places[::-1] for file in place.rglob("*.toml")}
    known = {**shipped, **beside}
    near = difflib.get_close_matches(path.stem, known, n=1)
    hint = f"; did you mean {str(known[near[0]])!r}?" if near else ""
    if beside:
        return f"{hint}; recipes in {folder}: {', '.join(sorted(beside))}"
    return hint or "".join(f"; shipped recipes are in {place}" for place in places[:1])


def shipped_recipe(path: Path) -> Path | None:
    """Return where a recipe "recipes/NAME.toml" is from here: in a clone, or as installed."""
    return next((root / path for root in _ROOTS if (root / path).is_file()), None)


def _recipes_in(folder: Path) -> dict[str, Path]:
    """Return name -> file of a folder's recipes; empty where there is no such folder."""
    files = folder.glob("*.toml") if folder.is_dir() else ()
    return {file.stem: file for file in files if file.name != "pyproject.toml"}


def apply_overrides(tree: dict[str, Any], overrides: Overrides) -> None:
    """Put overrides into a tree. Raises: RecipeError for a word that is not `section.key=value`."""
    if isinstance(overrides, Mapping):
        for key, value in leaves(overrides):  # {"data": {...}} keeps the section's other settings
            _apply(tree, key, value.tolist() if hasattr(value, "tolist") else value)
        return
    check_list(overrides, "overrides", RecipeError)
    for override in overrides:
        key, equals, text = str(override).partition("=")
        if not equals:
            what = "is not section.key=value, without blanks around ="
            raise RecipeError(f"override {shown(override)} {what}")
        try:
            value = _parse(f"value = {text}", f"override {shown(key)}")["value"]
        except RecipeError:
            raise
        except ValueError:
            value = text  # a bare word is a string, as on any command line
        _apply(tree, key, value)


def _apply(tree: dict[str, Any], key: str, value: Any) -> None:
    override = f"{key}={value}"
    parts = [part.strip() for part in key.split(".")]
    if not all(parts):
        raise RecipeError(f"override {shown(override)} is not section.key=value")
    *parents, leaf = parts
    section = tree
    for parent in parents:
        if section.get(parent) is None:  # a run's record has null for a section that is not there
            section[parent] = {}
        section = section[parent]
        if not isinstance(section, dict):
            raise RecipeError(f"override {shown(override)}: {parent} is a value, not a section")
    if leaf in ("steps", "epochs") and not parents:  # one replaces the other
        tree.pop("epochs" if leaf == "steps" else "steps", None)
    section[leaf] = value


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


# kinds of recipes: a pretraining, and those that satellites bring


class RecipeKind(NamedTuple):
    """A kind of recipe: a TOML file that has its section is one of it."""

    section: str  # "sampler"; no recipe of another kind has it
    model: type[RunRecipe]  # its settings
    first: Path | None = None  # "recipes/NAME.toml": to begin with, where images have labels
    column_key: str = ""  # "sampler.column": names the column of the labels; "": none can be named


def labelled_recipes(column: str | None = None) -> list[tuple[Path, list[str]]]:
    """Return the recipes to begin with where images have labels, each with its overrides.

    Args:
        column: Whose values are the labels; None: those of the data set.
    """
    recipes: list[tuple[Path, list[str]]] = []
    for kind in _brought().values():
        path = None if kind.first is None else shipped_recipe(kind.first)
        if path is None:
            continue
        if column is None:
            recipes.append((path, []))
        elif kind.column_key:
            recipes.append((path, [f"{kind.column_key}={column}"]))
    return recipes


def recipe_models() -> dict[str, type[RunRecipe]]:
    """Return the class of each kind of recipe by the kind's name, "pretraining" first."""
    return {"pretraining": Recipe, **{name: kind.model for name, kind in _brought().items()}}


def model_for(tree: Mapping[str, Any], origin: str, named: Mapping[str, Any]) -> type[RunRecipe]:
    """Return which class the settings of a recipe have.

    Args:
        tree: As TOML or JSON gives it.
        origin: Where it came from, for messages.
        named: What overrides put into it.

    Raises:
        RecipeError: It has a section that no kind of recipe of this installation has.
    """
    for kind in _brought().values():
        if kind.section in tree:
            return kind.model
    known = [*Recipe.model_fields, *(kind.section for kind in _brought().values())]
    for key, value in tree.items():
        if isinstance(value, dict) and key not in known and not did_you_mean(key, known):
            settings = [
                each
                for each in known_keys(Recipe)
                if not each.endswith(".kind") and each != "name"  # model.name is not the run's
            ]
            near = did_you_mean_key(next(iter(value), ""), settings, most=1, cutoff=0.7)
            where = "overrides" if key in named else origin
            raise RecipeError(
                f"{where}: no kind of recipe of this installation has a section {shown(key)}{near};"
                " take it out, or install what brings it: sslpipe as a whole, or a package that "
                f"adds to it (known here: {', '.join(known)})"
            )
    return Recipe


def _brought() -> dict[str, RecipeKind]:
    """Return the kinds that satellites bring, by name."""
    return gather("recipes", "RECIPES", {})
