"""The arguments and options that several commands share."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sslpipe.errors import UserError, shown
from sslpipe.recipe import FinetuneRecipe, Recipe, load_recipe, parse_recipe
from sslpipe.recipe.base import Weights as WeightsName
from sslpipe.recipe.reading import RECORDED, apply_overrides
from sslpipe.registry.plugins import made_with
from sslpipe.run.records import plugins_of, read_description

RecipePath = Annotated[
    Path,
    typer.Argument(
        help="A recipe, a TOML file; the repository has some: recipes/my_images_small.toml, say."
    ),
]
RecipeOrRun = Annotated[
    Path, typer.Argument(help="A recipe, a TOML file; or a run, whose recorded recipe is taken.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.KEY=VALUE]...",
        help="Settings instead of the recipe's, as data.batch_size=512.",
    ),
]
Data = Annotated[str, typer.Option("--data", help="The data set's dataset.json: a path or a URL.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="step-N|best",
        help="Of a run whose weights are loaded: this checkpoint, say step-00000012, or the best "
        "one of run.keep = 'best', instead of the newest.",
    ),
]
Weights = Annotated[
    WeightsName | None,
    typer.Option(
        "--weights",
        help="Of a run: its trained weights, or their moving average (optim.ema). Without it: of "
        "--checkpoint best those that were better, else the trained ones.",
        show_default=False,
    ),
]
CanvasPx = Annotated[
    int | None,
    typer.Option(min=1, help="Longer side an image is reduced to first; else by the view."),
]
NumWorkers = Annotated[int, typer.Option(min=0, help="Threads that decode.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Ids = Annotated[
    list[str] | None,
    typer.Option(
        "--ids",
        metavar="ID,ID,...",
        help="These samples instead: '469, 523', as in JSON, or one --ids for each.",
    ),
]
Init = Annotated[
    str | None,
    typer.Option(
        "--init",
        metavar="SOURCE",
        help="The weights that the backbone starts from: timm:NAME, torchvision:NAME, "
        "hf-hub:OWNER/NAME, a run, an export, a file or folder of weights; without it, random ones "
        "of the recipe's own. A run that has begun keeps them, and needs none.",
    ),
]


def parse_ids(texts: Sequence[str] | None) -> list[int] | None:
    """Read what --ids gave, separated by commas; in brackets, too. Raises: UserError."""
    if not texts:
        return None
    ids = [word for text in texts for word in re.split(r"[\s,]+", text.strip(" \t[],"))]
    for word in ids:
        if not re.fullmatch(r"[0-9]{1,18}", word):
            raise UserError(f"--ids {shown(word)} is no sample's id; write numbers, as in 469,523")
    return [int(word) for word in ids]


def recorded_in(path: Path) -> Path | None:
    """Return the run directory where a path names one, or its recipe.json; None: it does not."""
    run_dir = path.parent if path.name == RECORDED else path
    return run_dir if (run_dir / RECORDED).is_file() else None


def load_recipe_or_run(path: Path, overrides: Sequence[str]) -> Recipe | FinetuneRecipe:
    """Read a recipe, or the one that a run has recorded, with overrides. Raises: UserError."""
    run_dir = recorded_in(path)
    if run_dir is None:
        return load_recipe(path, overrides)
    with made_with(plugins_of(run_dir)):
        tree = read_description(run_dir, RECORDED)
        apply_overrides(tree, overrides)
        return parse_recipe(tree, f"{run_dir}/{RECORDED}", recorded=True, overrides=overrides)
