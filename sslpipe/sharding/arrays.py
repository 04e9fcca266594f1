"""Images of C channels of uint8, uint16 or float32 in shards: members KEY.npy, (h, w, C)."""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from pydantic import ValidationError

from sslpipe.data.decode import BadSample, read_npy
from sslpipe.data.image_type import ImageType, Reading
from sslpipe.data.storage import npy_bytes
from sslpipe.errors import DataError


class Arrays(NamedTuple):
    """What images that are not 8-bit RGB are in the shards."""

    channels: tuple[str, ...]
    reading: Reading  # how their files became images, for dataset.json


def parse_channels(channels: str | Sequence[str] | None) -> tuple[str, ...] | None:
    """Read --channels. Raises: DataError for what are no names of 1 to MOST_CHANNELS channels."""
    if channels is None:
        return None
    text = channels if isinstance(channels, str) else ",".join(channels)
    names = tuple(name.strip() for name in text.split(","))
    ones = (1.0,) * len(names)
    try:
        ImageType(channels=names, dtype="float32", low=(0.0,) * len(names), high=ones)
    except ValidationError as error:
        reason = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DataError(
            f"--channels={text!r}: {reason}; write names, as in red,green,nir"
        ) from None
    return names


def parse_range(ends: str | Sequence[float] | None) -> tuple[float, float] | None:
    """Read --range. Raises: DataError for what is no LOW,HIGH."""
    if ends is None:
        return None
    try:
        low, high = map(float, ends.split(",") if isinstance(ends, str) else ends)
    except ValueError:
        low = 0.0
        high = 0.0
    if not -3e38 <= low < high <= 3e38:
        raise DataError(f"--range={ends!r} is no LOW,HIGH, such as 0,4095")
    return low, high


def without_nan(raw: bytes, nan: float | None) -> tuple[bytes, bool]:
    """Return a .npy of finite values, and whether `nan` replaced any; None: raise BadSample."""
    pixels = read_npy(raw)
    if pixels.dtype.kind != "f" or (is_finite := np.isfinite(pixels)).all():
        return raw, False
    if nan is None:
        raise BadSample(
            f"{int((~is_finite).sum())} of {pixels.size} values are NaN or infinite; give a "
            "number in place of them, as --nan 0"
        )
    return npy_bytes(np.where(is_finite, pixels, np.float32(nan))), True
