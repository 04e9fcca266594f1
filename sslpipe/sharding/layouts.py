"""Read data sets that have a reader of their own: torchvision's, and MNIST's idx files.

Others, such as CUB-200 or Market-1501, have a script each in tools/datasets, which writes a table.
"""

import gzip
import inspect
import math
import struct
import zlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from sslpipe.errors import DataError, did_you_mean
from sslpipe.sharding.members import encode_png, png_bytes
from sslpipe.sharding.sources import (
    Images,
    SourceOptions,
    class_names,
    read_file,
    root_folder,
)

_LABEL_NAMES = ("targets", "labels", "_labels")  # torchvision's datasets do not agree on one


def read_torchvision(options: SourceOptions) -> dict[str, Images]:
    """Read a class of torchvision.datasets by its name.

    Images are the original files where the class takes a loader, else they are encoded as PNG.
    """
    import torchvision.datasets

    known = torchvision.datasets.__all__
    if options.name not in known:
        hint = did_you_mean(options.name or "", known)
        raise DataError(f"--name={options.name!r} is not a dataset of torchvision{hint}")
    constructor = getattr(torchvision.datasets, str(options.name))
    takes = inspect.signature(constructor).parameters
    if not {"train", "split"} & set(takes):
        raise DataError(f"torchvision's {options.name} has no train or split argument to choose by")
    if options.split:
        splits = [options.split]
    elif "train" in takes:
        splits = ["train", "test"]
    else:
        raise DataError(f"torchvision's {options.name} needs --split NAME; one run for each split")
    return {split: _from_torchvision(constructor, takes, split, options) for split in splits}


def _from_torchvision(
    constructor: Any, takes: Iterable[str], split: str, options: SourceOptions
) -> Images:
    # the constructor's arguments: not two of these classes take the same
    root = root_folder(options, must_exist=not options.download)
    arguments: dict[str, Any] = {"root": str(root)}
    if "train" in takes:
        if split not in ("train", "test"):
            raise DataError(f"torchvision's {options.name} has no split {split!r}: train, test")
        arguments["train"] = split == "train"
    else:
        arguments["split"] = split
    if "download" in takes:
        arguments["download"] = options.download
    if "loader" in takes:
        arguments["loader"] = read_file
    try:
        dataset = constructor(**arguments)
    except (RuntimeError, ValueError, OSError) as error:
        raise DataError(f"torchvision's {options.name}: {error}") from error
    # labels: from the attribute where there is one, else by reading every image
    stored = next((getattr(dataset, k) for k in _LABEL_NAMES if hasattr(dataset, k)), None)
    if stored is None:
        stored = [label for _, label in dataset]
    labels = np.array(stored if isinstance(stored, list) else stored.tolist())  # array or tensor
    if labels.shape != (len(dataset),) or not np.issubdtype(labels.dtype, np.integer):
        raise DataError(f"torchvision's {options.name} does not give one integer label an image")
    names = getattr(dataset, "classes", None) or range(int(labels.max(initial=-1)) + 1)
    classes = tuple(map(_class_name, names))

    def read(i: int) -> bytes:
        image = dataset[i][0]
        if isinstance(image, bytes):
            return image
        return encode_png(np.asarray(image if image.mode == "L" else image.convert("RGB")))

    first = len(read(0)) if len(dataset) else 0
    sizes = np.full(len(dataset), first, np.int64)
    numbers = [f"{split}/{i}" for i in range(len(dataset))]
    return Images(
        names=numbers, labels=labels.astype(np.int64), sizes=sizes, classes=classes, read=read
    )


def _class_name(name: Any) -> str:
    """Return a class's name: a text or a number, or the first of its synonyms."""
    if isinstance(name, str):
        return name
    if isinstance(name, int):
        return str(name)
    first: str = name[0]
    return first


# --- idx: MNIST and its like


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
    classes = class_names(class_file) if class_file.exists() else ()
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
