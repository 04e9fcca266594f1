"""`sslpipe embed`: a backbone and a split of shards -> features, one row a sample, in a file."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sslpipe.cli.inputs import check_model, open_split
from sslpipe.cli.progress import progress
from sslpipe.cli.recipes import Checkpoint
from sslpipe.cli.terminal import console, report_bad
from sslpipe.data.index import DatasetIndex
from sslpipe.errors import UserError

if TYPE_CHECKING:
    from sslpipe.augment.eval_view import EvalView
    from sslpipe.export.load import FrozenBackbone

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(
    epilog="Examples: sslpipe embed out/backbone --data out/photos/dataset.json --split test "
    "--out test.safetensors | accelerate launch --multi_gpu --num_processes 2 -m sslpipe embed "
    "out/backbone --data out/photos/dataset.json --out test.safetensors (two processes, the same "
    "file)"
)
def main(
    model: Annotated[Path, typer.Argument(help="An export's folder, or a run directory.")],
    data: Annotated[str, typer.Option(help="The data set's dataset.json: a path or a URL.")],
    out: Annotated[Path, typer.Option(help="The file to write: .safetensors, or .npz for numpy.")],
    split: Annotated[str, typer.Option(help="Which split to embed.")] = "test",
    dtype: Annotated[str, typer.Option(help="Of the features: float32 or float16.")] = "float32",
    crops: Annotated[
        str | None, typer.Option(help="Views an image: center, flip, five, ten; else the export's.")
    ] = None,
    reduce: Annotated[
        str | None, typer.Option(help="Several views' features: mean or concat; else the export's.")
    ] = None,
    resize_px: Annotated[
        int | None, typer.Option(help="Shorter side before the crops; else the export's.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 256,
    canvas_px: Annotated[
        int | None,
        typer.Option(min=1, help="Longer side an image is reduced to first; else by the view."),
    ] = None,
    num_workers: Annotated[int, typer.Option(min=0, help="Threads that decode.")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu, cuda or mps.")] = "auto",
    checkpoint: Checkpoint = None,
) -> None:
    """Write the features, labels and ids of every sample of a split.

    Every sample has one row, in id order; one that cannot be decoded is reported and has none. A
    pass that was stopped resumes: start the same command again, with any number of processes.
    Features are whitened where the export says so (`sslpipe whiten`).
    """
    if dtype not in ("float32", "float16"):
        raise UserError(f"--dtype {dtype} is unknown; use float32 or float16")
    check_model(model)
    index = open_split(data, split)

    import torch

    from sslpipe.cli.processes import start
    from sslpipe.evaluation.embed_file import embed_to_file
    from sslpipe.evaluation.features import view_canvas_px
    from sslpipe.export.load import load_backbone
    from sslpipe.run.launch import end_processes

    target, process = start(device)
    backbone = load_backbone(model, checkpoint=checkpoint).to(target)
    options = {"crops": crops, "reduce": reduce, "resize_px": resize_px}
    view = _choose_view(backbone, {k: v for k, v in options.items() if v is not None}, model)
    title = f"embed {split}" + (f", process {process.rank}" if process.world_size > 1 else "")
    embed_to_file(
        out,
        backbone.backbone,
        view,
        index.split(split),
        _metadata(backbone, view, index, split),
        process=process,
        dtype=getattr(torch, dtype),
        finish=None if backbone.whitening is None else backbone.whitening.__call__,
        batch_size=batch_size,
        canvas_px=canvas_px or view_canvas_px(view),
        num_workers=num_workers,
        device=target,
        bar=lambda samples: progress(title, samples),
        on_bad=report_bad,
    )
    if process.rank == 0:
        console.print(f"{out}: features of split {split!r}", highlight=False)
    end_processes()


def _choose_view(backbone: "FrozenBackbone", options: dict[str, Any], model: Path) -> "EvalView":
    """Return the export's view with the options instead of its own settings."""
    from sslpipe.augment.eval_view import EvalView

    try:
        view = EvalView(**backbone.view.config() | options)
    except ValueError as error:
        raise UserError(f"--crops, --reduce, --resize-px: {error}") from error
    if backbone.whitening is not None and view.config() != backbone.view.config():
        raise UserError(
            f"--crops, --reduce, --resize-px: {model} whitens features of its own view; leave them "
            "out, or whiten an export anew with other views"
        )
    return view


def _metadata(
    backbone: "FrozenBackbone", view: "EvalView", index: DatasetIndex, split: str
) -> dict[str, Any]:
    """Return all that decides the features, for the file to carry."""
    from sslpipe.evaluation.features import data_metadata
    from sslpipe.export.load import checkpoint_metadata

    sha256 = backbone.config.whitening_sha256
    return {
        "backbone_sha256": backbone.config.weights_sha256,
        "backbone": backbone.config.backbone.model_dump(),
        "view": view.config(),
        **data_metadata(index, split),
        **({} if sha256 is None else {"whitening_sha256": sha256}),
        **checkpoint_metadata(backbone),
    }
