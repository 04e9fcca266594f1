"""`sslpipe sensors`: files of sensors and large scenes -> shards."""

from typing import Annotated, Literal

from sslpipe.cli.building import (
    OutFolder,
    Reading,
    ValueRange,
    Writing,
    prepare_workers,
    print_built,
)
from sslpipe.cli.options import command, option
from sslpipe.cli.terminal import new_app, progress

app = new_app(
    help="Convert TIFF, DICOM, NIfTI, arrays and large scenes to shards.",
    no_args_is_help=True,
    examples=["sslpipe sensors build out/cells --root cells --channels dapi,gfp"],
)
app.callback()(prepare_workers)


@command(
    app,
    examples=[
        "sslpipe sensors build out/cells --root cells --channels dapi,gfp --test-fraction 0.1  "
        "# cells/CLASS/*.tif of 16 bits",
        "sslpipe sensors build out/scans --root scans --channels blue,green,red,edge,nir --tile "
        "512 --stride 384 --min-content 0.1  # scans/*.tif of five bands",
        "sslpipe sensors build out/slides --root slides --tile 512 --test-fraction 0.2  # 8-bit "
        "RGB slides",
    ],
)
def build(
    out: OutFolder,
    source: Annotated[str, option("folder, csv.")] = "folder",
    *,
    reading: Reading,
    channels: Annotated[
        str | None,
        option(
            "Names of the images' channels, such as dapi,gfp: store all of them, in all their "
            "bits. Default: 8-bit RGB, in tiles."
        ),
    ] = None,
    pages: Annotated[
        Literal["channels", "samples"] | None,
        option("What the pages of a file are: channels of one image, or samples."),
    ] = None,
    slice_axis: Annotated[
        int, option("NIfTI: the axis along which slices are samples.", min=0, max=2)
    ] = 2,
    nan: Annotated[
        float | None,
        option("Replace NaN and infinite values by this one. Default: such an image is bad."),
    ] = None,
    value_range: ValueRange = None,
    tile: Annotated[
        int | None,
        option(
            "Cut images into tiles of this side in px; columns parent, x and y say where they lie.",
            min=8,
        ),
    ] = None,
    stride: Annotated[
        int | None, option("Pixels from tile to tile. Default: --tile.", min=1)
    ] = None,
    min_content: Annotated[
        float,
        option(
            "Skip tiles of which a smaller share shows something; see docs/sensors.md.",
            min=0,
            max=1,
        ),
    ] = 0.0,
    writing: Writing,
) -> None:
    """Write shards of images of any channels, or of tiles of scenes.

    Reads TIFF, 16-bit PNG, .npy, .npz, DICOM and NIfTI, and pictures. If it is interrupted, run it
    again to resume.
    """
    from sslpipe.sensors.dataset import build_sensor_dataset
    from sslpipe.sharding.arrays import parse_range

    built = build_sensor_dataset(
        out,
        source,
        root=reading.root,
        channels=channels,
        pages=pages,
        slice_axis=slice_axis,
        nan=nan,
        range=parse_range(value_range),
        tile=tile,
        stride=stride,
        min_content=min_content,
        split=reading.split,
        csv=reading.csv,
        image_column=reading.image_column,
        label_column=reading.label_column,
        split_column=reading.split_column,
        skip_missing=reading.skip_missing,
        labels=reading.labels,
        columns=reading.columns,
        name_pattern=reading.name_pattern,
        test_fraction=writing.test_fraction,
        split_by=writing.split_by,
        unseen_classes=writing.unseen(),
        group_by=writing.group_by,
        samples_per_shard=writing.samples_per_shard,
        skip_bad=writing.skip_bad,
        overwrite=writing.overwrite,
        origin=writing.origin,
        license=writing.license,
        num_workers=writing.num_workers,
        progress=progress,
    )
    print_built(out, built)
