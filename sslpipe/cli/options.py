"""The arguments and options that several commands share, each with its help."""

from pathlib import Path
from typing import Annotated, Literal

import typer

SOURCES = (  # for the help of a MODEL
    "an export, a folder or file of weights (timm, torchvision, transformers, MoCo, DINO, VISSL, "
    "lightly, solo-learn), KIND@FILE, or, with a network, timm:NAME, torchvision:NAME, "
    "hf-hub:OWNER/NAME"
)
MOST_SEED = 2**63 - 1

RecipePath = Annotated[
    Path,
    typer.Argument(help="A recipe (TOML), such as recipes/my_images_small.toml in the repository."),
]
RecipeOrRun = Annotated[
    Path, typer.Argument(help="A recipe (TOML), or a run, for the recipe it was trained with.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[SECTION.KEY=VALUE]...",
        help="Settings that replace the recipe's, such as data.batch_size=512.",
    ),
]
Data = Annotated[str, typer.Option("--data", help="The data set's dataset.json: a path or a URL.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="step-N|best",
        help="For a run: load this checkpoint, such as step-00000012, or the best one (with "
        "run.keep = 'best'). Default: the newest.",
    ),
]
Weights = Annotated[
    Literal["trained", "ema"] | None,
    typer.Option(
        "--weights",
        help="For a run: load the trained weights, or their moving average (optim.ema). Default: "
        "the trained ones; with --checkpoint best, those that scored better.",
        show_default=False,
    ),
]
CanvasPx = Annotated[
    int | None,
    typer.Option(
        min=1, help="Reduce each image to this longer side first. Default: set by the view."
    ),
]
NumWorkers = Annotated[int, typer.Option(min=0, help="Threads that decode images.")]
BatchSize = Annotated[int, typer.Option(min=1, help="Images embedded at a time.")]
Device = Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")]
Ids = Annotated[
    list[str] | None,
    typer.Option(
        "--ids",
        metavar="ID,ID,...",
        help="Show these samples, such as '469, 523'; repeatable.",
    ),
]
Init = Annotated[
    str | None,
    typer.Option(
        "--init",
        metavar="SOURCE",
        help="Pretrained weights to start from: timm:NAME, torchvision:NAME, hf-hub:OWNER/NAME, a "
        "run, an export, or a file or folder of weights. Default: random weights. A run that has "
        "started keeps its own copy.",
    ),
]
