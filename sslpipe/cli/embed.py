"""A backbone and a split of shards -> features, one row a sample, in a safetensors or npz file."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from sslpipe.augment.eval_view import EvalView
from sslpipe.cli.progress import progress
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.data.loader import Quarantined
from sslpipe.distributed import Rank, pick_device
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import Embeddings, embed
from sslpipe.evaluation.embed_file import embed_to_file
from sslpipe.export.load import FrozenBackbone
from sslpipe.export.write import load_backbone
from sslpipe.run.launch import end_processes, join_processes

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
console = Console(stderr=True)


@app.command(
    epilog="Examples: python -m tools.embed out/demo/export --data out/demo/data/dataset.json "
    "--split test --out out/demo/test.safetensors | accelerate launch --config_file "
    "launch/cpu2.yaml -m tools.embed ... (several processes, the same file)"
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
) -> None:
    """Write the features, labels and ids of every sample of a split.

    Every sample has one row, in id order; one that cannot be decoded is reported and has none. A
    pass that was stopped goes on where it was: start the same command again, with any number of
    processes. Features are whitened where the export says so (`python -m tools.whiten`).
    """
    if dtype not in ("float32", "float16"):
        raise UserError(f"--dtype {dtype} is unknown; use float32 or float16")
    target, process = start(device)
    backbone = load_backbone(model).to(target)
    index = load_index(data)
    index.check_files(split) if split in index.manifest.splits else index.split(split)
    given = {"crops": crops, "reduce": reduce, "resize_px": resize_px}
    settings = backbone.view.config() | {k: v for k, v in given.items() if v is not None}
    try:
        view = EvalView(**settings)
    except ValueError as error:
        raise UserError(f"--crops, --reduce, --resize-px: {error}") from error
    if backbone.whitening is not None and view.config() != backbone.view.config():
        raise UserError(
            f"--crops, --reduce, --resize-px: {model} whitens features of its own view; leave them "
            "out, or whiten an export anew with other views"
        )
    facts = {
        "backbone_sha256": backbone.config.weights_sha256,
        "backbone": backbone.config.backbone.model_dump(),
        "view": view.config(),
        **data_facts(index, split),
        **whitening_facts(backbone),
    }
    title = f"embed {split}" + (f", process {process.rank}" if process.world_size > 1 else "")
    embed_to_file(
        out,
        backbone.backbone,
        view,
        index.split(split),
        facts,
        process=process,
        dtype=getattr(torch, dtype),
        finish=None if backbone.whitening is None else backbone.whitening.__call__,
        batch_size=batch_size,
        canvas_px=canvas_px or view_canvas_px(view),
        num_workers=num_workers,
        device=target,
        bar=lambda left: progress(title, left),
        on_bad=report_bad,
    )
    if process.rank == 0:
        console.print(f"{out}: features of split {split!r}", highlight=False)
    end_processes()


def whitening_facts(backbone: FrozenBackbone) -> dict[str, Any]:
    sha256 = backbone.config.whitening_sha256
    return {} if sha256 is None else {"whitening_sha256": sha256}


def report_bad(bad: Quarantined) -> None:
    """One line on stderr about a sample that cannot be decoded."""
    console.print(
        f"left out: {bad.shard}, key {bad.key!r} (id {bad.id}): {bad.reason}",
        style="yellow",
        highlight=False,
        markup=False,
    )


def embed_split(
    backbone: torch.nn.Module, view: Any, split: Split, *, title: str = "", **options: Any
) -> Embeddings:
    """`embed` with a progress bar; samples that cannot be decoded are named on stderr."""
    with progress(title or f"embed {split.name}", len(split)) as advance:
        return embed(backbone, view, split, progress=advance, on_bad=report_bad, **options)


def data_facts(index: DatasetIndex, split: str) -> dict[str, Any]:
    return {"data": index.manifest.name, "data_sha256": index.sha256, "split": split}


def view_canvas_px(view: EvalView) -> int:
    """A canvas that no picture of at most 2 : 1 loses by: it bounds the longer side, the view's
    resize_px the shorter one."""
    return max(256, 2 * view.resize_px)


def start(device: str) -> tuple[str, Rank]:
    """Where this process computes, and its place among the launcher's; `end_processes` ends it."""
    target = pick_device(device, f"--device {device}")
    process = join_processes(cpu=target == "cpu", timeout_s=3600.0)
    return f"cuda:{torch.cuda.current_device()}" if target == "cuda" else target, process


def run(application: typer.Typer) -> None:
    """Run a command line; a user's mistake is one line on stderr and exit status 2."""
    try:
        application()
    except UserError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    run(app)
