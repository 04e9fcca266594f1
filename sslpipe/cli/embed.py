"""`sslpipe embed`: a backbone and a split of shards -> features, one row a sample, in a file."""

import os
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from sslpipe.cli.inputs import FEATURE_SUFFIXES, OTHERS, check_file, check_model, open_split
from sslpipe.cli.next_step import after_embed
from sslpipe.cli.progress import progress
from sslpipe.cli.recipes import CanvasPx, Checkpoint, Device, NumWorkers, Weights
from sslpipe.cli.terminal import console, report_bad, say_weights
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.errors import UserError

if TYPE_CHECKING:
    from sslpipe.augment.eval_view import EvalView
    from sslpipe.evaluation.embed import Embeddings
    from sslpipe.export.load import FrozenBackbone

MOST_KEPT_BYTES = 2**30  # of a split's features that the suite leaves in the run

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")


@app.command(
    epilog="Examples: sslpipe embed out/backbone --data out/photos/dataset.json --split test "
    "--out test.safetensors | accelerate launch --multi_gpu --num_processes 2 -m sslpipe embed "
    "out/backbone --data out/photos/dataset.json --out test.safetensors (two processes, the same "
    "file)"
)
def main(
    model: Annotated[Path, typer.Argument(help=f"A run directory, {OTHERS}, or model.onnx.")],
    data: Annotated[str, typer.Option(help="The data set's dataset.json: a path or a URL.")],
    out: Annotated[
        Path,
        typer.Option(
            help="The file to write: .safetensors, or .npz for numpy; {split} in it is the split's "
            "name."
        ),
    ],
    split: Annotated[
        list[str], typer.Option(help="Which split to embed; repeatable, with {split} in --out.")
    ] = ["test"],  # noqa: B006 (typer copies it)
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
    canvas_px: CanvasPx = None,
    num_workers: NumWorkers = 2,
    device: Device = "auto",
    checkpoint: Checkpoint = None,
    weights: Weights = None,
) -> None:
    """Write the features, labels and ids of every sample of a split, or of several.

    Every sample has one row, in id order; one that cannot be decoded is reported and has none. A
    pass that was stopped resumes: start the same command again, with any number of processes.
    Features are whitened where the export says so (`sslpipe whiten`).
    """
    if dtype not in ("float32", "float16"):
        raise UserError(f"--dtype {dtype} is unknown; use float32 or float16")
    check_model(model)
    files = _files(out, split)
    for name, file in files.items():
        check_file(file)
        index = open_split(data, name)

    import torch

    from sslpipe.cli.processes import start
    from sslpipe.distributed import end_processes
    from sslpipe.evaluation.embed import embed_to_file
    from sslpipe.export.load import load_backbone

    target, process = start(device)
    backbone = load_backbone(model, checkpoint=checkpoint, weights=weights).to(target)
    say_weights(backbone)
    options = {"crops": crops, "reduce": reduce, "resize_px": resize_px}
    view = _choose_view(backbone, {k: v for k, v in options.items() if v is not None}, model)
    for name, file in files.items():
        title = f"embed {name}" + (f", process {process.rank}" if process.world_size > 1 else "")
        embed_to_file(
            file,
            backbone.backbone,
            view,
            index.split(name),
            features_metadata(backbone, view, index, name),
            network=f"{backbone.name} of {model}",
            process=process,
            dtype=getattr(torch, dtype),
            finish=None if backbone.whitening is None else backbone.whitening.__call__,
            batch_size=batch_size,
            canvas_px=canvas_px or view.canvas_px,
            num_workers=num_workers,
            device=target,
            bar=partial(progress, title),
            on_bad=report_bad,
        )
        if process.rank == 0:
            console.print(f"{file}: features of split {name!r}", highlight=False)
    end_processes()
    after_embed(files, data, index)


def _files(out: Path, splits: Sequence[str]) -> dict[str, Path]:
    """Return each split's file: --out with the split's name for {split}."""
    if out.suffix not in ("", *FEATURE_SUFFIXES) and not out.is_dir():  # which is told
        raise UserError(f"--out {out}: features are written to {' or '.join(FEATURE_SUFFIXES)}")
    files = {split: Path(str(out).replace("{split}", split)) for split in splits}
    if len({*files.values()}) < len(splits):
        raise UserError(
            f"--out {out} is one file for {len(splits)} splits; put {{split}} into it, as in "
            "--out features/{split}.safetensors, and name each split once"
        )
    return files


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


def features_metadata(
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


def keep_features(
    model: Path,
    backbone: "FrozenBackbone",
    index: DatasetIndex,
    splits: Sequence[Split],
    **options: Any,
) -> None:
    """Write RUN/features/SPLIT.safetensors where it is not there, for the report of the run.

    Args:
        model: Where the backbone is from; what is no run that can be written to gets no features,
            nor does a split whose features would take more than MOST_KEPT_BYTES.
        backbone: The backbone.
        index: The data set.
        splits: Of it.
        options: canvas_px, batch_size, num_workers, device, on_bad of `embed_to_file`.
    """
    from sslpipe.evaluation.embed import embed_to_file

    if not (model / "recipe.json").is_file() or not os.access(model, os.W_OK):
        return
    network = backbone.backbone.to(options["device"])
    for split in splits:
        file = model / "features" / f"{split.name}.safetensors"
        large = len(split) * backbone.config.num_features * 4 > MOST_KEPT_BYTES
        if file.exists() or large:
            continue
        facts = features_metadata(backbone, backbone.view, index, split.name)
        bar = partial(progress, f"embed {split.name}")
        embed_to_file(file, network, backbone.view, split, facts, bar=bar, **options)


def saved_features(
    model: Path,
    backbone: "FrozenBackbone",
    index: DatasetIndex,
    splits: Sequence[Split],
    canvas_px: int,
) -> dict[str, "Embeddings"]:
    """Read MODEL/features/SPLIT.safetensors where they are just what would be embedded now.

    Args:
        model: A run directory; an export has no such folder.
        backbone: Its backbone.
        index: The data set.
        splits: Of it.
        canvas_px: As they would be embedded.

    Returns:
        Split -> features, of those that are there; each is a line on the console.
    """
    from sslpipe.evaluation.features import saved_embeddings

    saved = {}
    for split in splits:
        file = model / "features" / f"{split.name}.safetensors"
        facts = features_metadata(backbone, backbone.view, index, split.name)
        rows = saved_embeddings(file, {**facts, "canvas_px": canvas_px, "dtype": "float32"}, split)
        if rows is not None:
            saved[split.name] = rows
            text = f"{split.name}: read from {file}"
            console.print(text, highlight=False, markup=False, soft_wrap=True)
    return saved
