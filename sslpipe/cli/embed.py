"""`sslpipe embed`: a backbone and a split of shards -> features, one row a sample, in a file."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Annotated

from sslpipe.cli.inputs import FEATURE_SUFFIXES, check_file, check_model, open_data
from sslpipe.cli.next_step import after_embed, say_next
from sslpipe.cli.options import (
    SOURCES,
    Checkpoint,
    Data,
    Embedding,
    argument,
    command,
    option,
)
from sslpipe.cli.terminal import load_model, new_app, progress, report_bad, say
from sslpipe.errors import UserError

app = new_app()


@command(
    app,
    examples=[
        "sslpipe embed out/backbone --data out/photos/dataset.json --out test.safetensors",
        "accelerate launch --multi_gpu --num_processes 2 -m sslpipe embed out/backbone --data "
        "out/photos/dataset.json --out test.safetensors  # two processes, the same file",
    ],
)
def embed(
    model: Annotated[Path, argument(f"A run directory, {SOURCES}.")],
    data: Data,
    out: Annotated[
        Path,
        option(
            "The file to write: .safetensors, or .npz for numpy; {split} stands for the split's "
            "name."
        ),
    ],
    split: Annotated[
        list[str],
        option("The split to embed; repeatable, with {split} in --out.", metavar="SPLIT"),
    ] = ["test"],  # noqa: B006 (typer copies it)
    *,
    embedding: Embedding,
    checkpoint: Checkpoint = None,
) -> None:
    """Write the features, labels and ids of every sample of a split, or of several.

    One row per sample, in id order; samples that cannot be decoded are reported and skipped. To
    resume an interrupted pass, run the same command, with any number of processes. Features are
    flattened where the export says so (`sslpipe whiten`).
    """
    check_model(model)
    files = _files(out, split)
    for file in files.values():
        check_file(file, FEATURE_SUFFIXES)
    index = open_data(data, files)

    from sslpipe.cli.inputs import start
    from sslpipe.distributed import end_processes
    from sslpipe.evaluation.embed import EmbedOptions
    from sslpipe.evaluation.embed_file import embed_to_file

    target, process = start(embedding.device)
    backbone = load_model(model, checkpoint).to(target)
    backbone, splits = backbone.matched(*map(index.split, files))
    options = EmbedOptions(
        device=target,
        process=process,
        batch_size=embedding.batch_size,
        num_workers=embedding.num_workers,
        on_bad=report_bad,
    )
    for (name, file), rows in zip(files.items(), splits, strict=True):
        title = f"embed {name}" + (f", process {process.rank}" if process.world_size > 1 else "")
        embed_to_file(
            out=file,
            backbone=backbone.backbone,
            view=backbone.view,
            split=rows,
            facts=backbone.features_metadata(rows),
            options=options,
            network=f"{backbone.name} of {model}",
            whitening=backbone.whitening,
            bar=partial(progress, title),
        )
        if process.rank == 0:
            say(f"{file}: features of split {name!r}")
    if process.rank == 0:
        if out.parent == Path(model) / "features":  # where a report finds them
            say_next(["report", model, "--data", data])
        else:
            after_embed(files, model, data, index)
    end_processes()


def _files(out: Path, splits: Sequence[str]) -> dict[str, Path]:
    """Return each split's file: --out with the split's name for {split}."""
    if out.suffix not in ("", *FEATURE_SUFFIXES) and not out.is_dir():  # which is reported
        raise UserError(f"--out {out}: features are written to {' or '.join(FEATURE_SUFFIXES)}")
    files = {split: Path(str(out).replace("{split}", split)) for split in splits}
    if len({*files.values()}) < len(splits):
        raise UserError(
            f"--out {out} is one file for {len(splits)} splits; put {{split}} into it, as in "
            "--out features/{split}.safetensors, and name each split once"
        )
    return files
