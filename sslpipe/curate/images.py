"""Take images out of shards, as files and by their keys."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
from numpy.typing import ArrayLike

from sslpipe.curate.scan import each_part
from sslpipe.data.decode import BadSample, image_kind
from sslpipe.data.index import Split
from sslpipe.data.reader import Raw
from sslpipe.errors import DataError
from sslpipe.portable import write_atomically


def keys_of(split: Split, ids: ArrayLike) -> dict[int, str]:
    """Look up the shards' keys of some samples."""
    return {sample_id: raw.key for sample_id, raw in _raw_samples(split, ids)}


def write_images(split: Split, ids: ArrayLike, folder: Path) -> dict[int, Path]:
    """Write images as FOLDER/SPLIT-ID.jpg, .png, .webp or .npy, as the shard holds their bytes.

    Returns:
        The file of each sample, in the order of their ids.

    Raises:
        DataError: A sample has no image.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = {}
    for sample_id, raw in _raw_samples(split, ids):
        if isinstance(raw.image, BadSample):
            kind = None
        else:
            kind = image_kind(raw.image) if split.stored_type.is_rgb8 else split.suffixes[0]
        if isinstance(raw.image, BadSample) or kind is None:
            raise DataError(
                f"split {split.name!r}, key {raw.key!r} has no image; embed the split again, which "
                "leaves out what cannot be read"
            )
        written[sample_id] = folder / f"{split.name}-{sample_id:09d}.{kind}"
        write_atomically(written[sample_id], bytes(raw.image), sweep=False)
    return written


def _raw_samples(split: Split, ids: ArrayLike) -> Iterator[tuple[int, Raw]]:
    """Read some samples by their ids, in ascending order. Raises: DataError."""
    wanted = np.unique(np.asarray(ids, np.int64))
    for part in each_part(split, lambda *sample: sample, list, ids=wanted, num_workers=0):
        yield from (sample for sample in part if sample is not None)
