"""A backbone and a split of shards -> one row of features a sample, in a safetensors file."""

import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console

from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.data.loader import Quarantined
from sslpipe.errors import UserError
from sslpipe.evaluation.embed import Embeddings, embed, save_embeddings
from sslpipe.export import load_backbone
from tools.progress import progress

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")
console = Console(stderr=True)


@app.command(
    epilog="Example: python -m tools.embed out/demo/export --data out/demo/data/dataset.json "
    "--split test --out out/demo/test.safetensors"
)
def main(
    model: Annotated[Path, typer.Argument(help="An export's folder, or a run directory.")],
    data: Annotated[str, typer.Option(help="The data set's dataset.json: a path or a URL.")],
    out: Annotated[Path, typer.Option(help="The safetensors file to write.")],
    split: Annotated[str, typer.Option(help="Which split to embed.")] = "test",
    batch_size: Annotated[int, typer.Option(min=1, help="Images at a time.")] = 256,
    canvas_px: Annotated[int, typer.Option(min=1, help="Larger images are reduced first.")] = 256,
    num_workers: Annotated[int, typer.Option(min=0, help="Threads that decode.")] = 2,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
) -> None:
    """Write the features, labels and ids of every sample of a split.

    Every sample has one row, in id order; one that cannot be decoded is reported and has none.
    """
    backbone = load_backbone(model)
    index = load_index(data)
    index.check_files(split) if split in index.manifest.splits else index.split(split)
    rows = embed_split(
        backbone,
        backbone.view,
        index.split(split),
        batch_size=batch_size,
        canvas_px=canvas_px,
        num_workers=num_workers,
        device=pick_device(device),
    )
    facts = {
        "backbone_sha256": backbone.config.weights_sha256,
        "backbone": backbone.config.backbone.model_dump(),
        "view": backbone.view.config(),
        **data_facts(index, split),
    }
    save_embeddings(out, rows, facts)
    size = f"{rows.features.shape[0]} x {rows.features.shape[1]}"
    console.print(f"{out}: {size} features of split {split!r}", highlight=False)


def embed_split(
    backbone: torch.nn.Module, view: Any, split: Split, *, title: str = "", **options: Any
) -> Embeddings:
    """`embed` with a progress bar; samples that cannot be decoded are named on stderr."""

    def report(bad: Quarantined) -> None:
        console.print(
            f"left out: {bad.shard}, key {bad.key!r} (id {bad.id}): {bad.reason}",
            style="yellow",
            highlight=False,
            markup=False,
        )

    with progress(title or f"embed {split.name}", len(split)) as advance:
        return embed(backbone, view, split, progress=advance, on_bad=report, **options)


def data_facts(index: DatasetIndex, split: str) -> dict[str, Any]:
    return {"data": index.manifest.name, "data_sha256": index.sha256, "split": split}


def pick_device(name: str) -> str:
    """cpu or cuda. Raises: UserError for cuda where there is none."""
    if name not in ("auto", "cpu", "cuda"):
        raise UserError(f"--device {name} is unknown; use auto, cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise UserError("--device cuda, but torch sees no CUDA device; use auto or cpu")
    return "cuda" if name != "cpu" and torch.cuda.is_available() else "cpu"


def run(application: typer.Typer) -> None:
    """Run a command line; a user's mistake is one line on stderr and exit status 2."""
    try:
        application()
    except UserError as error:
        console.print(f"error: {error}", style="red", highlight=False, markup=False, soft_wrap=True)
        sys.exit(2)


if __name__ == "__main__":
    run(app)
