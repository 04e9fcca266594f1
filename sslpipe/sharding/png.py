"""Write PNG files with the same bytes on every machine."""

import struct
import zlib

import numpy as np
from numpy.typing import NDArray

_COLOUR_TYPE = {1: 0, 3: 2}  # channels -> grey, RGB


def encode_png(pixels: NDArray[np.uint8]) -> bytes:
    """Encode (h, w) or (h, w, 1) grey or (h, w, 3) RGB uint8, losslessly, without compression.

    Compressed bytes differ between zlib, zlib-ng and their versions, and shards are named by their
    sha256; a small image in a tar is padded to 512 bytes anyway, and reads faster like this.

    Source:
        PNG specification (ISO/IEC 15948), RFC 1950 and RFC 1951 section 3.2.4.
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
