"""A data set of sensors' files or scenes in one call: what `sslpipe sensors build` does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Literal

from sslpipe.arguments import Progress, checked, silent
from sslpipe.errors import DataError, check_count
from sslpipe.sensors.scenes import Sensors, check_sensors, cut_scenes
from sslpipe.sharding.arrays import parse_channels, parse_range
from sslpipe.sharding.build import Built, read_samples, write_shards
from sslpipe.sharding.columns import parse_columns
from sslpipe.sharding.gather import parse_pattern
from sslpipe.sharding.record import FOLDER
from sslpipe.sharding.sources import SENSOR_SUFFIXES, SUFFIXES, SourceOptions
from sslpipe.sharding.writer import Cut, Layout


@checked
def build_sensor_dataset(  # noqa: D417  # the others are of build_dataset
    out: str | Path,
    source: str = "folder",
    *,
    root: str | Path | None = None,
    channels: str | Sequence[str] | None = None,
    pages: Literal["channels", "samples"] | None = None,
    slice_axis: int = 2,
    nan: float | None = None,
    range: Sequence[float] | None = None,
    tile: int | None = None,
    stride: int | None = None,
    min_content: float = 0.0,
    split: str | None = None,
    csv: str | Path | None = None,
    image_column: str = "path",
    label_column: str = "label",
    split_column: str | None = None,
    skip_missing: bool = False,
    labels: bool = True,
    columns: str | Sequence[str] | None = None,
    name_pattern: str | None = None,
    test_fraction: float = 0.0,
    split_by: str | None = None,
    unseen_classes: Sequence[str] = (),
    group_by: str | None = None,
    samples_per_shard: int = 1000,
    skip_bad: bool = False,
    overwrite: bool = False,
    origin: str = "",
    license: str = "",
    num_workers: int = 2,
    progress: Progress | None = None,
) -> Built:
    """Write shards of images of any channels, or tiles of scenes, as `sslpipe sensors build` does.

    >>> sslpipe.build_sensor_dataset("out/cells", root="cells", channels=["dapi", "gfp"])

    Reads TIFF, 16-bit PNG, .npy, .npz, DICOM and NIfTI, and pictures. The arguments that are not
    listed here are those of `build_dataset`; tiles and pages keep to their file without `split_by`.

    Args:
        out: The data set's folder.
        source: "folder" or "csv".
        root: Folder of the files.
        channels: Names of the images' channels, "dapi,gfp" or a list: all of them are stored, in
            all their bits. None: 8-bit RGB, in tiles.
        pages: What the pages of a file are: "channels" of one image, or "samples".
        slice_axis: Of NIfTI: the axis along which slices are samples, 0 to 2.
        nan: Stands for NaN and infinite values; None: such an image is bad.
        range: The low and the high value that views show as 0 and 1; None: measured.
        tile: Cut images into tiles of this side in px, at least 8; columns parent, x and y say
            where they lie.
        stride: Pixels from tile to tile; None: `tile`.
        min_content: Skip tiles of which a smaller share, in [0, 1], shows something.

    Returns:
        As `build_dataset`.

    Raises:
        DataError: An argument that does not fit, unreadable files, shards of another build.
    """
    check_count(samples_per_shard, "samples_per_shard", error=DataError)
    check_count(num_workers, "num_workers", error=DataError)
    if stride is not None:
        check_count(stride, "stride", error=DataError)
    if range is not None and channels is None:
        raise DataError("--range needs --channels: 8-bit RGB is 0 to 255")
    sensors = Sensors(
        channels=parse_channels(channels),
        pages=pages,
        slice_axis=slice_axis,
        nan=nan,
        tile_px=tile,
        stride_px=stride,
        min_content=min_content,
        value_range=parse_range(range),
    )
    check_sensors(sensors)
    cut = Cut(test_fraction, split_by, unseen_classes)
    options = SourceOptions(
        root=None if root is None else Path(root),
        split=split,
        csv=None if csv is None else Path(csv),
        image_column=image_column,
        label_column=label_column,
        split_column=split_column,
        labels=labels,
        skip_missing=skip_missing,
        columns=parse_columns(columns),
        name_pattern=parse_pattern(name_pattern),
        suffixes=SUFFIXES if channels is None else (*SUFFIXES, *SENSOR_SUFFIXES),
        out=Path(out),
    )
    samples = cut_scenes(
        read_samples(source, options),
        Path(out) / FOLDER,
        num_workers,
        sensors=sensors,
        pattern=options.name_pattern,
    )
    return write_shards(
        Path(out),
        samples,
        Layout(samples_per_shard=samples_per_shard, group_by=group_by, arrays=sensors.arrays),
        cut=cut,
        skip_bad=skip_bad,
        overwrite=overwrite,
        origin=origin,
        license=license,
        workers=num_workers,
        progress=progress or silent,
    )
