"""Read every image of some splits once, and keep what tells two of them apart."""

import hashlib
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.decode import MAX_PIXELS, BadSample, decode
from sslpipe.data.index import Split
from sslpipe.data.reader import Raw, Reader
from sslpipe.data.store import OnBad, Quarantined

PART_SAMPLES = 64  # read and decoded together
WINDOW_BYTES = 64 * 2**20

Pixels = NDArray[np.uint8]
Progress = Callable[[int], None]
T = TypeVar("T")


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
    """

    splits: tuple[str, ...]
    split: NDArray[np.int64]
    ids: NDArray[np.int64]
    keys: list[str]
    bytes_sha256: NDArray[np.uint8]
    pixels_sha256: NDArray[np.uint8]
    sizes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.ids)


class _Seen(NamedTuple):
    id: int
    key: str
    bytes_sha256: bytes
    pixels_sha256: bytes
    size: tuple[int, int]


def scan(
    splits: Sequence[Split],
    *,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
    progress: Progress | None = None,
) -> Samples:
    """Read the images of whole splits.

    Args:
        splits: Where they are.
        num_workers: Threads that decode; 0: the caller does.
        on_bad: Called for each image that cannot be decoded, which is skipped.
        progress: Called with the number of samples of each part that is done.

    Raises:
        DataError: A shard cannot be read.
    """
    seen: list[list[_Seen]] = []
    for split in splits:
        seen.append([])
        for part in each_sample(split, _look, num_workers=num_workers, on_bad=on_bad):
            seen[-1] += [one for one in part if one is not None]
            if progress is not None:
                progress(len(part))
    rows = [one for part in seen for one in part]
    hashes = (b"".join(part) for part in ([r.bytes_sha256 for r in rows], [r[3] for r in rows]))
    of_bytes, of_pixels = (np.frombuffer(raw, np.uint8).reshape(-1, 32) for raw in hashes)
    return Samples(
        tuple(split.name for split in splits),
        np.repeat(np.arange(len(splits)), [len(part) for part in seen]),
        np.array([row.id for row in rows], np.int64),
        [row.key for row in rows],
        of_bytes,
        of_pixels,
        np.array([row.size for row in rows], np.int64).reshape(-1, 2),
    )


def each_sample(
    split: Split,
    look: Callable[[int, Raw], T],
    *,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
) -> Iterator[list[T | None]]:
    """Look at every sample of a split, a part at a time, in order.

    Args:
        split: Where they are.
        look: Makes of a sample's id and bytes what is kept; raises BadSample.
        num_workers: Threads that look; 0: the caller does.
        on_bad: Called for each bad sample, from any thread; None stands in its place.

    Raises:
        DataError: A shard cannot be read.
    """
    reader = Reader(split, window_bytes=WINDOW_BYTES)
    sizes = [shard.samples for shard in split.shards]
    parts = [
        (shard, np.arange(first, min(first + PART_SAMPLES, size)))
        for shard, size in enumerate(sizes)
        for first in range(0, size, PART_SAMPLES)
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
    height, width, _ = pixels.shape
    of_pixels = hashlib.sha256(f"{height} {width} ".encode())
    of_pixels.update(np.ascontiguousarray(pixels).data)
    return _Seen(
        sample_id, raw.key, hashlib.sha256(raw.image).digest(), of_pixels.digest(), (height, width)
    )
