"""Read idx files, as MNIST and its like have them."""

import gzip
import math
import struct
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import DataError
from sslpipe.sharding.members import encode_png, png_bytes
from sslpipe.sharding.sources import Images, SourceOptions, read_class_names, read_file, root_folder


def parse_idx(path: Path, dimensions: int) -> NDArray[np.uint8]:
    """Read an idx file of uint8, plain or gzip, of so many dimensions. Raises DataError for others.

    Source: LeCun, Cortes and Burges: 00 00 08 (uint8) dimensions, each size as a big-endian int32,
    the data, last index fastest.
    """
    raw = read_file(path)
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


def read_idx(options: SourceOptions) -> dict[str, Images]:
    """Read MNIST's idx files, plain or .gz: *images*idx3* and *labels*idx1*.

    A file with "t10k" or "test" in its name is of the split test, any other of train. Class names
    come from classes.txt where there is one, else they are the numbers.
    """
    root = root_folder(options)
    class_file = root / "classes.txt"
    classes = read_class_names(class_file) if class_file.exists() else ()
    result = {}
    for path in sorted(root.glob("*images*idx3*")):
        split = "test" if "t10k" in path.name or "test" in path.name else "train"
        if options.split in (None, split):
            labels = path.with_name(path.name.replace("images", "labels").replace("idx3", "idx1"))
            if split in result:
                raise DataError(f"{root} has several image files for split {split!r}: {path.name}")
            result[split] = _from_idx(path, labels, classes)
    if not result:
        which = f" of split {options.split!r}" if options.split else ""
        raise DataError(f"{root} has no *images*idx3* file{which}")
    return result


def _from_idx(path: Path, label_path: Path, classes: tuple[str, ...]) -> Images:
    pixels = parse_idx(path, 3)
    labels = parse_idx(label_path, 1).astype(np.int64)
    if len(pixels) != len(labels):
        raise DataError(f"{path} has {len(pixels)} images, {label_path.name} {len(labels)} labels")
    highest = int(labels.max(initial=-1))
    if classes and highest >= len(classes):
        raise DataError(f"{label_path}: label {highest}, but only {len(classes)} class names")
    classes = classes or tuple(str(k) for k in range(highest + 1))
    sizes = np.full(len(pixels), png_bytes(pixels.shape[1], pixels.shape[2], 1), np.int64)
    names = [f"{path.name}[{i}]" for i in range(len(pixels))]
    return Images(
        names=names,
        labels=labels,
        sizes=sizes,
        classes=classes,
        read=lambda i: encode_png(pixels[i]),
    )
