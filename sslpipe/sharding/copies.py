"""Which images are there twice byte for byte where they should not: in two splits, two classes."""

import hashlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from sslpipe.data.decode import BadSample, Buffer
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.reader import KEYS_AT_ONCE, Reader, keys_of
from sslpipe.errors import DataError, counted, shown

Digests = NDArray[np.void]  # (n,), DIGEST_BYTES an image
DIGEST_BYTES = 16
UNREAD = np.zeros(1, f"V{DIGEST_BYTES}")  # in place of the digest of an image that cannot be read
WINDOW_BYTES = 2**24  # read at once


def digest_of(image: Buffer) -> bytes:
    """Hash an image as it is stored: equal bytes have equal digests, of DIGEST_BYTES."""
    return hashlib.blake2b(image, digest_size=DIGEST_BYTES).digest()


def copies_across(index: DatasetIndex, workers: int, known: Mapping[str, bytes]) -> list[str]:
    """Return a sentence for each two splits with a common image, and one on images of two classes.

    Args:
        index: A finished data set.
        workers: Threads.
        known: The digests of a shard's images, in order, by its sha256; other shards are read,
            unless there is one split.
    """
    names = sorted(index.manifest.splits, key=lambda name: name != "train")  # counted are others
    splits = {name: index.split(name) for name in names}
    are_known = all(shard.sha256 in known for split in splits.values() for shard in split.shards)
    if len(names) < 2 and not are_known:
        return []
    try:
        digests = {name: _digests(split, workers, known) for name, split in splits.items()}
    except DataError as error:  # of a split that stays, on a disk that is not there
        return [f"whether an image is in two splits is not known: {error}"]
    lines = []
    for first, second in combinations(names, 2):
        copied = np.isin(digests[second], digests[first]) & (digests[second] != UNREAD)
        if copied.any():
            copy = int(copied.argmax())
            original = int((digests[first] == digests[second][copy]).argmax())
            lines.append(
                f"{copied.sum():,} of {len(splits[second]):,} images of {second} are in {first}, "
                f"too, byte for byte, such as {_name(splits[second], copy)} "
                f"({_name(splits[first], original)} in {first}): what is trained on one scores too "
                "well on the other; keep one of each and build again (`sslpipe curate duplicates "
                "DATA --out DIR` lists them)"
            )
    return lines + _across_classes(splits, digests)


def _across_classes(splits: Mapping[str, Split], digests: Mapping[str, Digests]) -> list[str]:
    """Count the images that are in two classes, a file in each; [] for none."""
    labels = np.concatenate([split.labels for split in splits.values()])
    joined = np.concatenate([digests[name] for name in splits])
    rows = np.flatnonzero((labels >= 0) & (joined != UNREAD))
    _, pictures = np.unique(joined[rows], return_inverse=True)
    pairs, first_rows = np.unique(
        np.stack([pictures, labels[rows]], axis=1), axis=0, return_index=True
    )
    again = np.flatnonzero(pairs[1:, 0] == pairs[:-1, 0])  # the same picture with the next label
    if not len(again):
        return []
    both = rows[first_rows[again[0] : again[0] + 2]]
    named = " and ".join(_with_class(splits, int(row)) for row in both)
    return [
        f"{counted(len(np.unique(pairs[again, 0])), 'image')} in two classes, byte for byte, such "
        f"as {named}: a sample has one class; remove what is wrong and build again"
    ]


def _with_class(splits: Mapping[str, Split], row: int) -> str:
    """Name a sample and its class, by its place in all splits one behind the other."""
    for split in splits.values():
        if row < len(split):
            return f"{_name(split, row)} of {shown(split.class_name(int(split.labels[row])))}"
        row -= len(split)
    raise IndexError(row)


def _name(split: Split, sample: int) -> str:
    return shown(keys_of(split, [sample])[sample])


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
