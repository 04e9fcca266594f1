"""The arguments and options that several commands share, each with its help."""

import inspect
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Annotated, Any, Literal, get_args, get_origin

import typer


def option(help: str = "", *names: str, **settings: Any) -> Any:
    """Declare an option; see `typer.Option`. Without `help` a docstring has it: `documented`."""
    return typer.Option(*names, help=help, **settings)


def argument(help: str = "", **settings: Any) -> Any:
    """Declare an argument; see `option`."""
    return typer.Argument(help=help, **settings)


def documented(app: typer.Typer, **settings: Any) -> Callable[[Callable[..., None]], Any]:
    """Add a command to an app whose docstring has, in `Args:`, the help of its options."""

    def register(function: Callable[..., None]) -> Callable[..., None]:
        set_parameters(function, parameters(function))
        return app.command(help=documentation(function)[0], **settings)(function)

    return register


def set_parameters(function: Any, parameters: list[inspect.Parameter]) -> None:
    """Have typer see these parameters of a function."""
    function.__signature__ = inspect.Signature(parameters)
    function.__annotations__ = {each.name: each.annotation for each in parameters}


def parameters(function: Callable[..., None]) -> list[inspect.Parameter]:
    """Return the parameters of a function with the help that its docstring has of them."""
    _, helps = documentation(function)
    found = []
    for name, parameter in inspect.signature(function).parameters.items():
        kind: Any = parameter.annotation
        if get_origin(kind) is Annotated:
            kind, info = get_args(kind)
            info = copy(info)
        else:
            info = argument() if parameter.default is parameter.empty else option()
        if name in helps:
            info.help = helps[name]
            parameter = parameter.replace(annotation=Annotated[kind, info])
        found.append(parameter)
    return found


def documentation(function: Callable[..., Any]) -> tuple[str, dict[str, str]]:
    """Split a docstring into what a command's help says and what each option's says.

    Returns:
        The text with its Returns block, without headings; and each argument's line of Args.
    """
    summary: list[str] = []
    helps: dict[str, str] = {}
    name = ""
    for paragraph in inspect.cleandoc(function.__doc__ or "").split("\n\n"):
        heading, _, block = paragraph.partition("\n")
        if heading == "Args:":
            for line in map(str.rstrip, inspect.cleandoc(block).splitlines()):
                if not line.startswith(" "):
                    name, _, line = line.partition(": ")
                helps[name] = f"{helps.get(name, '')} {line.strip()}".strip()
        elif heading == "Returns:":
            summary.append(inspect.cleandoc(block))
        elif heading not in ("Raises:", "Source:"):
            summary.append(paragraph)
    return "\n\n".join(summary), helps


SOURCES = (  # for the help of a MODEL
    "an export, a folder or file of weights (timm, torchvision, transformers, MoCo, DINO, VISSL, "
    "lightly, solo-learn), KIND@FILE, or, with a network, timm:NAME, torchvision:NAME, "
    "hf-hub:OWNER/NAME; SOURCE@128 for images of 128 px, A+B for both side by side"
)

RecipePath = Annotated[
    Path, argument("A recipe (TOML), such as recipes/my_images_small.toml in the repository.")
]
RecipeOrRun = Annotated[
    Path, argument("A recipe (TOML), or a run, for the recipe it was trained with.")
]
Overrides = Annotated[
    list[str] | None,
    argument(
        "Settings that replace the recipe's, such as data.batch_size=512.",
        metavar="[SECTION.KEY=VALUE]...",
    ),
]
Data = Annotated[str, option("The data set's dataset.json: a path or a URL.", "--data")]
Checkpoint = Annotated[
    str | None,
    option(
        "For a run: load this checkpoint, such as step-00000012, the best one (with run.keep = "
        "'best') or the last. Default: the last; of a run from weights with run.keep = 'best' the "
        "best.",
        "--checkpoint",
        metavar="step-N|best|last",
    ),
]
Weights = Annotated[
    Literal["trained", "ema"] | None,
    option(
        "For a run: load the trained weights, or their moving average (optim.ema). Default: the "
        "trained ones; with --checkpoint best, those that scored better.",
        "--weights",
        show_default=False,
    ),
]
NumWorkers = Annotated[int, option("Threads that decode images.", min=0)]
BatchSize = Annotated[int, option("Images embedded at a time.", min=1)]
Device = Annotated[str, option("auto, cpu, cuda or mps.")]
JsonFile = Annotated[Path | None, option("Also write the results as JSON.", "--out")]
Ids = Annotated[
    list[str] | None,
    option("Show these samples, such as '469, 523'; repeatable.", "--ids", metavar="ID,ID,..."),
]
Init = Annotated[
    str | None,
    option(
        "Pretrained weights to start from: timm:NAME, torchvision:NAME, hf-hub:OWNER/NAME, a run, "
        "an export, or a file or folder of weights. Default: random weights. A run that has "
        "started keeps its own copy.",
        "--init",
        metavar="SOURCE",
    ),
]
