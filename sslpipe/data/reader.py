"""Samples out of shards: contiguous byte ranges, expanded and grouped as webdataset does; images.

The index says where each sample lies, so that plain ustar members are cut out directly (6 times as
fast); webdataset itself expands whatever else there is: long names, links, damage.
Nothing is written to disk or unpickled here: a member is bytes under a name. `ImageStore` decodes.
"""

import io
import threading
import zlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from webdataset.tariterators import group_by_keys, tar_file_expander

from sslpipe.data.decode import BadSample, decode
from sslpipe.data.index import BLOCK, IMAGE_SUFFIXES, Split
from sslpipe.data.storage import read_range

ADLER_PRIME = 65521
_EXTENSIONS = (b"x", b"g", b"X", b"L", b"K")  # pax and GNU: types of members that extend the next
_MOST_EXTENSION = 64 * 1024  # bytes; a name takes up to 4096
GAP_BYTES = 256 * 1024  # reading past fewer unwanted bytes is cheaper than another request
# whose images are in memory together
KEY_WINDOW_BYTES = 2**23
KEYS_AT_ONCE = 256

Image = NDArray[Any]  # (C, h, w), see `decode`


class Raw(NamedTuple):
    """A sample as in its shard: webdataset's key, and its encoded image or why there is none.

    A view keeps all of its read in memory. The key is "" where it could not be read.
    """

    key: str
    image: bytes | memoryview | BadSample


@dataclass(eq=False)
class Reader:
    """Reads samples of a split by shard and row; safe to use from several threads."""

    split: Split
    window_bytes: int = field(default=64 * 2**20, kw_only=True)  # the largest single read

    def rows(self, shard: int, rows: NDArray[np.int64]) -> list[Raw]:
        """Read the samples at some rows of a shard, (n,) in any order; bad ones are BadSamples.

        Raises:
            DataError: The shard itself cannot be read.
        """
        samples: dict[int, Raw] = {}
        for run in self._runs(shard, np.sort(rows)):
            samples.update(zip(run, self._read(shard, run), strict=True))
        return [samples[row] for row in rows.tolist()]

    def one(self, sample_id: int) -> Raw:
        """Read one sample by its id; raises as `rows`."""
        shard, row = self.split.locate([sample_id])
        return self.rows(int(shard[0]), row)[0]

    def _runs(self, shard: int, rows: NDArray[np.int64]) -> Iterator[list[int]]:
        """The rows of each read: near ones together, at most window_bytes."""
        if not len(rows):  # a decoding thread was faster: the cache holds all of them by now
            return
        offsets = self.split.offsets(shard)
        run = rows[:1].tolist()
        for row in rows[1:].tolist():
            far = offsets[row, 0] - offsets[run[-1], 1] > GAP_BYTES
            if far or offsets[row, 1] - offsets[run[0], 0] > self.window_bytes:
                yield run
                run = []
            run.append(row)
        yield run

    def _read(self, shard: int, rows: list[int]) -> list[Raw]:
        offsets = self.split.offsets(shard)[rows]
        begin = int(offsets[0, 0])
        raw = memoryview(read_range(self.split.url(shard), begin, int(offsets[-1, 1])))
        places = (offsets[:, :2] - begin).tolist()
        suffixes = self.split.suffixes
        return [
            _plain(raw, start, end, suffixes) or _alone(bytes(raw[start:end]), suffixes)
            for start, end in places
        ]


def _plain(
    raw: memoryview, start: int, end: int, suffixes: tuple[str, ...] = IMAGE_SUFFIXES
) -> Raw | None:
    """The sample in raw[start:end]; None unless it is whole ustar files and exactly one image.

    Source: POSIX.1-1988 tar (IEEE Std 1003.1, pax, "ustar Interchange Format").
    """
    images: dict[str, memoryview] = {}  # by suffix behind the key
    stem = ""
    while start < end:
        header = bytes(raw[start : start + BLOCK])
        data = start + BLOCK
        name = header[:100].rstrip(b"\0")
        if header[345:346] != b"\0" or header[156:157] not in b"0\0" or b"\0" in name:
            return None  # a name in two parts, no file, or no tar at all
        try:
            size = _octal(header[124:136])
            checksum = _octal(header[148:156])
            folder, slash, file = name.decode("ascii").rpartition("/")
        except ValueError:  # also a damaged or foreign header
            return None
        if (_byte_sum(header) - checksum) % ADLER_PRIME or size < 0 or data + size > end:
            return None
        base, dot, suffix = file.partition(".")
        key = folder + slash + base
        if not (base and dot) or key != (stem := stem or key):
            return None
        if suffix.rpartition(".")[2].lower() in suffixes:
            if suffix in images:
                return None
            images[suffix] = raw[data : data + size]
        start = data + -(-size // BLOCK) * BLOCK
    chosen = list(images) if len(images) == 1 else _image_suffixes(images, suffixes)
    if start != end or len(chosen) != 1:
        return None
    return Raw(_sample_key(stem, chosen[0]), images[chosen[0]])


def _image_suffixes(all_suffixes: Iterable[str], suffixes: tuple[str, ...]) -> list[str]:
    """Choose as `sharding.scan`: jpg (or another of the suffixes), else what ends in .jpg."""
    images = [suffix for suffix in all_suffixes if suffix.rpartition(".")[2].lower() in suffixes]
    return [suffix for suffix in images if "." not in suffix] or images


def _sample_key(key: str, suffix: str) -> str:
    """Name a sample by its image's name to the last dot."""
    return f"{key}.{suffix}".rpartition(".")[0]


def _longest_extension(raw: bytes) -> int:
    """Bytes of the largest extension (a long name, pax records) among these tar members."""
    longest = 0
    start = 0
    while start < len(raw):
        try:
            size = _octal(raw[start + 124 : start + 136])
        except ValueError:
            break
        if raw[start + 156 : start + 157] in _EXTENSIONS:
            longest = max(longest, size)
        start += BLOCK + max(0, -(-size // BLOCK) * BLOCK)
    return longest


def _octal(field: bytes) -> int:
    return int(field.rstrip(b"\0 "), 8)


def _byte_sum(header: bytes) -> int:
    """Sum of the bytes, those of the checksum taken as spaces, modulo ADLER_PRIME.

    Adler-32's low half is one more than the sum of the bytes: 15 times as fast as sum().
    """
    return (zlib.adler32(header) & 0xFFFF) - 1 - sum(header[148:156]) + 8 * ord(" ")


def _alone(raw: bytes, suffixes: tuple[str, ...] = IMAGE_SUFFIXES) -> Raw:
    """The sample in these whole tar members, by webdataset."""
    if (size := _longest_extension(raw)) > _MOST_EXTENSION:
        return Raw("", BadSample(f"not a tar member: a header extension of {size} bytes"))
    try:
        source = {"url": "", "stream": io.BytesIO(raw)}
        samples = list(group_by_keys(tar_file_expander([source])))
    except Exception as error:  # tarfile raises many kinds; all mean a damaged header
        reason = error.args[0] if error.args else error  # webdataset adds its stream
        return Raw("", BadSample(f"not a tar member: {reason}"))
    if len(samples) != 1:
        return Raw("", BadSample(f"{len(samples)} samples where the index has one"))
    key = str(samples[0]["__key__"])
    chosen = _image_suffixes(samples[0], suffixes)
    if len(chosen) != 1:
        return Raw(key, BadSample(f"{len(chosen)} images under one key"))
    return Raw(_sample_key(key, chosen[0]), samples[0][chosen[0]])


def keys_of(split: Split, ids: ArrayLike) -> dict[int, str]:
    """Look up the paths that samples were built from, where they are known, else shards' keys."""
    names = split.names_of(ids)
    if names is not None:
        return dict(zip(np.asarray(ids).tolist(), names, strict=True))
    reader = Reader(split, window_bytes=KEY_WINDOW_BYTES)
    shards, rows = split.locate(np.unique(np.asarray(ids, np.int64)))
    keys: dict[int, str] = {}
    for shard in np.unique(shards).tolist():
        of_shard = rows[shards == shard]
        first = int(split.starts[shard])
        for place in range(0, len(of_shard), KEYS_AT_ONCE):
            some = of_shard[place : place + KEYS_AT_ONCE]
            samples = zip(some.tolist(), reader.rows(shard, some), strict=True)
            keys |= {first + row: raw.key for row, raw in samples}
    return keys


class Quarantined(NamedTuple):
    """A sample that could not be used."""

    id: int
    shard: str
    key: str
    reason: str


OnBad = Callable[[Quarantined], None]


@dataclass(eq=False, kw_only=True)
class ImageStore:
    """Images of a reader's split by sample id."""

    reader: Reader
    canvas_px: int  # images with a longer side are reduced to it
    keep: bool  # every decoded image, in memory
    on_bad: OnBad  # called once for each bad sample, from any thread
    recent_bytes: int = 0  # of the images decoded last, which stay even without `keep`

    def __post_init__(self) -> None:
        self._kept: dict[int, Image] = {}
        self._bad = set[int]()
        self._lock = threading.Lock()
        self._recent = OrderedDict[int, Image]()  # oldest first
        self._recent_room = self.recent_bytes

    def holds(self, sample_id: int) -> bool:
        """Return whether a sample's decoded image is kept."""
        return sample_id in self._kept

    def get(self, sample_id: int, raw: Raw | None = None) -> Image | None:
        """Decode a sample, read already or not, or take it from the cache: (C, h, w); None: bad."""
        if sample_id in self._kept:
            return self._kept[sample_id]
        if sample_id in self._bad:
            return None
        if (recent := self._recent.get(sample_id)) is not None:
            return recent
        raw = raw or self.reader.one(sample_id)
        try:
            split = self.reader.split
            image = decode(
                raw.image,
                self.canvas_px,
                image_type=split.stored_type,
                channels=split.channels,
            )
        except BadSample as error:
            self._report(sample_id, raw.key, str(error))
            return None
        if self.keep:
            self._kept[sample_id] = image
        elif self._recent_room or self._recent:
            self._remember(sample_id, image)
        return image

    def _remember(self, sample_id: int, image: Image) -> None:
        with self._lock:
            if sample_id in self._recent:  # another thread was first
                return
            self._recent[sample_id] = image
            self._recent_room -= image.nbytes
            while self._recent_room < 0:
                self._recent_room += self._recent.popitem(last=False)[1].nbytes

    def _report(self, sample_id: int, key: str, reason: str) -> None:
        with self._lock:
            if sample_id in self._bad:  # another thread was first
                return
            self._bad.add(sample_id)
        shard = int(self.reader.split.locate([sample_id])[0][0])
        self.on_bad(Quarantined(sample_id, self.reader.split.shards[shard].file, key, reason))
