"""Read every image of some splits once, and keep what tells two of them apart."""

import errno
import hashlib
import shutil
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.threads import one_thread_an_operation
from sslpipe.curate.thumbnails import (
    THUMB_PX,
    VIEWS,
    WIDTH,
    ThumbFile,
    Thumbs,
    describe,
    inside_frame,
    thumbnail,
    thumbnails,
)
from sslpipe.data.decode import MAX_PIXELS, BadSample, decode
from sslpipe.data.index import Split
from sslpipe.data.reader import Raw, Reader
from sslpipe.data.store import OnBad, Quarantined
from sslpipe.errors import DataError

# read and looked at together, at most; of few, threads would mostly wait for Python's lock
PART_SAMPLES, PART_BYTES = 256, 8 * 2**20
WINDOW_BYTES = 64 * 2**20

Integers = NDArray[np.int64]
Progress = Callable[[int], None]
T = TypeVar("T")
U = TypeVar("U")


class Pictures(NamedTuple):
    """What samples are compared by: each one's whole and, of a framed one, then its inside.

    Args:
        sample: (M,) int64, rows of `Samples`, ascending.
        sizes: (M, 2) int64, height and width in px.
        descriptors: (M, VIEWS, 64) int8, see `thumbnails.describe`.
        thumbs: M thumbnails, on disk.
    """

    sample: Integers
    sizes: Integers
    descriptors: NDArray[np.int8]
    thumbs: ThumbFile

    def of(self, samples: Integers) -> tuple[Integers, Integers]:
        """Return the first picture of some samples, and how many they have: 1 or 2."""
        first = np.searchsorted(self.sample, samples)
        return first, np.searchsorted(self.sample, samples, side="right") - first


class Samples(NamedTuple):
    """The readable samples of some splits, one split after the other, by id.

    Args:
        splits: Their names.
        split: (N,) int64, which of them.
        ids: (N,) int64, the place in that split.
        keys: N of the shards.
        bytes_sha256: (N, 32) uint8, of the encoded image.
        pixels_sha256: (N, 32) uint8, of its decoded pixels and their shape.
        pictures: Of all of them.
    """

    splits: tuple[str, ...]
    split: Integers
    ids: Integers
    keys: list[str]
    bytes_sha256: NDArray[np.uint8]
    pixels_sha256: NDArray[np.uint8]
    pictures: Pictures

    def __len__(self) -> int:
        return len(self.ids)


class _Seen(NamedTuple):
    id: int
    key: str
    bytes_sha256: bytes
    pixels_sha256: bytes
    sizes: list[tuple[int, int]]  # of the whole, and of what is inside its frame


class _Part(NamedTuple):
    """What is kept of the samples of a part.

    Args:
        samples: How many there are, with those that cannot be read.
        seen: The others, in order.
        thumbs: (m, 64, 64, 1 or 3) uint8, of all their pictures.
        descriptors: (m, VIEWS, 64) int8.
    """

    samples: int
    seen: list[_Seen]
    thumbs: Thumbs
    descriptors: NDArray[np.int8]


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
    wanted = map(len, splits if ids is None else ids)
    found, counts = _Collected(sum(wanted)), []
    try:
        for number, split in enumerate(splits):
            before, some = len(found.rows), None if ids is None else ids[number]
            parts = each_part(
                split, _look, _gathered, ids=some, num_workers=num_workers, on_bad=on_bad
            )
            for part in parts:
                found.take(part)
                if progress is not None:
                    progress(part.samples)
            counts.append(len(found.rows) - before)
    except BaseException:
        found.close()
        raise
    return found.samples([split.name for split in splits], counts)


def scan_pictures(pictures: Iterable[NDArray[np.uint8]], name: str = "pictures") -> Samples:
    """Do as `scan` with pictures in memory, (h, w, 3) uint8 each; their bytes are their pixels."""
    found = _Collected()
    for number, pixels in enumerate(pictures):
        found.take(_gathered([_see(number, str(number), pixels.tobytes(), pixels)]))
    return found.samples([name], [len(found.rows)])


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


class _Collected:
    """What was seen so far; thumbnails go to the disk.

    Args:
        expected: How many samples will be seen, for all of which there must be room.
    """

    def __init__(self, expected: int = 0) -> None:
        self.rows: list[_Seen] = []
        with _temporary_file():
            if expected * ThumbFile.ROW_BYTES > shutil.disk_usage(tempfile.gettempdir()).free:
                raise OSError(errno.ENOSPC, f"{expected} of them have no room there")
            self._thumbs = ThumbFile()
        self._descriptors = [np.zeros((0, VIEWS, WIDTH), np.int8)]

    def close(self) -> None:
        """Give up: what was seen is of no use."""
        self._thumbs.close()

    def take(self, part: _Part) -> None:
        with _temporary_file():
            self._thumbs.append(part.thumbs)
        self._descriptors.append(part.descriptors)
        self.rows += part.seen

    def samples(self, splits: Sequence[str], counts: Sequence[int]) -> Samples:
        """Put everything into arrays. counts: Rows of each split."""
        rows = self.rows
        of_bytes, of_pixels = (
            np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
            for hashes in ([r.bytes_sha256 for r in rows], [r.pixels_sha256 for r in rows])
        )
        pictures = Pictures(
            np.repeat(np.arange(len(rows)), [len(row.sizes) for row in rows]),
            np.array([size for row in rows for size in row.sizes], np.int64).reshape(-1, 2),
            self._all_descriptors(),
            self._thumbs,
        )
        ids = np.array([row.id for row in rows], np.int64)
        split = np.repeat(np.arange(len(splits)), counts)
        keys = [row.key for row in rows]
        return Samples(tuple(splits), split, ids, keys, of_bytes, of_pixels, pictures)

    def _all_descriptors(self) -> NDArray[np.int8]:
        """Put the parts into one array; each is given up at once, that memory holds all once."""
        parts, at = self._descriptors, 0
        whole = np.empty((sum(map(len, parts)), VIEWS, WIDTH), np.int8)
        parts.reverse()
        while parts:
            part = parts.pop()
            whole[at : at + len(part)] = part
            at += len(part)
        return whole


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
        look: Makes of a sample's id and bytes what is kept; raises BadSample.
        gather: Makes of what is kept of a part's samples what is yielded, where these were made.
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


def _look(sample_id: int, raw: Raw) -> tuple[_Seen, list[Thumbs]]:
    """See `_see`. Raises: BadSample."""
    if isinstance(raw.image, BadSample):
        raise raw.image
    pixels = decode(raw.image, MAX_PIXELS).transpose(1, 2, 0)  # (h, w, 3), at full size
    return _see(sample_id, raw.key, raw.image, pixels)


def _see(
    sample_id: int, key: str, raw: bytes | memoryview, pixels: Thumbs
) -> tuple[_Seen, list[Thumbs]]:
    """Look at a picture, (h, w, 3) uint8.

    Returns:
        What is kept of it; itself and what is inside its frame, what is larger than a thumbnail as
        one, for a part of large pictures would need much memory.
    """
    height, width, _ = pixels.shape
    of_pixels = hashlib.sha256(f"{height} {width} ".encode())
    of_pixels.update(np.ascontiguousarray(pixels).data)
    inside = inside_frame(pixels)
    shown = [pixels] if inside is None else [pixels, inside]
    seen = _Seen(
        sample_id,
        key,
        hashlib.sha256(raw).digest(),
        of_pixels.digest(),
        [(each.shape[0], each.shape[1]) for each in shown],
    )
    return seen, [each if max(each.shape) <= THUMB_PX else thumbnail(each) for each in shown]


def _gathered(looked: list[tuple[_Seen, list[Thumbs]] | None]) -> _Part:
    """Compute what all pictures of a part are compared by."""
    readable = [each for each in looked if each is not None]
    thumbs = thumbnails([shown for _, pictures in readable for shown in pictures])
    return _Part(len(looked), [seen for seen, _ in readable], thumbs, describe(thumbs))
