"""Turn an image as its source has it into what the shard holds."""

import io
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from sslpipe.data.decode import (
    MAX_BYTES,
    MAX_PIXELS,
    BadSample,
    Kind,
    decode,
    first_line,
    image_kind,
    looks_like,
)
from sslpipe.sharding.png import encode_png

_OTHER_FORMATS = ("BMP", "GIF", "PPM", "TIFF")
_WITH_ALPHA = ("PNG", "WEBP", "GIF", "TIFF")
_FULL_SIZE_PX = MAX_PIXELS  # a canvas that no accepted image exceeds

Change = Callable[[NDArray[np.uint8]], NDArray[np.uint8]]


def to_member(raw: bytes, change: Change | None = None) -> tuple[Kind, bytes]:
    """Return suffix and bytes to store: JPEG, PNG and WebP as they are, other formats as PNG.

    Args:
        raw: The encoded image.
        change: (h, w, C) uint8 -> the same shape, C = 1 for grey; its result is stored as PNG.

    Raises:
        BadSample: The image cannot be decoded.
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
    """Put an image with transparent parts on a colour, as a PNG; any other stays as it is.

    Decoders drop alpha, and what lies under it is often black: a black drawing vanishes.

    Args:
        raw: The encoded image.
        background: Red, green and blue, 0 to 255.

    Raises:
        BadSample: The image cannot be decoded.
    """
    try:
        image = _with_alpha(raw)
        if image is None:
            return raw
        rgba = np.asarray(ImageOps.exif_transpose(image).convert("RGBA")).astype(np.uint16)
    except BadSample:
        raise
    except Exception as error:  # damaged bytes make the decoders raise almost anything
        raise BadSample(f"not a readable image: {first_line(error)}") from error
    alpha = rgba[:, :, 3:]  # (h, w, 1)
    if (alpha == 255).all():
        return raw
    under = np.array(background, np.uint16)
    mixed = (rgba[:, :, :3] * alpha + under * (255 - alpha) + 127) // 255  # at most 65,152
    return encode_png(mixed.astype(np.uint8))


def downscale(raw: bytes, shorter_px: int) -> bytes:
    """Downscale an image to a shorter side of `shorter_px`; a smaller one stays as it is.

    Antialiased (Lanczos), aspect kept, EXIF-oriented. A JPEG stays one (quality 95, full chroma),
    any other becomes a PNG.

    Raises:
        BadSample: The image cannot be decoded.
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
    try:
        image = _open(raw, _OTHER_FORMATS)
        image = ImageOps.exif_transpose(image)
        if image.mode.startswith("I;16"):
            return (np.asarray(image) >> 8).astype(np.uint8)
        if image.mode in ("I", "F"):
            raise BadSample(f"pixels of mode {image.mode!r} have no known range; convert it")
        if image.mode == "P":
            image = image.convert("RGBA")  # straight to RGB warns about transparency
        return np.asarray(image.convert("L" if image.mode in ("1", "L") else "RGB"))
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
        raise BadSample(f"not a readable image: {looks_like(raw)}") from None
    if image.width * image.height > MAX_PIXELS:
        raise BadSample(f"{image.width} x {image.height} px is more than {MAX_PIXELS} px")
    return image
