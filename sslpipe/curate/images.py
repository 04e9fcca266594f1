"""Take single pictures out of shards: their keys, and files of them in a folder."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np
from numpy.typing import ArrayLike
from PIL import Image

from sslpipe.curate.scan import each_part
from sslpipe.data.decode import BadSample, decode, image_kind
from sslpipe.data.index import Split
from sslpipe.data.reader import Raw
from sslpipe.errors import DataError
from sslpipe.portable import write_atomically


class Written(NamedTuple):
    """A picture in a folder: its sample, the key in its shard, the file."""

    id: int
    key: str
    path: Path


def raw_samples(split: Split, ids: ArrayLike) -> Iterator[tuple[int, Raw]]:
    """Read some samples by their ids, in ascending order. Raises: DataError."""
    wanted = np.unique(np.asarray(ids, np.int64))
    for part in each_part(split, lambda *sample: sample, list, ids=wanted, num_workers=0):
        yield from (sample for sample in part if sample is not None)


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
            if isinstance(raw.image, BadSample):
                raise raw.image
            content, suffix = bytes(raw.image), image_kind(raw.image)
            if suffix is None:
                raise BadSample("it is no JPEG, PNG or WebP")
            if most_px:
                file, suffix = io.BytesIO(), "jpg"
                pixels = np.ascontiguousarray(decode(raw.image, most_px).transpose(1, 2, 0))
                Image.fromarray(pixels).save(file, "JPEG", quality=90)
                content = file.getvalue()
        except BadSample as error:
            raise DataError(
                f"split {split.name!r}, key {raw.key!r}: {error}; embed the split again, which "
                "leaves out what cannot be read"
            ) from error
        path = folder / f"{split.name}-{sample_id:09d}.{suffix}"
        write_atomically(path, content, sweep=False)
        written.append(Written(sample_id, raw.key, path))
    return written
