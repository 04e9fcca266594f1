"""Turn an image as its source has it into what the shard holds."""

import io
import logging
import struct
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError, features
from PIL.TiffImagePlugin import TiffImageFile

from sslpipe.data.decode import (
    MAX_PIXELS,
    BadSample,
    Kind,
    check_bytes,
    check_size,
    decode,
    first_line,
    header_size,
    image_kind,
    is_plain_jpeg,
    looks_like,
    rgb_pixels,
    without_text,
)

# what Pillow logs on stderr, a line an image, is in the BadSample
logging.getLogger("PIL").addHandler(logging.NullHandler())
_COLOUR_TYPE = {1: 0, 3: 2, 4: 6}  # of a PNG, by channels: grey, RGB, RGBA
READS_AVIF = features.check("avif") is True  # as Pillow was built
READS_HEIC = find_spec("pillow_heif") is not None
_OTHER_FORMATS = (
    *("BMP", "GIF", "PPM", "TIFF"),
    *(["AVIF"] if READS_AVIF else []),
    *(["HEIF"] if READS_HEIC else []),
)
_WITH_ALPHA = ("PNG", "WEBP", "GIF", "TIFF")
_TIFF_BITS = 258  # the tag BitsPerSample
SMALL_PX = 16  # a picture with a shorter side is worth a remark
_FULL_SIZE_PX = MAX_PIXELS  # a canvas that no accepted image exceeds


def to_member(raw: bytes) -> tuple[Kind, bytes]:
    """Return suffix and bytes to store: JPEG, PNG and WebP as they are, other formats as PNG.

    Raises: BadSample.
    """
    kind = image_kind(raw)
    if kind is None:
        kind = "png"
        raw = encode_png(_open_other(raw))
    return kind, raw


def remarks_on(raw: bytes, *, on_background: bool) -> list[str]:
    """Return what a decodable image loses on the way to 8-bit RGB, or that it is tiny."""
    try:
        if is_plain_jpeg(raw):
            return _remarks_on_size(header_size(raw))
        image = _open(raw, ("JPEG", "PNG", "WEBP", *_OTHER_FORMATS))
        remarks = [*_remarks_on_size(image.size), *_remarks_on_values(raw, image)]
        if not on_background and _with_alpha(raw) is not None:
            alpha = image.convert("RGBA").getchannel("A")
            if alpha.tobytes().strip(b"\xff"):
                remarks.append(
                    "transparent parts, which show what is stored under them, mostly black (build "
                    "with --background=white and --overwrite to put them on white)"
                )
    except Exception:  # decoders mend damage that headers of the same bytes show
        return []
    return remarks


def _remarks_on_size(size: tuple[int, int]) -> list[str]:
    return [f"a side below {SMALL_PX} px"] if min(size) < SMALL_PX else []


def _remarks_on_values(raw: bytes, image: Image.Image) -> Iterator[str]:
    """Return what of an image's values or frames is not used."""
    kind = image_kind(raw)
    if image.mode in ("CMYK", "LAB"):
        yield f"{image.mode}, converted without their colour profile"
    bits = image.tag_v2.get(_TIFF_BITS, (8,)) if isinstance(image, TiffImageFile) else (8,)
    is_deep = image.mode.startswith("I") or max(bits) > 8
    if kind == "png":  # its header tells more
        is_deep = raw[24] == 16
    if is_deep:
        yield (
            "16-bit values, of which the upper 8 bits are used (a smaller range looks almost "
            "black: scale it to 0 to 65,535 first, or keep all bits with `sslpipe sensors "
            "build`)"
        )
    if isinstance(image, TiffImageFile) and image.n_frames > 1:
        yield (
            "several pages, of which the first is used (`sslpipe sensors build --pages` reads all)"
        )
    elif kind != "jpg" and getattr(image, "is_animated", False):
        yield "several frames, as of an animation, of which the first is used"


def _with_alpha(raw: bytes) -> Image.Image | None:
    """Open an image whose header declares alpha; None: it declares none."""
    if image_kind(raw) == "jpg":
        return None
    image = _open(raw, (*_WITH_ALPHA, *_OTHER_FORMATS))
    return image if not image.mode.startswith("I") and image.has_transparency_data else None


def flatten(raw: bytes, background: tuple[int, int, int]) -> bytes:
    """Put an image with transparent parts on a colour, 0 to 255, as a PNG; others stay as they are.

    Pixels are those of `decode` for this background. Raises: BadSample.
    """
    with _readable():
        image = _with_alpha(raw)
        if image is None:
            return raw
        alpha = image.convert("RGBA").getchannel("A").tobytes()
        if not alpha.strip(b"\xff"):
            return raw
        upright = ImageOps.exif_transpose(image)
        return encode_png(np.ascontiguousarray(rgb_pixels(upright, background)))


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
    """Decode a BMP, GIF, PPM, TIFF, AVIF or HEIC to (h, w) grey or (h, w, 3) RGB."""
    with _readable():
        image = ImageOps.exif_transpose(_open(raw, _OTHER_FORMATS))
        if image.mode.startswith("I;16"):
            return (np.asarray(image) >> 8).astype(np.uint8)
        if image.mode in ("I", "F"):
            raise BadSample(
                "32-bit values have no known range; scale them to 8 bits (0 to 255) or to 16-bit "
                "PNG (0 to 65,535), or keep them with `sslpipe sensors build`"
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
    check_bytes(len(raw))
    if "HEIF" in formats and "HEIF" not in Image.OPEN:
        import pillow_heif

        pillow_heif.register_heif_opener()
    try:
        image = Image.open(io.BytesIO(without_text(raw)), formats=formats)
    except UnidentifiedImageError:  # its text is the address of the bytes
        likeness = looks_like(raw)
        more = "; `sslpipe sensors build` reads other TIFFs" * (raw[:2] in (b"II", b"MM"))
        if likeness.endswith("HEIC") and not READS_HEIC:
            more = "; pip install pillow-heif reads it"
        raise BadSample(f"not a readable image: {likeness}{more}") from None
    check_size(*image.size)
    return image


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode (h, w) or (h, w, 1) grey, (h, w, 3) RGB or (h, w, 4) RGBA uint8, uncompressed.

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
