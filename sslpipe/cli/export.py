"""`sslpipe export`: a run's backbone in the formats of other libraries."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sslpipe.cli.inputs import check_run
from sslpipe.cli.recipes import Checkpoint

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(
    epilog="Example: sslpipe export runs/photos --out out/backbone --format safetensors,onnx"
)
def main(
    run: Annotated[Path, typer.Argument(help="The run directory of a training.")],
    out: Annotated[Path, typer.Option(help="The folder to write.")] = ...,  # type: ignore[assignment]
    format: Annotated[
        str,
        typer.Option(
            help="Formats, separated by commas: safetensors, torchvision, timm, onnx, pt2, hf; "
            "or all that can hold this backbone."
        ),
    ] = "safetensors",
    with_projector: Annotated[
        bool, typer.Option("--with-projector", help="Write the projector, too.")
    ] = False,
    checkpoint: Checkpoint = None,
    overwrite: Annotated[bool, typer.Option(help="Replace an export that is there.")] = False,
) -> None:
    """Write the trained backbone, each format proved in a clean process.

    The process loads the format with the library that it is for, and compares the features.
    """
    check_run(run)

    from sslpipe.export.load import load_run
    from sslpipe.export.write import export_model, refusals

    console = Console()
    formats = tuple(name.strip() for name in format.split(","))
    model = load_run(run, with_projector=with_projector, checkpoint=checkpoint)
    with console.status("writing each format and proving it in a clean process"):
        written = export_model(model, out, formats, overwrite=overwrite)
    lines = [f"{name}: {path}, proved equal in a clean process" for name, path in written.items()]
    if "all" in formats:
        lines += [f"{name}: skipped: {reason}" for name, reason in refusals(model).items()]
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
