"""Raw samples out of shards: contiguous byte ranges, expanded and grouped by webdataset.

Nothing is decoded, written to disk or unpickled here: a member is bytes under a name.
"""

import io
import threading
from collections.abc import Iterator
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from webdataset.gopen import gopen
from webdataset.tariterators import group_by_keys, tar_file_expander

from sslpipe.data.decode import BadSample
from sslpipe.data.index import Split
from sslpipe.data.storage import read_range

IMAGE_SUFFIXES = ("jpg", "jpeg", "png", "webp")
GAP_BYTES = 256 * 1024  # reading past fewer unwanted bytes is cheaper than another request


class Raw(NamedTuple):
    key: str  # "" where it could not be read
    image: bytes | BadSample


class Reader:
    """Reads samples of a split by shard and row.

    window_bytes: the largest single read. allow_pipe: let `pipe:` URLs run their shell command.
    Safe to use from several threads.
    """

    def __init__(self, split: Split, *, window_bytes: int, allow_pipe: bool = False) -> None:
        self.split, self.window_bytes, self.allow_pipe = split, window_bytes, allow_pipe
        self._piped = lru_cache(maxsize=2)(_run_pipe)
        self._pipe_lock = threading.Lock()

    def rows(self, shard: int, rows: NDArray[np.int64]) -> list[Raw]:
        """The samples at the given rows of a shard, in the order asked for.

        rows: (n,) rows of the shard, any order. A sample that cannot be read as one holds a
        BadSample in its image's place. Raises: DataError where the shard itself cannot be read.
        """
        found: dict[int, Raw] = {}
        for first, last in self._runs(shard, np.sort(rows)):
            found.update(zip(range(first, last + 1), self._read(shard, first, last), strict=True))
        return [found[row] for row in rows.tolist()]

    def one(self, sample_id: int) -> Raw:
        shard, row = self.split.locate([sample_id])
        return self.rows(int(shard[0]), row)[0]

    def _runs(self, shard: int, rows: NDArray[np.int64]) -> Iterator[tuple[int, int]]:
        """First and last row of each read: near rows together, at most window_bytes."""
        if not len(rows):  # a decoding thread was faster: the cache holds all of them by now
            return
        offsets = self.split.offsets(shard)
        first = last = int(rows[0])
        for row in rows[1:].tolist():
            far = offsets[row, 0] - offsets[last, 1] > GAP_BYTES
            if far or offsets[row, 1] - offsets[first, 0] > self.window_bytes:
                yield first, last
                first = row
            last = row
        yield first, last

    def _read(self, shard: int, first: int, last: int) -> list[Raw]:
        offsets = self.split.offsets(shard)[first : last + 1]
        begin = int(offsets[0, 0])
        raw = self._bytes(self.split.url(shard), begin, int(offsets[-1, 1]))
        try:
            samples = [_raw(sample) for sample in _expand(raw)]
        except Exception:  # tarfile raises many kinds; each sample is tried alone below
            samples = []
        if len(samples) == len(offsets):
            return samples
        return [_alone(raw[start - begin : end - begin]) for start, end in offsets[:, :2].tolist()]

    def _bytes(self, url: str, begin: int, end: int) -> bytes:
        if self.allow_pipe and url.startswith("pipe:"):
            with self._pipe_lock:
                return self._piped(url)[begin:end]
        return read_range(url, begin, end)


def _expand(raw: bytes) -> list[dict[str, Any]]:
    """Whole tar members as webdataset samples: {"__key__": ..., "png": bytes, ...}."""
    source = {"url": "", "stream": io.BytesIO(raw)}
    return list(group_by_keys(tar_file_expander([source])))


def _raw(sample: dict[str, Any]) -> Raw:
    key = str(sample["__key__"])
    images = [sample[suffix] for suffix in IMAGE_SUFFIXES if suffix in sample]
    if len(images) != 1:
        return Raw(key, BadSample(f"{len(images)} images under one key"))
    return Raw(key, images[0])


def _alone(raw: bytes) -> Raw:
    try:
        samples = _expand(raw)
    except Exception as error:  # tarfile raises many kinds; all mean a damaged header
        return Raw("", BadSample(f"not a tar member: {error}"))
    if len(samples) != 1:
        return Raw("", BadSample(f"{len(samples)} samples where the index has one"))
    return _raw(samples[0])


def _run_pipe(url: str) -> bytes:
    with gopen(url) as stream:
        return bytes(stream.read())
