"""`sslpipe export`: a backbone in the formats of other libraries."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sslpipe.cli.inputs import OTHERS, check_folder, check_model
from sslpipe.cli.next_step import say_next_program
from sslpipe.cli.progress import working
from sslpipe.cli.recipes import Checkpoint, Weights
from sslpipe.cli.terminal import say_weights

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(
    epilog="Example: sslpipe export runs/photos --out out/backbone --format safetensors,onnx"
)
def main(
    source: Annotated[Path, typer.Argument(help=f"The run directory of a training, or {OTHERS}.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")] = ...,  # type: ignore[assignment]
    format: Annotated[
        list[str],
        typer.Option(
            help="Formats, separated by commas, or one --format for each: safetensors, "
            "torchvision, timm, onnx, pt2, hf; or all that can hold this backbone."
        ),
    ] = ["safetensors"],  # noqa: B006 (typer copies it)
    with_projector: Annotated[
        bool, typer.Option("--with-projector", help="Write the projector, too.")
    ] = False,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an export that is there.")] = False,
) -> None:
    """Write the backbone, each format proved in a clean process.

    The process loads the format with the library that it is for, and compares the features.
    """
    check_model(source)
    check_folder(out)

    from sslpipe.export.write import export_model, load_for_export, refusals

    console = Console()
    formats = tuple(name.strip() for text in format for name in text.split(","))
    model = load_for_export(
        source, with_projector=with_projector, checkpoint=checkpoint, weights=weights
    )
    say_weights(model)
    with working("export") as say:
        written = export_model(model, out, formats, overwrite=overwrite, say=say)
    lines = [f"{name}: {path}, proved equal in a clean process" for name, path in written.items()]
    if "all" in formats:
        lines += [f"{name}: skipped: {reason}" for name, reason in refusals(model).items()]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    say_next_program("cat", out / "README.md")  # how each format is loaded
