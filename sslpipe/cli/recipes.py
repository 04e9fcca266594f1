"""The arguments and options that several commands share."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from sslpipe.errors import UserError, shown

RecipePath = Annotated[
    Path,
    typer.Argument(
        help="A recipe, a TOML file; the repository has some: recipes/my_images_small.toml, say."
    ),
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
        "--backbone",
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
