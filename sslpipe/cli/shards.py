"""`sslpipe shards`: images -> webdataset shards with an index, and a look at them."""

import os
import sys
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer
from rich.markup import escape
from rich.table import Table

from sslpipe.cli.inputs import check_picture, open_data, parse_ids
from sslpipe.cli.next_step import after_a_look, say_next
from sslpipe.cli.options import Ids, argument, documented, option
from sslpipe.cli.terminal import new_app, progress
from sslpipe.errors import DataError, one_line
from sslpipe.run.console import SafeConsole

if TYPE_CHECKING:
    from sslpipe.data.index import Manifest
    from sslpipe.sharding.build import Built
    from sslpipe.sharding.report import Report

app = new_app(
    help="Convert images to webdataset shards with an index (dataset.json and offsets).",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    epilog="Example: sslpipe shards build out/photos --root MY_PHOTOS --test-fraction 0.1",
)

OutFolder = Annotated[Path, argument("The data set's folder.", show_default=False)]
DataSet = Annotated[
    str, argument("The data set's dataset.json or its folder: a path or a URL.", show_default=False)
]
Workers = Annotated[int, option("Threads; the files do not depend on them.", min=1)]

# of `build`
_read = partial(option, "", rich_help_panel="What to read")
_write = partial(option, "", rich_help_panel="How to write")


@app.callback()
def _settings() -> None:
    from PIL import Image

    os.environ["OMP_NUM_THREADS"] = "1"  # the workers are the parallelism; before torch comes
    warnings.simplefilter("error", Image.DecompressionBombWarning)  # such an image is a bad one


@documented(
    app, epilog="Example: sslpipe shards build out/photos --root MY_PHOTOS --test-fraction 0.1"
)
def build(
    out: OutFolder,
    source: Annotated[str, _read()] = "folder",
    root: Annotated[Path | None, _read()] = None,
    split: Annotated[str | None, _read()] = None,
    name: Annotated[str | None, _read()] = None,
    csv: Annotated[Path | None, _read()] = None,
    image_column: Annotated[str, _read()] = "path",
    label_column: Annotated[str, _read()] = "label",
    split_column: Annotated[str | None, _read()] = None,
    skip_missing: Annotated[bool, _read("--skip-missing")] = False,
    labels: Annotated[bool, _read()] = True,
    columns: Annotated[str | None, _read()] = None,
    name_pattern: Annotated[str | None, _read()] = None,
    download: Annotated[bool, _read("--download")] = False,
    channels: Annotated[str | None, _read()] = None,
    pages: Annotated[Literal["channels", "samples"] | None, _read()] = None,
    slice_axis: Annotated[int, _read(min=0, max=2)] = 2,
    nan: Annotated[float | None, _read()] = None,
    value_range: Annotated[str | None, _read("--range", metavar="LOW,HIGH")] = None,
    test_fraction: Annotated[float, _write(min=0, max=0.9)] = 0.0,
    split_by: Annotated[str | None, _write()] = None,
    unseen_classes: Annotated[str | None, _write()] = None,
    group_by: Annotated[str | None, _write()] = None,
    tile: Annotated[int | None, _write(min=8)] = None,
    stride: Annotated[int | None, _write(min=1)] = None,
    min_content: Annotated[float, _write(min=0, max=1)] = 0.0,
    resize_shorter: Annotated[int | None, _write(min=1)] = None,
    background: Annotated[str | None, _write()] = None,
    samples_per_shard: Annotated[int, _write(min=1)] = 1000,
    skip_bad: Annotated[bool, _write("--skip-bad")] = False,
    overwrite: Annotated[bool, _write("--overwrite")] = False,
    origin: Annotated[str, _write()] = "",
    license: Annotated[str, _write()] = "",
    num_workers: Workers = 2,
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
    - scans/*.tif of 16 bits and five bands:  `... build out/scans --root scans --channels
      blue,green,red,edge,nir --tile 512 --stride 384 --min-content 0.1`; see docs/sensors.md

    Args:
        source: folder, csv, parquet, huggingface, torchvision, idx.
        root: Folder of the images or files.
        split: Read only this split; its name where the source has none.
        name: The data set's name; for torchvision its class, such as CIFAR10.
        csv: csv: the file, one row per image.
        image_column: csv: column of the paths, relative to the file; parquet: of the images.
        label_column: csv, parquet: column of the classes.
        split_column: csv: column of the splits' names.
        skip_missing: Skip files of a table that do not exist, and links or pointers of git-annex,
            DVC and git-lfs without content; list them.
        labels: Take folder names or --label-column as classes.
        columns: Columns of metadata: patient,age:integer,shot_at:time; NAME=THEIRS:KIND renames.
            Kinds: text, integer, float, time. Default: inferred.
        name_pattern: Columns from named groups of a file-name pattern, `'(?P<theme>[^/]+)/.*'`
        download: torchvision: download it.
        channels: Names of the images' channels, such as dapi,gfp: store all of them, in all their
            bits. Reads TIFF, 16-bit PNG, .npy, .npz, DICOM and NIfTI, too. Default: 8-bit RGB.
        pages: What the pages of a file are: channels of one image, or samples.
        slice_axis: NIfTI: the axis along which slices are samples.
        nan: Replace NaN and infinite values by this one. Default: such an image is bad.
        value_range: The values that views show as 0 and 1. Default: measured for each channel.
        test_fraction: Share of each class to move from train to test.
        split_by: Keep groups of this column, such as patient, in one split. Default for tiles and
            pages: parent, their file.
        unseen_classes: Classes, separated by commas, to put in splits of their own, such as
            test_unseen beside test.
        group_by: Store groups of this column side by side, to read partners together.
        tile: Cut images into tiles of this side in px; columns parent, x and y say where they lie.
        stride: Pixels from tile to tile. Default: --tile.
        min_content: Skip tiles of which a smaller share shows something; see docs/sensors.md.
        resize_shorter: Shrink images to this shorter side in px; JPEGs are saved again at quality
            95, all others as PNG.
        background: Colour under transparent parts, such as white or '#ffffff'. Default:
            transparency is dropped, which often leaves black.
        samples_per_shard: Most samples per shard.
        skip_bad: Skip bad images, and list them.
        overwrite: Replace existing splits.
        origin: Where the images come from, for the record.
        license: The images' license, for the record.
    """
    from sslpipe.sharding.build import build_dataset
    from sslpipe.sharding.gather import parse_columns, parse_pattern
    from sslpipe.sharding.scenes import parse_range, parse_sensors
    from sslpipe.sharding.sources import SourceOptions
    from sslpipe.sharding.writer import Layout

    unseen = [] if unseen_classes is None else [name.strip() for name in unseen_classes.split(",")]
    sensors = parse_sensors(channels, pages, slice_axis, nan, tile, stride, min_content)
    if value_range is not None and channels is None:
        raise DataError("--range needs --channels: 8-bit RGB is 0 to 255")
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
            is_sensors=sensors is not None and sensors.channels is not None,
        ),
        Layout(
            seed=0,
            samples_per_shard=samples_per_shard,
            max_shard_bytes=10**9,
            resize_shorter_px=resize_shorter,
            background=_parse_colour(background),
            group_by=group_by,
            sensors=sensors,
        ),
        test_fraction=test_fraction,
        split_by=split_by,
        unseen_classes=unseen,
        skip_bad=skip_bad,
        overwrite=overwrite,
        origin=origin,
        license=license,
        workers=num_workers,
        progress=progress,
        value_range=parse_range(value_range),
    )
    _print_built(out, built)


def _print_built(out: Path, built: "Built") -> None:
    from sslpipe.sharding.build import MISSING

    for line in built.skipped:
        print(one_line(f"skipped: {line}"), file=sys.stderr)
    for line in built.notes:
        print(one_line(line))
    if built.missing:
        count = sum(map(len, built.missing.values()))
        print(f"skipped: {count:,} missing files, listed in {out / MISSING}", file=sys.stderr)
    if built.report is not None:
        _print_report(out, built.manifest, built.report)


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
    num_workers: Workers = 2,
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
        value_range: As in `build`.
    """
    from sslpipe.sharding.gather import parse_columns, parse_pattern
    from sslpipe.sharding.index import check_columns, gather_tars, index_folder
    from sslpipe.sharding.scenes import parse_channels, parse_range
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
    _print_report(target, indexed.manifest, indexed.report)


@app.command(epilog="Example: sslpipe shards verify out/photos")
def verify(folder: DataSet, num_workers: Workers = 2) -> None:
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


def _print_report(folder: Path, manifest: "Manifest", report: "Report") -> None:
    """Say what became of the images, what was left out, and what looks like a slip."""
    from sslpipe.sharding.report import FILE

    for line in report.lines():
        print(line)
    classes = len(manifest.classes) or "no"
    print(f"{folder / 'dataset.json'}: {classes} classes; this report: {folder / FILE}")
    names = [*manifest.splits]
    split = [] if "train" in names else ["--split", names[0]]
    say_next("shards", "show", folder, *split, "--out", "samples.png")
