"""Read images of splits: to keep what tells two of them apart, to look at each, as files."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sslpipe.arguments import Advance
from sslpipe.curate.thumbnails import THUMB_PX, Thumbs, thumbnail
from sslpipe.data.decode import MAX_PIXELS, BadSample, decode_picture, image_kind
from sslpipe.data.image_type import ImageType
from sslpipe.data.index import Split
from sslpipe.data.reader import OnBad, Quarantined, Raw, Reader
from sslpipe.errors import DataError
from sslpipe.portable import write_atomically

# read and looked at together, at most; of few, threads would mostly wait for Python's lock
PART_SAMPLES = 256
PART_BYTES = 8 * 2**20
WINDOW_BYTES = 64 * 2**20

Integers = NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Samples:
    """The N readable samples of some splits, one split after the other, by id."""

    splits: tuple[str, ...]
    split: Integers  # (N,), which of them
    ids: Integers  # (N,), the place in that split
    keys: list[str]  # paths that they were built from, where known, else those of the shards
    pixels_sha256: NDArray[np.uint8]  # (N, 32), of the decoded pixels and their shape
    sizes: Integers  # (N, 2), height and width in px
    thumbs: Thumbs  # (N, 32, 32, 3)

    def __len__(self) -> int:
        return len(self.ids)

    def name(self, row: int) -> str:
        """Name a row as SPLIT:ID."""
        return f"{self.splits[self.split[row]]}:{self.ids[row]}"


class _Seen(NamedTuple):
    """What is kept of a sample."""

    id: int
    key: str
    pixels_sha256: bytes
    size: tuple[int, int]
    thumb: Thumbs


def scan(
    splits: Sequence[Split],
    *,
    ids: Sequence[Integers] | None = None,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
    progress: Advance = lambda count: None,
) -> Samples:
    """Read the images of some splits.

    Args:
        splits: Where they are.
        ids: Of each split the samples wanted, sorted; all of them by default.
        num_workers: Threads that decode; 0: the caller does.
        on_bad: Called for each image that cannot be decoded, which is skipped.
        progress: Called with the number of samples of each part that is done.

    Raises:
        DataError: A shard cannot be read.
    """
    rows: list[_Seen] = []
    counts = []
    for number, split in enumerate(splits):
        look = partial(_look, split.stored_type)
        some = None if ids is None else ids[number]
        of_split: list[_Seen] = []
        for part in each_part(split, look, ids=some, num_workers=num_workers, on_bad=on_bad):
            of_split += [seen for seen in part if seen is not None]
            progress(len(part))
        names = split.names_of([seen.id for seen in of_split])
        if names is not None:
            of_split = [seen._replace(key=name) for seen, name in zip(of_split, names, strict=True)]
        rows += of_split
        counts.append(len(of_split))
    return _collected([split.name for split in splits], counts, rows)


def scan_pictures(pictures: Iterable[NDArray[np.uint8]]) -> Samples:
    """Do as `scan` with pictures in memory, (h, w, 3) uint8 each."""
    rows = [_see(k, str(k), pixels) for k, pixels in enumerate(pictures)]
    return _collected(["pictures"], [len(rows)], rows)


def _collected(splits: Sequence[str], counts: Sequence[int], rows: Sequence[_Seen]) -> Samples:
    """Put rows of splits, so many of each, together."""
    hashes = b"".join(row.pixels_sha256 for row in rows)
    return Samples(
        splits=tuple(splits),
        split=np.repeat(np.arange(len(splits)), counts),
        ids=np.array([row.id for row in rows], np.int64),
        keys=[row.key for row in rows],
        pixels_sha256=np.frombuffer(hashes, np.uint8).reshape(-1, 32),
        sizes=np.array([row.size for row in rows], np.int64).reshape(-1, 2),
        thumbs=np.array([row.thumb for row in rows], np.uint8).reshape(-1, THUMB_PX, THUMB_PX, 3),
    )


@contextmanager
def one_thread_an_operation() -> Iterator[None]:
    """Let torch's and numpy's operations run in the threads that call them, without more of them.

    Else the threads of each of several workers' operations wait for each other.
    """
    threads = import_module("threadpoolctl")  # scikit-learn brings it; it has no types
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threads.threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(before)


def each_part(
    split: Split,
    look: Callable[[int, Raw], T],
    *,
    ids: Integers | None = None,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
) -> Iterator[list[T | None]]:
    """Look at every sample of a split, or at some, in order; yield the results of a part at a time.

    Args:
        split: Where they are.
        look: Called with a sample's id and bytes, in a thread; raises BadSample.
        ids: The samples wanted, sorted; all by default.
        num_workers: Threads that look; 0: the caller does.
        on_bad: Called for each bad sample, from any thread; None stands in its place.

    Raises:
        DataError: A shard cannot be read.
    """
    reader = Reader(split, window_bytes=WINDOW_BYTES)
    shards, rows = split.locate(np.arange(len(split)) if ids is None else ids)
    parts = []
    for shard in np.unique(shards).tolist():
        entry = split.shards[shard]
        of_shard = rows[shards == shard]
        size = max(1, min(PART_SAMPLES, PART_BYTES * entry.samples // entry.bytes))
        parts += [
            (shard, of_shard[first : first + size]) for first in range(0, len(of_shard), size)
        ]

    def look_at(shard: int, rows: NDArray[np.int64]) -> list[T | None]:
        first = int(split.starts[shard])
        seen: list[T | None] = []
        for row, raw in zip(rows.tolist(), reader.rows(shard, rows), strict=True):
            try:
                seen.append(look(first + row, raw))
            except BadSample as error:
                seen.append(None)
                if on_bad is not None:
                    file = split.shards[shard].file
                    on_bad(Quarantined(first + row, file, raw.key, str(error)))
        return seen

    if not num_workers:
        yield from (look_at(shard, rows) for shard, rows in parts)
        return
    with one_thread_an_operation(), ThreadPoolExecutor(num_workers, "sslpipe-scan") as pool:
        ahead: deque[Future[list[T | None]]] = deque()
        for shard, rows in parts:
            ahead.append(pool.submit(look_at, shard, rows))
            if len(ahead) > 2 * num_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _look(image_type: ImageType, sample_id: int, raw: Raw) -> _Seen:
    if isinstance(raw.image, BadSample):
        raise raw.image
    pixels = decode_picture(raw.image, MAX_PIXELS, image_type)  # (h, w, 3), at full size
    return _see(sample_id, raw.key, pixels)


def _see(sample_id: int, key: str, pixels: Thumbs) -> _Seen:
    """Keep what a picture, (h, w, 3) uint8, is compared by."""
    height, width, _ = pixels.shape
    of_pixels = hashlib.sha256(f"{height} {width} ".encode())
    of_pixels.update(np.ascontiguousarray(pixels).data)
    return _Seen(
        id=sample_id,
        key=key,
        pixels_sha256=of_pixels.digest(),
        size=(height, width),
        thumb=thumbnail(pixels),
    )


def decoded(split: Split, ids: ArrayLike) -> dict[int, NDArray[np.uint8]]:
    """Decode some images that can be read, (h, w, 3) each, by their ids."""
    images = {}
    for sample_id, raw in _raw_samples(split, ids):
        assert not isinstance(raw.image, BadSample)  # it was read before
        images[sample_id] = decode_picture(raw.image, MAX_PIXELS, split.stored_type)
    return images


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
                "skips what cannot be read"
            )
        written[sample_id] = folder / f"{split.name}-{sample_id:09d}.{kind}"
        write_atomically(written[sample_id], bytes(raw.image), sweep=False)
    return written


def _raw_samples(split: Split, ids: ArrayLike) -> Iterator[tuple[int, Raw]]:
    """Read some samples by their ids, in ascending order. Raises: DataError."""
    wanted = np.unique(np.asarray(ids, np.int64))
    for part in each_part(split, lambda *sample: sample, ids=wanted, num_workers=0):
        yield from (sample for sample in part if sample is not None)
