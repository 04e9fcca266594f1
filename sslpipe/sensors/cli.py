"""`sslpipe sensors`: files of sensors and large scenes -> shards."""

from typing import Annotated, Literal

from sslpipe.cli.building import (
    OutFolder,
    ReadOptions,
    ValueRange,
    WriteOptions,
    build_shards,
    prepare_workers,
)
from sslpipe.cli.options import command, option
from sslpipe.cli.terminal import new_app

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
    reading: ReadOptions,
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
    writing: WriteOptions,
) -> None:
    """Write shards of images of any channels, or of tiles of scenes.

    Reads TIFF, 16-bit PNG, .npy, .npz, DICOM and NIfTI, and pictures. If it is interrupted, run it
    again to resume.
    """
    from sslpipe.sensors.sensor_files import SensorFiles
    from sslpipe.sharding.arrays import parse_range

    files = SensorFiles(
        source,
        channels=channels,
        pages=pages,
        slice_axis=slice_axis,
        nan=nan,
        range=parse_range(value_range),
        tile=tile,
        stride=stride,
        min_content=min_content,
    )
    build_shards(out, files, reading, writing)
