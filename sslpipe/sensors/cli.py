"""`sslpipe sensors`: files of sensors and large scenes -> shards."""

import os
import warnings
from functools import partial
from typing import Annotated, Literal

from sslpipe.cli import building as opt
from sslpipe.cli.building import names_in, print_built, read_option, write_option
from sslpipe.cli.options import documented
from sslpipe.cli.terminal import new_app, progress
from sslpipe.errors import DataError

app = new_app(
    help="Convert TIFF, DICOM, NIfTI, arrays and large scenes to shards.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
    epilog="Example: sslpipe sensors build out/cells --root cells --channels dapi,gfp",
)


@app.callback()
def _settings() -> None:
    from PIL import Image

    os.environ["OMP_NUM_THREADS"] = "1"  # the workers are the parallelism; before torch comes
    warnings.simplefilter("error", Image.DecompressionBombWarning)  # such an image is a bad one


@documented(
    app,
    epilog="Example: sslpipe sensors build out/cells --root cells --channels dapi,gfp "
    "--test-fraction 0.1",
)
def build(
    out: opt.OutFolder,
    source: Annotated[str, read_option()] = "folder",
    root: opt.Root = None,
    split: opt.Split = None,
    csv: opt.Csv = None,
    image_column: Annotated[str, read_option()] = "path",
    label_column: opt.LabelColumn = "label",
    split_column: opt.SplitColumn = None,
    skip_missing: opt.SkipMissing = False,
    labels: opt.Labels = True,
    columns: opt.ColumnSpecs = None,
    name_pattern: opt.NamePattern = None,
    channels: Annotated[str | None, read_option()] = None,
    pages: Annotated[Literal["channels", "samples"] | None, read_option()] = None,
    slice_axis: Annotated[int, read_option(min=0, max=2)] = 2,
    nan: Annotated[float | None, read_option()] = None,
    value_range: Annotated[str | None, read_option("", "--range", metavar="LOW,HIGH")] = None,
    test_fraction: opt.TestFraction = 0.0,
    split_by: Annotated[str | None, write_option()] = None,
    unseen_classes: opt.UnseenClasses = None,
    group_by: opt.GroupBy = None,
    tile: Annotated[int | None, write_option(min=8)] = None,
    stride: Annotated[int | None, write_option(min=1)] = None,
    min_content: Annotated[float, write_option(min=0, max=1)] = 0.0,
    samples_per_shard: opt.SamplesPerShard = 1000,
    skip_bad: opt.SkipBad = False,
    overwrite: opt.Overwrite = False,
    origin: opt.OriginText = "",
    license: opt.License = "",
    num_workers: opt.Workers = 2,
) -> None:
    """Write shards of images that are not 8-bit RGB, or of tiles of scenes.

    Reads TIFF, 16-bit PNG, .npy, .npz, DICOM and NIfTI, and pictures. If it is interrupted, run it
    again to resume.

    - cells/CLASS/*.tif of 16 bits:  `sslpipe sensors build out/cells --root cells --channels
      dapi,gfp`
    - scans/*.tif of five bands:  `... build out/scans --root scans --channels
      blue,green,red,edge,nir --tile 512 --stride 384 --min-content 0.1`
    - 8-bit RGB slides:  `... build out/slides --root slides --tile 512 --test-fraction 0.2`

    Args:
        source: folder, csv.
        image_column: csv: column of the paths, relative to the file.
        channels: Names of the images' channels, such as dapi,gfp: store all of them, in all their
            bits. Default: 8-bit RGB, in tiles.
        pages: What the pages of a file are: channels of one image, or samples.
        slice_axis: NIfTI: the axis along which slices are samples.
        nan: Replace NaN and infinite values by this one. Default: such an image is bad.
        value_range: The values that views show as 0 and 1. Default: measured for each channel.
        split_by: Keep groups of this column, such as patient, in one split. Default for tiles and
            pages: parent, their file.
        tile: Cut images into tiles of this side in px; columns parent, x and y say where they lie.
        stride: Pixels from tile to tile. Default: --tile.
        min_content: Skip tiles of which a smaller share shows something; see docs/sensors.md.
    """
    from sslpipe.sensors.scenes import cut_scenes, parse_sensors
    from sslpipe.sharding.arrays import parse_range
    from sslpipe.sharding.build import build_dataset
    from sslpipe.sharding.gather import parse_columns, parse_pattern
    from sslpipe.sharding.sources import SENSOR_SUFFIXES, SUFFIXES, SourceOptions
    from sslpipe.sharding.writer import Layout

    if value_range is not None and channels is None:
        raise DataError("--range needs --channels: 8-bit RGB is 0 to 255")
    sensors = parse_sensors(channels, pages, slice_axis, nan, tile, stride, min_content)
    pattern = None if name_pattern is None else parse_pattern(name_pattern)
    built = build_dataset(
        out,
        source,
        SourceOptions(
            root=root,
            split=split,
            csv=csv,
            image_column=image_column,
            label_column=label_column,
            split_column=split_column,
            labels=labels,
            skip_missing=skip_missing,
            columns=() if columns is None else parse_columns(columns, "--columns"),
            name_pattern=pattern,
            suffixes=SUFFIXES if channels is None else (*SUFFIXES, *SENSOR_SUFFIXES),
        ),
        Layout(
            seed=0,
            samples_per_shard=samples_per_shard,
            max_shard_bytes=10**9,
            group_by=group_by,
            arrays=sensors.arrays,
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
        value_range=parse_range(value_range),
        make_samples=partial(cut_scenes, sensors=sensors, pattern=pattern),
    )
    print_built(out, built)
