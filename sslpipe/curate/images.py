"""Take single pictures out of shards: their keys, and files of them in a folder."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from sslpipe.data.decode import BadSample, Buffer, decode, image_kind
from sslpipe.data.index import Split
from sslpipe.data.reader import Raw, Reader
from sslpipe.errors import DataError
from sslpipe.portable import write_atomically

PART_SAMPLES = 64  # read at a time
WINDOW_BYTES = 64 * 2**20


class Written(NamedTuple):
    """A picture in a folder.

    Args:
        id: Of the sample.
        key: Of its shard.
        path: Of the file.
    """

    id: int
    key: str
    path: Path


def raw_samples(split: Split, ids: ArrayLike) -> Iterator[tuple[int, Raw]]:
    """Read some samples by their ids, in ascending order. Raises: DataError."""
    wanted = np.unique(np.asarray(ids, np.int64))
    reader = Reader(split, window_bytes=WINDOW_BYTES)
    shards, rows = split.locate(wanted)
    for shard in np.unique(shards).tolist():
        here = np.flatnonzero(shards == shard)
        for first in range(0, len(here), PART_SAMPLES):
            part = here[first : first + PART_SAMPLES]
            yield from zip(wanted[part].tolist(), reader.rows(shard, rows[part]), strict=True)


def write_images(split: Split, ids: ArrayLike, folder: Path, *, most_px: int = 0) -> list[Written]:
    """Write pictures as FOLDER/SPLIT-ID.jpg, .png or .webp, in the order of their ids.

    Args:
        split: Where they are.
        ids: Which.
        folder: Made where it is not there.
        most_px: Each becomes a JPEG whose longer side is at most this; 0: each is the file that the
            shard holds, byte by byte.

    Raises:
        DataError: A sample has no picture.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for sample_id, raw in raw_samples(split, ids):
        try:
            content, suffix = _file(raw, most_px)
        except BadSample as error:
            raise DataError(
                f"split {split.name!r}, key {raw.key!r}: {error}; embed the split again, which "
                "leaves out what cannot be read"
            ) from error
        path = folder / f"{split.name}-{sample_id:09d}.{suffix}"
        write_atomically(path, content, sweep=False)
        written.append(Written(sample_id, raw.key, path))
    return written


def _file(raw: Raw, most_px: int) -> tuple[bytes, str]:
    """A picture's bytes and the suffix of its name. Raises: BadSample."""
    if isinstance(raw.image, BadSample):
        raise raw.image
    kind = image_kind(raw.image)
    if kind is None:
        raise BadSample("it is no JPEG, PNG or WebP")
    return (_reduced(raw.image, most_px), "jpg") if most_px else (bytes(raw.image), kind)


def _reduced(image: Buffer, most_px: int) -> bytes:
    file = io.BytesIO()
    pixels = np.ascontiguousarray(decode(image, most_px).transpose(1, 2, 0))  # (h, w, 3)
    Image.fromarray(pixels).save(file, "JPEG", quality=90)
    return file.getvalue()
