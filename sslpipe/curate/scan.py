"""Read images of splits: to keep what tells two of them apart, to look at each, as files."""

import hashlib
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sslpipe.curate.thumbnails import THUMB_PX, VIEWS, WIDTH, ThumbFile, Thumbs, describe, thumbnail
from sslpipe.data.decode import MAX_PIXELS, BadSample, decode_picture, image_kind
from sslpipe.data.image_type import ImageType
from sslpipe.data.index import Split
from sslpipe.data.reader import OnBad, Quarantined, Raw, Reader
from sslpipe.errors import DataError
from sslpipe.portable import write_atomically

# read and looked at together, at most; of few, threads would mostly wait for Python's lock
PART_SAMPLES, PART_BYTES = 256, 8 * 2**20
WINDOW_BYTES = 64 * 2**20

Integers = NDArray[np.int64]
Progress = Callable[[int], None]
T = TypeVar("T")
U = TypeVar("U")


class Samples(NamedTuple):
    """The N readable samples of some splits, one split after the other, by id."""

    splits: tuple[str, ...]
    split: Integers  # (N,), which of them
    ids: Integers  # (N,), the place in that split
    keys: list[str]  # of the shards
    bytes_sha256: NDArray[np.uint8]  # (N, 32), of the encoded image
    pixels_sha256: NDArray[np.uint8]  # (N, 32), of its decoded pixels and their shape
    sizes: Integers  # (N, 2), height and width in px
    descriptors: NDArray[np.int8]  # (N, VIEWS, 64), see `thumbnails.describe`
    thumbs: ThumbFile  # on disk

    def __len__(self) -> int:
        return len(self.ids)

    def name(self, row: int) -> str:
        """Name a row as SPLIT:ID."""
        return f"{self.splits[self.split[row]]}:{self.ids[row]}"


class _Seen(NamedTuple):
    """What is kept of a sample, but its thumbnail."""

    id: int
    key: str
    bytes_sha256: bytes
    pixels_sha256: bytes
    size: tuple[int, int]


# of a part: how many samples, and of those that can be read what is kept
_Part = tuple[int, list[_Seen], Thumbs, NDArray[np.int8]]


def scan(
    splits: Sequence[Split],
    *,
    ids: Sequence[Integers] | None = None,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Samples:
    """Read the images of some splits.

    Args:
        splits: Where they are.
        ids: Of each split the samples wanted, sorted; all of them by default.
        num_workers: Threads that decode; 0: the caller does.
        on_bad: Called for each image that cannot be decoded, which is skipped.
        progress: Called with the number of samples of each part that is done.

    Raises:
        DataError: A shard cannot be read, or thumbnails have no room on the disk.
    """

    def parts() -> Iterator[tuple[int, _Part]]:
        for number, split in enumerate(splits):
            some = None if ids is None else ids[number]
            look = partial(_look, split.stored_type)
            for part in each_part(
                split, look, _gathered, ids=some, num_workers=num_workers, on_bad=on_bad
            ):
                yield number, part
                if progress is not None:
                    progress(part[0])

    return _collected([split.name for split in splits], parts())


def scan_pictures(pictures: Iterable[NDArray[np.uint8]]) -> Samples:
    """Do as `scan` with pictures in memory, (h, w, 3) uint8 each; their bytes are their pixels."""
    seen = (_see(k, str(k), pixels.tobytes(), pixels) for k, pixels in enumerate(pictures))
    return _collected(["pictures"], ((0, _gathered([each])) for each in seen))


def _collected(splits: Sequence[str], parts: Iterable[tuple[int, _Part]]) -> Samples:
    """Put parts of splits, by number, together."""
    with _temporary_file():
        thumbs = ThumbFile()
    rows: list[_Seen] = []
    of_split: list[int] = []
    descriptors = [np.zeros((0, VIEWS, WIDTH), np.int8)]
    try:
        for number, (_, seen, own_thumbs, own_descriptors) in parts:
            with _temporary_file():
                thumbs.append(own_thumbs)
            rows += seen
            of_split += [number] * len(seen)
            descriptors.append(own_descriptors)
    except BaseException:
        thumbs.close()
        raise
    return Samples(
        tuple(splits),
        np.array(of_split, np.int64),
        np.array([row.id for row in rows], np.int64),
        [row.key for row in rows],
        np.frombuffer(b"".join(row.bytes_sha256 for row in rows), np.uint8).reshape(-1, 32),
        np.frombuffer(b"".join(row.pixels_sha256 for row in rows), np.uint8).reshape(-1, 32),
        np.array([row.size for row in rows], np.int64).reshape(-1, 2),
        np.concatenate(descriptors),
        thumbs,
    )


@contextmanager
def _temporary_file() -> Iterator[None]:
    """Say where thumbnails cannot be put, and what helps."""
    try:
        yield
    except OSError as error:
        place = tempfile.tempdir or "a folder of temporary files"
        raise DataError(
            f"thumbnails of the images, {ThumbFile.ROW_BYTES // 1024} KiB each, cannot be written "
            f"to {place}: {error.strerror}; set TMPDIR to a folder that has room"
        ) from error


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
    gather: Callable[[list[T | None]], U],
    *,
    ids: Integers | None = None,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
) -> Iterator[U]:
    """Look at every sample of a split, or at some, a part at a time, in order.

    Args:
        split: Where they are.
        look: Called with a sample's id and bytes, in a thread; raises BadSample.
        gather: Called with a part's results, in the same thread; its own are yielded.
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
        entry, own = split.shards[shard], rows[shards == shard]
        size = max(1, min(PART_SAMPLES, PART_BYTES * entry.samples // entry.bytes))
        parts += [(shard, own[first : first + size]) for first in range(0, len(own), size)]

    def look_at(shard: int, rows: NDArray[np.int64]) -> U:
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
        return gather(seen)

    if not num_workers:
        yield from (look_at(*part) for part in parts)
        return
    with one_thread_an_operation(), ThreadPoolExecutor(num_workers, "sslpipe-scan") as pool:
        ahead: deque[Future[U]] = deque()
        for part in parts:
            ahead.append(pool.submit(look_at, *part))
            if len(ahead) > 2 * num_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _look(image_type: ImageType, sample_id: int, raw: Raw) -> tuple[_Seen, Thumbs]:
    if isinstance(raw.image, BadSample):
        raise raw.image
    pixels = decode_picture(raw.image, MAX_PIXELS, image_type)  # (h, w, 3), at full size
    return _see(sample_id, raw.key, raw.image, pixels)


def _see(sample_id: int, key: str, raw: bytes | memoryview, pixels: Thumbs) -> tuple[_Seen, Thumbs]:
    """Keep what a picture, (h, w, 3) uint8, is compared by."""
    height, width, _ = pixels.shape
    of_pixels = hashlib.sha256(f"{height} {width} ".encode())
    of_pixels.update(np.ascontiguousarray(pixels).data)
    of_bytes = hashlib.sha256(raw).digest()
    seen = _Seen(sample_id, key, of_bytes, of_pixels.digest(), (height, width))
    return seen, thumbnail(pixels)


def _gathered(looked: list[tuple[_Seen, Thumbs] | None]) -> _Part:
    """Describe all pictures of a part."""
    known = [each for each in looked if each is not None]
    thumbs = np.array([thumb for _, thumb in known], np.uint8).reshape(-1, THUMB_PX, THUMB_PX, 3)
    return len(looked), [seen for seen, _ in known], thumbs, describe(thumbs)


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
