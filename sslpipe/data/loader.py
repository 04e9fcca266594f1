"""Batches of decoded images along the planned order; a bad sample does not shift it."""

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial
from itertools import count
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray

from sslpipe.data.cache import DiskCache
from sslpipe.data.decode import JpegDecoder
from sslpipe.data.index import Split
from sslpipe.data.order import Order, StreamPlan
from sslpipe.data.pairing import Pairing
from sslpipe.data.pipeline import CPU, Batch, Prepare, pipelined
from sslpipe.data.reader import Raw, Reader
from sslpipe.data.store import Image, ImageStore, OnBad, Quarantined
from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.recipe.base import RunConfig
from sslpipe.recipe.pretrain import Data

T = TypeVar("T")
Integers = NDArray[np.int64]

RECENT_BYTES = 512 * 2**20  # of decoded images, each of which is soon somebody's partner
STAND_IN_TRIES = 100  # bad samples in a row before the data are given up


class Taken(NamedTuple):
    """One stream's part of a global step: the ids of n samples and their bytes, None: kept decoded.

    `begin` is the position of the first one in the stream of `plan`. Of the partners, None where
    nobody has one, else each sample's own id where both views show it, the bytes that are in
    memory.
    """

    ids: list[int]
    raws: list[Raw | None]
    plan: StreamPlan
    begin: int
    partners: list[int] | None
    partner_raws: list[Raw | None]


class StreamReader:
    """The raw samples of one stream, one window at a time."""

    def __init__(self, order: Order, store: ImageStore, number: int) -> None:
        self._order, self._store, self._number = order, store, number
        self._window: tuple[int, int] = (-1, -1)
        self._raw: dict[int, Raw] = {}

    def take(self, step: int, partners: list[int] | None = None) -> Taken:
        """Read this stream's part of a global step; of the partners, what its window holds."""
        order, holds = self._order, self._store.holds
        epoch, within = divmod(step, order.steps_per_epoch)
        plan = order.epoch(epoch).stream(self._number)
        share = order.batch_size // order.num_streams
        begin = within * share
        taken = Taken([], [], plan, begin, partners, [])
        for window, own in plan.pieces(begin, begin + share):
            for sample_id in plan.window_ids(window)[own].tolist():
                partner = sample_id if partners is None else partners[len(taken.ids)]
                kept = holds(sample_id) and holds(partner)
                raws = {} if kept else self._read(plan, epoch, window)
                taken.ids.append(sample_id)
                taken.raws.append(raws.get(sample_id))
                taken.partner_raws.append(raws.get(partner))
        return taken

    def _read(self, plan: StreamPlan, epoch: int, window: int) -> dict[int, Raw]:
        """Read the samples of a window that are not kept decoded, unless it was the last one."""
        if self._window != (epoch, window):
            ids = plan.window_ids(window)
            wanted = ids[[not self._store.holds(i) for i in ids.tolist()]]
            shard = int(plan.windows[window, 0])
            raws = self._store.reader.rows(shard, wanted - self._order.starts[shard])
            self._window, self._raw = (epoch, window), dict(zip(wanted.tolist(), raws, strict=True))
        return self._raw


def open_reader(split: Split, run: RunConfig) -> Reader:
    """Open a split for reading, the way the recipe's [run] says."""
    cache = DiskCache(Path(run.cache_dir), int(run.cache_gb * 1e9)) if run.cache_dir else None
    return Reader(split, window_bytes=run.window_bytes, cache=cache)


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
    pairing: Pairing | None = None,
) -> Generator[Batch]:
    """Yield this rank's part of every global step from `first_step` on, without end.

    The same arguments give the same batches, whatever run.num_workers, run.cache and the number of
    processes are: the ranks' parts, put together in rank order, are the one-process batch.
    A bad sample's place is taken by the next good one half a segment further in its stream, which
    has no partner; where a partner is bad, both views show the sample itself.

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
        pairing: Of [pairs].

    Raises:
        DataError: A shard cannot be read, or STAND_IN_TRIES samples in a row are bad.
    """
    has_partners = pairing is not None and pairing.partners is not None
    store = ImageStore(
        open_reader(split, run),
        canvas_px=data.canvas_px,
        keep=run.cache == "memory",
        on_bad=on_bad,
        recent_bytes=RECENT_BYTES if has_partners else 0,
        jpeg=jpeg,
    )
    streams = process.share(data.num_streams)
    readers = [StreamReader(order, store, number) for number in streams]
    pinned = device.type == "cuda"

    def read(step: int) -> list[Taken]:
        drawn = None if pairing is None else pairing.drawn(step, streams)
        parts = drawn.ids.reshape(len(readers), -1).tolist() if drawn else [None] * len(readers)
        return [reader.take(step, part) for reader, part in zip(readers, parts, strict=True)]

    def batch(step: int, parts: list[Decoded]) -> Batch:
        epoch, ids = order.ids(step, streams)
        rows = [row for part in parts for row in part.rows]
        partners = [partner for part in parts for partner in part.partners]
        collated = collate(split, ids, rows, epoch, partners=partners, pinned=pinned)
        if pairing is not None:
            pairs = zip(rows, partners, strict=False)
            shown = np.array([(partner or row)[0] for row, partner in pairs], np.int64)
            collated = pairing.describe(step, streams, collated, shown if partners else None)
        return prepare(step, collated) if prepare else collated

    steps = iter(count(first_step))
    decode_part = partial(_decode, store)
    yield from pipelined(steps, read, decode_part, batch, run.num_workers, run.prefetch, device)


class Decoded(NamedTuple):
    """One stream's part of a global step: id and image of the sample at each position.

    `partners` are those of second views that show another sample; empty: none does.
    """

    rows: list[tuple[int, Image]]
    partners: list[tuple[int, Image] | None]


def _decode(store: ImageStore, taken: Taken) -> Decoded:
    """Decode what was read; find stand-ins of bad samples."""
    ids, partners = taken.ids, taken.partners or []
    paired = [row for row, partner in enumerate(partners) if partner != ids[row]]
    images = store.get_many(
        [*ids, *(partners[row] for row in paired)],
        [*taken.raws, *(taken.partner_raws[row] for row in paired)],
    )
    rows = [
        (sample_id, image) if image is not None else stand_in(store.get, taken.plan, position)
        for position, (sample_id, image) in enumerate(zip(ids, images, strict=False), taken.begin)
    ]
    seconds: list[tuple[int, Image] | None] = [None] * len(partners)
    for row, image in zip(paired, images[len(ids) :], strict=True):
        if image is not None and rows[row][0] == ids[row]:
            seconds[row] = partners[row], image
    return Decoded(rows, seconds)


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
    """
    wanted = np.arange(len(split)) if ids is None else np.asarray(ids, dtype=np.int64)
    share = process.share(len(wanted))
    wanted = wanted[share.start : share.stop]
    reader = reader or Reader(split)
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
        get: Gives what there is of a sample by its id, None for a bad one; it is returned, too.
        plan: The bad sample's stream.
        position: Its place there.

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


def pixel_dtype(split: Split) -> torch.dtype:
    """Say what pixels are in batches: uint8, or float32 in the units of `ImageType`."""
    return torch.uint8 if split.image_type.dtype == "uint8" else torch.float32


def collate(
    split: Split,
    ids: Integers,
    rows: list[tuple[int, Image]],
    epoch: int,
    *,
    partners: Sequence[tuple[int, Image] | None] = (),
    pinned: bool = False,
) -> Batch:
    """Put decoded images on one canvas, zeros around them.

    Args:
        split: Where their labels are.
        ids: (B,) the positions' samples.
        rows: Id and (C, h, w) image of the sample that stands at each position.
        epoch: Of the batch.
        partners: Of the second views; the images that are there come last, in this order.
        pinned: Write to memory where a copy to a GPU begins; torch reuses it after the copies.
    """
    sources = np.array([source for source, _ in rows], np.int64)
    pictures = [image for _, image in rows] + [partner[1] for partner in partners if partner]
    sizes = np.array([image.shape[1:] for image in pictures], np.int64).reshape(-1, 2)
    height, width = sizes.max(axis=0, initial=1).tolist()
    shape, dtype = (len(sizes), height, width, len(split.image_type.channels)), pixel_dtype(split)
    images = torch.empty(shape, dtype=dtype, pin_memory=pinned)
    for canvas, picture, (h, w) in zip(images.numpy(), pictures, sizes.tolist(), strict=True):
        canvas[:h, :w] = picture.transpose(1, 2, 0)
        canvas[h:], canvas[:h, w:] = 0, 0
    arrays = sizes, split.labels_of(sources), ids, sources
    sides, labels, positions, read = map(torch.from_numpy, arrays)
    return Batch(images.permute(0, 3, 1, 2), sides, labels, positions, read, epoch)
