"""Files of sensors for whoever has one image of a path: `encode`, search and gallery."""

from pathlib import Path
from typing import TYPE_CHECKING, Any

from numpy.typing import NDArray

from sslpipe.sharding.sources import SENSOR_SUFFIXES

if TYPE_CHECKING:
    from sslpipe.data.image_type import ImageType

SUFFIXES = SENSOR_SUFFIXES

_ONE_IMAGE = (
    "a path is one image: give one of them as an array (h, w, C) or as a file of its own; of all, "
    "`sslpipe sensors build` makes a data set for `sslpipe embed`"
)


def read_image(path: Path, wanted: "ImageType") -> NDArray[Any]:
    """Read a file of one image, as the build of a data set read such files.

    Args:
        path: Of any format that `sslpipe sensors build` reads.
        wanted: Its channels, or those of its channels that are wanted, and its depth.

    Returns:
        (h, w, C) of `wanted.dtype`.

    Raises:
        BadSample: It is another image, several, or damaged.
        OSError: It cannot be read.
    """
    import numpy as np

    from sslpipe.data.decode import BadSample, check_size
    from sslpipe.data.image_type import Reading
    from sslpipe.sensors.readers import Pages, UnknownPages, open_planes

    reading = wanted.reading or Reading()
    stored = reading.channels or wanted.channels
    try:
        planes = open_planes(path, Pages(reading.pages, reading.slice_axis))
    except UnknownPages:
        raise BadSample(f"it has several pages, and {_ONE_IMAGE}") from None
    height, width, channels = planes.shape
    if planes.total != 1:
        raise BadSample(f"it holds {planes.total} images (pages or slices), and {_ONE_IMAGE}")
    names = ", ".join(stored)
    if (planes.dtype.name, channels) != (wanted.dtype, len(stored)):
        raise BadSample(
            f"an image of {planes.dtype} in {channels} channels, and the network takes {wanted}"
            f"{'' if stored == wanted.channels else f' from files of {names}'}: give such a file, "
            "or an array (h, w, C) of its channels"
        )
    check_size(width, height)
    pixels = planes.read(0, slice(0, height), slice(0, width))
    if stored != wanted.channels:
        pixels = pixels[:, :, [stored.index(name) for name in wanted.channels]]
    is_finite = np.isfinite(pixels)
    if not is_finite.all():
        if reading.nan is None:
            raise BadSample("it has values that are NaN or infinite")
        pixels = np.where(is_finite, pixels, np.float32(reading.nan))
    return pixels
