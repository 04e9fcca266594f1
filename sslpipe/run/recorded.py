"""A run as the source of a recipe: what it has recorded, and the weights that it keeps."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from sslpipe.errors import UserError

if TYPE_CHECKING:
    from sslpipe.recipe.reading import Overrides
    from sslpipe.recipe.sections import RunRecipe

T = TypeVar("T")


def check_run(run_dir: Path) -> None:
    """Raise UserError where a path is not the directory of a run that has begun."""
    if not (run_dir / "recipe.json").is_file():
        raise UserError(
            f"{run_dir} holds no run: there is no recipe.json; name the --run-dir of "
            "`sslpipe train`, once it has begun"
        )


def recorded_in(path: Path) -> Path | None:
    """Return the run directory that a path is, or whose recipe.json it is; None for a recipe."""
    run_dir = path.parent if path.name == "recipe.json" else path
    return run_dir if (run_dir / "recipe.json").is_file() else None


def start_of(path: Path, init: T | None) -> T | str | None:
    """Return which weights to start from: those that --init names, or those that a run keeps."""
    run_dir = recorded_in(path)
    if init is None and run_dir is not None and (run_dir / "init").is_dir():
        return str(run_dir / "init")
    return init


def load_recipe_or_run(path: Path, overrides: "Overrides") -> "RunRecipe":
    """Read a recipe, or the one that a run has recorded, with overrides. Raises: UserError."""
    from sslpipe.files import Tree
    from sslpipe.recipe.reading import RECORDED, apply_overrides, load_recipe, parse_recipe
    from sslpipe.registry.plugins import made_with
    from sslpipe.run.description import plugins_of, read_description

    run_dir = recorded_in(path)
    if run_dir is None:
        return load_recipe(path, overrides)
    with made_with(plugins_of(run_dir)):
        tree = read_description(run_dir, RECORDED, Tree)
        apply_overrides(tree, overrides)
        return parse_recipe(tree, f"{run_dir}/{RECORDED}", recorded=True, overrides=overrides)


def report_file(run_dirs: Sequence[Path]) -> Path:
    """Return where the report of a run is written, or that of several side by side."""
    first = run_dirs[0]
    return first.parent / "comparison.html" if len(run_dirs) > 1 else first / "report.html"
