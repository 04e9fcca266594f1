"""Turn an image as its source has it into what the shard holds."""

import io
import struct
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError
from PIL.TiffImagePlugin import ImageFileDirectory_v2, TiffImageFile

from sslpipe.data.decode import (
    MAX_BYTES,
    MAX_PIXELS,
    BadSample,
    Kind,
    decode,
    first_line,
    image_kind,
    is_plain_jpeg,
    looks_like,
)

_COLOUR_TYPE = {1: 0, 3: 2}  # of a PNG, by channels: grey, RGB
_OTHER_FORMATS = ("BMP", "GIF", "PPM", "TIFF")
_WITH_ALPHA = ("PNG", "WEBP", "GIF", "TIFF")
_TIFF_BITS, _TIFF_BANDS = 258, 277  # tags: BitsPerSample, SamplesPerPixel
_PAGES = "several pages of a"
_FULL_SIZE_PX = MAX_PIXELS  # a canvas that no accepted image exceeds

Change = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]


def to_member(raw: bytes, change: Change | None = None) -> tuple[Kind, bytes]:
    """Return suffix and bytes to store: JPEG, PNG and WebP as they are, other formats as PNG.

    With `change` ((h, w, C) uint8 -> the same shape, C = 1 for grey) its result is stored as PNG.

    Raises: BadSample where the image cannot be decoded.
    """
    kind = image_kind(raw)
    if kind is None:
        kind, raw = "png", encode_png(_open_other(raw))
    if change is None:
        return kind, raw
    pixels = decode(raw, _FULL_SIZE_PX).transpose(1, 2, 0)  # (h, w, 3)
    if (pixels == pixels[:, :, :1]).all():
        pixels = pixels[:, :, :1]
    return "png", encode_png(change(np.ascontiguousarray(pixels)))


class Conversion(NamedTuple):
    """What of an image's pixels is lost on the way to 8-bit RGB, such as "16-bit grey PNG".

    `low` and `high` are the values found; 0 where `kind` is not about a range.
    """

    kind: str
    low: int = 0
    high: int = 0


def conversion_of(raw: bytes) -> Conversion | None:
    """Say how an image that can be decoded is converted; None for 8 bits in grey or RGB.

    Of 16-bit colour, where Pillow reads high bytes only, the range is that of them.
    """
    try:
        return _conversion_of(raw)
    except Exception:  # decoders mend damage that headers of the same bytes show
        return None


def _conversion_of(raw: bytes) -> Conversion | None:
    kind = image_kind(raw)
    if kind == "webp" or (kind == "png" and raw[24] != 16):  # bits in the header
        return None
    if kind == "jpg" and is_plain_jpeg(raw):
        return None
    image = _open(raw, ("JPEG", "PNG", *_OTHER_FORMATS))
    name = image.format or ""
    if image.mode in ("CMYK", "LAB"):
        return Conversion(f"{image.mode} {name}")
    if image.mode.startswith("I"):
        values = np.asarray(image)
        return Conversion(f"16-bit grey {name}", int(values.min()), int(values.max()))
    bits = image.tag_v2.get(_TIFF_BITS, (8,)) if isinstance(image, TiffImageFile) else (8,)
    if kind == "png" or max(bits) > 8:
        values = np.asarray(image.convert("RGB"))
        return Conversion(f"16-bit colour {name}", 256 * int(values.min()), 256 * int(values.max()))
    if isinstance(image, TiffImageFile) and image.n_frames > 1:
        return Conversion(f"{_PAGES} {name}")
    return None


def describe_conversion(found: Conversion, count: int, total: int) -> str:
    """Say what happens to images of one kind, and what to do instead."""
    images = f"{count:,} of {total:,} images are {found.kind}"
    if found.kind.startswith(_PAGES):
        return f"{images}: only the first page is used; write each page as a file to use all"
    if not found.high:
        return (
            f"{images}, converted to RGB without a colour profile; convert them with their profile "
            "first where colours matter"
        )
    text = f"{images} with values from {found.low:,} to {found.high:,}; the upper 8 bits are used"
    if found.high - found.low >= 2**15:
        return text
    return (
        f"{text}, so they have the levels {found.low >> 8} to {found.high >> 8} of 255 and look "
        "almost black or flat; scale the values to 0 to 65,535, or convert the images to 8 bits, "
        "and build with --overwrite"
    )


def has_transparent_parts(raw: bytes) -> bool:
    """Say whether decoders, which drop alpha, show what lies under it; False for what is damaged.

    Pixels are decoded only where the header tells of alpha.
    """
    try:
        image = _with_alpha(raw)
        if image is None:
            return False
        alpha = image.convert("RGBA").getchannel("A")
    except Exception:  # it is counted where it is decoded for the shard
        return False
    return alpha.tobytes().strip(b"\xff") != b""


def _with_alpha(raw: bytes) -> Image.Image | None:
    """Open an image whose header tells of alpha; None: it tells of none."""
    if image_kind(raw) == "jpg":
        return None
    image = _open(raw, (*_WITH_ALPHA, *_OTHER_FORMATS))
    return image if not image.mode.startswith("I") and image.has_transparency_data else None


def flatten(raw: bytes, background: tuple[int, int, int]) -> bytes:
    """Put an image with transparent parts on a colour, 0 to 255, as a PNG; others stay as they are.

    Decoders drop alpha, and what lies under it is often black: a black drawing vanishes.

    Raises: BadSample where the image cannot be decoded.
    """
    with _readable():
        image = _with_alpha(raw)
        if image is None:
            return raw
        rgba = np.asarray(ImageOps.exif_transpose(image).convert("RGBA")).astype(np.uint16)
    alpha = rgba[:, :, 3:]  # (h, w, 1)
    if (alpha == 255).all():
        return raw
    under = np.array(background, np.uint16)
    mixed = (rgba[:, :, :3] * alpha + under * (255 - alpha) + 127) // 255  # at most 65,152
    return encode_png(mixed.astype(np.uint8))


def downscale(raw: bytes, shorter_px: int) -> bytes:
    """Downscale an image to a shorter side of `shorter_px`; a smaller one stays as it is.

    Antialiased (Lanczos), aspect kept, EXIF-oriented. A JPEG stays one (quality 95, full chroma),
    any other becomes a PNG. Raises: BadSample.
    """
    kind = image_kind(raw)
    pixels = _open_other(raw) if kind is None else decode(raw, _FULL_SIZE_PX).transpose(1, 2, 0)
    image = Image.fromarray(np.ascontiguousarray(pixels))
    shorter = min(image.size)
    if shorter <= shorter_px:
        return raw
    size = [max(1, round(side * shorter_px / shorter)) for side in image.size]
    image = image.resize((size[0], size[1]), Image.Resampling.LANCZOS)
    if kind != "jpg":
        return encode_png(np.asarray(image))
    file = io.BytesIO()
    image.save(file, "JPEG", quality=95, subsampling="4:4:4")
    return file.getvalue()


def _open_other(raw: bytes) -> NDArray[np.uint8]:
    """Decode a BMP, GIF, PPM or TIFF to (h, w) grey or (h, w, 3) RGB."""
    with _readable():
        image = ImageOps.exif_transpose(_open(raw, _OTHER_FORMATS))
        if image.mode.startswith("I;16"):
            return (np.asarray(image) >> 8).astype(np.uint8)
        if image.mode in ("I", "F"):
            values = np.asarray(image)
            raise BadSample(
                f"32-bit values from {values.min():,} to {values.max():,} have no known range; "
                "scale them to 8 bits (0 to 255) or to 16-bit PNG (0 to 65,535)"
            )
        if image.mode == "P":
            image = image.convert("RGBA")  # straight to RGB warns about transparency
        return np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))


@contextmanager
def _readable() -> Iterator[None]:
    try:
        yield
    except BadSample:
        raise
    except Exception as error:  # damaged bytes make the decoders raise almost anything
        raise BadSample(f"not a readable image: {first_line(error)}") from error


def _open(raw: bytes, formats: tuple[str, ...]) -> Image.Image:
    """Open an image of a size that is allowed, not yet decoded."""
    if len(raw) > MAX_BYTES:
        raise BadSample(f"{len(raw)} bytes, more than the limit of {MAX_BYTES}")
    try:
        image = Image.open(io.BytesIO(raw), formats=formats)
    except UnidentifiedImageError:  # its text is the address of the bytes
        if raw[:4] in (b"II*\0", b"MM\0*") and (layout := _tiff_layout(raw)):
            raise BadSample(
                f"a TIFF of {layout} is not supported; store three bands as an 8-bit RGB image"
            ) from None
        raise BadSample(f"not a readable image: {looks_like(raw)}") from None
    if image.width * image.height > MAX_PIXELS:
        raise BadSample(f"{image.width} x {image.height} px is more than {MAX_PIXELS} px")
    return image


def _tiff_layout(raw: bytes) -> str:
    """Say bands and bits of a TIFF by its header; '' for a damaged one."""
    try:
        tags = ImageFileDirectory_v2(raw[:8])
        file = io.BytesIO(raw)
        file.seek(tags.next)
        tags.load(file)
        bits = tags.get(_TIFF_BITS, (1,))
        return f"{int(tags.get(_TIFF_BANDS, 1))} bands of {max(bits)} bits"
    except Exception:  # damaged tags make the parser raise almost anything
        return ""


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode (h, w) or (h, w, 1) grey or (h, w, 3) RGB uint8 as PNG, without compression.

    Compressed bytes differ between zlib, zlib-ng and their versions, and shards are named by their
    sha256; a small image in a tar is padded to 512 bytes anyway, and reads faster like this.

    Source: PNG specification (ISO/IEC 15948), RFC 1950 and RFC 1951 section 3.2.4.
    """
    if pixels.ndim == 2:
        pixels = pixels[:, :, None]
    height, width, channels = pixels.shape
    rows = np.zeros((height, 1 + width * channels), np.uint8)  # first byte: filter 0, none
    rows[:, 1:] = pixels.reshape(height, -1)
    header = struct.pack(">IIBBBBB", width, height, 8, _COLOUR_TYPE[channels], 0, 0, 0)
    data = _stored(rows.tobytes())
    return (
        b"\x89PNG\r\n\x1a\n"
        + _chunk(b"IHDR", header)
        + _chunk(b"IDAT", data)
        + _chunk(b"IEND", b"")
    )


def png_bytes(height: int, width: int, channels: int) -> int:
    """Return the length of what encode_png returns."""
    data = height * (1 + width * channels)
    return 8 + 3 * 12 + 13 + 2 + 5 * -(-data // 0xFFFF) + data + 4


def _chunk(kind: bytes, data: bytes) -> bytes:
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def _stored(data: bytes) -> bytes:
    """Make a zlib stream of stored blocks, written here: zlib's own differ between versions."""
    blocks = [b"\x78\x01"]
    for start in range(0, len(data), 0xFFFF):
        block = data[start : start + 0xFFFF]
        last = start + 0xFFFF >= len(data)
        blocks += [struct.pack("<BHH", last, len(block), len(block) ^ 0xFFFF), block]
    return b"".join(blocks) + struct.pack(">I", zlib.adler32(data))
