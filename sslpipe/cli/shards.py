"""`sslpipe shards`: images -> webdataset shards with an index, and a look at them."""

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.table import Table

from sslpipe.cli import building as opt
from sslpipe.cli.building import (
    names_in,
    print_built,
    print_report,
    read_option,
    write_option,
)
from sslpipe.cli.inputs import check_picture, open_data, parse_ids
from sslpipe.cli.next_step import after_a_look
from sslpipe.cli.options import Ids, argument, documented, option
from sslpipe.cli.terminal import new_app, progress
from sslpipe.errors import DataError, one_line
from sslpipe.run.console import SafeConsole

app = new_app(
    help="Convert images to webdataset shards with an index (dataset.json and offsets).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    epilog="Example: sslpipe shards build out/photos --root MY_PHOTOS --test-fraction 0.1",
)

DataSet = Annotated[
    str, argument("The data set's dataset.json or its folder: a path or a URL.", show_default=False)
]


@app.callback()
def _settings() -> None:
    from PIL import Image

    os.environ["OMP_NUM_THREADS"] = "1"  # the workers are the parallelism; before torch comes
    warnings.simplefilter("error", Image.DecompressionBombWarning)  # such an image is a bad one


@documented(
    app, epilog="Example: sslpipe shards build out/photos --root MY_PHOTOS --test-fraction 0.1"
)
def build(
    out: opt.OutFolder,
    source: Annotated[str, read_option()] = "folder",
    root: opt.Root = None,
    split: opt.Split = None,
    name: Annotated[str | None, read_option()] = None,
    csv: opt.Csv = None,
    image_column: Annotated[str, read_option()] = "path",
    label_column: opt.LabelColumn = "label",
    split_column: opt.SplitColumn = None,
    skip_missing: opt.SkipMissing = False,
    labels: opt.Labels = True,
    columns: opt.ColumnSpecs = None,
    name_pattern: opt.NamePattern = None,
    download: Annotated[bool, read_option("", "--download")] = False,
    test_fraction: opt.TestFraction = 0.0,
    split_by: Annotated[str | None, write_option()] = None,
    unseen_classes: opt.UnseenClasses = None,
    group_by: opt.GroupBy = None,
    resize_shorter: Annotated[int | None, write_option(min=1)] = None,
    background: Annotated[str | None, write_option()] = None,
    samples_per_shard: opt.SamplesPerShard = 1000,
    skip_bad: opt.SkipBad = False,
    overwrite: opt.Overwrite = False,
    origin: opt.OriginText = "",
    license: opt.License = "",
    num_workers: opt.Workers = 2,
) -> None:
    """Write shards from images. If it is interrupted, run it again to resume.

    - photos/CLASS/*.jpg:  `sslpipe shards build out/mydata --root photos --test-fraction 0.1`
    - photos/train/CLASS/*.jpg and photos/test/...:  `sslpipe shards build out/mydata --root photos`
    - photos/*.jpg, no labels:  `sslpipe shards build out/mydata --root photos`
    - `... build out/cifar10 --source torchvision --name CIFAR10 --root data --download`
    - `... build out/birds --source csv --csv birds.csv --image-column file --label-column species`
    - `... build out/fashion --source idx --root FOLDER_OF_THE_FILES`
    - `... build out/beans --source parquet --root beans/data --label-column labels`
    - photos/VENDOR/THING.png:  `... build out/icons --root photos --name-pattern
      '(?P<vendor>[^/]+)/(?P<thing>.+)[.]png' --group-by thing --split-by thing --test-fraction 0.1`
    - images of other channels or depths, tiles of scenes:  `sslpipe sensors build --help`

    Args:
        source: folder, csv, parquet, huggingface, torchvision, idx.
        name: The data set's name; for torchvision its class, such as CIFAR10.
        image_column: csv: column of the paths, relative to the file; parquet: of the images.
        download: torchvision: download it.
        split_by: Keep groups of this column, such as patient, in one split.
        resize_shorter: Shrink images to this shorter side in px; JPEGs are saved again at quality
            95, all others as PNG.
        background: Colour under transparent parts, such as white or '#ffffff'. Default:
            transparency is dropped, which often leaves black.
    """
    from sslpipe.sharding.build import build_dataset
    from sslpipe.sharding.gather import parse_columns, parse_pattern
    from sslpipe.sharding.sources import SourceOptions
    from sslpipe.sharding.writer import Layout

    built = build_dataset(
        out,
        source,
        SourceOptions(
            root=root,
            split=split,
            name=name,
            csv=csv,
            image_column=image_column,
            label_column=label_column,
            split_column=split_column,
            labels=labels,
            download=download,
            skip_missing=skip_missing,
            columns=() if columns is None else parse_columns(columns, "--columns"),
            name_pattern=None if name_pattern is None else parse_pattern(name_pattern),
        ),
        Layout(
            seed=0,
            samples_per_shard=samples_per_shard,
            max_shard_bytes=10**9,
            resize_shorter_px=resize_shorter,
            background=_parse_colour(background),
            group_by=group_by,
        ),
        test_fraction=test_fraction,
        split_by=split_by,
        unseen_classes=names_in(unseen_classes),
        skip_bad=skip_bad,
        overwrite=overwrite,
        origin=origin,
        license=license,
        workers=num_workers,
        progress=progress,
    )
    print_built(out, built)


def _parse_colour(text: str | None) -> tuple[int, int, int] | None:
    """Read a colour by its name or hexadecimal digits. Raises DataError."""
    from PIL import ImageColor

    if text is None:
        return None
    try:
        red, green, blue = ImageColor.getrgb(text)[:3]
    except ValueError:
        message = f"--background {text!r} is no colour; for example white, '#ffffff'"
        raise DataError(message) from None
    return red, green, blue


@documented(app, epilog="Example: sslpipe shards index laion --json-fields url,width:integer")
def index(
    folders: Annotated[
        list[Path], argument("The folder of the tars, or several to join.", show_default=False)
    ],
    out: Path | None = None,
    split: str | None = None,
    classes: Path | None = None,
    json_fields: str | None = None,
    name_pattern: str | None = None,
    channels: str | None = None,
    value_range: Annotated[str | None, option("", "--range", metavar="LOW,HIGH")] = None,
    num_workers: opt.Workers = 2,
) -> None:
    """Index existing webdataset tars (img2dataset, open_clip) without rewriting them.

    A sample is all members up to the first dot of their names: KEY.jpg, KEY.png or KEY.webp (with
    --channels KEY.npy), or its one KEY.ANYTHING.jpg, with an optional integer label in KEY.cls and
    columns in KEY.json. Images whose names differ behind that dot only (v1.0.jpg, v1.1.jpg) are
    samples of their own. Other members are left out, and counted. mean and std in dataset.json are
    ImageNet's, those of the channels, or those of the folders that are joined.

    - tars that must not be written beside:  `sslpipe shards index /shared/laion --out out/laion`
    - folders built apart as one data set:  `sslpipe shards index big/1 big/2 big/3 --out big`

    Args:
        out: Folder for dataset.json and the offsets. Default: the tars' own; several folders need
            it.
        split: The split of all tars. Default: by name, as in train-000000.tar.
        classes: Text file: a class name per line, by label.
        json_fields: Columns from keys of KEY.json: sku,shot_at:time or sku=product:text. "" drops
            the columns that dataset.json has, but the paths that a build wrote.
        name_pattern: Columns from named groups of a regular expression of the image's name.
        channels: Names of the channels of images in KEY.npy, (h, w, C); their type is measured.
        value_range: The values that views show as 0 and 1. Default: measured for each channel.
    """
    from sslpipe.sharding.arrays import parse_channels, parse_range
    from sslpipe.sharding.gather import parse_columns, parse_pattern
    from sslpipe.sharding.index import check_columns, gather_tars, index_folder
    from sslpipe.sharding.sources import SourceOptions, class_names

    if out is None and len(folders) > 1:
        raise DataError("several folders become one data set in a folder that --out names")
    target = out or folders[0]
    names = class_names(classes) if classes else ()
    tars, known = gather_tars(target, folders, split, names, with_columns=json_fields is None)
    columns = SourceOptions(
        columns=parse_columns(json_fields, "--json-fields") if json_fields else known,
        name_pattern=None if name_pattern is None else parse_pattern(name_pattern),
    )
    if json_fields != "":
        check_columns(target, tars.groups, columns)
    with progress(f"index {target.name}", sum(map(len, tars.groups.values()))) as advance:
        indexed = index_folder(
            target,
            tars,
            columns=columns,
            workers=num_workers,
            advance=advance,
            channels=parse_channels(channels),
            value_range=parse_range(value_range),
        )
    print_report(target, indexed.manifest, indexed.report)


@app.command(epilog="Example: sslpipe shards verify out/photos")
def verify(folder: DataSet, num_workers: opt.Workers = 2) -> None:
    """Check sizes and sha256, decode every image, and list what is bad; exit status 1 if any is."""
    from sslpipe.sharding.index import verify_columns, verify_shard

    data = open_data(folder)
    faults = []
    splits = data.manifest.splits
    jobs = [(key, k) for key, shards in splits.items() for k in range(len(shards))]
    total = sum(splits[key][k].samples for key, k in jobs)
    title = f"verify {Path(folder).name}"
    with progress(title, total) as advance, ThreadPoolExecutor(num_workers) as pool:
        results = pool.map(lambda job: verify_shard(data, *job), jobs)
        for (key, k), found in zip(jobs, results, strict=True):
            faults += found
            advance(splits[key][k].samples)
    faults += [fault for key in splits for fault in verify_columns(data, key)]
    for fault in faults:
        where = f"{fault.shard} {fault.key}" if fault.key else fault.shard
        print(one_line(f"{where}: {fault.reason}"))
    if faults:
        plural = "s" * (len(faults) != 1)
        print(f"{len(faults)} fault{plural} in {total:,} samples", file=sys.stderr)
        raise typer.Exit(1)
    print(f"{folder}: {total} samples in {len(jobs)} shards are good")
    after_a_look(folder)


@documented(app, epilog="Example: sslpipe shards show out/photos --split test --out samples.png")
def show(
    folder: DataSet,
    split: str = "train",
    out: Path = Path("samples.png"),
    ids: Ids = None,
    all_channels: Annotated[bool, option("", "--all-channels")] = False,
) -> None:
    """Draw some samples with their classes, sizes, ids and paths; with --ids, also print them.

    - `sslpipe shards show out/mydata --split test --out test.png`
    - `sslpipe shards show out/mydata --ids 469,523`

    Args:
        split: The split to show.
        out: The PNG to write.
        all_channels: Each sample as a strip of its channels in grey.
    """
    wanted = parse_ids(ids)
    data = open_data(folder)
    check_picture(out)

    from sslpipe.sharding import show

    sheet = show.sample_sheet(data, split, ids=wanted, all_channels=all_channels)
    show.save_sheet(sheet, out)
    chosen = show.choose_ids(data.split(split), wanted)
    for line in show.sample_lines(data, split, chosen.tolist()):
        if wanted or not show.is_drawable(line):  # in other letters than the picture's font has
            print(line)
    for name, text in show.channel_rows(data, split, chosen):
        print(one_line(f"{name}: {text}"))
    print(out)
    if not wanted:  # else who asks for some samples is in the middle of something else
        after_a_look(folder)


@app.command(epilog="Example: sslpipe shards stats out/photos")
def stats(folder: DataSet) -> None:
    """Print counts, classes, bytes, image sizes and columns of each split, without decoding."""
    data = open_data(folder)

    from sslpipe.sharding.show import column_rows, split_rows

    for name in data.manifest.splits:
        title = one_line(f"{data.manifest.name}, {name}")
        table = Table(title=escape(title), show_header=False, box=None)
        for row in [*split_rows(data, name), *column_rows(data, name)]:
            table.add_row(*(escape(one_line(cell)) for cell in row))
        SafeConsole().print(table)
    after_a_look(folder)
