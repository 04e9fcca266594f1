"""Which images of one split are in another one, too, byte for byte."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.decode import BadSample, Buffer
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.reader import KEYS_AT_ONCE, Reader, keys_of
from sslpipe.errors import DataError, shown

Digests = NDArray[np.void]  # (n,), DIGEST_BYTES an image
DIGEST_BYTES = 16
UNREAD = np.zeros(1, f"V{DIGEST_BYTES}")  # in place of the digest of an image that cannot be read
WINDOW_BYTES = 2**24  # read at once


def digest_of(image: Buffer) -> bytes:
    """Hash an image as it is stored: equal bytes have equal digests, of DIGEST_BYTES."""
    return hashlib.blake2b(image, digest_size=DIGEST_BYTES).digest()


def copies_across_splits(
    index: DatasetIndex, workers: int, known: Mapping[str, bytes]
) -> list[str]:
    """Return a sentence for each two splits with a common image: how many, one of them, the remedy.

    Args:
        index: A finished data set.
        workers: Threads.
        known: The digests of a shard's images, in order, by its sha256; other shards are read,
            unless there is one split.
    """
    names = sorted(index.manifest.splits, key=lambda name: name != "train")  # counted are others
    if len(names) < 2:
        return []
    splits = {name: index.split(name) for name in names}
    try:
        digests = {name: _digests(split, workers, known) for name, split in splits.items()}
    except DataError as error:  # of a split that stays, on a disk that is not there
        return [f"whether an image is in two splits is not known: {error}"]
    lines = []
    for first, second in combinations(names, 2):
        copied = np.isin(digests[second], digests[first]) & (digests[second] != UNREAD)
        ids = np.flatnonzero(copied)
        if not len(ids):
            continue
        copy = int(ids[0])
        original = int(np.flatnonzero(digests[first] == digests[second][copy])[0])
        name = keys_of(splits[second], [copy])[copy]
        name_in_first = keys_of(splits[first], [original])[original]
        lines.append(
            f"{len(ids):,} of {len(splits[second]):,} images of {second} are in {first}, too, byte "
            f"for byte, such as {shown(name)} ({shown(name_in_first)} in {first}): what is trained "
            "on one scores too well on the other; keep one of each and build again (`sslpipe "
            "curate duplicates DATA --out DIR` lists them)"
        )
    return lines


def _digests(split: Split, workers: int, known: Mapping[str, bytes]) -> Digests:
    """Return the digests of all images of a split; UNREAD where one cannot be read."""
    reader = Reader(split, window_bytes=WINDOW_BYTES)

    def of_shard(shard: int) -> bytes:
        entry = split.shards[shard]
        noted = known.get(entry.sha256, b"")
        if len(noted) == DIGEST_BYTES * entry.samples:
            return noted
        digests = []
        rows = np.arange(entry.samples)
        for begin in range(0, len(rows), KEYS_AT_ONCE):
            for raw in reader.rows(shard, rows[begin : begin + KEYS_AT_ONCE]):
                if isinstance(raw.image, BadSample):
                    digests.append(UNREAD.tobytes())
                else:
                    digests.append(digest_of(raw.image))
        return b"".join(digests)

    with ThreadPoolExecutor(workers) as pool:
        parts = pool.map(of_shard, range(len(split.shards)))
        return np.frombuffer(b"".join(parts), UNREAD.dtype)
