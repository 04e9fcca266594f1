"""The arguments and options of every command that takes a recipe."""

from pathlib import Path
from typing import Annotated

import typer

RecipePath = Annotated[Path, typer.Argument(help="A recipe, a TOML file.")]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="[SECTION.KEY=VALUE]...", help="Settings instead of the recipe's."),
]
Data = Annotated[str, typer.Option("--data", help="The data set's dataset.json: a path or a URL.")]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint",
        metavar="step-N",
        help="Of a run that weights are loaded from (a fine-tuning's --backbone): this "
        "checkpoint, say step-00000012, instead of its newest.",
    ),
]
BackbonePath = Annotated[
    Path | None,
    typer.Option(
        "--backbone",
        help="Of a fine-tuning: the export or run it starts from; without it, random weights of "
        "the recipe's own.",
    ),
]
