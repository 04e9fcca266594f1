"""How a command declares its options, and the options that several commands share.

A parameter is written once, with its help beside it: `Annotated[TYPE, option("help")]`. Parameters
that belong together are the fields of a dataclass, and a parameter of that class stands for them.
"""

import inspect
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, fields, is_dataclass
from functools import wraps
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sslpipe.cli.terminal import list_examples, load_model

if TYPE_CHECKING:
    from sslpipe.export.load import FrozenBackbone


def option(help: str, *names: str, **settings: Any) -> Any:
    """Declare an option; see `typer.Option`."""
    if "min" in settings or "max" in settings:
        settings.setdefault("metavar", "N")  # the limits stand behind the help
    return typer.Option(*names, help=help, **settings)


def argument(help: str, **settings: Any) -> Any:
    """Declare an argument; see `option`."""
    return typer.Argument(help=help, **settings)


def command(
    app: typer.Typer, name: str | None = None, *, examples: Sequence[str] = ()
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Add a command to an app. Its help is the function's docstring.

    A parameter that is a dataclass stands for the options that its fields declare.

    Args:
        app: The app.
        name: The command's. Default: the function's.
        examples: Command lines, with which the help ends.
    """

    def register(function: Callable[..., None]) -> Callable[..., None]:
        bundles: dict[str, Any] = {}  # parameter -> its dataclass
        options: list[inspect.Parameter] = []  # as typer sees them
        for parameter in inspect.signature(function).parameters.values():
            if is_dataclass(parameter.annotation):
                bundles[parameter.name] = parameter.annotation
                options += inspect.signature(bundles[parameter.name]).parameters.values()
            else:
                options.append(parameter)

        @wraps(function)
        def run(**values: Any) -> None:
            for name, bundle in bundles.items():
                settings = {field.name: values.pop(field.name) for field in fields(bundle)}
                values[name] = bundle(**settings)
            function(**values)

        set_parameters(run, options)
        app.command(name, epilog=list_examples(examples))(run)
        return function

    return register


def set_parameters(function: Any, parameters: Iterable[inspect.Parameter]) -> None:
    """Have typer see these parameters of a function, by their names."""
    named = [each.replace(kind=each.KEYWORD_ONLY) for each in parameters]
    function.__signature__ = inspect.Signature(named)
    function.__annotations__ = {each.name: each.annotation for each in named}


_COLLECTIVE = re.compile(r"\s*\bCollective(: [^.]*)?\.")  # what processes do, of a docstring


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
            summary.append(_COLLECTIVE.sub("", paragraph))
    return "\n\n".join(filter(None, summary)), helps


SOURCES = (  # for the help of a MODEL
    "an export, a folder or file of weights (timm, torchvision, transformers, MoCo, DINO, VISSL, "
    "lightly, solo-learn), KIND@FILE, or, with a network, timm:NAME, torchvision:NAME, "
    "hf-hub:OWNER/NAME; SOURCE@128 for images of 128 px, A+B for both side by side"
)

Data = Annotated[str, option("The data set's dataset.json: a path or a URL.")]
Checkpoint = Annotated[
    str | None,
    option(
        "For a run: load this checkpoint, such as step-00000012, the best one (with run.keep = "
        "'best') or the last. Default: the last; of a run from weights with run.keep = 'best' the "
        "best.",
        metavar="step-N|best|last",
    ),
]
NumWorkers = Annotated[int, option("Threads that decode images.", min=0)]
Device = Annotated[str, option("auto, cpu, cuda or mps.")]
Ids = Annotated[
    list[str] | None,
    option("Show these samples, such as '469, 523'; repeatable.", metavar="ID,ID,..."),
]


@dataclass(frozen=True)
class Training:
    """A recipe, and the weights that its training starts from."""

    recipe: Annotated[
        Path,
        argument(
            "A recipe (TOML), such as recipes/my_images_small.toml; for check and preview also a "
            "run, for the recipe it was trained with."
        ),
    ]
    overrides: Annotated[
        list[str] | None,
        argument(
            "Settings that replace the recipe's, such as data.batch_size=512.",
            metavar="SECTION.KEY=VALUE",
        ),
    ] = None
    init: Annotated[
        str | None,
        option(
            "Pretrained weights to start from: timm:NAME, torchvision:NAME, hf-hub:OWNER/NAME, a "
            "run, an export, or a file or folder of weights. Default: random weights. A run that "
            "has started keeps its own copy.",
            metavar="SOURCE",
        ),
    ] = None
    checkpoint: Checkpoint = None

    @property
    def start(self) -> dict[str, str]:
        """Those of --init and --checkpoint that are given, by their names."""
        start = {"init": self.init, "checkpoint": self.checkpoint}
        return {name: value for name, value in start.items() if value is not None}

    def words(self, data: str) -> list[str]:
        """Return the words that say the same of another command, with a data set."""
        start = [word for name, value in self.start.items() for word in (f"--{name}", value)]
        return [str(self.recipe), *(self.overrides or []), "--data", data, *start]


@dataclass(frozen=True)
class Model:
    """The model that embeds images, and where it does."""

    model: Annotated[Path, option(f"A run directory, {SOURCES}.", metavar="MODEL")]
    checkpoint: Checkpoint = None
    device: Device = "auto"

    def load(self) -> "FrozenBackbone":
        """Load it, and say which weights of a run were chosen."""
        return load_model(self.model, self.checkpoint, device=self.device)


@dataclass(frozen=True)
class Embedding:
    """How the images of shards are embedded."""

    batch_size: Annotated[int, option("Images embedded at a time.", min=1)] = 256
    num_workers: NumWorkers = 2
    device: Device = "auto"
