"""Files of sensors and large scenes as a source of `sslpipe.build_dataset`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal

from sslpipe.arguments import checked
from sslpipe.errors import DataError, check_count
from sslpipe.sensors.scenes import Sensors, check_sensors, cut_scenes
from sslpipe.sharding.arrays import parse_channels, parse_range
from sslpipe.sharding.build import read_samples
from sslpipe.sharding.record import FOLDER
from sslpipe.sharding.samples import Samples
from sslpipe.sharding.sources import SENSOR_SUFFIXES, SUFFIXES, SourceOptions


class SensorFiles:
    """Images of any channels, or tiles of scenes: a source of `sslpipe.build_dataset`.

    >>> cells = sslpipe.SensorFiles(channels=["dapi", "gfp"])
    >>> sslpipe.build_dataset("out/cells", cells, root="cells", test_fraction=0.1)

    Reads TIFF, 16-bit PNG, .npy, .npz, DICOM and NIfTI, and pictures. Tiles and pages keep to their
    file without `split_by`.

    Args:
        source: "folder" or "csv": how `build_dataset` finds the files.
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

    Raises:
        DataError: An argument that does not fit.
    """

    @checked
    def __init__(
        self,
        source: str = "folder",
        *,
        channels: str | Sequence[str] | None = None,
        pages: Literal["channels", "samples"] | None = None,
        slice_axis: int = 2,
        nan: float | None = None,
        range: Sequence[float] | None = None,
        tile: int | None = None,
        stride: int | None = None,
        min_content: float = 0.0,
    ) -> None:
        if stride is not None:
            check_count(stride, "stride", error=DataError)
        if range is not None and channels is None:
            raise DataError("--range needs --channels: 8-bit RGB is 0 to 255")
        self._source = source
        self._sensors = Sensors(
            channels=parse_channels(channels),
            pages=pages,
            slice_axis=slice_axis,
            nan=nan,
            tile_px=tile,
            stride_px=stride,
            min_content=min_content,
            value_range=parse_range(range),
        )
        check_sensors(self._sensors)

    def read_samples(self, options: SourceOptions, out: Path, workers: int) -> Samples:
        """Find the samples of the files that the options name; see `SampleReader`."""
        if self._sensors.channels is not None:
            options = replace(options, suffixes=(*SUFFIXES, *SENSOR_SUFFIXES))
        return cut_scenes(
            read_samples(self._source, options),
            out / FOLDER,
            workers,
            sensors=self._sensors,
            pattern=options.name_pattern,
        )
