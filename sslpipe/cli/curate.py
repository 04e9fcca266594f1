"""`sslpipe curate`: what is in a data set, before it is trained on."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from sslpipe.cli.curate_features import clusters, export, outliers, select
from sslpipe.cli.inputs import open_split
from sslpipe.cli.progress import progress
from sslpipe.cli.terminal import console, report_bad
from sslpipe.data.index import load_index
from sslpipe.errors import UserError

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
def _group() -> None:
    """A command line of subcommands, also with a single one."""


@app.command(
    epilog="Example: sslpipe curate duplicates out/photos/dataset.json --out out/duplicates"
)
def duplicates(
    data: Annotated[str, typer.Argument(help="The data set's dataset.json or its folder.")],
    out: Annotated[Path, typer.Option(help="The folder to write groups.csv and so on into.")],
    split: Annotated[
        list[str] | None, typer.Option(help="Only this split; repeatable, else all of them.")
    ] = None,
    column: Annotated[
        bool, typer.Option(help="Write the column duplicate_group beside the data set.")
    ] = True,
    num_workers: Annotated[int, typer.Option(min=0, help="Threads that decode.")] = 2,
) -> None:
    """Find the images that are one picture, inside a split and across splits.

    Writes groups.csv and groups.parquet, one row a sample of a group, and the column
    duplicate_group, by which training keeps one of each group, or none as another's negative. The
    column changes the sha256 of dataset.json; the shards stay as they are.
    """
    names = split or list(load_index(data).manifest.splits)
    if len({*names}) < len(names):
        raise UserError(f"--split {' '.join(names)} names a split twice; name each once")
    for name in names:
        index = open_split(data, name)

    from sslpipe.curate.duplicates import exact_duplicates
    from sslpipe.curate.groups import group
    from sslpipe.curate.results import group_rows, write_column, write_csv, write_parquet
    from sslpipe.curate.scan import scan

    splits = [index.split(name) for name in names]
    with progress("read", sum(map(len, splits))) as advance:
        samples = scan(splits, num_workers=num_workers, on_bad=report_bad, progress=advance)
    groups = group(exact_duplicates(samples), len(samples))
    rows = group_rows(samples, groups)
    out.mkdir(parents=True, exist_ok=True)
    write_csv(out / "groups.csv", rows)
    if not write_parquet(out / "groups.parquet", rows):
        text = "groups.parquet needs pyarrow and is not written: pip install 'sslpipe[parquet]'"
        console.print(text, highlight=False, markup=False)
    if column:
        write_column(index.folder, samples, groups)
    summary = f"{len(groups.sizes())} groups of {len(rows)} of {len(samples)} samples in {out}"
    Console().print(summary, highlight=False, markup=False)
