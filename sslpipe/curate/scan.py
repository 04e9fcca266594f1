"""Read every image of some splits once, and keep what tells two of them apart."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sslpipe.curate.thumbnails import (
    VIEWS,
    WIDTH,
    ThumbFile,
    describe,
    inside_frame,
    thumbnail,
)
from sslpipe.data.decode import MAX_PIXELS, BadSample, decode
from sslpipe.data.index import Split
from sslpipe.data.reader import Raw, Reader
from sslpipe.data.store import OnBad, Quarantined

PART_SAMPLES = 64  # read and decoded together
WINDOW_BYTES = 64 * 2**20

Integers = NDArray[np.int64]
Progress = Callable[[int], None]
T = TypeVar("T")
_NO_THUMB = np.zeros((0, 0, 3), np.uint8)  # where it is on disk


class Samples(NamedTuple):
    """The readable samples of some splits, one split after the other, by id.

    Args:
        splits: Their names.
        split: (N,) int64, which of them.
        ids: (N,) int64, the place in that split.
        keys: N of the shards.
        bytes_sha256: (N, 32) uint8, of the encoded image.
        pixels_sha256: (N, 32) uint8, of its decoded pixels and their shape.
        sizes: (N, 2) int64, height and width in px.
        descriptors: (N, VIEWS, 64) int8, see `thumbnails.describe`.
        frames: (N, 4) float32, see `thumbnails.inside_frame`.
        thumbs: N thumbnails, on disk.
    """

    splits: tuple[str, ...]
    split: NDArray[np.int64]
    ids: NDArray[np.int64]
    keys: list[str]
    bytes_sha256: NDArray[np.uint8]
    pixels_sha256: NDArray[np.uint8]
    sizes: NDArray[np.int64]
    descriptors: NDArray[np.int8]
    frames: NDArray[np.float32]
    thumbs: ThumbFile

    def __len__(self) -> int:
        return len(self.ids)


class _Seen(NamedTuple):
    id: int
    key: str
    bytes_sha256: bytes
    pixels_sha256: bytes
    size: tuple[int, int]
    thumb: NDArray[np.uint8]
    frame: NDArray[np.float32]
    descriptor: NDArray[np.int8]


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
        DataError: A shard cannot be read.
    """
    rows: list[_Seen] = []
    counts, thumbs = [], ThumbFile()
    for number, split in enumerate(splits):
        before, some = len(rows), None if ids is None else ids[number]
        parts = each_sample(split, _look, ids=some, num_workers=num_workers, on_bad=on_bad)
        for part in parts:
            seen = [one for one in part if one is not None]
            thumbs.append([one.thumb for one in seen])
            rows += [one._replace(thumb=_NO_THUMB) for one in seen]
            if progress is not None:
                progress(len(part))
        counts.append(len(rows) - before)
    return _samples([split.name for split in splits], counts, rows, thumbs)


def scan_pictures(pictures: Iterable[NDArray[np.uint8]], name: str = "pictures") -> Samples:
    """Do as `scan` with pictures in memory, (h, w, 3) uint8 each; their bytes are their pixels."""
    rows, thumbs = list[_Seen](), ThumbFile()
    for number, pixels in enumerate(pictures):
        seen = _see(number, str(number), pixels.tobytes(), pixels)
        thumbs.append([seen.thumb])
        rows.append(seen._replace(thumb=_NO_THUMB))
    return _samples([name], [len(rows)], rows, thumbs)


def _samples(
    splits: Sequence[str], counts: Sequence[int], rows: Sequence[_Seen], thumbs: ThumbFile
) -> Samples:
    """Put what was seen into arrays. counts: Rows of each split."""
    descriptors = [row.descriptor[None] for row in rows]
    of_bytes, of_pixels = (
        np.frombuffer(b"".join(hashes), np.uint8).reshape(-1, 32)
        for hashes in ([r.bytes_sha256 for r in rows], [r.pixels_sha256 for r in rows])
    )
    return Samples(
        tuple(splits),
        np.repeat(np.arange(len(splits)), counts),
        np.array([row.id for row in rows], np.int64),
        [row.key for row in rows],
        of_bytes,
        of_pixels,
        np.array([row.size for row in rows], np.int64).reshape(-1, 2),
        np.concatenate([np.zeros((0, VIEWS, WIDTH), np.int8), *descriptors]),
        np.array([row.frame for row in rows], np.float32).reshape(-1, 4),
        thumbs,
    )


def each_sample(
    split: Split,
    look: Callable[[int, Raw], T],
    *,
    ids: Integers | None = None,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
) -> Iterator[list[T | None]]:
    """Look at every sample of a split, or at some, a part at a time, in order.

    Args:
        split: Where they are.
        look: Makes of a sample's id and bytes what is kept; raises BadSample.
        ids: The samples wanted, sorted; all by default.
        num_workers: Threads that look; 0: the caller does.
        on_bad: Called for each bad sample, from any thread; None stands in its place.

    Raises:
        DataError: A shard cannot be read.
    """
    reader = Reader(split, window_bytes=WINDOW_BYTES)
    shards, rows = split.locate(np.arange(len(split)) if ids is None else ids)
    parts = [
        (shard, own[first : first + PART_SAMPLES])
        for shard, own in ((int(k), rows[shards == k]) for k in np.unique(shards))
        for first in range(0, len(own), PART_SAMPLES)
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
        yield from (look_at(*part) for part in parts)
        return
    with ThreadPoolExecutor(num_workers, "sslpipe-scan") as pool:
        ahead: deque[Future[list[T | None]]] = deque()
        for part in parts:
            ahead.append(pool.submit(look_at, *part))
            if len(ahead) > 2 * num_workers:
                yield ahead.popleft().result()
        while ahead:
            yield ahead.popleft().result()


def _look(sample_id: int, raw: Raw) -> _Seen:
    """What is kept of one sample. Raises: BadSample."""
    if isinstance(raw.image, BadSample):
        raise raw.image
    pixels = decode(raw.image, MAX_PIXELS).transpose(1, 2, 0)  # (h, w, 3), at full size
    return _see(sample_id, raw.key, raw.image, pixels)


def _see(sample_id: int, key: str, raw: bytes | memoryview, pixels: NDArray[np.uint8]) -> _Seen:
    """What is kept of a picture, (h, w, 3) uint8."""
    height, width, _ = pixels.shape
    of_pixels = hashlib.sha256(f"{height} {width} ".encode())
    of_pixels.update(np.ascontiguousarray(pixels).data)
    thumb, frame = thumbnail(pixels), inside_frame(pixels)
    return _Seen(
        sample_id,
        key,
        hashlib.sha256(raw).digest(),
        of_pixels.digest(),
        (height, width),
        thumb,
        frame,
        describe(thumb, frame),
    )
