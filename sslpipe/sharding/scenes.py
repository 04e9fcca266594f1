"""Files of sensors -> samples: channels brought together, pages and slices apart, scenes in tiles.

What a sample is, is decided by headers alone, and with `min_content` by a look at every tile. Then
samples are read one by one, as the bytes that a shard holds.
"""

import io
import itertools
import math
import os
import re
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from pydantic import ValidationError

from sslpipe.data.decode import MAX_BYTES, MAX_PIXELS, BadSample, read_npy
from sslpipe.data.image_type import RGB8, ImageType
from sslpipe.data.storage import npy_bytes
from sslpipe.errors import DataError
from sslpipe.sharding.columns import Columns, ColumnValues
from sslpipe.sharding.members import encode_png, png_bytes
from sslpipe.sharding.sensors import Array, Pages, Planes, open_planes
from sslpipe.sharding.sources import Images

CHANNEL = "channel"  # the group of --name-pattern that tells channels of one sample apart
PARENT, PAGE, X, Y = "parent", "page", "x", "y"  # columns
NPY_HEADER = 128  # bytes, as NumPy writes it
BAND_BYTES = 2**26  # of a scene that is copied
BLOCK_PX = 16
LEAST_DEVIATION = 0.02  # of a block that shows something, as a share of its scene's range
MOST_TILES = 2**20  # of a file
MOST_LOOKED_AT = 64  # tiles of a scene, for its range


class Sensors(NamedTuple):
    """What of other images than 8-bit RGB, and of scenes, decides the bytes of the shards.

    Args:
        channels: Their names; None: 8-bit RGB.
        pages: See `sensors.Pages`; `slice_axis` as well.
        nan: What stands for values that are NaN or infinite; None: such an image is bad.
        tile_px: Side of the tiles that scenes are cut into; None: they are not.
        stride_px: From tile to tile.
        min_content: Least share of a tile's blocks that show something; see `content`.
    """

    channels: tuple[str, ...] | None = None
    pages: Any = None
    slice_axis: int = 2
    nan: float | None = None
    tile_px: int | None = None
    stride_px: int | None = None
    min_content: float = 0.0


def parse_channels(text: str | None) -> tuple[str, ...] | None:
    """Read --channels. Raises: DataError for what are no names of 1 to MOST_CHANNELS channels."""
    if text is None:
        return None
    names = tuple(name.strip() for name in text.split(","))
    ends = (0.0,) * len(names), (1.0,) * len(names)
    try:
        ImageType(channels=names, dtype="float32", low=ends[0], high=ends[1])
    except ValidationError as error:
        said = error.errors()[0]["msg"].removeprefix("Value error, ")
        raise DataError(f"--channels {text!r}: {said}; write names, as in red,green,nir") from None
    return names


def parse_range(text: str | None) -> tuple[float, float] | None:
    """Read --range. Raises: DataError for what is no LOW,HIGH."""
    if text is None:
        return None
    try:
        low, high = map(float, text.split(","))
    except ValueError:
        low, high = 0.0, 0.0
    if not -3e38 <= low < high <= 3e38:
        raise DataError(f"--range {text!r} is no LOW,HIGH, such as 0,4095")
    return low, high


def parse_sensors(
    channels: str | None,
    pages: str | None,
    slice_axis: int,
    nan: float | None,
    tile: int | None,
    stride: int | None,
    min_content: float,
) -> Sensors | None:
    """Read what the command line says; None: nothing. Raises: DataError."""
    for option, value, needed, there in (
        ("--pages", pages, "--channels or --tile", channels or tile),
        ("--slice-axis", slice_axis != 2, "--channels", channels),
        ("--nan", nan is not None, "--channels", channels),
        ("--stride", stride, "--tile", tile),
        ("--min-content", min_content, "--tile", tile),
    ):
        if value and not there:
            raise DataError(f"{option} needs {needed}")
    if nan is not None and not abs(nan) < 3e38:
        raise DataError(f"--nan {nan} is itself no finite value of float32")
    if channels is None and tile is None:
        return None
    names = parse_channels(channels)
    return Sensors(names, pages, slice_axis, nan, tile, stride, min_content)


class Cut(NamedTuple):
    """Samples of all splits, with columns; `dtype` of images that are not 8-bit RGB.

    `window` is the low and high value that all files say to look at, None where they differ;
    `split_by` the column that keeps samples of a file in one split.
    """

    images: dict[str, Images]
    columns: dict[str, Columns]
    dtype: str | None
    window: tuple[float, float] | None
    notes: list[str]
    split_by: str | None = None


class _Scene(NamedTuple):
    """What one or several files hold: planes, or why there are none."""

    name: str
    file: int  # of the source, whose label and columns the samples have
    planes: Planes | BadSample | None  # None: opened again when it is read
    paths: tuple[Path, ...]


class _Sample(NamedTuple):
    """A window of one of a scene's images."""

    scene: int
    page: int = 0
    y: int = 0
    x: int = 0
    height: int = 0
    width: int = 0

    def of(self, planes: Planes) -> Array:
        """Read it, (h, w, C)."""
        rows, columns = slice(self.y, self.y + self.height), slice(self.x, self.x + self.width)
        return planes.read(self.page, rows, columns)


def cut_scenes(
    splits: Mapping[str, Images],
    columns: Mapping[str, Columns],
    sensors: Sensors,
    pattern: re.Pattern[str] | None,
    folder: Path,
    workers: int,
) -> Cut:
    """Make samples of a source's files.

    Args:
        splits: The source's files.
        columns: Theirs.
        sensors: What samples are.
        pattern: Its group `channel`, if it has one, tells the channels of a sample apart.
        folder: On a disk with room for scenes that have to be decoded as a whole.
        workers: Threads.

    Raises:
        DataError: Files are of different types, or no tile shows anything; two are named.
    """
    scratch, notes = _Scratch(folder), list[str]()
    if not all(files.paths for files in splits.values()):
        raise DataError("--channels and --tile need a source of files: folder or csv")
    opened = {
        split: _open_scenes(files, sensors, pattern, workers) for split, files in splits.items()
    }
    good = [
        (scene.name, scene.planes)
        for own in opened.values()
        for scene in own
        if isinstance(scene.planes, Planes)
    ]
    for scene in good:
        _check_type(good[0], scene, sensors)
    dtype, channels = (good[0][1].dtype, good[0][1].shape[2]) if good else (np.dtype("u1"), 3)
    images, own_columns = dict[str, Images](), dict[str, Columns]()
    for split, files in splits.items():
        samples, skipped = _cut(opened[split], sensors, scratch, workers)
        if skipped:
            notes.append(
                f"split {split}: {skipped:,} of {skipped + len(samples):,} tiles skipped, with "
                f"less than {sensors.min_content:g} of content"
            )
        if not samples:
            raise DataError(f"split {split!r}: every tile is empty; give a lower --min-content")
        kept = {name: own for name, own in columns[split].items() if name != CHANNEL}
        images[split], own_columns[split] = _described(
            files, kept, opened[split], samples, sensors, channels * dtype.itemsize
        )
    windows = {planes.window for _, planes in good}
    return Cut(
        images,
        own_columns,
        dtype.name if sensors.channels else None,
        windows.pop() if len(windows) == 1 else None,
        notes,
        PARENT if all(PARENT in own for own in own_columns.values()) else None,
    )


# --- files


def _open_scenes(
    files: Images, sensors: Sensors, pattern: re.Pattern[str] | None, workers: int
) -> list[_Scene]:
    def opened(job: tuple[str, tuple[int, ...]]) -> _Scene:
        name, numbers = job
        paths = tuple(files.paths[number] for number in numbers)
        try:
            planes: Planes | BadSample = _open(paths, sensors)
        except BadSample as error:
            planes = error
        return _Scene(name, numbers[0], planes, paths)

    with ThreadPoolExecutor(workers) as pool:
        return list(pool.map(opened, _grouped(files.names, sensors, pattern)))


def _grouped(
    names: Sequence[str], sensors: Sensors, pattern: re.Pattern[str] | None
) -> list[tuple[str, tuple[int, ...]]]:
    """Name of each sample's files, and their numbers, in the order of the channels."""
    wanted = sensors.channels
    if pattern is None or CHANNEL not in pattern.groupindex or wanted is None:
        return [(name, (number,)) for number, name in enumerate(names)]
    groups: dict[str, dict[str, int]] = {}
    for number, name in enumerate(names):
        match = pattern.fullmatch(name)
        if match and match[CHANNEL] in wanted:
            start, end = match.span(CHANNEL)
            groups.setdefault(f"{name[:start]}*{name[end:]}", {})[match[CHANNEL]] = number
    if not groups:
        raise DataError(
            f"--name-pattern: no file's channel is one of --channels {','.join(wanted)}"
        )
    for name, own in groups.items():
        for channel in wanted:
            if channel not in own:
                raise DataError(
                    f"{name} has no file of channel {channel!r}; it has: {', '.join(own)}"
                )
    return [(name, tuple(own[channel] for channel in wanted)) for name, own in groups.items()]


def _open(paths: Sequence[Path], sensors: Sensors) -> Planes:
    """Planes of files whose channels belong together. Raises: BadSample."""
    pages = Pages(sensors.pages, sensors.slice_axis, sensors.channels is None)
    return _joined([open_planes(path, pages) for path in paths])


def _joined(each: Sequence[Planes]) -> Planes:
    """Planes of one size and type as the channels of one image. Raises: BadSample."""
    if len(each) == 1:
        return each[0]
    kinds = [(one.total, one.shape[:2], one.dtype) for one in each]
    if other := next((kind for kind in kinds if kind != kinds[0]), None):
        one, two = ("{} x {} {}".format(*kind) for kind in (kinds[0], other))
        raise BadSample(f"channels of {one} and {two}")

    def read(image: int, rows: slice, columns: slice) -> Array:
        return np.concatenate([planes.read(image, rows, columns) for planes in each], axis=2)

    shape = *kinds[0][1], sum(planes.shape[2] for planes in each)
    has_windows = all(planes.has_windows for planes in each)
    return Planes(kinds[0][0], shape, kinds[0][2], read, None, has_windows, parts=tuple(each))


def _check_type(first: tuple[str, Planes], scene: tuple[str, Planes], sensors: Sensors) -> None:
    """Raise DataError where a scene is of another type than the first one, or than asked for."""
    one, other = (f"{name} has {planes.shape[2]} channels" for name, planes in (first, scene))
    (_, planes), (_, theirs), names = first, scene, sensors.channels
    if names is None:
        if theirs.dtype != np.uint8 or theirs.shape[2] not in (1, 3):
            raise DataError(
                f"{other} of {theirs.dtype}, of which 8-bit RGB would lose some: name its "
                "channels with --channels NAME,..."
            )
    elif (planes.shape[2], planes.dtype) != (theirs.shape[2], theirs.dtype):
        raise DataError(
            f"{one} of {planes.dtype}, and {other} of {theirs.dtype}: a data set has one type; "
            "convert some, or build two data sets"
        )
    elif planes.shape[2] != len(names):
        raise DataError(f"{one}, and --channels names {len(names)}: {', '.join(names)}")
    elif names == RGB8.channels and planes.dtype == np.uint8:
        raise DataError("these are 8-bit RGB images: build them without --channels")


# --- samples


def _cut(
    scenes: list[_Scene], sensors: Sensors, scratch: "_Scratch", workers: int
) -> tuple[list[_Sample], int]:
    """Windows of all scenes, and how many were skipped; of a bad scene one stands for it.

    Scenes that are decoded as a whole are copied once a tile is read, and then read by windows;
    those that are read once are forgotten, and opened again.
    """
    samples, skipped = list[_Sample](), 0
    for number, scene in enumerate(scenes):
        planes = scene.planes
        try:
            assert planes is not None
            if isinstance(planes, BadSample):
                raise planes
            own = _windows(number, planes, sensors)
            _check_size(own[0], planes)
            has_load = any(part.load for part in planes.parts or (planes,))
            if not planes.has_windows and (len(own) > planes.total or (len(own) > 1 and has_load)):
                planes = scratch.lazily(planes)
            if sensors.min_content:
                shown = _with_content(planes, own, workers, sensors.min_content)
                skipped, own = skipped + len(own) - len(shown), shown
            scenes[number] = scene._replace(planes=planes if len(own) > 1 else None)
        except BadSample as error:
            scenes[number], own = scene._replace(planes=error), [_Sample(number)]
        samples += own
    return samples, skipped


def _check_size(sample: _Sample, planes: Planes) -> None:
    """Raise BadSample where an image is larger than a shard may hold."""
    count = sample.height * sample.width
    size = count * planes.shape[2] * planes.dtype.itemsize + NPY_HEADER
    if count > MAX_PIXELS or size > MAX_BYTES:
        raise BadSample(
            f"{sample.width} x {sample.height} px of {planes.shape[2]} channels are {size} bytes, "
            f"more than the limits of {MAX_PIXELS} px and {MAX_BYTES} bytes: cut it with --tile"
        )


def _windows(scene: int, planes: Planes, sensors: Sensors) -> list[_Sample]:
    """Each image, or its tiles: one every `stride_px`, and one that ends where the side does."""
    height, width, _ = planes.shape
    tile = sensors.tile_px or max(height, width)
    step = sensors.stride_px or tile
    last = [max(0, side - tile) for side in (height, width)]
    tops, lefts = ([*range(0, end, step), end] for end in last)
    count = planes.total * len(tops) * len(lefts)
    if sensors.tile_px and count > MOST_TILES:
        raise BadSample(
            f"{count} tiles of {width} x {height} px, more than the limit of {MOST_TILES}: give a "
            "larger --tile or --stride"
        )
    size = min(tile, height), min(tile, width)
    places = itertools.product(range(planes.total), tops, lefts)
    return [_Sample(scene, *place, *size) for place in places]


def _with_content(
    planes: Planes, samples: list[_Sample], workers: int, least: float
) -> list[_Sample]:
    """Those of a scene's tiles that show enough."""
    # the range of the scene, by some of its tiles
    looked_at = samples[:: -(-len(samples) // MOST_LOOKED_AT)]
    with ThreadPoolExecutor(workers) as pool:
        some = pool.map(lambda sample: sample.of(planes), looked_at)
        seen = [np.array(tile[::4, ::4]).reshape(-1, planes.shape[2]) for tile in some]
        values = np.concatenate(seen).astype(np.float64)
        values[~np.isfinite(values)] = np.nan
        with warnings.catch_warnings(action="ignore"):  # a channel of NaN only
            low, high = np.nanpercentile(values, [1, 99], axis=0)
        shares = pool.map(lambda sample: content(sample.of(planes), high - low), samples)
        return [sample for sample, share in zip(samples, shares, strict=True) if share >= least]


def content(pixels: Array, spread: NDArray[np.float64]) -> float:
    """Say what share of a tile's blocks of BLOCK_PX shows something, dark or light.

    In such a block the standard deviation of a channel is over LEAST_DEVIATION of its scene's
    range, from the 1st to the 99th percentile, at every other pixel. Blocks with NaN show nothing.

    Args:
        pixels: (h, w, C).
        spread: (C,), the range of the scene.
    """
    pixels = pixels[::2, ::2]
    height, width, channels = pixels.shape
    tall, wide = min(BLOCK_PX // 2, height), min(BLOCK_PX // 2, width)
    whole = pixels[: height // tall * tall, : width // wide * wide].astype(np.float64)
    blocks = whole.reshape(height // tall, tall, width // wide, wide, channels)
    with np.errstate(invalid="ignore"):
        shown = blocks.std(axis=(1, 3)) > LEAST_DEVIATION * spread
    return float(shown.any(axis=2).mean())


def _described(
    files: Images,
    columns: Columns,
    scenes: list[_Scene],
    samples: list[_Sample],
    sensors: Sensors,
    pixel_bytes: int,
) -> tuple[Images, Columns]:
    """Name samples, and give them labels and columns of their files, and where they lie."""
    rows = np.array(samples, np.int64)  # (n, 6)
    of_file = np.array([scene.file for scene in scenes], np.int64)[rows[:, 0]]
    own: dict[str, ColumnValues] = {
        name: column._replace(values=column.values[of_file]) for name, column in columns.items()
    }
    is_tiled = sensors.tile_px is not None
    used = {PAGE: bool(rows[:, 1].any()), Y: is_tiled, X: is_tiled}
    places = {name: rows[:, k] for k, name in enumerate(used, start=1) if used[name]}
    added = {name: ColumnValues("integer", values.copy()) for name, values in places.items()}
    if added:
        codes = rows[:, 0].astype(np.int32)
        added[PARENT] = ColumnValues("text", codes, [scene.name for scene in scenes])
    for name in added:
        if name in own:
            raise DataError(f"column {name!r} says where a tile or page lies; rename your own")

    def named(number: int) -> str:
        stem, suffix = os.path.splitext(scenes[samples[number].scene].name)
        return stem + "".join(f"-{key}{own[number]}" for key, own in places.items()) + suffix

    def size(sample: _Sample) -> int:
        if sensors.channels is None:
            return png_bytes(sample.height, sample.width, pixel_bytes)
        return NPY_HEADER + sample.height * sample.width * pixel_bytes

    def read(number: int) -> bytes:
        scene = scenes[samples[number].scene]
        if isinstance(scene.planes, BadSample):
            raise scene.planes
        pixels = samples[number].of(scene.planes or _open(scene.paths, sensors))
        if sensors.channels is not None:
            return npy_bytes(pixels)
        grey = pixels[:, :, :1]
        return encode_png(np.ascontiguousarray(grey if (pixels == grey).all() else pixels))

    made = replace(
        files,
        names=[named(number) for number in range(len(samples))],
        labels=files.labels[of_file],
        sizes=np.array([size(sample) for sample in samples], np.int64),
        read=read,
        cells={},
        paths=(),
    )
    return made, {**own, **added}


def without_nan(raw: bytes, nan: float | None) -> tuple[bytes, bool]:
    """Return a .npy whose values are finite, and whether any had to be replaced by `nan`.

    Raises: BadSample where some are not and `nan` is None, with their number.
    """
    pixels = read_npy(raw)
    if pixels.dtype.kind != "f" or (is_finite := np.isfinite(pixels)).all():
        return raw, False
    if nan is None:
        raise BadSample(
            f"{int((~is_finite).sum())} of {pixels.size} values are NaN or infinite; give --nan "
            "VALUE to replace them"
        )
    return npy_bytes(np.where(is_finite, pixels, np.float32(nan))), True


class _Scratch:
    """A file without a name on the disk, for scenes of formats that are decoded as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._lock, self._copying = folder, threading.Lock(), threading.Lock()
        self._file: IO[bytes] | None = None

    def lazily(self, planes: Planes) -> Planes:
        """Planes that are copied when the first window is read: a part or a resume may need none.

        One scene is decoded at a time; what is wrong with it is raised for each of its windows.
        """

        @cache
        def copied() -> Planes | BadSample:
            try:
                return self._copy(planes)
            except BadSample as error:
                return error

        def read(image: int, rows: slice, columns: slice) -> Array:
            with self._copying:
                found = copied()
            if isinstance(found, BadSample):
                raise found
            return found.read(image, rows, columns)

        return planes._replace(read=read)

    def _copy(self, planes: Planes) -> Planes:
        """Copy all pixels, a band at a time, and of several files one after another."""
        if planes.parts:
            return _joined([p if p.has_windows else self._copy(p) for p in planes.parts])
        source = planes.load() if planes.load else planes
        (height, width, channels), dtype = planes.shape, planes.dtype
        rows = max(1, BAND_BYTES // (width * channels * dtype.itemsize))
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            file, shape = self._file, (planes.total, *planes.shape)
            with self._lock:  # a memory map looks for the end of the file, too
                offset = place = file.seek(0, io.SEEK_END)
                file.truncate(offset + math.prod(shape) * dtype.itemsize)
            for page, y in itertools.product(range(planes.total), range(0, height, rows)):
                band = source.read(page, slice(y, min(y + rows, height)), slice(0, width))
                with self._lock:
                    file.seek(place)
                    file.write(np.ascontiguousarray(band).data)
                    file.flush()
                place += band.nbytes
        except OSError as error:
            raise DataError(f"cannot copy a scene to {self._folder}: {error.strerror}") from error

        def read(image: int, rows: slice, columns: slice) -> Array:
            with self._lock:
                pixels = np.memmap(file, dtype, "r", offset, shape)
            return np.array(pixels[image, rows, columns])

        return Planes(planes.total, planes.shape, dtype, read)
