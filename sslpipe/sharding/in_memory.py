"""Images that a program holds, as a source: a list or array of them, or a torch Dataset."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable, Mapping, Sequence
from operator import index
from pathlib import Path
from typing import Any, Protocol, TypeGuard

import numpy as np
from PIL import Image

from sslpipe.data.decode import BadSample, check_size, rgb_pixels
from sslpipe.errors import DataError, shown
from sslpipe.sharding.listed_files import place_of, read_place
from sslpipe.sharding.members import encode_png
from sslpipe.sharding.sources import (
    Images,
    SourceOptions,
    SourceReader,
    chosen_splits,
    distinct_names,
    merged_classes,
    number_labels,
)
from sslpipe.sharding.split_names import split_of

# of the parts of a data set: the names of numbered classes, None where it has none
ClassLists = set[tuple[str, ...] | None]

_TAKEN = (
    "give the path or the bytes of an image file, a PIL image, or uint8 pixels: an array (H, W), "
    "(H, W, 3) or (H, W, 4), or a tensor (1, H, W) or (3, H, W)"
)


class Rows(Protocol):
    """Images, or (image, class) pairs, by number."""

    def __len__(self) -> int: ...
    def __getitem__(self, number: int, /) -> Any: ...


def are_rows(source: object) -> TypeGuard[Rows]:
    """Return whether a source is a list, an array or a Dataset of images, or splits of such."""
    by_number = hasattr(source, "__getitem__") and hasattr(source, "__len__")
    return by_number and not isinstance(source, str | bytes | Path)


def reader_of(source: Rows | Mapping[str, Rows]) -> SourceReader:
    """Return what reads images in memory, by split; without names of splits they are train."""

    def read(options: SourceOptions) -> dict[str, Images]:
        groups = source if isinstance(source, Mapping) else {options.split or "train": source}
        for split, rows in groups.items():
            if not are_rows(rows) or isinstance(rows, Mapping):
                raise DataError(f"source[{split!r}] is a {type(rows).__name__}, no list of images")
            if not isinstance(split, str):
                raise DataError(f"source has the split {shown(split)}; give a text, as 'train'")
            _refuse_one_image(rows)
            if not len(rows):
                raise DataError(f"source has no image of split {split!r}; give one or more")
        if not any(map(split_of, groups)) and len(groups) != 1:
            raise DataError(
                f"source names no split: {', '.join(map(shown, groups)) or 'it is empty'}; name "
                "one 'train'; where these are classes, give [(image, class), ...]"
            )
        wanted = chosen_splits(options, groups, "source")
        return {split: _images(split, groups[split], options.labels) for split in wanted}

    return read


def _refuse_one_image(rows: Any) -> None:
    """Raise DataError for an array or a tensor that is one colour image, not many grey ones."""
    if getattr(rows, "ndim", 0) != 3:
        return
    channels = rows.shape[0] if hasattr(rows, "detach") else rows.shape[-1]
    if channels in (3, 4):
        raise DataError(f"source is one image, {tuple(rows.shape)}; give a list: [source]")


def _images(split: str, rows: Rows, labelled: bool) -> Images:
    """Read every row once, for its class, its size and a hash of its contents."""
    read = _reader(split, rows)
    names = [f"{split}[{number}]" for number in range(len(rows))]
    lists: ClassLists = _class_lists(rows) if labelled else {None}
    known = next(iter(lists)) if len(lists) == 1 else None
    labels: list[str | None] = []
    sizes = np.zeros(len(rows), np.int64)
    digests: list[bytes] = []
    for number, name in enumerate(names):
        try:
            raw, label = read(number)
        except BadSample:  # which the writing reports
            raw = b""
            label = None
        if len(lists - {None}) > 1 and label is not None and not isinstance(label, str):
            raise _mixed_classes(split, lists)
        labels.append(_class_text(label, known, name) if labelled else None)
        sizes[number] = len(raw)
        digests.append(hashlib.sha256(raw).digest())
    numbers, texts = number_labels(labels, labels)
    if known is not None and {*labels} <= {*known, None}:  # else texts of the rows name them
        numbers = np.array([-1 if each is None else known.index(each) for each in labels], np.int64)
        texts = known

    def read_again(number: int) -> bytes:
        raw = read(number)[0]
        if hashlib.sha256(raw).digest() != digests[number]:
            raise DataError(
                f"{names[number]} is another image at each read; leave random transforms out: "
                "training draws its own views"
            )
        return raw

    return Images(
        names=names,
        labels=numbers,
        sizes=sizes,
        classes=texts,
        read=read_again,
        doubts=merged_classes(labels),
        contents=hashlib.sha256(b"".join(digests)).hexdigest(),
    )


def _class_lists(rows: Any) -> ClassLists:
    """Return the names of numbered classes, where torchvision's datasets have them; None: nowhere.

    A Subset has those of its data set, a ConcatDataset those of each part.
    """
    if (classes := getattr(rows, "classes", None)) is not None:
        return {distinct_names([str(name) for name in classes])}
    parts: list[Any] = []
    if type(rows).__module__.startswith("torch.utils.data"):  # others may number anew
        parts = getattr(rows, "datasets", None) or [getattr(rows, "dataset", None)]
    return {names for part in parts for names in _class_lists(part)} or {None}


def _mixed_classes(split: str, lists: ClassLists) -> DataError:
    """Return the error of a number that means another class in each part."""
    firsts = sorted(names[0] for names in lists if names)
    return DataError(
        f"source[{split!r}] is put together of data sets whose classes are others: number 0 is "
        f"{' and '.join(map(shown, firsts))}; give their names, as in [(image, name), ...]"
    )


def _reader(split: str, rows: Rows) -> Callable[[int], tuple[bytes, Any]]:
    """Return what reads the i-th image as the bytes of a file, and its class, which may be None."""
    lock = threading.Lock()  # a Dataset may have one open file for all

    def read(number: int) -> tuple[bytes, Any]:
        with lock:
            try:
                row = rows[number]
            except OSError as error:
                raise BadSample(f"cannot be read: {error}") from error
            except LookupError:
                raise DataError(
                    f"{split}[{number}]: a {type(rows).__name__} has no such row; give a list, an "
                    "array or a Dataset of images"
                ) from None
            is_pair = isinstance(row, tuple | list) and len(row) == 2
            image, label = row if is_pair else (row, None)
            return encoded_image(image, f"{split}[{number}]"), label

    return read


def encoded_image(image: Any, name: str) -> bytes:
    """Return an image as the bytes of a file. Raises: BadSample, and DataError for other things."""
    if isinstance(image, bytes):
        return image
    if isinstance(image, str | Path):
        return read_place(place_of(Path(), str(image)))
    if isinstance(image, Image.Image):
        return encode_png(_pixels_of(image))
    if isinstance(image, Mapping):
        raise DataError(
            f"{name} is a dictionary of {', '.join(map(str, image))}; of Hugging Face datasets "
            "save_to_disk(FOLDER) writes what build_dataset(OUT, 'parquet', root=FOLDER) reads"
        )
    if isinstance(image, tuple | list):
        raise DataError(f"{name} is {len(image)} things; give the image, or (image, class)")
    pixels = np.asarray(image)
    if hasattr(image, "detach"):  # a tensor: channels first
        pixels = pixels.transpose(1, 2, 0) if pixels.ndim == 3 else pixels
    channels = pixels.shape[-1] if pixels.ndim == 3 else 1
    if pixels.dtype != np.uint8 or pixels.ndim not in (2, 3) or channels not in (1, 3, 4):
        kind = f"{type(image).__name__} of {pixels.dtype} {tuple(np.shape(image))}"
        if pixels.dtype == object:
            kind = type(image).__name__
        is_float = pixels.dtype.kind == "f"
        remedy = "; leave ToTensor and Normalize out of the transform" if is_float else ""
        raise DataError(f"{name} is a {kind}; {_TAKEN}{remedy}")
    if not pixels.size:
        raise BadSample(f"an image of {pixels.shape} has no pixels")
    check_size(pixels.shape[1], pixels.shape[0])
    return encode_png(np.ascontiguousarray(pixels))


def _pixels_of(image: Image.Image) -> Any:
    """Return the pixels of a PIL image, transparency kept: (h, w, 3 or 4) uint8."""
    if image.mode.startswith(("I", "F")):
        raise BadSample(f"a PIL image of mode {image.mode!r} holds no 8-bit levels; convert it")
    check_size(*image.size)
    try:
        if image.has_transparency_data:
            return np.asarray(image.convert("RGBA"))
        return np.ascontiguousarray(rgb_pixels(image))
    except (OSError, SyntaxError) as error:  # a lazy one is read here
        raise BadSample(f"not a readable image: {error}") from error


def _class_text(label: Any, names: Sequence[Any] | None, row: str) -> str | None:
    if label is None or isinstance(label, str):
        return label
    try:
        number = index(label)  # an int, numpy's, or a tensor of one
    except TypeError:
        raise DataError(
            f"{row} has the class {shown(label)}; give a text, a whole number, or None for none"
        ) from None
    if number < 0:
        return None
    if names is None:
        return str(number)
    if number >= len(names):
        raise DataError(f"{row} has the class {number}, but there are {len(names)} classes")
    return str(names[number])
