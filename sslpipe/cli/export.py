"""`sslpipe export` and `whiten`: a backbone in the formats of other libraries, and flattened."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from sslpipe.cli.inputs import check_features, check_folder, check_model, open_data
from sslpipe.cli.next_step import say_next_program
from sslpipe.cli.options import SOURCES, Checkpoint, argument, command, option
from sslpipe.cli.terminal import load_model, new_app, say, show, working
from sslpipe.errors import UserError

if TYPE_CHECKING:
    from sslpipe.export.onnx_files import Agreement

LEAST_EQUAL = 0.95  # sslpipe.export.onnx_files.LEAST_EQUAL

app = new_app()


@command(
    app,
    examples=[
        "sslpipe export runs/photos --out out/backbone --format safetensors,onnx",
        "sslpipe export runs/photos --out out/small --format onnx-int8 --data "
        "out/photos/dataset.json",
    ],
)
def export(
    model: Annotated[Path, argument(f"A run directory, {SOURCES}.")],
    *,
    out: Annotated[Path, option("The folder to write.")],
    format: Annotated[
        list[str],
        option(
            "safetensors, torchvision, timm, onnx, pt2 or hf, separated by commas; or all: every "
            "format that can hold this backbone, but onnx-int8, which is named itself. Repeatable.",
            metavar="NAME",
        ),
    ] = ["safetensors"],  # noqa: B006 (typer copies it)
    preprocessing: Annotated[
        bool,
        option(
            "Beside each ONNX file, write one that takes uint8 pixels of any size: it resizes, "
            "crops and normalises them.",
            "--with-preprocessing",
        ),
    ] = False,
    data: Annotated[
        str | None,
        option("For onnx-int8: the dataset.json of the images that calibrate and verify it."),
    ] = None,
    split: Annotated[str, option("Its split, which training has not seen.")] = "test",
    least_equal: Annotated[
        float,
        option(
            "Share of these images whose nearest image must be the same as in float32.",
            min=0,
            max=1,
        ),
    ] = LEAST_EQUAL,
    overwrite: Annotated[bool, option("Replace an existing export.", "--overwrite")] = False,
    checkpoint: Checkpoint = None,
) -> None:
    """Export the backbone; each format is verified in a clean process.

    That process loads the format with its own library and compares the features. onnx-int8 is
    verified by search: as in float32, which image is the nearest of each?
    """
    check_model(model)
    check_folder(out)
    formats = tuple(name.strip() for text in format for name in text.split(","))
    index = None if data is None else open_data(data, [split])

    from sslpipe.export.write import export_backbone, refusals

    loaded = load_model(model, checkpoint)
    proofs: dict[str, Agreement] = {}
    with working("export") as stage:
        written = export_backbone(
            loaded,
            out,
            formats,
            with_preprocessing=preprocessing,
            data=index,
            split=split,
            least_equal=least_equal,
            overwrite=overwrite,
            say=stage,
            on_agreement=proofs.__setitem__,
        )
    for name, path in written.items():
        show(f"{name}: {path}, {proofs.get(name, 'proved equal in a clean process')}")
    for name, reason in refusals(loaded).items() if "all" in formats else ():
        show(f"{name}: skipped: {reason}")
    say_next_program(["cat", out / "README.md"])  # how each format is loaded


@command(
    app,
    examples=["sslpipe whiten out/backbone train.safetensors --dims 64"],
)
def whiten(
    model: Annotated[Path, argument("An export's folder.")],
    train: Annotated[Path, argument("Features of the train split (`sslpipe embed`).")],
    power: Annotated[
        float | None,
        option(
            "Divide each axis by its spread to this power. 1: PCA whitening; 0: only centre and "
            "rotate. Default: what is best on TRAIN by its labels; without labels 0.25.",
            min=0,
            max=1,
        ),
    ] = None,
    dims: Annotated[int | None, option("Axes to keep. Default: all.", min=1)] = None,
) -> None:
    """Flatten the features of an export by the PCA of TRAIN.

    The export stores it; from then on `encode` and `sslpipe embed` apply it.
    """
    if not (model / "config.json").is_file():
        raise UserError(f"{model} holds no config.json; name the folder of an export")
    check_features([train])

    from sslpipe.export.whitening import whiten

    fitted = whiten(model, train, dims=dims, power=power, say=say)
    width, kept = fitted.projection.shape
    say(f"{model}: {width} -> {kept} features, spectrum flattened")
