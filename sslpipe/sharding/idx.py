"""Read and write MNIST's idx files, and cut the Fashion-MNIST that ships with the project."""

import gzip
import io
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import DataError
from sslpipe.portable import read_regular, write_atomically


def parse_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of uint8, plain or gzip.

    Args:
        path: The file.
        dimensions: How many the array must have.

    Raises:
        DataError: The file is anything else.

    Source:
        The format's description by LeCun, Cortes and Burges: 00 00 08 (uint8) dimensions, then
        each size as a big-endian int32, then the data, last index fastest.
    """
    try:
        raw = read_regular(path)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror}") from error
    if raw[:2] == b"\x1f\x8b":
        try:
            raw = gzip.decompress(raw)
        except (OSError, EOFError, zlib.error) as error:
            raise DataError(f"{path}: damaged gzip: {error}") from error
    magic = bytes((0, 0, 8, dimensions))
    if raw[:4] != magic:
        raise DataError(f"{path}: magic is {raw[:4].hex()}, not {magic.hex()}: no such idx file")
    start = 4 + 4 * dimensions
    if len(raw) < start:
        raise DataError(f"{path}: truncated in its header")
    shape = struct.unpack_from(f">{dimensions}I", raw, 4)
    if len(raw) != start + math.prod(shape):
        raise DataError(
            f"{path}: {len(raw)} bytes, but sizes {shape} need {start + math.prod(shape)}"
        )
    return np.frombuffer(raw, np.uint8, offset=start).reshape(shape)


def write_idx(path: Path, values: NDArray[np.uint8]) -> None:
    """Write uint8 values as a gzip idx file without time or name in its header."""
    header = bytes((0, 0, 8, values.ndim)) + struct.pack(f">{values.ndim}I", *values.shape)
    packed = io.BytesIO()
    with gzip.GzipFile(filename="", mode="wb", fileobj=packed, compresslevel=9, mtime=0) as file:
        file.write(header + values.tobytes())
    write_atomically(path, packed.getvalue())


def cut_idx(root: Path, out: Path, per_class: int) -> list[Path]:
    """Keep the first `per_class` training images of each class, in file order.

    Args:
        root: Folder of train-images-idx3-ubyte.gz and train-labels-idx1-ubyte.gz; a test file is
            never read.
        out: Folder for two files of the same names.
        per_class: How many images to keep of each class.

    Returns:
        The files written.

    Raises:
        DataError: A class has fewer images.
    """
    names = ("train-images-idx3-ubyte.gz", "train-labels-idx1-ubyte.gz")
    pixels, labels = parse_idx(root / names[0], 3), parse_idx(root / names[1], 1)
    if len(pixels) != len(labels):
        raise DataError(f"{root}: {len(pixels)} images, {len(labels)} labels")
    counts = np.bincount(labels)
    if counts.min() < per_class:
        raise DataError(f"class {counts.argmin()} has {counts.min()} images, not {per_class}")
    kept = np.sort(
        np.concatenate([np.nonzero(labels == k)[0][:per_class] for k in np.unique(labels)])
    )
    out.mkdir(parents=True, exist_ok=True)
    for name, values in zip(names, (pixels[kept], labels[kept]), strict=True):
        write_idx(out / name, values)
    return [out / name for name in names]
