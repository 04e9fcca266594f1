"""Files as sensors write them: what a header says they hold, and their pixels by windows.

A header is judged before anything is decoded. Readers are imported where a file needs them, from
the extra `sensors`. To add a format: a function of path and `Pages`, and a line in `_FORMATS`.
"""

import io
import logging
import math
import struct
import warnings
import zipfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
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
)
from sslpipe.errors import DataError
from sslpipe.portable import open_regular, read_at, read_regular

MOST_DECODED = 2**30  # bytes of pixels that are in memory at once, of a file without windows
MOST_SEGMENT = 2**28  # bytes of a strip or tile of a TIFF
MOST_PAGES = 2**16
MOST_SIDE = 2**20
EXACT_FLOAT32 = 2**24  # integers up to it
_ORIENTATION = 0x0112
_TRANSPOSED = range(5, 9)

Array = NDArray[Any]
Read = Callable[[int, slice, slice], Array]  # image, rows, columns -> (h, w, C)


class Pages(NamedTuple):
    """What a file with more dimensions than an image has means.

    Args:
        pages: Whether its pages are channels of one image, or images; None: it has one page.
        slice_axis: The dimension of a volume along which its slices lie: 0, 1 or 2.
        as_rgb8: Whether other formats than TIFF are read as 8-bit RGB.
    """

    pages: Literal["channels", "samples"] | None = None
    slice_axis: int = 2
    as_rgb8: bool = False


class Planes(NamedTuple):
    """Images of one size and type that a file holds.

    Args:
        total: How many.
        shape: (h, w, C) of each.
        dtype: As it is stored: uint8, uint16 or float32.
        read: Gives a window of one of them, of `dtype`; raises BadSample.
        load: Of a file that is only decoded as a whole: decodes it, and gives the same in memory.
        has_windows: Whether a window is read without most of the rest.
        window: Low and high value that the file says to look at.
        parts: Of several files, their own planes, whose channels these are.
    """

    total: int
    shape: tuple[int, int, int]
    dtype: np.dtype[Any]
    read: Read
    load: "Callable[[], Planes] | None" = None
    has_windows: bool = True
    window: tuple[float, float] | None = None
    parts: "tuple[Planes, ...]" = ()


def open_planes(path: Path, pages: Pages) -> Planes:
    """Say what a file holds, by its first bytes and its header.

    Raises:
        BadSample: It is damaged, too large, or of a kind that is not read.
        DataError: A library is missing, or the file cannot be opened.
    """
    try:
        with open_regular(path) as file:
            start = file.read(348)
            size = file.seek(0, io.SEEK_END)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    with _readable(path):
        for is_kind, opened in _FORMATS:
            if is_kind(start, path.name.lower()):
                planes = _checked(opened(path, pages, size))
                load = planes.load and partial(_guarded, path, planes.load)
                return planes._replace(read=partial(_guarded, path, planes.read), load=load)
    raise BadSample(f"not an image of a known format: {looks_like(start)}")


def _guarded(path: Path, read: Callable[..., Any], *window: Any) -> Any:
    with _readable(path):
        return read(*window)


def _checked(planes: Planes) -> Planes:
    height, width, channels = planes.shape
    if not (0 < height <= MOST_SIDE and 0 < width <= MOST_SIDE and channels and planes.total):
        raise BadSample(f"the header says {planes.total} images of {width} x {height} px")
    if planes.total > MOST_PAGES:
        raise BadSample(f"{planes.total} images, more than the limit of {MOST_PAGES}")
    return planes


class _Ambiguous(Exception):
    """A file has pages, and nothing says what they are."""


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (BadSample, DataError):
        raise
    except _Ambiguous as error:
        raise DataError(
            f"{path} has {error}; say what they are: --pages channels or --pages samples"
        ) from error
    except ImportError as error:
        raise DataError(
            f"{path} needs a library that is missing ({first_line(error)}): "
            'pip install "sslpipe[sensors]"'
        ) from error
    except MemoryError as error:
        raise BadSample("no memory to decode it") from error
    except Exception as error:  # damaged bytes make the readers raise almost anything
        raise BadSample(f"not a readable image: {first_line(error)}") from error


# --- types


def stored_dtype(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Say what numbers are stored as: uint8, uint16, else float32. Raises: BadSample."""
    if dtype.kind not in "uif":
        raise BadSample(f"its values are {dtype}, neither integers nor floats")
    if dtype.kind == "u" and dtype.itemsize <= 2:
        return np.dtype(f"<u{dtype.itemsize}")
    return np.dtype("<f4")


def cast(pixels: Array, dtype: np.dtype[Any]) -> Array:
    """Convert to what is stored; integers that a float32 does not hold are a BadSample."""
    if dtype.kind == "f" and pixels.dtype.kind in "ui" and pixels.dtype.itemsize > 2:
        largest = max(abs(int(pixels.max(initial=0))), abs(int(pixels.min(initial=0))))
        if largest > EXACT_FLOAT32:
            raise BadSample(f"holds the integer {largest}, which is none of float32: divide it")
    with np.errstate(over="ignore"):
        return pixels.astype(dtype, copy=False)


def _check_decoded(count: int, dtype: np.dtype[Any]) -> None:
    if (size := count * dtype.itemsize) > MOST_DECODED:
        raise BadSample(
            f"{size / 2**30:.1f} GiB of pixels, more than the limit of {MOST_DECODED / 2**30:.0f} "
            "GiB for a file without windows: save it as a tiled TIFF"
        )


def _in_memory(pixels: Array, dtype: np.dtype[Any]) -> Planes:
    """Planes of (n, h, w, C) pixels."""

    def read(image: int, rows: slice, columns: slice) -> Array:
        return cast(pixels[image, rows, columns], dtype)

    count, height, width, channels = pixels.shape
    return Planes(count, (height, width, channels), dtype, read)


def _whole(load: Callable[[], Array], shape: tuple[int, ...], dtype: np.dtype[Any]) -> Planes:
    """Planes of a file that is decoded as a whole: `load` gives (n, h, w, C)."""
    count, height, width, channels = shape
    stored = stored_dtype(dtype)
    _check_decoded(math.prod(shape), max(dtype, stored, key=lambda each: each.itemsize))

    def loaded() -> Planes:
        pixels = load()
        if pixels.shape != shape:
            raise BadSample(f"holds {pixels.shape}, and its header says {shape}")
        return _in_memory(pixels, stored)

    def read(image: int, rows: slice, columns: slice) -> Array:
        return loaded().read(image, rows, columns)

    return Planes(count, (height, width, channels), stored, read, loaded, has_windows=False)


# --- TIFF


def _is_tiff(start: bytes, name: str) -> bool:
    return start[:4] in (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+")


def _open_tiff(path: Path, pages: Pages, size: int) -> Planes:
    """The first series of a TIFF, BigTIFF or OME-TIFF, at full size."""
    import imagecodecs  # noqa: F401  # a codec that is missing would look like damage
    import tifffile

    logging.getLogger("tifffile").setLevel(logging.CRITICAL + 1)  # it raises as well
    with (
        open_regular(path) as file,
        tifffile.TiffFile(file, name=path.name, _multifile=False) as tiff,
    ):
        if _has_page(tiff, MOST_PAGES):
            raise BadSample(f"more than {MOST_PAGES} pages, or a loop of them")
        series = tiff.series[0]
        key: Any = series.keyframe
        axes, shape = series.axes, tuple(series.shape)
        colours = key.photometric.name
        is_inverted = pages.as_rgb8 and colours == "MINISWHITE"
        is_luminance = colours == "YCBCR" and key.compression not in _JPEG
        if colours not in _COLOURS or is_inverted or is_luminance:
            raise BadSample(f"its colours are {colours}; save it as grey or RGB")
        inner = key.axes
        if not axes.endswith(inner) or set(inner) - set("YXS") or not set("YX") <= set(inner):
            raise BadSample(f"its dimensions are {axes}, in pages of {inner}; save pages of YX")
        outer = shape[: len(shape) - len(inner)]
        if series.dataoffset is not None:  # uncompressed, in one piece
            if series.dataoffset + math.prod(shape) * series.dtype.itemsize > size:
                raise BadSample("is truncated: its pixels end beyond the file")
            dtype = series.dtype.newbyteorder(tiff.byteorder)
            plane = _mapped_page(path, series.dataoffset, dtype, shape[len(outer) :], inner)
            has_windows = True
        else:
            if None in series.pages or len(series.pages) != math.prod(outer):
                raise BadSample(f"does not have the {math.prod(outer)} pages of its header")
            segments = [_segments(page, size) for page in series.pages]
            plane, has_windows = _segment_page(path, key, segments), key.is_tiled
    planes = _arranged(axes, shape, len(inner), stored_dtype(series.dtype), plane, pages)
    return planes._replace(has_windows=has_windows)


_COLOURS = ("MINISBLACK", "MINISWHITE", "RGB", "YCBCR")
_JPEG = (6, 7, 34892, 33007)  # which tifffile converts to RGB


def _has_page(tiff: Any, number: int) -> bool:
    try:
        tiff.pages[number]
    except IndexError:
        return False
    return True


def _arranged(
    axes: str, shape: tuple[int, ...], inner: int, dtype: np.dtype[Any], plane: Read, pages: Pages
) -> Planes:
    """Planes of pages, of which `plane` reads (h, w, S): which are images, which are channels."""
    outer = shape[: len(shape) - inner]
    images = [k for k in range(len(outer)) if axes[k] not in "CS"]
    if pages.pages is None and images:
        raise _Ambiguous(f"pages, {axes} {shape}")
    if pages.pages == "channels":
        images = []
    # numbers of pages, (images, channels)
    rest = [k for k in range(len(outer)) if k not in images]
    count = math.prod(outer[k] for k in images)
    numbers = np.arange(math.prod(outer)).reshape(outer).transpose(*images, *rest)
    numbers = numbers.reshape(count, -1)
    sides = dict(zip(axes[-inner:], shape[len(outer) :], strict=True))

    def read(image: int, rows: slice, columns: slice) -> Array:
        parts = [plane(number, rows, columns) for number in numbers[image].tolist()]
        return cast(np.concatenate(parts, axis=2), dtype)

    channels = numbers.shape[1] * sides.get("S", 1)
    return Planes(count, (sides["Y"], sides["X"], channels), dtype, read)


def _mapped_page(
    path: Path, offset: int, dtype: np.dtype[Any], inner: tuple[int, ...], axes: str
) -> Read:
    """Read windows of pixels that lie in one piece."""
    page_bytes = math.prod(inner) * dtype.itemsize
    order = [axes.index(axis) for axis in "YXS" if axis in axes]

    def read(page: int, rows: slice, columns: slice) -> Array:
        with open_regular(path) as file:
            pixels = np.memmap(file, dtype, "r", offset + page * page_bytes, inner)
            window = np.array(pixels.transpose(order)[rows, columns])
            return window.reshape(*window.shape[:2], -1)

    return read


class _Segments(NamedTuple):
    """Where the strips or tiles of a page lie, and what a JPEG in them lacks."""

    offsets: NDArray[np.int64]
    sizes: NDArray[np.int64]
    tables: dict[str, Any]


def _segments(page: Any, size: int) -> _Segments:
    key = page.keyframe
    offsets, sizes = np.array(page.dataoffsets, np.int64), np.array(page.databytecounts, np.int64)
    if len(offsets) != len(sizes) or (offsets + sizes).max(initial=0) > size:
        raise BadSample("is truncated: its pixels end beyond the file")
    is_jpeg = key.compression in _JPEG
    tables = {"jpegtables": page.jpegtables, "jpegheader": key.jpegheader} if is_jpeg else {}
    return _Segments(offsets, sizes, tables)


def _segment_page(path: Path, key: Any, pages: list[_Segments]) -> Read:
    """Read windows of a page's strips or tiles: only those that the window needs."""
    decode, nodata, dtype = key.decode, key.nodata, key.dtype
    height, width, samples = key.imagelength, key.imagewidth, key.samplesperpixel
    if key.is_tiled:
        tall, wide = key.tilelength, key.tilewidth
    else:
        tall, wide = min(key.rowsperstrip, height), width
    separate = key.planarconfig == 2 and samples > 1
    if tall * wide * (1 if separate else samples) * dtype.itemsize > MOST_SEGMENT:
        raise BadSample(
            f"strips or tiles of {wide} x {tall} px, more than {MOST_SEGMENT / 2**20:.0f} MiB; "
            "save it as a tiled TIFF"
        )
    across, down = -(-width // wide), -(-height // tall)
    planes = samples if separate else 1
    if any(len(page.offsets) != planes * across * down for page in pages):
        raise BadSample(f"does not have the {planes * across * down} strips or tiles of its header")

    def read(page: int, rows: slice, columns: slice) -> Array:
        own = pages[page]
        top, bottom, _ = rows.indices(height)
        left, right, _ = columns.indices(width)
        window = np.full((bottom - top, right - left, samples), nodata, dtype)
        with open_regular(path) as file:
            for plane in range(planes):
                for row in range(top // tall, -(-bottom // tall)):
                    for column in range(left // wide, -(-right // wide)):
                        number = (plane * down + row) * across + column
                        size = int(own.sizes[number])
                        if not size:  # a hole: no data
                            continue
                        raw = read_at(file.fileno(), size, int(own.offsets[number]))
                        pixels = decode(raw, number, **own.tables)[0]
                        y, x = row * tall, column * wide
                        part = pixels[0, max(0, top - y) : bottom - y, max(0, left - x) : right - x]
                        at = slice(max(y - top, 0), None), slice(max(x - left, 0), None)
                        target = window[:, :, plane : plane + 1] if separate else window
                        target[at][: part.shape[0], : part.shape[1]] = part
        return window

    return read


# --- arrays


def _open_npy(path: Path, pages: Pages, size: int) -> Planes:
    with open_regular(path) as file:
        shape, fortran, dtype = _array_header(file)
        offset = file.tell()
    if offset + math.prod(shape) * dtype.itemsize > size:
        raise BadSample(f"is truncated: {size} bytes do not hold {shape} {dtype}")

    def opened() -> Array:
        with open_regular(path) as file:
            return np.memmap(file, dtype, "r", offset, shape, "F" if fortran else "C")

    return _of_array(opened, shape, dtype, pages)


def _open_npz(path: Path, pages: Pages, size: int) -> Planes:
    with open_regular(path) as file, zipfile.ZipFile(file) as archive:
        names = archive.namelist()
        if len(names) != 1:
            listed = ", ".join(name.removesuffix(".npy") for name in names[:5])
            raise BadSample(f"holds {len(names)} arrays ({listed}), and an image is one")
        with archive.open(names[0]) as member:
            shape, _, dtype = _array_header(member)
    _check_decoded(math.prod(shape), dtype)

    def opened() -> Array:
        with open_regular(path) as file, np.load(file, allow_pickle=False) as arrays:
            array: Array = arrays[arrays.files[0]]
            return array

    def loaded() -> Planes:
        array = opened()
        return _of_array(lambda: array, shape, dtype, pages)

    return _of_array(opened, shape, dtype, pages)._replace(load=loaded, has_windows=False)


def _array_header(file: IO[bytes]) -> tuple[tuple[int, ...], bool, np.dtype[Any]]:
    version = np.lib.format.read_magic(file)
    read = np.lib.format.read_array_header_1_0
    shape, fortran, dtype = (read if version[0] == 1 else np.lib.format.read_array_header_2_0)(file)
    stored_dtype(dtype)
    return shape, fortran, dtype


def _of_array(
    opened: Callable[[], Array], shape: tuple[int, ...], dtype: np.dtype[Any], pages: Pages
) -> Planes:
    """Planes of an array (h, w) or (h, w, C); with --pages (pages, h, w) or (pages, h, w, C)."""
    axes = (_ARRAY_AXES if pages.pages is None else _PAGED_AXES).get(len(shape))
    if axes is None:
        raise BadSample(f"an array of {shape}: give (h, w), (h, w, C), or pages first and --pages")

    def plane(page: int, rows: slice, columns: slice) -> Array:
        array = opened()
        window = np.array((array[page] if axes[0] == "Q" else array)[rows, columns])
        return window.reshape(*window.shape[:2], -1)

    return _arranged(axes, shape, len(axes.lstrip("Q")), stored_dtype(dtype), plane, pages)


_ARRAY_AXES = {2: "YX", 3: "YXS"}
_PAGED_AXES = {2: "YX", 3: "QYX", 4: "QYXS"}


# --- pictures


def _open_png(path: Path, pages: Pages, size: int) -> Planes:
    """A PNG of 16 bits: Pillow keeps 8 of its colours."""
    from imagecodecs import png_decode

    with open_regular(path) as file:
        width, height, _, colours = struct.unpack(">IIBB", file.read(26)[16:])
    shape = (1, height, width, {0: 1, 2: 3, 4: 2, 6: 4}[colours])

    def load() -> Array:
        return np.asarray(png_decode(read_regular(path, MOST_DECODED))).reshape(shape)

    return _whole(load, shape, np.dtype("u2"))


def _open_picture(path: Path, pages: Pages, size: int) -> Planes:
    """What Pillow reads, upright: 8 bits a value."""

    def opened(file: IO[bytes]) -> Image.Image:
        kind = image_kind(file.read(16))
        file.seek(0)
        if kind is not None:
            return PILLOW[kind](file)  # type: ignore[no-any-return]
        return Image.open(file, formats=("BMP", "GIF", "PPM"))

    with open_regular(path) as file:
        image = opened(file)
        width, height = image.size
        _check_decoded(width * height * len(image.getbands()), np.dtype("u1"))
        if image.getexif().get(_ORIENTATION) in _TRANSPOSED:
            width, height = height, width
        mode = image.mode
    channels = 3 if pages.as_rgb8 else _MODES.get(mode)
    if channels is None:
        raise BadSample(f"its values are of Pillow's mode {mode}; save it as 8-bit grey or RGB")

    def load() -> Array:
        image = opened(io.BytesIO(read_regular(path, MOST_DECODED)))
        if image.size not in ((width, height), (height, width)):
            raise BadSample("two headers that differ")
        pixels = rgb_pixels(image) if pages.as_rgb8 else np.array(ImageOps.exif_transpose(image))
        return pixels.reshape(1, *pixels.shape[:2], -1)

    return _whole(load, (1, height, width, channels), np.dtype("u1"))


_MODES = {"L": 1, "LA": 2, "RGB": 3, "RGBA": 4}


# --- DICOM


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
    frames, samples = int(header.get("NumberOfFrames") or 1), int(header.SamplesPerPixel)
    if header.PhotometricInterpretation == "PALETTE COLOR" or "ModalityLUTSequence" in header:
        raise BadSample("a DICOM file whose values are places in a table, which is not read")
    shape = (frames, int(header.Rows), int(header.Columns), samples)
    bits = int(header.BitsAllocated)
    raw = np.dtype(f"{'i' if header.get('PixelRepresentation') else 'u'}{max(1, bits // 8)}")
    if pages.pages == "channels" and frames > 1:
        raise BadSample(f"{frames} frames, which are images: leave --pages channels out")
    _check_decoded(math.prod(shape[1:]), raw)
    slope, intercept = _rescale(header)
    dtype = stored_dtype(raw if (slope, intercept) == (1, 0) else np.dtype("f4"))
    syntax = header.file_meta.get("TransferSyntaxUID")

    def read(image: int, rows: slice, columns: slice) -> Array:
        try:
            with open_regular(path) as file:
                pixels = pixel_array(file, index=image)
        except (RuntimeError, NotImplementedError, AttributeError) as error:
            name = getattr(syntax, "name", syntax)
            why = " ".join(str(error).split())[:200]  # it lists the decoders, a line each
            raise BadSample(f"cannot decode DICOM's {name}: {why}") from error
        pixels = pixels.reshape(shape[1:])[rows, columns]
        if (slope, intercept) != (1, 0):
            pixels = pixels.astype(np.float64) * slope + intercept
        return cast(pixels, dtype)

    return Planes(frames, (shape[1], shape[2], samples), dtype, read, None, False, _look_at(header))


_DEFLATED = b"1.2.840.10008.1.2.1.99"  # small files may hold any number of bytes


def _rescale(header: Any) -> tuple[float, float]:
    """Slope and intercept, also of an enhanced file, whose frames share them."""
    groups = header.get("SharedFunctionalGroupsSequence") or [{}]
    shared = groups[0].get("PixelValueTransformationSequence") or [header]
    frames = header.get("PerFrameFunctionalGroupsSequence") or [{}]
    if any("PixelValueTransformationSequence" in frame for frame in frames):
        raise BadSample("a DICOM file that rescales each frame on its own, which is not read")
    slope, intercept = shared[0].get("RescaleSlope"), shared[0].get("RescaleIntercept")
    return float(1 if slope is None else slope), float(intercept or 0)


def _look_at(header: Any) -> tuple[float, float] | None:
    """Low and high value of the first window. Source: DICOM PS3.3, C.11.2.1.2."""
    centre, width = header.get("WindowCenter"), header.get("WindowWidth")
    if centre is None or width is None:
        return None
    centre, width = (float(np.atleast_1d(each)[0]) for each in (centre, width))
    return (centre - width / 2, centre + width / 2) if width > 0 else None


# --- NIfTI


def _is_nifti(start: bytes, name: str) -> bool:
    return start[344:347] in (b"n+1", b"ni1") or start[4:8] == b"n+2\0" or name.endswith(".nii.gz")


def _open_nifti(path: Path, pages: Pages, size: int) -> Planes:
    """The slices of a volume along `slice_axis`, rescaled; volumes of a series are pages."""
    import nibabel

    logging.getLogger("nibabel.global").setLevel(logging.CRITICAL + 1)  # it mends headers
    image: Any = nibabel.load(path)
    shape, kept = image.shape, [k for k in range(3) if k != pages.slice_axis]
    volumes = shape[3] if len(shape) == 4 else 1
    if len(shape) not in (3, 4):
        raise BadSample(f"a volume of {shape}, neither 3 nor 4 dimensions")
    if volumes > 1 and pages.pages is None:
        raise _Ambiguous(f"{volumes} volumes {shape}")
    slices = shape[pages.slice_axis]
    together = volumes if pages.pages == "channels" else 1  # volumes that are channels
    raw = image.get_data_dtype()
    is_scaled = (image.dataobj.slope, image.dataobj.inter) != (1, 0)
    dtype = stored_dtype(np.dtype("f4") if is_scaled and raw.kind in "uif" else raw)

    def windows(data: Any) -> Read:
        def read(number: int, rows: slice, columns: slice) -> Array:
            volume, place = divmod(number, slices)
            at = {pages.slice_axis: place, kept[0]: rows, kept[1]: columns}
            index = tuple(at[k] for k in range(3))
            parts = [
                np.asarray(data[index if len(shape) == 3 else (*index, volume + k)])
                for k in range(together)
            ]
            return cast(np.stack(parts, axis=2), dtype)

        return read

    count, sides = slices * volumes // together, (shape[kept[0]], shape[kept[1]], together)
    if not path.name.lower().endswith(".gz"):
        return Planes(count, sides, dtype, windows(image.dataobj))
    _check_decoded(math.prod(shape), np.dtype("f8") if is_scaled else raw)

    def load() -> Planes:
        return Planes(count, sides, dtype, windows(np.asanyarray(image.dataobj)))

    def read(number: int, rows: slice, columns: slice) -> Array:
        return load().read(number, rows, columns)

    return Planes(count, sides, dtype, read, load, has_windows=False)


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
