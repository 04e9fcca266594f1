"""What the images of a data set are: their channels, depth, and the range that views work in.

Everything after the decoder sees one of two tensors: uint8 in 0..255, or float32 in the same
units, where each channel's `low` is 0 and its `high` 255 (values outside of the range
continue beyond them: nothing is clamped). So views, networks and exports know channels, and no
other depth.
"""

from collections.abc import Sequence
from functools import cached_property, lru_cache
from typing import Annotated, Any, Literal

import numpy as np
from numpy.typing import NDArray
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from sslpipe.errors import counted

Depth = Literal["uint8", "uint16", "float32"]
MOST_CHANNELS = 64
ChannelName = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_.+-]{0,63}$")]
Value = Annotated[float, Field(ge=-3e38, le=3e38)]
Level = Annotated[int, Field(ge=0, le=255)]
Colour = tuple[Level, Level, Level]  # red, green, blue
_RGB = ("red", "green", "blue")


class Reading(BaseModel):
    """How files became images where a data set was built, which their bytes do not say.

    Args:
        pages: What the pages of a file, or the volumes of a series, are; None: it has one.
        slice_axis: The dimension of a volume along which its slices lie.
        nan: Stands for NaN and infinite values; None: such an image is bad.
        channels: Names of a file's channels, of which the images are some; None: of all.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    pages: Literal["channels", "samples"] | None = None
    slice_axis: int = Field(default=2, ge=0, le=2)
    nan: Value | None = None
    channels: tuple[ChannelName, ...] | None = Field(default=None, max_length=MOST_CHANNELS)


class ImageType(BaseModel):
    """Channels, depth and range of all images of a data set.

    Args:
        channels: Names, in the order of the stored images, 1 to MOST_CHANNELS that differ.
        dtype: Of the stored images.
        low: A value of each channel that views show as 0; `high` as 1. 0 and 255 for uint8.
        background: What transparent parts of 8-bit RGB pictures are put on; None: alpha is dropped,
            and they show what is stored under them.
        reading: How a file of other images than 8-bit RGB is read; None: as `Reading()`.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)
    channels: tuple[ChannelName, ...] = Field(min_length=1, max_length=MOST_CHANNELS)
    dtype: Depth
    low: tuple[Value, ...]
    high: tuple[Value, ...]
    background: Colour | None = None
    reading: Reading | None = None

    @model_validator(mode="after")
    def _check(self) -> "ImageType":
        count = len(self.channels)
        if len(set(self.channels)) < count:
            raise ValueError(f"channels = {list(self.channels)} names one twice")
        if not len(self.low) == len(self.high) == count:
            raise ValueError(f"low and high are not {count} numbers, one a channel")
        if any(not low < high for low, high in zip(self.low, self.high, strict=True)):
            raise ValueError("low is not below high in every channel")
        if self.dtype == "uint8" and (set(self.low), set(self.high)) != ({0.0}, {255.0}):
            raise ValueError("low and high of uint8 are 0 and 255")
        if self.background is not None and not self.is_rgb8:
            raise ValueError("background is for 8-bit RGB")
        if self.reading is not None and self.is_rgb8:
            raise ValueError("reading is for other images than 8-bit RGB")
        stored = self.reading and self.reading.channels
        if stored is not None and not {*self.channels} <= {*stored}:
            raise ValueError(f"reading.channels = {list(stored)} has not all of the channels")
        return self

    @model_serializer(mode="wrap")
    def _without_defaults(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        tree: dict[str, Any] = write(self)
        for name in ("background", "reading"):
            if tree[name] is None:
                del tree[name]
        return tree

    @cached_property
    def is_rgb8(self) -> bool:
        """Whether these are 8-bit RGB images, on any background."""
        return self.channels == _RGB and self.dtype == "uint8"

    @property
    def is_rgb(self) -> bool:
        """Whether the channels are red, green and blue, of any depth: colour operations apply."""
        return self.channels == _RGB

    def __str__(self) -> str:
        """Describe it in words, for messages."""
        channels = counted(len(self.channels), "channel")
        on = "" if self.background is None else f" on {hex_colour(self.background)}"
        return f"{self.dtype} in {channels} ({', '.join(self.channels)}){on}"

    def on(self, background: Colour | None) -> "ImageType":
        """Return the same type on another background."""
        return self.model_copy(update={"background": background})

    def read_as(self, reading: Reading | None) -> "ImageType":
        """Return the same type of files that are read in another way."""
        return self.model_copy(update={"reading": None if reading == Reading() else reading})

    def in_units(self, pixels: NDArray[Any], places: Sequence[int] | None = None) -> NDArray[Any]:
        """Return what views take of stored pixels, (h, w, C) of `dtype`, or of some channels.

        Returns:
            uint8 as it is; else (h, w, C) float32, (value - low) * 255 / (high - low).
        """
        lows = self.low
        highs = self.high
        if places is not None:  # first: what is not wanted is not converted
            pixels = np.ascontiguousarray(pixels[:, :, list(places)])
            lows, highs = (tuple(ends[k] for k in places) for ends in (lows, highs))
        if self.dtype == "uint8":
            return pixels
        # by whole rows: numpy takes ten times as long for a last dimension of a few channels
        low, scale = _row(lows, highs, pixels.shape[1])
        rows = pixels.reshape(len(pixels), -1).astype(low.dtype)
        rows -= low
        rows *= scale
        units: NDArray[Any] = rows.astype(np.float32, copy=False).reshape(pixels.shape)
        return units

    def picture(self, units: NDArray[Any]) -> NDArray[np.uint8]:
        """Return what people see of an image in units of views: (C, h, w) -> (h, w, 3) uint8.

        Values outside of the range are clamped, as in `strip`.
        """
        return self.strip(units[self._shown]).transpose(1, 2, 0)

    def strip(self, units: NDArray[Any]) -> NDArray[np.uint8]:
        """Return each channel as a grey picture: (C, h, w) -> (C, h, w) uint8."""
        pixels: NDArray[np.uint8] = np.clip(np.rint(units), 0, 255).astype(np.uint8)
        return pixels

    @property
    def caption(self) -> str:
        """Return which channels `picture` shows, and from which value to which; "": 8-bit RGB."""
        if self.is_rgb8:
            return ""
        shown = [f"{self.channels[k]} ({self.low[k]:g} to {self.high[k]:g})" for k in self._shown]
        if shown[0] == shown[1]:
            return f"pictures show {shown[0]} as grey"
        pairs = zip(shown, _RGB, strict=True)
        return "pictures show " + ", ".join(f"{name} as {colour}" for name, colour in pairs)

    @property
    def _shown(self) -> list[int]:
        """Places of red, green, blue if channels have these names; else the first three, or one."""
        named = [self.channels.index(name) for name in _RGB if name in self.channels]
        if len(named) == 3:
            return named
        return [0, 1, 2] if len(self.channels) >= 3 else [0, 0, 0]


def hex_colour(colour: Colour) -> str:
    """Return a colour as people write it: "#ffffff"."""
    return "#" + bytes(colour).hex()


@lru_cache(maxsize=256)
def _row(
    low: tuple[float, ...], high: tuple[float, ...], width: int
) -> tuple[NDArray[Any], NDArray[Any]]:
    """What every value of a row of pixels is reduced by, then multiplied by: (width * C,) each.

    In float32, which takes half the time; in float64 where a step might leave its range.
    """
    ends = np.array([low, high])
    span = ends[1] - ends[0]
    is_usual = np.abs(ends).max() < 1e30 and span.min() > 1e-30
    dtype = np.float32 if is_usual else np.float64
    return np.tile(ends[0].astype(dtype), width), np.tile((255 / span).astype(dtype), width)


RGB8 = ImageType(channels=_RGB, dtype="uint8", low=(0.0,) * 3, high=(255.0,) * 3)
