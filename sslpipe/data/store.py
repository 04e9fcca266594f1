"""Images of samples by id: read, decoded, and kept where a cache is requested."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numpy.typing import NDArray

from sslpipe.data.decode import BadSample, JpegDecoder, decode, is_plain_jpeg
from sslpipe.data.reader import Raw, Reader

Image = NDArray[Any]  # (C, h, w), see `decode`


class Quarantined(NamedTuple):
    """A sample that could not be used."""

    id: int
    shard: str
    key: str
    reason: str


OnBad = Callable[[Quarantined], None]


class ImageStore:
    """Images of a reader's split by sample id.

    Args:
        reader: Of the split.
        canvas_px: Images with a longer side are reduced to it.
        keep: Keep every decoded image in memory.
        on_bad: Called once for each bad sample, from any thread.
        recent_bytes: Of the images decoded last, which stay even without `keep`: where partners
            are drawn, an image is soon wanted again.
        jpeg: Decodes plain JPEGs, many at once (nvjpeg.py); else the CPU does, one by one.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        canvas_px: int,
        keep: bool,
        on_bad: OnBad,
        recent_bytes: int = 0,
        jpeg: JpegDecoder | None = None,
    ) -> None:
        self.reader, self.canvas_px, self.keep, self._jpeg = reader, canvas_px, keep, jpeg
        self._kept: dict[int, Image] = {}
        self._on_bad, self._bad, self._lock = on_bad, set[int](), threading.Lock()
        self._recent, self._recent_room = OrderedDict[int, Image](), recent_bytes  # oldest first

    def holds(self, sample_id: int) -> bool:
        """Say whether a sample's decoded image is kept."""
        return sample_id in self._kept

    def get_many(self, ids: list[int], raws: Sequence[Raw | None]) -> list[Image | None]:
        """Call `get` for each sample; plain JPEGs are decoded together."""
        decoded = self._decoded_together(ids, raws) if self._jpeg else {}
        return [self.get(i, raw, decoded.get(i)) for i, raw in zip(ids, raws, strict=True)]

    def get(
        self, sample_id: int, raw: Raw | None = None, decoded: Image | None = None
    ) -> Image | None:
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
            image = decode(raw.image, self.canvas_px, decoded, split.stored_type, split.channels)
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

    def _decoded_together(self, ids: list[int], raws: Sequence[Raw | None]) -> dict[int, Image]:
        plain = {
            sample_id: raw.image
            for sample_id, raw in zip(ids, raws, strict=True)
            if raw is not None and not isinstance(raw.image, BadSample) and is_plain_jpeg(raw.image)
        }
        assert self._jpeg is not None
        try:
            return dict(zip(plain, self._jpeg(list(plain.values())), strict=True)) if plain else {}
        except RuntimeError:  # one is damaged: the CPU's decoder says which, and why
            return {}

    def _report(self, sample_id: int, key: str, reason: str) -> None:
        with self._lock:
            if sample_id in self._bad:  # another thread was first
                return
            self._bad.add(sample_id)
        shard = int(self.reader.split.locate([sample_id])[0][0])
        self._on_bad(Quarantined(sample_id, self.reader.split.shards[shard].file, key, reason))
