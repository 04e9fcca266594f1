"""`sslpipe shards`: images -> webdataset shards with an index, and a look at them."""

import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from sslpipe.cli.building import (
    OutFolder,
    ReadOptions,
    ValueRange,
    Workers,
    WriteOptions,
    build_shards,
    prepare_workers,
    print_report,
)
from sslpipe.cli.inputs import check_picture, open_data, parse_ids
from sslpipe.cli.next_step import after_a_look
from sslpipe.cli.options import Ids, argument, command, option
from sslpipe.cli.terminal import new_app, progress
from sslpipe.errors import counted, one_line
from sslpipe.run.console import SafeConsole

app = new_app(
    help="Convert images to webdataset shards with an index (dataset.json and offsets).",
    no_args_is_help=True,
    examples=["sslpipe shards build out/photos --root MY_PHOTOS --test-fraction 0.1"],
)

DataSet = Annotated[
    str, argument("The data set's dataset.json or its folder: a path or a URL.", show_default=False)
]

app.callback()(prepare_workers)


@command(
    app,
    examples=[
        "sslpipe shards build out/photos --root photos --test-fraction 0.1  # photos/CLASS/*.jpg",
        "sslpipe shards build out/photos --root photos  # photos/train/CLASS/*.jpg, photos/test/",
        "sslpipe shards build out/photos --root photos  # photos/*.jpg: no labels",
        "sslpipe shards build out/cifar10 --source torchvision --name CIFAR10 --root data "
        "--download",
        "sslpipe shards build out/birds --source csv --csv birds.csv --image-column file "
        "--label-column species",
        "sslpipe shards build out/fashion --source idx --root FOLDER_OF_THE_FILES",
        "sslpipe shards build out/beans --source parquet --root beans/data --label-column labels",
        "sslpipe shards build out/icons --root photos --name-pattern "
        "'(?P<vendor>[^/]+)/(?P<thing>.+)[.]png' --group-by thing --split-by thing "
        "--test-fraction 0.1  # photos/VENDOR/THING.png",
    ],
)
def build(
    out: OutFolder,
    source: Annotated[
        str, option("folder, csv, parquet, huggingface, tars, torchvision, idx.")
    ] = "folder",
    *,
    reading: ReadOptions,
    name: Annotated[
        str | None, option("The data set's name; for torchvision its class, such as CIFAR10.")
    ] = None,
    download: Annotated[bool, option("torchvision: download it.", "--download")] = False,
    resize_px: Annotated[
        int | None,
        option(
            "Shrink images to this shorter side in px; JPEGs are saved again at quality 95, all "
            "others as PNG.",
            min=1,
        ),
    ] = None,
    background: Annotated[
        str | None,
        option(
            "Colour under transparent parts, such as white or '#ffffff'. Default: transparency is "
            "dropped, which often leaves black."
        ),
    ] = None,
    writing: WriteOptions,
) -> None:
    """Write shards from images. If it is interrupted, run it again to resume.

    Images of other channels or depths than 8-bit RGB, and tiles of scenes: `sslpipe sensors build`.
    """
    build_shards(
        out,
        source,
        reading,
        writing,
        name=name,
        download=download,
        resize_px=resize_px,
        background=background,
    )


@command(
    app,
    examples=[
        "sslpipe shards index laion --columns url,width:integer",
        "sslpipe shards index /shared/laion --out out/laion  # not to be written beside the tars",
        "sslpipe shards index big/1 big/2 big/3 --out big  # folders built apart as one data set",
    ],
)
def index(
    folders: Annotated[list[Path], argument("The folder of the tars, or several to join.")],
    out: Annotated[
        Path | None,
        option(
            "Folder for dataset.json and the offsets. Default: the tars' own; several folders need "
            "it."
        ),
    ] = None,
    split: Annotated[
        str | None, option("The split of all tars. Default: by name, as in train-000000.tar.")
    ] = None,
    classes: Annotated[Path | None, option("Text file: a class name per line, by label.")] = None,
    columns: Annotated[
        str | None,
        option(
            "Columns from keys of KEY.json: sku,shot_at:time or sku=product:text. '' drops the "
            "columns that dataset.json has, but the paths that a build wrote."
        ),
    ] = None,
    name_pattern: Annotated[
        str | None, option("Columns from named groups of a regular expression of the image's name.")
    ] = None,
    channels: Annotated[
        str | None,
        option("Names of the channels of images in KEY.npy, (h, w, C); their type is measured."),
    ] = None,
    value_range: ValueRange = None,
    num_workers: Workers = 2,
) -> None:
    """Index existing webdataset tars, as of img2dataset and open_clip.

    A sample is all members up to the first dot of their names: KEY.jpg, KEY.png or KEY.webp (with
    --channels KEY.npy), or its one KEY.ANYTHING.jpg, with an optional integer label in KEY.cls and
    columns in KEY.json. Images whose names differ behind that dot only (v1.0.jpg, v1.1.jpg;
    7.front.jpg, 7.back.jpg) are samples of their own, to each of which KEY.cls and KEY.json belong.
    Other members are skipped, and counted. mean and std in dataset.json are
    ImageNet's, those of the channels, or those of the folders that are joined.
    """
    from sslpipe.sharding.arrays import parse_range
    from sslpipe.sharding.index_tars import index_tars

    indexed = index_tars(
        folders,
        out,
        split=split,
        classes=classes,
        columns=columns,
        name_pattern=name_pattern,
        channels=channels,
        range=parse_range(value_range),
        num_workers=num_workers,
        progress=progress,
    )
    print_report(out or folders[0], indexed.manifest, indexed.report)


@command(
    app,
    examples=["sslpipe shards verify out/photos"],
)
def verify(
    folder: DataSet,
    num_workers: Workers = 2,
) -> None:
    """Check sizes and sha256, decode every image, list what is bad.

    The exit status is 1 where something is.
    """
    from sslpipe.sharding.dataset import verify_dataset

    data = open_data(folder)
    shards = [shard for each in data.manifest.splits.values() for shard in each]
    total = sum(shard.samples for shard in shards)
    faults = verify_dataset(data, num_workers=num_workers, progress=progress)
    for fault in faults:
        where = f"{fault.shard} {fault.key}" if fault.key else fault.shard
        print(one_line(f"{where}: {fault.reason}"))
    if faults:
        print(f"{counted(len(faults), 'fault')} in {counted(total, 'sample')}", file=sys.stderr)
        raise typer.Exit(1)
    print(
        f"{folder}: nothing is wrong in {counted(total, 'sample')}, {counted(len(shards), 'shard')}"
    )
    after_a_look(folder)


@command(
    app,
    examples=["sslpipe shards show out/photos --split test --out samples.png"],
)
def show(
    folder: DataSet,
    split: Annotated[str, option("The split to show.")] = "train",
    out: Annotated[Path, option("The PNG to write.")] = Path("samples.png"),
    ids: Ids = None,
    all_channels: Annotated[
        bool, option("Each sample as a strip of its channels in grey.", "--all-channels")
    ] = False,
) -> None:
    """Draw some samples with their classes, sizes, ids and paths.

    With --ids they are also printed.
    """
    wanted = parse_ids(ids)
    data = open_data(folder)
    check_picture(out)

    from sslpipe.data.lettering import is_drawable
    from sslpipe.sharding import show
    from sslpipe.sharding.stats import channel_rows

    sheet = show.sample_sheet(data, split, ids=wanted, all_channels=all_channels)
    show.save_sheet(sheet, out)
    chosen = show.choose_ids(data.split(split), wanted)
    for line in show.sample_lines(data, split, chosen.tolist()):
        # in other letters than the picture's font has
        if wanted or not is_drawable(line, show.LETTERS_PX):
            print(line)
    for name, text in channel_rows(data, split, chosen):
        print(one_line(f"{name}: {text}"))
    print(out)
    if not wanted:  # else who asks for some samples is in the middle of something else
        after_a_look(folder)


@command(
    app,
    examples=["sslpipe shards stats out/photos"],
)
def stats(
    folder: DataSet,
) -> None:
    """Print counts, classes, image sizes and columns of each split."""
    data = open_data(folder)

    from sslpipe.sharding.dataset import describe_dataset

    for name, rows in describe_dataset(data).items():
        title = one_line(f"{data.manifest.name}, {name}")
        table = Table(title=escape(title), show_header=False, box=None)
        table.add_column(no_wrap=True)
        table.add_column(overflow="fold")  # a long name is not cut
        for row in rows.items():
            table.add_row(*(escape(one_line(cell)) for cell in row))
        SafeConsole().print(table)
    after_a_look(folder)
