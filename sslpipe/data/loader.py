"""Batches of decoded images along the planned order; a bad sample does not shift it."""

import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.data.cache import DiskCache
from sslpipe.data.decode import BadSample, JpegDecoder, decode, is_plain_jpeg
from sslpipe.data.index import Split
from sslpipe.data.order import Order, StreamPlan
from sslpipe.data.pipeline import CPU, Batch, Prepare, pipelined
from sslpipe.data.reader import Raw, Reader
from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.recipe.base import RunConfig
from sslpipe.recipe.pretrain import Data

T = TypeVar("T")
Image = NDArray[np.uint8]
Integers = NDArray[np.int64]

STAND_IN_TRIES = 100  # bad samples in a row before the data are given up


class Quarantined(NamedTuple):
    """A sample that could not be used."""

    id: int
    shard: str
    key: str
    reason: str


OnBad = Callable[[Quarantined], None]


class ImageStore:
    """Images by sample id: read, decoded, and kept where a cache is requested.

    Args:
        reader: Of the split.
        canvas_px: Images with a longer side are reduced to it.
        keep: Keep every decoded image in memory.
        on_bad: Called once for each bad sample, from any thread.
        jpeg: Decodes plain JPEGs, many at once (see nvjpeg.py); by default they are decoded one by
            one on the CPU.
    """

    def __init__(
        self,
        reader: Reader,
        *,
        canvas_px: int,
        keep: bool,
        on_bad: OnBad,
        jpeg: JpegDecoder | None = None,
    ) -> None:
        self.reader, self.canvas_px, self.keep, self._jpeg = reader, canvas_px, keep, jpeg
        self._kept: dict[int, Image] = {}
        self._on_bad, self._bad, self._lock = on_bad, set[int](), threading.Lock()

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
        """Decode one sample, or take it from the cache.

        Args:
            sample_id: Its place in the split.
            raw: Its bytes, where they are read already.
            decoded: Its pixels, where another decoder made them; see `decode`.

        Returns:
            (3, h, w) uint8, or None where the sample is bad.
        """
        if sample_id in self._kept:
            return self._kept[sample_id]
        if sample_id in self._bad:
            return None
        raw = raw or self.reader.one(sample_id)
        try:
            if isinstance(raw.image, BadSample):
                raise raw.image
            image = decode(raw.image, self.canvas_px, decoded)
        except BadSample as error:
            self._report(sample_id, raw.key, str(error))
            return None
        if self.keep:
            self._kept[sample_id] = image
        return image

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


class StreamReader:
    """The raw samples of one stream, one window at a time."""

    def __init__(self, order: Order, store: ImageStore, number: int) -> None:
        self._order, self._store, self._number = order, store, number
        self._window: tuple[int, int] = (-1, -1)
        self._raw: dict[int, Raw] = {}

    def take(self, step: int) -> tuple[list[int], list[Raw | None], StreamPlan, int]:
        """Read this stream's part of a global step.

        Returns:
            The samples' ids, their bytes (None: the image is kept), the plan, and the position of
            the first one in the stream.
        """
        order = self._order
        epoch, within = divmod(step, order.steps_per_epoch)
        plan = order.epoch(epoch).stream(self._number)
        share = order.batch_size // order.num_streams
        begin = within * share
        ids = plan.ids(begin, begin + share).tolist()
        raws: list[Raw | None] = []
        for position, sample_id in enumerate(ids, begin):
            if self._store.holds(sample_id):
                raws.append(None)
                continue
            window = plan.window_at(position)
            if self._window != (epoch, window):
                self._window = (epoch, window)
                self._raw = self._read(plan, window)
            raws.append(self._raw.get(sample_id))
        return ids, raws, plan, begin

    def _read(self, plan: StreamPlan, window: int) -> dict[int, Raw]:
        ids = plan.window_ids(window)
        wanted = ids[[not self._store.holds(i) for i in ids.tolist()]]
        shard = int(plan.windows[window, 0])
        rows = wanted - self._order.starts[shard]
        return dict(zip(wanted.tolist(), self._store.reader.rows(shard, rows), strict=True))


def open_reader(split: Split, run: RunConfig) -> Reader:
    """Open a split for reading, the way the recipe's [run] says."""
    return Reader(
        split,
        window_bytes=run.window_bytes,
        allow_pipe=run.allow_pipe,
        cache=DiskCache(Path(run.cache_dir), int(run.cache_gb * 1e9)) if run.cache_dir else None,
    )


def batches(
    split: Split,
    order: Order,
    data: Data,
    run: RunConfig,
    process: Rank,
    *,
    first_step: int = 0,
    device: torch.device = CPU,
    on_bad: OnBad,
    jpeg: JpegDecoder | None = None,
    prepare: Prepare | None = None,
) -> Generator[Batch]:
    """Yield this rank's part of every global step from `first_step` on, without end.

    The same arguments give the same batches, whatever run.num_workers, run.cache and the number of
    processes are: the ranks' parts, put together in rank order, are the one-process batch.
    A bad sample's place is taken by the next good one half a segment further in its stream.

    Args:
        split: Where the samples are.
        order: Which sample stands where.
        data: The recipe's [data].
        run: The recipe's [run].
        process: This process; it serves its share of the streams.
        first_step: The global step to begin with.
        device: Where the images are; all else is on the CPU.
        on_bad: Called once for each bad sample, from any thread.
        jpeg: See `ImageStore`.
        prepare: Called with each step and its batch where it is collated: plans its views.

    Raises:
        DataError: A shard cannot be read, or STAND_IN_TRIES samples in a row are bad.
    """
    reader = open_reader(split, run)
    store = ImageStore(
        reader, canvas_px=data.canvas_px, keep=run.cache == "memory", on_bad=on_bad, jpeg=jpeg
    )
    streams = process.share(data.num_streams)
    readers = [StreamReader(order, store, number) for number in streams]

    def read(step: int) -> list[tuple[list[int], list[Raw | None], StreamPlan, int]]:
        return [reader.take(step) for reader in readers]

    def decoded(
        taken: tuple[list[int], list[Raw | None], StreamPlan, int],
    ) -> list[tuple[int, Image]]:
        ids, raws, plan, begin = taken
        images = store.get_many(ids, raws)
        return [
            (sample_id, image) if image is not None else stand_in(store.get, plan, position)
            for position, (sample_id, image) in enumerate(zip(ids, images, strict=True), begin)
        ]

    def batch(step: int, parts: list[list[tuple[int, Image]]]) -> Batch:
        epoch, ids = order.ids(step, streams)
        rows = [row for part in parts for row in part]
        collated = collate(split, ids, rows, epoch, pinned=device.type == "cuda")
        return prepare(step, collated) if prepare else collated

    steps = iter(count(first_step))
    yield from pipelined(steps, read, decoded, batch, run.num_workers, run.prefetch, device)


def one_pass(
    split: Split,
    *,
    ids: Integers | None = None,
    process: Rank = Rank(),  # noqa: B008 (immutable)
    batch_size: int = 256,
    canvas_px: int = 256,
    num_workers: int = 2,
    on_bad: OnBad | None = None,
    reader: Reader | None = None,
    jpeg: JpegDecoder | None = None,
) -> Iterator[Batch]:
    """Yield this rank's contiguous share of the samples, each exactly once, in id order.

    Args:
        split: Where the samples are.
        ids: (n,) the samples wanted, sorted; all of the split by default.
        process: This process.
        batch_size: Samples of a batch; the last one, or one with bad samples, has fewer.
        canvas_px: Images with a longer side are reduced to it.
        num_workers: Threads that decode; 0: the caller does.
        on_bad: Called for each bad sample, which is skipped; without it, a DataError.
        reader: Of this split; by default one that runs no command and keeps nothing on disk.
        jpeg: See `ImageStore`.

    Raises:
        DataError: A shard cannot be read, or a sample is bad and there is no `on_bad`.
    """
    wanted = np.arange(len(split)) if ids is None else np.asarray(ids, dtype=np.int64)
    share = process.share(len(wanted))
    wanted = wanted[share.start : share.stop]
    reader = reader or Reader(split, window_bytes=64 * 2**20)
    store = ImageStore(reader, canvas_px=canvas_px, keep=False, on_bad=on_bad or _refuse, jpeg=jpeg)

    def read(start: int) -> list[tuple[Integers, list[Raw]]]:
        part = wanted[start : start + batch_size]
        shards, rows = split.locate(part)
        return [
            (part[shards == k], reader.rows(int(k), rows[shards == k])) for k in np.unique(shards)
        ]

    def decoded(taken: tuple[Integers, list[Raw]]) -> list[tuple[int, Image]]:
        ids = taken[0].tolist()
        images = store.get_many(ids, taken[1])
        return [(i, image) for i, image in zip(ids, images, strict=True) if image is not None]

    def batch(start: int, parts: list[list[tuple[int, Image]]]) -> Batch:
        rows = [row for part in parts for row in part]
        return collate(split, np.array([i for i, _ in rows], np.int64), rows, 0)

    starts = iter(range(0, len(wanted), batch_size))
    for result in pipelined(starts, read, decoded, batch, num_workers, prefetch=4):
        if len(result.ids):
            yield result


def _refuse(bad: Quarantined) -> None:
    raise DataError(f"{bad.shard}, key {bad.key!r} (id {bad.id}): {bad.reason}")


def stand_in(get: Callable[[int], T | None], plan: StreamPlan, position: int) -> tuple[int, T]:
    """Find who takes a bad sample's place: the next good one half a segment further on.

    Args:
        get: Gives what there is of a sample by its id, None for a bad one.
        plan: The bad sample's stream.
        position: Its place there.

    Returns:
        The stand-in's id, and what `get` gave for it.

    Raises:
        DataError: STAND_IN_TRIES samples in a row are bad.
    """
    tries = min(STAND_IN_TRIES, plan.length)
    for further in range(tries):
        place = (position + plan.length // 2 + further) % plan.length
        candidate = int(plan.ids(place, place + 1)[0])
        result = get(candidate)
        if result is not None:
            return candidate, result
    raise DataError(
        f"{tries} samples in a row cannot be decoded, the last with id {candidate}; "
        "`sslpipe shards verify` lists every bad one"
    )


def collate(
    split: Split,
    ids: Integers,
    rows: list[tuple[int, Image]],
    epoch: int,
    *,
    pinned: bool = False,
) -> Batch:
    """Put decoded images on one canvas, zeros around them.

    Args:
        split: Where their labels are.
        ids: (B,) the positions' samples.
        rows: Id and (3, h, w) uint8 image of the sample that stands at each position.
        epoch: Of the batch.
        pinned: Write the images where a copy to a GPU begins: torch reuses such memory as soon as
            the copies from it are done.
    """
    sources = np.array([source for source, _ in rows], np.int64)
    sizes = np.array([image.shape[1:] for _, image in rows], np.int64).reshape(-1, 2)
    height, width = sizes.max(axis=0, initial=1).tolist()
    shape = len(rows), height, width, 3
    images = torch.empty(shape, dtype=torch.uint8, pin_memory=pinned)
    if (sizes == (height, width)).all() and rows:
        np.stack([image.transpose(1, 2, 0) for _, image in rows], out=images.numpy())
    else:
        for slot, (_, image) in zip(images.numpy(), rows, strict=True):
            _, h, w = image.shape
            slot[:h, :w] = image.transpose(1, 2, 0)
            slot[h:], slot[:h, w:] = 0, 0
    parts = (sizes, split.labels_of(sources), ids, sources)
    tensors = [torch.from_numpy(part) for part in parts]
    images = images.permute(0, 3, 1, 2)
    return Batch(images, tensors[0], tensors[1], tensors[2], tensors[3], epoch)
