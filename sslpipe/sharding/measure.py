"""Measure the images of shards that are not 8-bit RGB: their type, range, mean and deviation."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.decode import BadSample, read_npy
from sslpipe.data.image_type import Depth, ImageType
from sslpipe.data.index import ARRAY_SUFFIXES
from sslpipe.data.storage import read_range
from sslpipe.errors import DataError, counted
from sslpipe.sharding.scan import scan_tar

MOST_IMAGES = 1000  # evenly over all
PIXELS_AN_IMAGE = 4096  # of float32, evenly over an image; of integers all are counted
PERCENTILES = (0.1, 99.9)
MOST_LEVEL = 1000  # of a mean or deviation that dataset.json may hold
LEAST_STD = 1 / 255  # views are divided by it


class Measured(NamedTuple):
    """What `dataset.json` holds of images that are not 8-bit RGB, and what to say of them."""

    image: ImageType
    mean: tuple[float, ...]
    std: tuple[float, ...]
    notes: list[str]


def measure(
    shards: Sequence[Path], channels: Sequence[str], value_range: tuple[float, float] | None
) -> Measured:
    """Measure the images of some shards, arrays of one type.

    `low` and `high` of a channel are `value_range`, or its PERCENTILES; where these are equal, its
    least and largest value; of a constant channel `high` is above its value, which is said.

    Raises: DataError where no image can be read, or their channels are others.
    """
    values, dtype, count = _channel_values(shards, value_range)
    if len(values) != len(channels):
        raise DataError(
            f"images have {len(values)} channels, and --channels names {len(channels)}: "
            f"{', '.join(channels)}"
        )
    notes = [f"range, mean and std are measured on {counted(count, 'image')}"]
    lows: list[float] = []
    highs: list[float] = []
    means: list[float] = []
    stds: list[float] = []
    for name, channel_values in zip(channels, values, strict=True):
        least, most = channel_values.ends((0, 100))
        if least == most:
            notes.append(f"channel {name} is constant: {least:g} in all of them")
        low, high = value_range or _range_of(channel_values, dtype)
        mean, std = channel_values.moments()
        lows.append(low)
        highs.append(high)
        means.append(round((mean - low) / (high - low), 6))
        stds.append(round(max(std / (high - low), LEAST_STD), 6))
    if max(map(abs, (*means, *stds))) > MOST_LEVEL:
        raise DataError("values lie far outside of the range; give another --range LOW,HIGH")
    image = ImageType(channels=tuple(channels), dtype=dtype, low=tuple(lows), high=tuple(highs))
    return Measured(image, tuple(means), tuple(stds), notes)


class _Values:
    """The values of a channel: how often each integer is there, or some of the floats."""

    def __init__(self, dtype: np.dtype[Any]) -> None:
        levels = 256**dtype.itemsize if dtype.kind == "u" else 0
        self._counts = np.zeros(levels, np.int64)
        self._floats: list[NDArray[np.float32]] = []

    def add(self, pixels: NDArray[Any]) -> None:
        """Take the pixels of an image, (h, w)."""
        if len(self._counts):
            self._counts += np.bincount(pixels.ravel(), minlength=len(self._counts))
            return
        flat = pixels.ravel()
        flat = flat[:: -(-flat.size // PIXELS_AN_IMAGE)]
        self._floats.append(flat[np.isfinite(flat)])

    def ends(self, percentiles: tuple[float, float]) -> tuple[float, float]:
        """The values that so many percent of all do not exceed."""
        if len(self._counts):
            total = self._counts.cumsum()
            wanted = np.maximum(1, np.ceil(np.array(percentiles) / 100 * total[-1]))
            low, high = np.searchsorted(total, wanted)
        else:
            values = np.concatenate(self._floats)
            if not len(values):
                raise DataError("a channel holds nothing but NaN and infinite values")
            low, high = np.percentile(values, percentiles, method="lower")
        return float(low), float(high)

    def moments(self) -> tuple[float, float]:
        """Mean and standard deviation."""
        if len(self._counts):
            levels = np.arange(len(self._counts), dtype=np.float64)
            total = self._counts.sum()
            mean = float(self._counts @ levels / total)
            return mean, float(np.sqrt(self._counts @ (levels - mean) ** 2 / total))
        values = np.concatenate(self._floats).astype(np.float64)
        return float(values.mean()), float(values.std())


def _channel_values(
    shards: Sequence[Path], value_range: tuple[float, float] | None
) -> tuple[list[_Values], Any, int]:
    """Return the values of each channel of some images, their type, and how many images.

    At most MOST_IMAGES are read, evenly over all shards; bad ones are skipped.

    Raises: DataError where no image can be read, or they are not of one type.
    """
    places = [
        (path, sample.image) for path in shards for sample in scan_tar(path, ARRAY_SUFFIXES).samples
    ]
    values = list[_Values]()
    count = 0
    dtype: Any = None
    for path, (start, size) in places[:: -(-len(places) // MOST_IMAGES) or 1]:
        try:
            pixels = read_npy(read_range(str(path), start, start + size))
        except BadSample:
            continue
        count += 1
        name = pixels.dtype.name
        if not values:
            dtype = name
            if dtype not in get_args(Depth):
                raise DataError(f"images of {dtype}; store {', '.join(get_args(Depth))}")
            if dtype == "uint8" and value_range is not None:
                raise DataError("--range is for 16 bits and floats; 8 bits are 0 to 255")
            values = [_Values(pixels.dtype) for _ in range(pixels.shape[2])]
        if (name, pixels.shape[2]) != (dtype, len(values)):
            raise DataError(
                f"an image of {counted(pixels.shape[2], 'channel')} of {name}, and others of "
                f"{len(values)} of {dtype}: a data set has one type"
            )
        for channel, channel_values in enumerate(values):
            channel_values.add(pixels[:, :, channel])
    if not values:
        raise DataError("no image can be read to measure channels: KEY.npy of (h, w, C)")
    return values, dtype, count


def _range_of(values: _Values, dtype: str) -> tuple[float, float]:
    """Return the low and the high value of a channel, where none are given."""
    if dtype == "uint8":
        return 0.0, 255.0
    low, high = values.ends(PERCENTILES)
    if low < high:
        return low, high
    least, most = values.ends((0, 100))
    return least, most if most > least else least + max(1.0, abs(least) * 1e-3)
