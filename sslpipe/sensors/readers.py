"""Files as sensors write them: what a header says they hold, and their pixels by windows.

A header is judged before anything is decoded. Readers are imported where a file needs them, from
the extra `sensors`. To add a format: a function of path and `Pages`, and a line in `_FORMATS`.
"""

import io
import itertools
import logging
import math
import os
import struct
import warnings
import zipfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import IO, Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps

from sslpipe.data.decode import (
    PILLOW,
    BadSample,
    first_line,
    image_kind,
    looks_like,
    rgb_pixels,
    without_text,
)
from sslpipe.data.storage import load_array, npy_header
from sslpipe.errors import DataError, install
from sslpipe.portable import gib, open_regular, read_regular
from sslpipe.sharding.sources import open_file

MOST_DECODED = 2**30  # bytes of pixels that are in memory at once, of a file without windows
MOST_SEGMENT = 2**28  # bytes of a strip or tile of a TIFF
MOST_PAGES = 2**16
MOST_SIDE = 2**20
EXACT_FLOAT32 = 2**24  # integers up to it
_ORIENTATION = 0x0112
_TRANSPOSED = range(5, 9)

_WHITE = "are {}: their lowest value means white and is kept; invert them if others are not"
_NO_DATA = (
    "state the no-data value {:g}, which is measured and shown like others; write NaN in its place "
    "and give --nan"
)
_PADDING = (
    "state the padding value {:g}, which is measured and shown like others; give --range of what "
    "is to be seen"
)

Array = NDArray[Any]
Get = Callable[[tuple[Any, ...]], Array]  # integers and slices -> what they select
Read = Callable[[int, slice, slice], Array]  # image, rows, columns -> (h, w, C)


class Pages(NamedTuple):
    """What a file with more dimensions than an image has means."""

    pages: Literal["channels", "samples"] | None = None  # what its pages are; None: it has one
    slice_axis: int = 2  # the dimension of a volume along which its slices lie: 0, 1 or 2
    as_rgb8: bool = False  # whether other formats than TIFF are read as 8-bit RGB


class Planes(NamedTuple):
    """Images of one size and type that a file holds."""

    total: int
    shape: tuple[int, int, int]  # (h, w, C) of each
    dtype: np.dtype[Any]  # as it is stored: uint8, uint16 or float32
    read: Read  # gives a window of one of them, of `dtype`; raises BadSample
    # of a file that is only decoded as a whole: decodes it, and gives the same in memory
    load: "Callable[[], Planes] | None" = None
    has_windows: bool = True  # whether a window is read without most of the rest
    window: tuple[float, float] | None = None  # low and high value that the file says to look at
    remark: str = ""  # what it says of its values, which stay what they are: "are MINISWHITE ..."
    directions: str = ""  # to which the axes of a volume lead, such as RAS


def open_planes(path: Path, pages: Pages) -> Planes:
    """Return what a file holds, by its first bytes and its header.

    Raises:
        BadSample: It is damaged, too large, or of a kind that is not read.
        DataError: A library is missing, or the file cannot be opened.
    """
    with open_file(path) as file:
        start = file.read(348)
        size = file.seek(0, io.SEEK_END)
    readers = [reader for is_kind, reader in _FORMATS if is_kind(start, path.name.lower())]
    if not readers:
        raise BadSample(f"not an image of a known format: {looks_like(start)}")
    planes: Planes = _guarded(path, readers[0], path, pages, size)
    height, width, _ = planes.shape
    if min(*planes.shape, planes.total) < 1 or max(height, width) > MOST_SIDE:
        raise BadSample(f"the header says {planes.total} images of {width} x {height} px")
    if planes.total > MOST_PAGES:
        raise BadSample(f"{planes.total} images, more than the limit of {MOST_PAGES}")
    load = planes.load and partial(_guarded, path, planes.load)
    return planes._replace(read=partial(_guarded, path, planes.read), load=load)


def _guarded(path: Path, read: Callable[..., Any], *arguments: Any) -> Any:
    """Call a reader; whatever goes wrong is a BadSample, or a DataError that says what to do."""
    try:
        return read(*arguments)
    except UnknownPages as error:
        raise UnknownPages(
            f"{path} has {error}; say what they are: --pages=channels or --pages=samples"
        ) from error
    except (BadSample, DataError):
        raise
    except ImportError as error:
        raise DataError(
            f"{path} needs a library that is missing ({first_line(error)}): {install('sensors')}"
        ) from error
    except MemoryError as error:
        raise BadSample("no memory to decode it") from error
    except Exception as error:  # damaged bytes make the readers raise almost anything
        is_inner = isinstance(error, AttributeError | TypeError | LookupError)  # of a reader's code
        text = f"damaged ({type(error).__name__})" if is_inner else first_line(error)
        raise BadSample(f"not a readable image: {text}") from error


class UnknownPages(DataError):
    """A file has pages, and no option says what they are."""


# --- from a file's own dimensions to images


def _stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    if dtype.kind not in "uif":
        raise BadSample(f"its values are {dtype}, neither integers nor floats")
    is_short = dtype.kind == "u" and dtype.itemsize <= 2
    return np.dtype(f"<u{dtype.itemsize}" if is_short else "<f4")


def _cast(pixels: Array, dtype: np.dtype[Any]) -> Array:
    """Convert to what is stored; integers that a float32 does not hold are a BadSample."""
    if dtype.kind == "f" and pixels.dtype.kind in "ui" and pixels.dtype.itemsize > 2:
        largest = max(abs(int(pixels.max(initial=0))), abs(int(pixels.min(initial=0))))
        if largest > EXACT_FLOAT32:
            raise BadSample(f"holds the integer {largest}, which float32 cannot hold: divide it")
    with np.errstate(over="ignore"):
        return pixels.astype(dtype, copy=False)


def _check_decoded(shape: Sequence[int], *dtypes: np.dtype[Any]) -> None:
    if (size := math.prod(shape) * max(each.itemsize for each in dtypes)) > MOST_DECODED:
        raise BadSample(
            f"{gib(size)} of pixels, more than the limit of {gib(MOST_DECODED)} for a file without "
            "windows: save it as a tiled TIFF"
        )


def _arranged(
    axes: str,
    shape: Sequence[int],
    dtype: np.dtype[Any],
    get: Get | None = None,
    load: Callable[[], Array] | None = None,
    pages: str | None = "samples",
) -> Planes:
    """Planes of an array that a file holds.

    Args:
        axes: A letter for each dimension: Y, X, of channels C or S, others of images; v is first.
        shape: Of the array.
        dtype: Of the file; values that `get` or `load` converted may be of another.
        get: Gives what an index of the array, of integers and slices, selects.
        load: Decodes all of it, where nothing less can be; instead of `get`.
        pages: See `Pages`; "channels": dimensions of images are channels.
    """
    images = [k for k, axis in enumerate(axes) if axis not in "YXCS"]
    if pages is None and images:
        raise UnknownPages(f"pages, {axes} {tuple(shape)}")
    images = [] if pages == "channels" else sorted(images, key=lambda k: axes[k] != "v")
    y = axes.index("Y")
    x = axes.index("X")
    counts = [shape[k] for k in images]
    kept = [k for k in range(len(axes)) if k not in images]
    order = [kept.index(y), kept.index(x), *(n for n, k in enumerate(kept) if k not in (y, x))]
    stored = _stored_dtype(dtype)

    def reader(get: Get) -> Read:
        def read(image: int, rows: slice, columns: slice) -> Array:
            at: list[Any] = [slice(None)] * len(axes)
            at[y] = rows
            at[x] = columns
            for k, place in zip(images, np.unravel_index(image, counts), strict=True):
                at[k] = int(place)
            window = np.array(np.asarray(get(tuple(at))).transpose(order), order="C")
            return _cast(window.reshape(*window.shape[:2], -1), stored)

        return read

    def loaded() -> Array:
        assert load is not None
        if (array := load()).shape != tuple(shape):
            raise BadSample(f"holds {array.shape}, and its header says {tuple(shape)}")
        return array

    size = shape[y], shape[x], math.prod(shape[kept[n]] for n in order[2:])
    planes = Planes(math.prod(counts), size, stored, reader(get or (lambda at: loaded()[at])))
    if load is None:
        return planes
    _check_decoded(shape, dtype, stored)
    return planes._replace(
        load=lambda: planes._replace(read=reader(loaded().__getitem__)), has_windows=False
    )


def _mapped(
    path: Path, dtype: np.dtype[Any], offset: int, shape: tuple[int, ...], order: Any = "C"
) -> Get:
    """Get from pixels that lie in one piece."""

    def get(at: tuple[Any, ...]) -> Array:
        with open_regular(path) as file:
            window: Array = np.memmap(file, dtype, "r", offset, shape, order)[at]
            return window

    return get


# --- TIFF


def _is_tiff(start: bytes, name: str) -> bool:
    return start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def _open_tiff(path: Path, pages: Pages, size: int) -> Planes:
    """The images of a TIFF, BigTIFF or OME-TIFF, at full size."""
    import imagecodecs  # noqa: F401  # a codec that is missing would look like damage
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)  # it raises as well
    with (
        open_regular(path) as file,
        tifffile.TiffFile(file, name=path.name, _multifile=False) as tiff,
    ):
        with suppress(IndexError):
            tiff.pages[MOST_PAGES]
            raise BadSample(f"more than {MOST_PAGES} pages, or a loop of them")
        stack = _stack(tiff.series)
        gets = [_get_of_series(path, tiff.byteorder, series, pages, size) for series in stack]
        first = stack[0]
        axes = first.axes
        shape = tuple(first.shape)
        dtype = first.dtype
        has_windows = all(_is_mapped(each) or each.keyframe.is_tiled for each in stack)
    get = gets[0]
    if len(stack) > 1:
        axes = f"Q{axes}"
        shape = (len(stack), *shape)
        get = _stacked(gets)
    planes = _arranged(axes=axes, shape=shape, dtype=dtype, get=get, pages=pages.pages)
    return planes._replace(has_windows=has_windows, remark=_remark(first.keyframe))


def _remark(page: Any) -> str:
    if page.photometric.name == "MINISWHITE":
        return _WHITE.format("MINISWHITE")
    is_stated = "GDAL_NODATA" in page.tags and math.isfinite(page.nodata)
    return _NO_DATA.format(page.nodata) if is_stated else ""


def _stack(series: Sequence[Any]) -> list[Any]:
    """Return the series that hold a file's images: many programs append each page as one more.

    Masks and the smaller pictures of a slide are skipped.
    """
    first = series[0]
    stack = [first]
    for other in series[1:]:
        page = other.keyframe
        if (other.axes, other.shape, other.dtype) == (first.axes, first.shape, first.dtype):
            stack.append(other)
        elif not (page.is_reduced or page.is_mask or 4 * _px(other) < _px(first)):
            raise BadSample(
                f"holds images of {first.axes} {first.shape} {first.dtype} and of {other.axes} "
                f"{other.shape} {other.dtype}; save each kind in a file of its own"
            )
    return stack


def _px(series: Any) -> int:
    return int(series.keyframe.imagelength * series.keyframe.imagewidth)


def _is_mapped(series: Any) -> bool:
    """Return whether its pixels lie uncompressed in one piece."""
    return series.dataoffset is not None


def _get_of_series(path: Path, byteorder: str, series: Any, pages: Pages, size: int) -> Get:
    """Get from a series of pages of one shape."""
    key = series.keyframe
    colours = key.photometric.name
    is_inverted = pages.as_rgb8 and colours == "MINISWHITE"
    is_luminance = colours == "YCBCR" and key.compression not in _JPEG
    if colours not in _COLOURS or is_inverted or is_luminance:
        raise BadSample(f"its colours are {colours}; save it as grey or RGB")
    if key.axes not in _OF_PAGE or not series.axes.endswith(key.axes):
        raise BadSample(
            f"its dimensions are {series.axes}, in pages of {key.axes}; save pages of YX"
        )
    if not _is_mapped(series):
        return _segmented(path, series, size)
    shape = tuple(series.shape)
    if series.dataoffset + math.prod(shape) * series.dtype.itemsize > size:
        raise BadSample("is truncated: its pixels end beyond the file")
    dtype = series.dtype.newbyteorder(byteorder)
    return _mapped(path=path, dtype=dtype, offset=series.dataoffset, shape=shape)


def _stacked(gets: Sequence[Get]) -> Get:
    """Get from arrays of one shape as from one array of them."""
    numbers = np.arange(len(gets))

    def get(at: tuple[Any, ...]) -> Array:
        wanted = numbers[at[0]]
        parts = [gets[k](at[1:]) for k in wanted.flat]
        return np.reshape(parts, (*wanted.shape, *parts[0].shape))

    return get


_COLOURS = ("MINISBLACK", "MINISWHITE", "RGB", "YCBCR")
_JPEG = (6, 7, 34892, 33007)  # which tifffile converts to RGB
# dimensions of a page -> them, of (separate samples, h, w, samples side by side)
_OF_PAGE: dict[str, Any] = {"YX": np.s_[0, :, :, 0], "YXS": np.s_[0], "SYX": np.s_[..., 0]}


def _segmented(path: Path, series: Any, size: int) -> Get:
    """Get from the strips or tiles of a series' pages: only those that a window needs."""
    key = series.keyframe
    decode = key.decode
    nodata = key.nodata
    dtype = key.dtype
    in_page = len(key.axes)
    planes, _, height, width, samples = key.shaped
    tall = min(key.rowsperstrip, height)
    wide = width
    if key.is_tiled:
        tall = key.tilelength
        wide = key.tilewidth
    if tall * wide * samples * dtype.itemsize > MOST_SEGMENT:
        raise BadSample(
            f"strips or tiles of {wide} x {tall} px, more than {MOST_SEGMENT / 2**20:.0f} MiB; "
            "save it as a tiled TIFF"
        )
    grid = planes, -(-height // tall), -(-width // wide)
    pages = [_segments_of(page, math.prod(grid), size) for page in series.pages]
    outer = series.shape[:-in_page]
    if len(pages) != math.prod(outer):
        raise BadSample(f"does not have the {math.prod(outer)} pages of its header")
    numbers = np.arange(len(pages)).reshape(outer)

    def read(file: IO[bytes], number: int, rows: slice, columns: slice) -> Array:
        page = pages[number]
        top, bottom, _ = rows.indices(height)
        left, right, _ = columns.indices(width)
        window = np.full((planes, bottom - top, right - left, samples), nodata, dtype)
        down = range(top // tall, -(-bottom // tall))
        across = range(left // wide, -(-right // wide))
        for place in itertools.product(range(planes), down, across):
            segment = int(np.ravel_multi_index(place, grid))
            if not page.sizes[segment]:  # a hole: no data
                continue
            raw = os.pread(file.fileno(), int(page.sizes[segment]), int(page.offsets[segment]))
            y = place[1] * tall
            x = place[2] * wide
            if key.compression in _JPEG:
                decoded = decode(
                    raw, segment, jpegtables=page.jpeg_tables, jpegheader=key.jpegheader
                )
            else:
                decoded = decode(raw, segment)
            part = decoded[0][0, max(0, top - y) :, max(0, left - x) :]
            target = window[place[0], max(0, y - top) :, max(0, x - left) :]
            part = part[: target.shape[0], : target.shape[1]]
            target[: part.shape[0], : part.shape[1]] = part
        return window

    def get(at: tuple[Any, ...]) -> Array:
        wanted = numbers[at[:-in_page]]
        rows, columns = (at[len(outer) + key.axes.index(axis)] for axis in "YX")
        with open_regular(path) as file:
            parts = [read(file, k, rows, columns)[_OF_PAGE[key.axes]] for k in wanted.flat]
        return np.reshape(parts, (*wanted.shape, *parts[0].shape))

    return get


class _Segments(NamedTuple):
    """The strips or tiles of a page."""

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]  # in bytes; 0: a hole
    jpeg_tables: bytes | None  # what a JPEG in them lacks


def _segments_of(page: Any, count: int, file_size: int) -> _Segments:
    """Return the `count` strips or tiles of a page. Raises BadSample where a header lies."""
    offsets = np.array(page.dataoffsets, np.int64)
    sizes = np.array(page.databytecounts, np.int64)
    if len(offsets) != len(sizes) or (offsets + sizes).max(initial=0) > file_size:
        raise BadSample("is truncated: its pixels end beyond the file")
    if len(offsets) != count:
        raise BadSample(f"does not have the {count} strips or tiles of its header")
    return _Segments(offsets, sizes, page.jpegtables)


# --- arrays


def _open_npy(path: Path, pages: Pages, size: int) -> Planes:
    with open_regular(path) as file:
        shape, fortran, dtype = npy_header(file)
        offset = file.tell()
    if offset + math.prod(shape) * dtype.itemsize > size:
        raise BadSample(f"is truncated: {size} bytes do not hold {shape} {dtype}")
    get = _mapped(path=path, dtype=dtype, offset=offset, shape=shape, order="F" if fortran else "C")
    return _arranged(
        axes=_array_axes(shape, pages), shape=shape, dtype=dtype, get=get, pages=pages.pages
    )


def _open_npz(path: Path, pages: Pages, size: int) -> Planes:
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if len(names) != 1:
            listed = ", ".join(name.removesuffix(".npy") for name in names[:5])
            raise BadSample(f"holds {len(names)} arrays ({listed}), and an image is one")
        with archive.open(names[0]) as member:
            shape, _, dtype = npy_header(member)

    def load() -> Array:
        with (
            open_regular(path) as file,
            zipfile.ZipFile(file) as archive,
            archive.open(names[0]) as member,
        ):
            return load_array(member)

    return _arranged(
        axes=_array_axes(shape, pages),
        shape=shape,
        dtype=dtype,
        get=None,
        load=load,
        pages=pages.pages,
    )


def _array_axes(shape: tuple[int, ...], pages: Pages) -> str:
    """Dimensions of an array (h, w) or (h, w, C); with --pages (pages, h, w) or with C behind."""
    known = {2: "YX", 3: "YXS"} if pages.pages is None else {2: "YX", 3: "QYX", 4: "QYXS"}
    if len(shape) not in known:
        raise BadSample(f"an array of {shape}: give (h, w), (h, w, C), or pages first and --pages")
    return known[len(shape)]


# --- pictures


def _open_png(path: Path, pages: Pages, size: int) -> Planes:
    """A PNG of 16 bits: Pillow keeps 8 of its colours."""
    from imagecodecs import png_decode

    with open_regular(path) as file:
        width, height, _, colours = struct.unpack(">IIBB", file.read(26)[16:])
    shape = (height, width, {0: 1, 2: 3, 4: 2, 6: 4}[colours])

    def load() -> Array:
        pixels = np.asarray(png_decode(read_regular(path, MOST_DECODED)))
        return pixels.reshape(*pixels.shape[:2], -1)

    return _arranged("YXS", shape, np.dtype("u2"), load=load)


def _open_picture(path: Path, pages: Pages, size: int) -> Planes:
    """What Pillow reads, upright: 8 bits a value."""

    def opened(file: IO[bytes]) -> Image.Image:
        kind = image_kind(file.read(16))
        file.seek(0)
        if kind is not None:
            whole = io.BytesIO(without_text(file.read())) if kind == "png" else file
            return PILLOW[kind](whole)  # type: ignore[no-any-return]
        return Image.open(file, formats=("BMP", "GIF", "PPM"))

    with open_regular(path) as file:
        image = opened(file)
        width, height = image.size
        is_turned = image.getexif().get(_ORIENTATION) in _TRANSPOSED
    channels = 3 if pages.as_rgb8 else _MODES.get(image.mode)
    if channels is None:
        raise BadSample(
            f"its values are of Pillow's mode {image.mode}; save it as 8-bit grey or RGB"
        )

    def load() -> Array:
        image = opened(io.BytesIO(read_regular(path, MOST_DECODED)))
        if image.size != (width, height):
            raise BadSample("two headers that differ")
        pixels = rgb_pixels(image) if pages.as_rgb8 else np.array(ImageOps.exif_transpose(image))
        return pixels.reshape(*pixels.shape[:2], -1)

    sides = (width, height) if is_turned else (height, width)
    return _arranged("YXS", (*sides, channels), np.dtype("u1"), load=load)


_MODES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


# --- volumes


def _open_dicom(path: Path, pages: Pages, size: int) -> Planes:
    """The frames of a DICOM file, rescaled to what its modality measures; its window."""
    import pydicom
    from pydicom.pixels.utils import pixel_array

    pydicom.config.settings.reading_validation_mode = pydicom.config.IGNORE
    warnings.filterwarnings("ignore", module="pydicom")  # of headers that it mends
    with open_regular(path) as file:
        if _DEFLATED in file.read(4096):
            raise BadSample("a DICOM file that is deflated as a whole, which is not read")
        file.seek(0)
        header = pydicom.dcmread(file, stop_before_pixels=True)
    if "Rows" not in header:
        raise BadSample("a DICOM file without pixels")
    if header.PhotometricInterpretation == "PALETTE COLOR" or "ModalityLUTSequence" in header:
        raise BadSample("a DICOM file whose values are places in a table, which is not read")
    sides = int(header.Rows), int(header.Columns), int(header.SamplesPerPixel)
    frames = int(header.get("NumberOfFrames") or 1)
    bits = int(header.BitsAllocated)
    raw = np.dtype(f"{'i' if header.get('PixelRepresentation') else 'u'}{max(1, bits // 8)}")
    if pages.pages == "channels" and frames > 1:
        raise BadSample(f"{frames} frames, which are images: leave --pages=channels out")
    _check_decoded(sides, raw)
    slope, intercept = rescale = _rescale(header)
    syntax = header.file_meta.get("TransferSyntaxUID")

    def get(at: tuple[Any, ...]) -> Array:
        try:
            with open_regular(path) as file:
                pixels = pixel_array(file, index=at[0])
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            name = getattr(syntax, "name", syntax)
            why = " ".join(str(error).split())[:200]  # it lists the decoders, a line each
            raise BadSample(f"cannot decode DICOM's {name}: {why}") from error
        window: Array = pixels.reshape(sides)[at[1:]]
        return window if rescale == (1, 0) else window.astype(np.float64) * slope + intercept

    dtype = raw if rescale == (1, 0) else np.dtype("f4")
    planes = _arranged(axes="IYXS", shape=(frames, *sides), dtype=dtype, get=get)
    window = _look_at(header)
    padding = header.get("PixelPaddingValue")
    remark = ""
    if header.PhotometricInterpretation == "MONOCHROME1":
        remark = _WHITE.format("MONOCHROME1")
    elif window is None and isinstance(padding, int):
        remark = _PADDING.format(padding * slope + intercept)
    return planes._replace(has_windows=False, window=window, remark=remark)


_DEFLATED = b"1.2.840.10008.1.2.1.99"  # small files may hold any number of bytes


def _rescale(header: Any) -> tuple[float, float]:
    """Slope and intercept, also of an enhanced file, whose frames share them."""
    groups = header.get("SharedFunctionalGroupsSequence") or [{}]
    shared = groups[0].get("PixelValueTransformationSequence") or [header]
    frames = header.get("PerFrameFunctionalGroupsSequence") or [{}]
    if any("PixelValueTransformationSequence" in frame for frame in frames):
        raise BadSample("a DICOM file that rescales each frame on its own, which is not read")
    slope = shared[0].get("RescaleSlope")
    intercept = shared[0].get("RescaleIntercept")
    return float(1 if slope is None else slope), float(intercept or 0)


def _look_at(header: Any) -> tuple[float, float] | None:
    """Low and high value of the first window. Source: DICOM PS3.3, C.11.2.1.2."""
    centre = header.get("WindowCenter")
    width = header.get("WindowWidth")
    if centre is None or width is None:
        return None
    centre, width = (float(np.atleast_1d(each)[0]) for each in (centre, width))
    return (centre - width / 2, centre + width / 2) if width > 0 else None


def _is_nifti(start: bytes, name: str) -> bool:
    return start[344:347] in (b"n+1", b"ni1") or start[4:8] == b"n+2\0" or name.endswith(".nii.gz")


def _open_nifti(path: Path, pages: Pages, size: int) -> Planes:
    """The slices of a volume along `slice_axis`, rescaled; volumes of a series are pages."""
    import nibabel

    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL + 1)  # it mends headers
    image: Any = nibabel.load(path)
    shape = image.shape
    data = image.dataobj
    if len(shape) not in (3, 4):
        raise BadSample(f"a volume of {shape}, neither 3 nor 4 dimensions")
    if shape[3:] > (1,) and pages.pages is None:
        raise UnknownPages(f"{shape[3]} volumes {shape}")
    axes = ("ZYX", "YZX", "YXZ")[pages.slice_axis]
    axes += ("C" if pages.pages == "channels" else "v") * (len(shape) - 3)
    dtype = image.get_data_dtype()
    if (data.slope, data.inter) != (1, 0) and dtype.kind in "uif":
        dtype = np.dtype("f8")
    if path.name.lower().endswith(".gz"):
        planes = _arranged(axes, shape, dtype, load=lambda: np.asanyarray(image.dataobj))
    else:
        planes = _arranged(axes=axes, shape=shape, dtype=dtype, get=data.__getitem__)
    return planes._replace(directions=directions_of(image.affine))


def directions_of(affine: Array) -> str:
    """Return the directions to which a volume's axes lead, such as RAS; "" where none are known."""
    from nibabel import aff2axcodes

    try:
        with np.errstate(all="ignore"):
            return "".join(map(str, aff2axcodes(affine)))
    except (TypeError, ValueError):  # numbers that are no directions
        return ""


_FORMATS: tuple[tuple[Callable[[bytes, str], bool], Callable[[Path, Pages, int], Planes]], ...] = (
    # before TIFF: the first 128 bytes of a DICOM file may be those of a TIFF
    (lambda start, name: start[128:132] == b"DICM", _open_dicom),
    (_is_tiff, _open_tiff),
    (lambda start, name: start[:6] == b"\x93NUMPY", _open_npy),
    (lambda start, name: start[:4] == b"PK\3\4", _open_npz),
    (_is_nifti, _open_nifti),
    (lambda start, name: image_kind(start) == "png" and start[24:25] == b"\x10", _open_png),
    (lambda start, name: image_kind(start) is not None or start[:1] in b"BGP", _open_picture),
)
