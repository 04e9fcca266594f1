"""Files of sensors -> samples: channels brought together, pages and slices apart, scenes in tiles.

What a sample is, is decided by headers alone, and with `min_content` by a look at every tile. Then
samples are read one by one, as the bytes that a shard holds.
"""

import io
import itertools
import math
import mmap
import os
import re
import tempfile
import threading
import warnings
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import IO, Any, NamedTuple

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from sslpipe.data.decode import MAX_BYTES, MAX_PIXELS, BadSample
from sslpipe.data.image_type import RGB8, Reading
from sslpipe.data.storage import npy_bytes
from sslpipe.errors import DataError, counted
from sslpipe.sensors.readers import Array, Pages, Planes, open_planes
from sslpipe.sharding.arrays import Arrays
from sslpipe.sharding.columns import Columns
from sslpipe.sharding.members import encode_png, png_bytes
from sslpipe.sharding.samples import Samples
from sslpipe.sharding.sources import Images

CHANNEL = "channel"  # the group of --name-pattern that tells channels of one sample apart
# columns
PARENT = "parent"
PAGE = "page"
X = "x"
Y = "y"
NPY_HEADER = 128  # bytes, as NumPy writes it
BAND_BYTES = 2**26  # of a scene that is copied
BLOCK_PX = 16
LEAST_DEVIATION = 0.02  # of a block that shows something, as a share of its scene's range
MOST_TILES = 2**20  # of a file
MOST_LOOKED_AT = 64  # tiles of a scene, for its range


class Sensors(NamedTuple):
    """How files become samples."""

    channels: tuple[str, ...] | None = None  # their names; None: 8-bit RGB
    pages: Any = None  # see `readers.Pages`, as slice_axis
    slice_axis: int = 2
    nan: float | None = None  # stands for NaN and infinite values; None: such an image is bad
    tile_px: int | None = None  # side of the tiles that scenes are cut into; None: they are not
    stride_px: int | None = None  # from tile to tile
    min_content: float = 0.0  # least share of a tile's blocks that show something; see `content`
    value_range: tuple[float, float] | None = None  # of all channels; None: as the files say

    @property
    def arrays(self) -> Arrays | None:
        """What the shards hold, and how one of the files is read again; None: 8-bit RGB."""
        if self.channels is None:
            return None
        reading = Reading(pages=self.pages, slice_axis=self.slice_axis, nan=self.nan)
        return Arrays(self.channels, reading)


def check_sensors(sensors: Sensors) -> None:
    """Raise DataError for settings without an effect, and where none says what samples are."""
    channels = sensors.channels
    tile = sensors.tile_px
    for option, is_given, needed, has_needed in (
        ("--pages", sensors.pages is not None, "--channels or --tile", channels or tile),
        ("--slice-axis", sensors.slice_axis != 2, "--channels", channels),
        ("--nan", sensors.nan is not None, "--channels", channels),
        ("--stride", sensors.stride_px is not None, "--tile", tile),
        ("--min-content", sensors.min_content > 0, "--tile", tile),
    ):
        if is_given and not has_needed:
            raise DataError(f"{option} needs {needed}")
    if sensors.nan is not None and not abs(sensors.nan) < 3e38:
        raise DataError(f"--nan: {sensors.nan} is itself no finite value of float32")
    if channels is None and tile is None:
        raise DataError(
            "name the channels with --channels, or cut 8-bit RGB scenes with --tile; whole 8-bit "
            "RGB images are what `sslpipe shards build` reads"
        )


class _Window(NamedTuple):
    """A part of one of a scene's images."""

    page: int = 0
    y: int = 0
    x: int = 0
    height: int = 0
    width: int = 0

    def of(self, planes: Planes) -> Array:
        """Read it, (h, w, C)."""
        rows = slice(self.y, self.y + self.height)
        columns = slice(self.x, self.x + self.width)
        return planes.read(self.page, rows, columns)


class _Scene(NamedTuple):
    """What one or several files hold: planes, or why there are none; a sample for each window."""

    name: str
    file: int  # of the source, whose label and columns the samples have
    paths: Sequence[Path]
    planes: Planes | BadSample
    windows: Sequence[_Window] = (_Window(),)  # of a bad one, one stands for it
    header: Planes | None = None  # what it says, also where that is too large to be read


def cut_scenes(
    source: Samples,
    folder: Path,
    workers: int,
    *,
    sensors: Sensors,
    pattern: re.Pattern[str] | None,
) -> Samples:
    """Make samples of a source's files, with their columns.

    The pattern's group `channel`, if it has one, tells the channels of a sample apart. The folder's
    disk has room for scenes that have to be decoded as a whole. Raises: DataError where files are
    of different types, or no tile shows anything.
    """
    splits = source.images
    if not all(files.paths for files in splits.values()):
        raise DataError("--channels and --tile need a source of files: folder or csv")
    scratch = _Scratch(folder)
    notes = list[str]()
    opened = {
        split: _open_scenes(
            files=files, sensors=sensors, pattern=pattern, scratch=scratch, workers=workers
        )
        for split, files in splits.items()
    }
    good = {
        scene.name: scene.header
        for of_split in opened.values()
        for scene in of_split
        if scene.header is not None
    }
    for name in good:
        _check_type(good, name, sensors)
    first = next(iter(good.values()), None)
    dtype = first.dtype if first else np.dtype("u1")
    pixel_bytes = dtype.itemsize * (first.shape[2] if first else 3)
    images = dict[str, Images]()
    columns = dict[str, Columns]()
    for split, files in splits.items():
        scenes = opened[split]
        if sensors.min_content:
            scenes, skipped = _shown(split, scenes, sensors.min_content, workers)
            notes += skipped
        table = source.columns[split]
        kept = table.select([name for name in table.column_names if name != CHANNEL])
        images[split], columns[split] = _described(
            files=files, columns=kept, scenes=scenes, sensors=sensors, pixel_bytes=pixel_bytes
        )
    remarks = Counter(planes.remark for planes in good.values() if planes.remark)
    doubts = [f"{n:,} of {len(good):,} files {remark}" for remark, n in remarks.items()]
    lying = Counter(planes.directions for planes in good.values() if planes.directions)
    if len(lying) > 1:
        counts = ", ".join(f"{way} in {n:,}" for way, n in sorted(lying.items()))
        doubts.append(
            f"axes of volumes lead to different directions, {counts}: their slices are of other "
            "planes, or mirrored; reorient them, as nibabel.as_closest_canonical does"
        )
    windows = {planes.window for planes in good.values()}
    is_cut = all(PARENT in table.column_names for table in columns.values())
    return source._replace(
        images={
            split: replace(each, doubts=[*each.doubts, *doubts]) for split, each in images.items()
        },
        columns=columns,
        arrays=sensors.arrays,
        dtype=dtype.name if sensors.channels else None,
        window=sensors.value_range or (windows.pop() if len(windows) == 1 else None),
        notes=notes,
        split_by=PARENT if is_cut else None,
    )


# --- files


def _open_scenes(
    files: Images,
    sensors: Sensors,
    pattern: re.Pattern[str] | None,
    scratch: "_Scratch",
    workers: int,
) -> list[_Scene]:
    """Open all files, and say which windows of them are samples."""

    def opened(job: tuple[str, tuple[int, ...]]) -> _Scene:
        name, numbers = job
        paths = [files.paths[number] for number in numbers]
        header = None
        try:
            parts = _open(paths, sensors)
            header = _joined(parts)
            windows = _windows(header, sensors)
            for k, part in enumerate(parts):
                is_tiled = len(windows) > part.total
                # what is decoded as a whole is copied when it is read, and then read by windows
                if not part.has_windows and (is_tiled or (len(windows) > 1 and part.load)):
                    parts[k] = scratch.lazily(part)
            return _Scene(
                name=name,
                file=numbers[0],
                paths=paths,
                planes=_joined(parts),
                windows=windows,
                header=header,
            )
        except BadSample as error:
            return _Scene(name=name, file=numbers[0], paths=paths, planes=error, header=header)

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
            f"--name-pattern: no file's channel is one of --channels={','.join(wanted)!r}"
        )
    for name, files in groups.items():
        for channel in wanted:
            if channel not in files:
                raise DataError(
                    f"{name} has no file of channel {channel!r}; it has: {', '.join(files)}; "
                    "names of a sample's files differ in the group `channel` alone: rename others"
                )
    return [(name, tuple(files[channel] for channel in wanted)) for name, files in groups.items()]


def _open(paths: Sequence[Path], sensors: Sensors) -> list[Planes]:
    pages = Pages(sensors.pages, sensors.slice_axis, sensors.channels is None)
    return [open_planes(path, pages) for path in paths]


def _joined(parts: Sequence[Planes]) -> Planes:
    """Planes of one size and type as the channels of one image. Raises: BadSample."""
    if len(parts) == 1:
        return parts[0]
    kinds = [(part.total, part.shape[:2], part.dtype) for part in parts]
    if other := next((kind for kind in kinds if kind != kinds[0]), None):
        one, two = (f"{total} x {size} {dtype}" for total, size, dtype in (kinds[0], other))
        raise BadSample(f"channels of {one} and {two}")

    def read(image: int, rows: slice, columns: slice) -> Array:
        return np.concatenate([part.read(image, rows, columns) for part in parts], axis=2)

    total, (height, width), dtype = kinds[0]
    channels = sum(part.shape[2] for part in parts)
    remark = next((part.remark for part in parts if part.remark), "")
    return Planes(
        total=total,
        shape=(height, width, channels),
        dtype=dtype,
        read=read,
        remark=remark,
        directions=parts[0].directions,
    )


def _check_type(scenes: Mapping[str, Planes], name: str, sensors: Sensors) -> None:
    """Raise DataError where a scene is of another type than the first one, or than asked for."""
    first = next(iter(scenes))
    planes = scenes[name]
    names = sensors.channels
    types = [(each.shape[2], each.dtype) for each in (scenes[first], planes)]
    (count, dtype), (own_count, own_dtype) = types
    if names is None:
        if own_dtype != np.uint8 or own_count not in (1, 3):
            raise DataError(
                f"{name} has {counted(own_count, 'channel')} of {own_dtype}, of which 8-bit RGB "
                "would lose some: name its channels with --channels NAME,..."
            )
    elif types[0] != types[1]:
        raise DataError(
            f"{first} has {counted(count, 'channel')} of {dtype}, and {name} has "
            f"{counted(own_count, 'channel')} of {own_dtype}: a data set has one type; convert "
            "some, or build two data sets"
        )
    elif count != len(names):
        more = "; --pages=channels reads arrays whose channels come first"
        raise DataError(
            f"{first} has {counted(count, 'channel')}, and --channels names {len(names)}: "
            f"{', '.join(names)}{more * (planes.shape[0] == len(names))}"
        )
    elif names == RGB8.channels and dtype == np.uint8:
        raise DataError("these are 8-bit RGB images: build them with `sslpipe shards build`")


# --- samples


def _windows(planes: Planes, sensors: Sensors) -> list[_Window]:
    """Each image, or its tiles: one every `stride_px`, and one that ends where the side does."""
    height, width, channels = planes.shape
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
    tall = min(tile, height)
    wide = min(tile, width)
    size = tall * wide * channels * planes.dtype.itemsize + NPY_HEADER
    if tall * wide > MAX_PIXELS or size > MAX_BYTES:
        raise BadSample(
            f"{wide} x {tall} px of {channels} channels are {size} bytes, more than the limits of "
            f"{MAX_PIXELS} px and {MAX_BYTES} bytes: cut it with --tile"
        )
    return [
        _Window(page=page, y=top, x=left, height=tall, width=wide)
        for page, top, left in itertools.product(range(planes.total), tops, lefts)
    ]


def _shown(
    split: str, scenes: Sequence[_Scene], least: float, workers: int
) -> tuple[list[_Scene], list[str]]:
    """Keep the tiles of a split that show enough, and say how many do not. Raises: DataError."""
    shown = [_with_content(scene, least, workers) for scene in scenes]
    skipped = sum(
        len(before.windows) - len(after.windows)
        for before, after in zip(scenes, shown, strict=True)
        if isinstance(after.planes, Planes)
    )
    left = sum(len(scene.windows) for scene in shown)
    if not left:
        raise DataError(f"split {split!r}: every tile is empty; give a lower --min-content")
    if not skipped:
        return shown, []
    return shown, [
        f"split {split}: {skipped:,} of {skipped + left:,} tiles skipped, with less than {least:g} "
        "of content"
    ]


def _with_content(scene: _Scene, least: float, workers: int) -> _Scene:
    """Keep those of a scene's tiles that show enough."""
    planes = scene.planes
    windows = scene.windows
    if isinstance(planes, BadSample):
        return scene
    # the range of the scene, by some of its tiles
    looked_at = windows[:: -(-len(windows) // MOST_LOOKED_AT)]
    try:
        with ThreadPoolExecutor(workers) as pool:
            some = pool.map(lambda window: window.of(planes)[::4, ::4].copy(), looked_at)
            seen = [tile.reshape(-1, planes.shape[2]) for tile in some]
            values = np.concatenate(seen).astype(np.float64)
            values[~np.isfinite(values)] = np.nan
            with warnings.catch_warnings(action="ignore"):  # a channel of NaN only
                low, high = np.nanpercentile(values, [1, 99], axis=0)
            shares = pool.map(lambda window: content(window.of(planes), high - low), windows)
            kept = [window for window, share in zip(windows, shares, strict=True) if share >= least]
            return scene._replace(windows=kept)
    except BadSample as error:
        return scene._replace(planes=error, windows=(_Window(),))


def content(pixels: Array, spread: NDArray[np.float64]) -> float:
    """Return what share of a tile's blocks of BLOCK_PX shows something, dark or light.

    In such a block the standard deviation of a channel is over LEAST_DEVIATION of its scene's
    range, from the 1st to the 99th percentile, at every other pixel. Blocks with NaN show nothing.

    Args:
        pixels: (h, w, C).
        spread: (C,), the range of the scene.
    """
    pixels = pixels[::2, ::2]
    height, width, channels = pixels.shape
    tall = min(BLOCK_PX // 2, height)
    wide = min(BLOCK_PX // 2, width)
    whole = pixels[: height // tall * tall, : width // wide * wide].astype(np.float64)
    blocks = whole.reshape(height // tall, tall, width // wide, wide, channels)
    with np.errstate(invalid="ignore"):
        shown = blocks.std(axis=(1, 3)) > LEAST_DEVIATION * spread
    return float(shown.any(axis=2).mean())


def _described(
    files: Images, columns: Columns, scenes: Sequence[_Scene], sensors: Sensors, pixel_bytes: int
) -> tuple[Images, Columns]:
    """Name samples, and give them labels and columns of their files, and where they lie."""
    samples = [(number, window) for number, scene in enumerate(scenes) for window in scene.windows]
    codes = np.array([number for number, _ in samples], np.int32)
    rows = np.array([window for _, window in samples], np.int64)  # (n, 5)
    of_file = np.array([scene.file for scene in scenes], np.int64)[codes]
    repeated = {name: columns.column(name).take(of_file) for name in columns.column_names}
    is_tiled = sensors.tile_px is not None
    used = {PAGE: bool(rows[:, 0].any()), Y: is_tiled, X: is_tiled}
    places = {name: rows[:, k] for k, name in enumerate(used) if used[name]}
    added = {name: pa.array(values) for name, values in places.items()}
    names = [scene.name for scene in scenes]
    if added:
        added[PARENT] = pa.array(names, pa.string()).take(codes)
    for name in added:
        if name in repeated:
            raise DataError(f"column {name!r} says where a tile or page lies; rename your own")
    # what is read once is forgotten, and opened again
    paths = [scene.paths for scene in scenes]
    kept = [
        scene.planes if len(scene.windows) > 1 or isinstance(scene.planes, BadSample) else None
        for scene in scenes
    ]

    def named(number: int) -> str:
        stem, suffix = os.path.splitext(names[samples[number][0]])
        return stem + "".join(f"-{key}{cells[number]}" for key, cells in places.items()) + suffix

    def size(window: _Window) -> int:
        if sensors.channels is None:
            return png_bytes(window.height, window.width, pixel_bytes)
        return NPY_HEADER + window.height * window.width * pixel_bytes

    def read(number: int) -> bytes:
        code, window = samples[number]
        planes = kept[code]
        if isinstance(planes, BadSample):
            raise planes
        pixels = window.of(planes or _joined(_open(paths[code], sensors)))
        if sensors.channels is not None:
            return npy_bytes(pixels)
        grey = pixels[:, :, :1]
        return encode_png(np.ascontiguousarray(grey if (pixels == grey).all() else pixels))

    made = replace(
        files,
        names=[named(number) for number in range(len(samples))],
        labels=files.labels[of_file],
        sizes=np.array([size(window) for _, window in samples], np.int64),
        read=read,
        cells={},
        paths=(),
        are_places=False,
    )
    return made, pa.table({**repeated, **added})


class _Scratch:
    """A file without a name on the disk, for scenes of formats that are decoded as a whole."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._copying = threading.Lock()
        self._file: IO[bytes] | None = None

    def lazily(self, planes: Planes) -> Planes:
        """Planes that are copied when the first window is read: a part or a resume may need none.

        One file is decoded at a time; what is wrong with it is raised for each of its windows.
        """

        @cache
        def copied() -> Callable[[], Array] | BadSample:
            try:
                return self._copy(planes)
            except BadSample as error:
                return error

        def read(image: int, rows: slice, columns: slice) -> Array:
            with self._copying:
                mapped = copied()
            if isinstance(mapped, BadSample):
                raise mapped
            return np.array(mapped()[image, rows, columns])

        return planes._replace(read=read)

    def _copy(self, planes: Planes) -> Callable[[], Array]:
        """Copy all pixels, a band at a time; gives what maps them: an open map holds a file."""
        source = planes.load() if planes.load else planes
        height, width, channels = planes.shape
        dtype = planes.dtype
        rows = max(1, BAND_BYTES // (width * channels * dtype.itemsize))
        try:
            if self._file is None:
                self._folder.mkdir(parents=True, exist_ok=True)
                self._file = tempfile.TemporaryFile(dir=self._folder)  # noqa: SIM115
                weakref.finalize(self, self._file.close)
            file = self._file
            step = mmap.ALLOCATIONGRANULARITY
            start = file.seek(-(-file.seek(0, io.SEEK_END) // step) * step)
            for page, y in itertools.product(range(planes.total), range(0, height, rows)):
                band = source.read(page, slice(y, min(y + rows, height)), slice(0, width))
                file.write(np.ascontiguousarray(band).data)
            file.flush()
        except OSError as error:
            raise DataError(f"cannot copy a scene to {self._folder}: {error.strerror}") from error
        shape = planes.total, *planes.shape
        size = math.prod(shape) * dtype.itemsize

        def mapped() -> Array:  # which moves no position in the file, as np.memmap does
            view = mmap.mmap(file.fileno(), size, access=mmap.ACCESS_READ, offset=start)
            return np.frombuffer(view, dtype).reshape(shape)

        return mapped
