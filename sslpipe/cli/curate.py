"""`sslpipe curate`: what is in a data set, before it is trained on."""

import signal
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from sslpipe.cli.curate_features import clusters, export, outliers, select, write_results
from sslpipe.cli.inputs import check_features, check_folder, check_model, open_split
from sslpipe.cli.next_step import after_a_look
from sslpipe.cli.progress import progress
from sslpipe.cli.terminal import report_bad, say_once
from sslpipe.data.index import DatasetIndex, Split, load_index
from sslpipe.errors import UserError
from sslpipe.portable import replacing

if TYPE_CHECKING:
    from torch import Tensor

    from sslpipe.curate.scan import Samples
    from sslpipe.evaluation.embed import Embeddings

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Look into a data set: which images are one picture, which resemble no other, which kinds "
    "there are, and which are worth a label first.",
    epilog="Examples: sslpipe curate duplicates out/photos --out out/duplicates --split train | "
    "sslpipe curate select train.safetensors --data out/photos --count 100 --out out/chosen",
)
app.command(
    epilog="Example: sslpipe curate outliers train.safetensors --data out/photos --out out/outliers"
)(outliers)
app.command(
    epilog="Example: sslpipe curate clusters train.safetensors --data out/photos --out out/clusters"
)(clusters)
app.command(
    epilog="Examples: sslpipe curate select train.safetensors --data out/photos --count 100 "
    "--images --out out/chosen | sslpipe curate select train.safetensors --data out/photos "
    "--count 100 --how hard --labels out/chosen/chosen.csv --out out/next"
)(select)
app.command(
    epilog="Example: sslpipe curate export train.safetensors --data out/photos --to fiftyone "
    "--table out/outliers/outliers.csv --table out/chosen/chosen.csv --out out/fiftyone"
)(export)


@app.callback()
def _group(context: typer.Context) -> None:
    """Let SIGTERM end every subcommand as Ctrl-C does: no file is left half-written."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise SystemExit(128 + number)  # the shell's status of a signal

    before = signal.signal(signal.SIGTERM, stop)
    context.call_on_close(lambda: signal.signal(signal.SIGTERM, before))


@app.command(
    epilog="Example: sslpipe curate duplicates out/photos/dataset.json --out out/duplicates"
)
def duplicates(
    data: Annotated[str, typer.Argument(help="The data set's dataset.json or its folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write groups.csv and so on into.")],
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; repeatable, else all of them.")
    ] = None,
    features: Annotated[
        list[Path] | None,
        typer.Option(help="Search by features, too: files of `sslpipe embed`, one a split."),
    ] = None,
    init: Annotated[
        str | None, typer.Option(help="Search by these weights, too: what `sslpipe embed` takes.")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Search by a run's backbone, too.")] = None,
    column: Annotated[
        bool, typer.Option(help="Write the column duplicate_group beside the data set.")
    ] = True,
    num_workers: Annotated[int, typer.Option(min=0, help="Threads that decode and compare.")] = 2,
    device: Annotated[str, typer.Option(help="Of --init and --run: auto, cpu, cuda or mps.")] = (
        "auto"
    ),
) -> None:
    """Find the images that are one picture, inside a split and across splits.

    Finds exact copies, and those that were saved again, resized, cropped to 90 % or mirrored.
    Candidates come from their lowest frequencies, and from features if these are given; their
    pixels decide. Writes groups.csv and groups.parquet (a row a sample of a group), doubt.png (look
    at it first) and the column duplicate_group, by which training keeps one of each group, or uses
    none as another's negative. The shards do not change, and existing features and runs stay valid.
    """
    check_folder(out)
    names = split or list(load_index(data).manifest.splits)
    if not names:
        raise UserError(f"{data} has no split; build one with `sslpipe shards build`")
    if len({*names}) < len(names):
        raise UserError(f"--split {' '.join(names)} names a split twice; name each once")
    for name in names:
        index = open_split(data, name)
    if sum(map(bool, (features, init, run))) > 1:
        raise UserError("--features, --init and --run each say what to search by; give one of them")
    check_model(run if init is None else init)
    check_features(features or [])

    from sslpipe.curate.duplicates import find_duplicates
    from sslpipe.curate.groups import group
    from sslpipe.curate.results import (
        COLUMN,
        FIELDS,
        check_place,
        group_rows,
        shared_sentences,
        write_column,
    )
    from sslpipe.curate.scan import scan
    from sslpipe.curate.sheet import doubt_sheet
    from sslpipe.run.allocator import keep_freed_memory

    if column:
        check_place(index)
    # read, compare, group
    splits = [index.split(name) for name in names]
    rows = None
    if features or init or run:
        rows = _features(index, splits, features or [], init or run, device, num_workers)
    if rows is None:  # else memory is what features take
        keep_freed_memory()
    with progress("read", sum(map(len, splits))) as advance:
        samples = scan(splits, num_workers=num_workers, on_bad=report_bad, progress=advance)
    with closing(samples.thumbs):
        vectors = None if rows is None else _of_samples(rows, samples)
        found = find_duplicates(samples, vectors, num_workers=num_workers, progress=progress)
        sheet = doubt_sheet(samples, found.doubt)
    groups = group(found.pairs, len(samples), found.apart)
    # write
    table = group_rows(samples, groups)
    write_results(out / "groups", table, FIELDS)
    if sheet is None:
        (out / "doubt.png").unlink(missing_ok=True)  # of other pairs
    else:
        with replacing(out / "doubt.png") as temporary:
            sheet.save(temporary, "PNG")
    if column:
        write_column(index.folder, samples, groups)
        had = COLUMN in index.manifest.columns
        if had and load_index(data).file_sha256 != index.file_sha256:
            say_once(
                f"the column {COLUMN} has other values than before: runs that train by it were "
                "begun with those, and are not resumed with these"
            )
    summary = f"{len(groups.sizes())} groups of {len(table)} of {len(samples)} samples in {out}"
    for text in (*shared_sentences(samples, groups), summary):
        Console().print(text, highlight=False, markup=False, soft_wrap=True)
    after_a_look(data, *(["data.keep=duplicate_group first"] if column else []))


def _features(
    index: DatasetIndex,
    splits: Sequence[Split],
    files: Sequence[Path],
    model: str | Path | None,
    device: str,
    num_workers: int,
) -> "list[Embeddings]":
    """Return a row of features a sample of each split, from files or by a backbone."""
    from sslpipe.evaluation.embed import check_comparable, embed, load_embeddings
    from sslpipe.evaluation.features import split_of_file

    if model is None:
        found, first = {}, None
        for path in files:
            rows, facts = load_embeddings(path)
            name = split_of_file(index.folder, path, rows, facts).name
            check_comparable(first or facts, facts)
            first = first or facts
            in_order = bool((rows.ids[1:] > rows.ids[:-1]).all())
            found[name] = rows if in_order else rows.rows(rows.ids.argsort())
        missing = [split.name for split in splits if split.name not in found]
        if missing or len(found) < len(files) or len(files) > len(splits):
            raise UserError(
                f"--features names {len(files)} files, of split {' and '.join(found)}; give one "
                f"for each of {' and '.join(split.name for split in splits)}"
            )
        return [found[split.name] for split in splits]

    from sslpipe.cli.processes import start_alone
    from sslpipe.export.load import load_backbone

    target = start_alone("curate", device)
    backbone = load_backbone(model).to(target)
    every = []
    for split in splits:
        with progress(f"embed {split.name}", len(split)) as advance:
            rows = embed(
                backbone.backbone,
                backbone.view,
                split,
                canvas_px=backbone.view.canvas_px,
                num_workers=num_workers,
                device=target,
                progress=advance,
                on_bad=lambda bad: None,  # reported where pixels are read
                network=backbone.name,
            )
        every.append(rows)
    return every


def _of_samples(rows: "list[Embeddings]", samples: "Samples") -> "Tensor":
    """Return the features of each sample, in their order.

    Args:
        rows: Of each split; emptied, so that features are held once.
        samples: All that could be read.

    Raises:
        UserError: One of them has no features.
    """
    import torch

    features, first = torch.empty(len(samples), rows[0].features.shape[1]), 0
    for number, name in enumerate(samples.splits):
        own, ids = rows.pop(0), torch.from_numpy(samples.ids[samples.split == number])
        places = torch.searchsorted(own.ids, ids).clamp_(max=len(own.ids) - 1)
        if not torch.equal(own.ids[places], ids):
            raise UserError(
                f"the features of split {name!r} lack samples that can be read; embed it again"
            )
        torch.index_select(own.features, 0, places, out=features[first : first + len(ids)])
        first += len(ids)
    return features
