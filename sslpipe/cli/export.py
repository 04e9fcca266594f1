"""`sslpipe export`: a backbone in the formats of other libraries."""

from pathlib import Path
from typing import Annotated

from sslpipe.cli.inputs import check_folder, check_model
from sslpipe.cli.next_step import say_next_program
from sslpipe.cli.options import SOURCES, Checkpoint, Weights, argument, option
from sslpipe.cli.terminal import new_app, say_weights, show, working

app = new_app()


@app.command(
    epilog="Example: sslpipe export runs/photos --out out/backbone --format safetensors,onnx"
)
def main(
    source: Annotated[Path, argument(f"A run directory, {SOURCES}.")],
    out: Annotated[Path, option("The folder to write.")] = ...,  # type: ignore[assignment]
    format: Annotated[
        list[str],
        option(
            "safetensors, torchvision, timm, onnx, pt2 or hf, separated by commas; or all: every "
            "format that can hold this backbone. Repeatable."
        ),
    ] = ["safetensors"],  # noqa: B006 (typer copies it)
    with_projector: Annotated[
        bool, option("Write the projector, too.", "--with-projector")
    ] = False,
    checkpoint: Checkpoint = None,
    weights: Weights = None,
    overwrite: Annotated[bool, option("Replace an existing export.")] = False,
) -> None:
    """Export the backbone; each format is verified in a clean process.

    That process loads the format with its own library and compares the features.
    """
    check_model(source)
    check_folder(out)

    from sslpipe.export.write import export_model, load_for_export, refusals

    formats = tuple(name.strip() for text in format for name in text.split(","))
    model = load_for_export(
        source, with_projector=with_projector, checkpoint=checkpoint, weights=weights
    )
    say_weights(model)
    with working("export") as stage:
        written = export_model(model, out, formats, overwrite=overwrite, say=stage)
    for name, path in written.items():
        show(f"{name}: {path}, proved equal in a clean process")
    for name, reason in refusals(model).items() if "all" in formats else ():
        show(f"{name}: skipped: {reason}")
    say_next_program("cat", out / "README.md")  # how each format is loaded
