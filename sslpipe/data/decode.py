"""Bytes of one image -> pixels, no more than needed; whatever goes wrong is a BadSample.

8-bit RGB comes from JPEG, PNG or WebP. simplejpeg decodes JPEG at libjpeg-turbo's rate, Pillow
everything else and what simplejpeg refuses (CMYK, recoverable damage); where both decode, their
pixels are equal. Both release the GIL. torchvision's PNG decoder crashes the process on some
damaged files. Images of other types come from NumPy's .npy, whose header is never evaluated.
"""

import io
import os
import re
import struct
import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from io import BufferedReader
from typing import Any, Literal

import numpy as np
import simplejpeg
from numpy.typing import NDArray
from PIL import Image, ImageFile, JpegImagePlugin, PngImagePlugin, WebPImagePlugin

from sslpipe.data.image_type import RGB8, Colour, ImageType
from sslpipe.errors import counted

MAX_PIXELS = 64 * 2**20  # a header that says more is refused before anything is decoded
MAX_BYTES = 64 * 2**20
LEAST_COUNTED = 2**20  # pixels: images below it are decoded by all threads at once
ROWS_MIXED = 64

Kind = Literal["jpg", "png", "webp"]
Pixels = NDArray[Any]  # uint8, or float32 in the units of `ImageType`
Buffer = bytes | memoryview
# Pillow's own classes, not Image.open: no search for plugins, no warnings about size or MPO
_NPY = b"\x93NUMPY"
_NPY_HEADER = re.compile(  # as every version of NumPy writes it
    rb"\{\s*'descr':\s*'([^']*)',\s*'fortran_order':\s*(True|False),"
    rb"\s*'shape':\s*\(((?:\d{1,18},\s*)*(?:\d{1,18})?)\),?\s*\}\s*"
)
_PNG_BEGIN = b"\x89PNG\r\n\x1a\n"
_PNG_TEXTS = (b"tEXt", b"zTXt", b"iTXt", b"iCCP")
# of files that are named as images, or lie among them: place and beginning, and what that is
_LOOKS: tuple[tuple[int, tuple[bytes, ...], str], ...] = (
    (128, (b"DICM",), "a DICOM"),  # first: what is before may look like a TIFF
    (4, (b"ftypavif", b"ftypavis"), "an AVIF"),
    (4, (b"ftyphei", b"ftyphev", b"ftypmif1", b"ftypmsf1"), "a HEIC"),
    (4, (b"ftyp", b"moov", b"mdat"), "a video"),
    (0, (b"\x1aE\xdf\xa3",), "a video"),
    (8, (b"AVI ",), "a video"),
    (0, (b"\xff\x0a", b"\0\0\0\x0cJXL "), "a JPEG XL"),
    (0, (b"GIF8",), "a GIF"),
    (0, (b"II*\0", b"MM\0*", b"II+\0", b"MM\0+"), "a TIFF"),
    (0, (b"BM",), "a BMP"),
    (0, (b"%PDF",), "a PDF"),
    (0, (b"PK\x03\x04",), "a zip archive"),
)
PILLOW: dict[Kind, Any] = {
    "jpg": JpegImagePlugin.JpegImageFile,
    "png": PngImagePlugin.PngImageFile,
    "webp": WebPImagePlugin.WebPImageFile,
}


class BadSample(ValueError):
    """These bytes are no image that can be used; the message says why."""


Content = Buffer | BadSample  # of a file, or why there is none


def decode(
    raw: Content,
    canvas_px: int,
    image_type: ImageType = RGB8,
    channels: tuple[int, ...] | None = None,
) -> Pixels:
    """Decode a JPEG, PNG or WebP (known by its first bytes, not by its name), or a .npy.

    Where 8-bit RGB is wanted, grey is repeated; CMYK and palettes are converted; transparent parts
    are put on the type's background, and without one an alpha channel is dropped, as torchvision's
    ImageFolder does; of 16-bit samples the high byte is kept (exact for 8-bit values stored in 16
    bits, else less than one level off); of an animation the first frame.

    Args:
        raw: The encoded image; a BadSample is raised.
        canvas_px: An image whose longer side is over it is reduced to fit (bilinear, antialiased,
            aspect kept, at least 1 px); a smaller one is not touched.
        image_type: What the image is: a .npy of just this type, unless it is 8-bit RGB.
        channels: Places of those that are wanted, in this order; None: all.

    Returns:
        (3, h, w) uint8 RGB, EXIF-oriented; of another type (C, h, w) in its units, see `in_units`.
        Over (h, w, C) memory (channels last: decoders write so, and torch resizes it twice as
        fast).

    Raises:
        BadSample: With the reason.
    """
    if isinstance(raw, BadSample):
        raise raw
    kind = _known_kind(raw) if image_type is RGB8 or image_type.is_rgb8 else None
    check_bytes(len(raw))
    if kind is None:
        height, width, _ = _npy_header(raw)[2]
    else:
        width, height = header_size(raw)
    check_size(width, height)
    scale = _jpeg_scale(max(width, height), canvas_px) if kind == "jpg" else 1
    with _at_once.take(width * height // scale**2):
        try:
            if kind is None:
                units = image_type.in_units(read_npy(raw, image_type), channels)
                pixels = np.require(units, requirements="W")
            elif kind == "jpg":
                pixels = _decode_jpeg(raw, canvas_px)
            else:
                pixels = _decode_by_pillow(raw, kind, image_type.background)
        except BadSample:
            raise
        except MemoryError as error:
            raise BadSample("no memory to decode it") from error
        except Exception as error:  # damaged bytes make the decoders raise almost anything
            raise BadSample(f"cannot decode the {kind}: {first_line(error)}") from error
        if channels is not None and kind is not None:
            pixels = pixels[:, :, channels]
        return reduce_to(np.ascontiguousarray(pixels), canvas_px).transpose(2, 0, 1)


class _PixelBudget:
    """Bound the pixels that all threads of a process decode at once: some 16 bytes each."""

    def __init__(self, pixels: int) -> None:
        self._left = pixels
        self._changed = threading.Condition()

    def take(self, pixels: int) -> AbstractContextManager[None]:
        """Wait until an image fits beside those that other threads decode; at once for most."""
        return nullcontext() if pixels < LEAST_COUNTED else self._take(pixels)

    @contextmanager
    def _take(self, pixels: int) -> Iterator[None]:
        with self._changed:
            self._changed.wait_for(lambda: self._left >= pixels)
            self._left -= pixels
        try:
            yield
        finally:
            with self._changed:
                self._left += pixels
                self._changed.notify_all()


_at_once = _PixelBudget(MAX_PIXELS)


def decode_picture(raw: Content, canvas_px: int, image_type: ImageType = RGB8) -> Pixels:
    """Decode what people see of an image, as `ImageType.picture`: (h, w, 3) uint8."""
    pixels = decode(raw, canvas_px, image_type=image_type)
    if image_type is RGB8 or image_type.is_rgb8:
        return pixels.transpose(1, 2, 0)
    return np.ascontiguousarray(image_type.picture(pixels))


def read_npy(raw: Buffer, image_type: ImageType | None = None) -> Pixels:
    """Read a .npy of (h, w, C) or (h, w) little-endian numbers: (h, w, C), over the same memory.

    image_type None: any numbers, which may be NaN.

    Raises: BadSample for other bytes, or another type; nothing is built before that is known.
    """
    start, dtype, shape = _npy_header(raw)
    check_size(shape[1], shape[0])
    count = shape[0] * shape[1] * shape[2]
    if start + count * dtype.itemsize != len(raw):
        raise BadSample(f"{len(raw) - start} bytes of pixels, and {shape} {dtype} in the header")
    if image_type is not None:
        wanted = len(image_type.channels)
        if dtype.name != image_type.dtype or shape[2] != wanted:
            raise BadSample(
                f"{counted(shape[2], 'channel')} of {dtype}, but the data set's images are "
                f"{wanted} of {image_type.dtype}"
            )
    pixels: Pixels = np.frombuffer(raw, dtype, count, start).reshape(shape)
    if image_type is not None and dtype.kind == "f" and not np.isfinite(pixels).all():
        bad = int((~np.isfinite(pixels)).sum())
        raise BadSample(f"{bad} values are NaN or infinite")
    return pixels


def _npy_header(raw: Buffer) -> tuple[int, np.dtype[Any], tuple[int, int, int]]:
    """Where the numbers begin, their type, and (h, w, C). Source: NEP 1, versions 1.0 and 2.0."""
    if raw[:6] != _NPY:
        raise BadSample(f"not a .npy file: {looks_like(raw)}")
    try:
        start, form = (10, "<H") if raw[6] == 1 else (12, "<I")
        (size,) = struct.unpack_from(form, raw, start - struct.calcsize(form))
    except (struct.error, IndexError):
        raise BadSample("truncated in the .npy header") from None
    match = _NPY_HEADER.fullmatch(bytes(raw[start : start + size])) if size <= 2**12 else None
    if match is None or raw[6] > 2 or start + size > len(raw):
        raise BadSample("a .npy header that is damaged, or of an array of records or objects")
    code = match[1].decode("latin-1")
    order = match[2]
    text = match[3].decode()
    shape = tuple(map(int, text.replace(",", " ").split()))
    if not re.fullmatch(r"\|[ui]1|<[uif][248]", code) or order == b"True":
        raise BadSample(
            f"a .npy of {code!r}{', in Fortran order' * (order == b'True')}; store little-endian "
            "numbers in C order: numpy.ascontiguousarray(a, a.dtype.newbyteorder('<'))"
        )
    if len(shape) not in (2, 3):
        raise BadSample(f"a .npy of shape {shape}, not (height, width, channels)")
    return start + size, np.dtype(code), (shape[0], shape[1], shape[2] if len(shape) == 3 else 1)


def is_plain_jpeg(raw: Buffer) -> bool:
    """Return whether any decoder makes the same pixels of it: an upright JPEG in grey or YCbCr."""
    if image_kind(raw) != "jpg" or raw[-2:] != b"\xff\xd9":  # no end: cut short
        return False
    try:
        check_size(*header_size(raw))
        colours = simplejpeg.decode_jpeg_header(raw)[2]
        return colours in ("Gray", "YCbCr") and _orientation(_jpeg_exif(raw)) == 1
    except ValueError:  # BadSample is one
        return False


def header_size(raw: Content) -> tuple[int, int]:
    """Read width and height from the header, before any rotation. Raises: BadSample."""
    if isinstance(raw, BadSample):
        raise raw
    if raw[:6] == _NPY:
        height, width, _ = _npy_header(raw)[2]
        return width, height
    kind = _known_kind(raw)
    try:
        return _HEADER_SIZE[kind](raw)
    except (struct.error, IndexError):
        raise BadSample(f"truncated in the {kind} header") from None


def _known_kind(raw: Buffer) -> Kind:
    if (kind := image_kind(raw)) is None:
        raise BadSample(f"not a JPEG, PNG or WebP: {looks_like(raw)}")
    return kind


def image_kind(raw: Buffer) -> Kind | None:
    """Tell 'jpg', 'png' or 'webp' by the first bytes; None for anything else."""
    if raw[:3] == b"\xff\xd8\xff":
        return "jpg"
    if raw[:8] == b"\x89PNG\r\n\x1a\n":
        return "png"
    if raw[:4] == b"RIFF" and raw[8:12] == b"WEBP":
        return "webp"
    return None


def pillow_remarks() -> list[str]:
    """Return that truncated images are no bad samples, where a program has set Pillow so."""
    if not ImageFile.LOAD_TRUNCATED_IMAGES:
        return []
    return [
        "PIL.ImageFile.LOAD_TRUNCATED_IMAGES is set: truncated images are read, the rest of them "
        "grey, and a process without it takes them for damaged; set it to False"
    ]


def _decode_jpeg(raw: Buffer, canvas_px: int) -> Pixels:
    """(h, w, 3) uint8, EXIF-oriented; at the least of 1, 1/2, 1/4, 1/8 that fills the canvas.

    Only at those scales is libjpeg-turbo faster than at full size.
    """
    try:
        height, width, colours, _ = simplejpeg.decode_jpeg_header(raw)
        if colours not in ("CMYK", "YCCK"):
            scale = _jpeg_scale(max(height, width), canvas_px)
            reduced = scale > 1
            pixels = simplejpeg.decode_jpeg(
                raw,
                min_height=-(-height // scale) if reduced else 0,
                min_width=-(-width // scale) if reduced else 0,
                min_factor=scale,
            )
            return _oriented(pixels, _orientation(_jpeg_exif(raw)))
    except ValueError:  # also for damage that libjpeg can repair: Pillow decides
        pass
    return _decode_by_pillow(raw, "jpg")


def _jpeg_scale(longer: int, canvas_px: int) -> int:
    return next((scale for scale in (8, 4, 2) if -(-longer // scale) >= canvas_px), 1)


def _decode_by_pillow(raw: Buffer, kind: Kind, background: Colour | None = None) -> Pixels:
    """(h, w, 3) uint8, EXIF-oriented."""
    try:
        return _by_pillow(raw, kind, background)
    except BadSample:
        raise
    except ValueError:  # Pillow unpacks a PNG's texts, and refuses long ones
        return _by_pillow(without_text(raw), kind, background)


def _by_pillow(raw: Buffer, kind: Kind, background: Colour | None) -> Pixels:
    image = PILLOW[kind](io.BytesIO(raw))
    check_size(*image.size)  # a PNG may hold a second header
    return rgb_pixels(image, background)


def rgb_pixels(image: Image.Image, background: Colour | None = None) -> Pixels:
    """Convert a Pillow image as `decode` does: (h, w, 3) uint8 RGB, EXIF-oriented.

    Raises: BadSample for 32-bit values; those of a PPM are known to be of 16.
    """
    if image.mode == "F" or (image.mode == "I" and image.format != "PPM"):
        raise BadSample(
            f"a PIL image of mode {image.mode!r} has values of no known range; scale them to 8 "
            "bits, mode 'L', or to 16, mode 'I;16'"
        )
    image.load()
    if image.mode.startswith("I"):  # 16-bit grey
        grey = (np.asarray(image).astype(np.int32) >> 8).astype(np.uint8)  # (h, w)
        pixels = np.repeat(grey[:, :, None], 3, axis=2)
    elif background is not None and image.has_transparency_data:
        rgba = np.asarray(image.convert("RGBA"))  # (h, w, 4)
        pixels = np.empty((*rgba.shape[:2], 3), np.uint8)
        under = np.array(background, np.uint16)
        for top in range(0, len(rgba), ROWS_MIXED):  # 16-bit values of some rows at a time
            some = rgba[top : top + ROWS_MIXED].astype(np.uint16)
            alpha = some[:, :, 3:]
            mixed = (some[:, :, :3] * alpha + under * (255 - alpha) + 127) // 255  # <= 65,152
            pixels[top : top + ROWS_MIXED] = mixed
    else:
        if image.mode == "P" and "transparency" in image.info:
            image = image.convert("RGBA")  # straight to RGB warns
        pixels = np.array(image if image.mode == "RGB" else image.convert("RGB"))
    return _oriented(pixels, _orientation(image.info.get("exif", b"")))


def reduce_to(pixels: Pixels, canvas_px: int) -> Pixels:
    """(h, w, C) uint8 or float32 -> the same, or reduced to fit canvas_px."""
    longer = max(pixels.shape[:2])
    if longer <= canvas_px:
        return pixels
    size = [max(1, round(side * canvas_px / longer)) for side in pixels.shape[:2]]
    import torch  # only here: shards are written, and mistakes reported, without it

    # torch tells channels last by the strides: permute(2, 0, 1)[None] is not, and is slower
    whole = torch.from_numpy(pixels)[None].permute(0, 3, 1, 2)
    reduced = torch.nn.functional.interpolate(whole, size=size, mode="bilinear", antialias=True)
    result: Pixels = reduced[0].permute(1, 2, 0).numpy()
    return result


def read_encoded(file: BufferedReader) -> bytes:
    """Read all of an open file of an image. Raises: BadSample before reading one over the limit."""
    check_bytes(os.fstat(file.fileno()).st_size)
    return file.read()


def check_bytes(count: int) -> None:
    """Check that an encoded image is not over the limit. Raises: BadSample."""
    if count > MAX_BYTES:
        raise BadSample(f"{count:,} bytes are more than the limit of {MAX_BYTES:,}; shrink it")


def check_size(width: int, height: int) -> None:
    """Check that an image is neither empty nor over the limit. Raises: BadSample."""
    if width < 1 or height < 1:
        raise BadSample(f"the header says {width} x {height} px")
    if width * height > MAX_PIXELS:
        raise BadSample(
            f"{width} x {height} px is more than the limit of {MAX_PIXELS:,} px; shrink it"
        )


def _png_size(raw: Buffer) -> tuple[int, int]:
    width, height = struct.unpack_from(">II", raw, 16)
    return width, height


def without_text(raw: Buffer) -> Buffer:
    """Return a PNG without its texts and colour profile, which no pixel needs; others as they are.

    Pillow unpacks them, and refuses an image whose texts are long.

    Source: PNG specification (ISO/IEC 15948), section 5.
    """
    if bytes(raw[:8]) != _PNG_BEGIN:
        return raw
    kept = [raw[:8]]
    start = 8
    while start + 12 <= len(raw):
        end = start + 12 + int.from_bytes(raw[start : start + 4], "big")
        if bytes(raw[start + 4 : start + 8]) not in _PNG_TEXTS:
            kept.append(raw[start:end])
        start = end
    return b"".join([*kept, raw[start:]])


def _webp_size(raw: Buffer) -> tuple[int, int]:
    """Source: RFC 9649, sections 2.5 to 2.7 (lossy, lossless, extended)."""
    form = bytes(raw[12:16])
    if form == b"VP8 ":
        width, height = struct.unpack_from("<HH", raw, 26)
        return width & 0x3FFF, height & 0x3FFF
    if form == b"VP8L":
        (bits,) = struct.unpack_from("<I", raw, 21)
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if form == b"VP8X":
        low_w, high_w, low_h, high_h = struct.unpack_from("<HBHB", raw, 24)
        return 1 + low_w + (high_w << 16), 1 + low_h + (high_h << 16)
    raise BadSample(f"a WebP with an unknown first chunk {form!r}")


def _jpeg_segments(raw: Buffer) -> Iterator[tuple[int, int]]:
    """Marker and place of each segment's length, up to the first scan. Source: ITU-T T.81, annex B.

    Raises: IndexError or struct.error where the file ends before.
    """
    at = 2
    while True:
        while raw[at] != 0xFF or raw[at + 1] in (0x00, 0xFF):  # libjpeg, too, skips stray bytes
            at += 1
        marker = raw[at + 1]
        if marker in (0xD9, 0xDA):
            return
        at += 2
        if not (0xD0 <= marker <= 0xD8 or marker == 0x01):  # those have no length
            yield marker, at
            at += struct.unpack_from(">H", raw, at)[0]


def _jpeg_size(raw: Buffer) -> tuple[int, int]:
    """Width and height of the frame header."""
    for marker, at in _jpeg_segments(raw):
        if 0xC0 <= marker <= 0xCF and marker not in (0xC4, 0xC8, 0xCC):
            height, width = struct.unpack_from(">HH", raw, at + 3)
            return width, height
    raise BadSample("a JPEG without a frame header")


def _jpeg_exif(raw: Buffer) -> bytes:
    """The APP1 segment that holds EXIF tags; empty where there is none."""
    for marker, at in _jpeg_segments(raw):
        if marker == 0xE1 and raw[at + 2 : at + 8] == b"Exif\0\0":
            return bytes(raw[at + 2 : at + struct.unpack_from(">H", raw, at)[0]])
    return b""


_HEADER_SIZE = {"jpg": _jpeg_size, "png": _png_size, "webp": _webp_size}


def _orientation(exif: bytes) -> int:
    """EXIF tag 0x0112 of the first directory, 1 to 8; 1 (upright) where it cannot be read."""
    tiff = exif.removeprefix(b"Exif\0\0")
    order = {b"II*\0": "<", b"MM\0*": ">"}.get(tiff[:4])
    if order is None:
        return 1
    try:
        (directory,) = struct.unpack_from(order + "I", tiff, 4)
        (entries,) = struct.unpack_from(order + "H", tiff, directory)
        for entry in range(directory + 2, directory + 2 + 12 * entries, 12):
            tag, _, _, value = struct.unpack_from(order + "HHIH", tiff, entry)
            if tag == 0x0112:
                return value if 1 <= value <= 8 else 1
    except struct.error:  # cut short: a picture is worth more than its tags
        pass
    return 1


def _oriented(pixels: Pixels, orientation: int) -> Pixels:
    """Undo an EXIF orientation. (h, w, 3) -> the same, or (w, h, 3) for 5 to 8."""
    if orientation >= 5:
        pixels = pixels.transpose(1, 0, 2)
    if orientation in (3, 4, 7, 8):
        pixels = pixels[::-1]
    if orientation in (2, 3, 6, 7):
        pixels = pixels[:, ::-1]
    return pixels


def other_kind(raw: Buffer) -> str | None:
    """Return what a file is by its first 132 bytes, where `image_kind` does not know it."""
    start = bytes(raw[:132])
    for place, begins, name in _LOOKS:
        if start[place:].startswith(begins):
            return name
    return None


def looks_like(raw: Buffer) -> str:
    """Return what bytes are that are no image, for a message."""
    start = bytes(raw[:132])
    if not start:
        return "it is empty"
    if start.lstrip()[:1] == b"<":
        return "it looks like HTML or XML"
    if name := other_kind(start):
        return f"it looks like {name}"
    return f"it starts with {start[:8]!r}"


def first_line(error: Exception) -> str:
    """Return what an error says in one line; its type where it says nothing."""
    return (str(error) or type(error).__name__).splitlines()[0]
