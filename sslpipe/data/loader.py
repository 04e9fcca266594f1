"""Batches of decoded images along the planned order; a bad sample does not shift it."""

import math
from collections.abc import Callable, Generator, Iterator, Sequence
from itertools import count, product
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from sslpipe.data.index import Split
from sslpipe.data.order import Order, StreamPlan
from sslpipe.data.partners import Pairing
from sslpipe.data.pipeline import BATCHES_AHEAD, CPU, Batch, Prepare, pipelined, send
from sslpipe.data.reader import Image, ImageStore, OnBad, Quarantined, Raw, Reader
from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.portable import free_memory_bytes, gib
from sslpipe.recipe.sections import RunConfig

T = TypeVar("T")
Integers = NDArray[np.int64]

RECENT_BYTES = 512 * 2**20  # of decoded images, each of which is soon somebody's partner
STAND_IN_TRIES = 100  # bad samples in a row before the data are given up
MOST_OF_MEMORY = 0.5  # of what is free, for run.cache = "device": the rest is for the training

Shown = tuple[Batch, Integers | None]  # and the samples of second views; None: all their own
DrawPartners = Callable[[int], Integers | None]  # of a step; None: no sample has one


class Taken(NamedTuple):
    """One stream's part of a global step."""

    ids: list[int]
    raws: list[Raw | None]  # None: kept decoded
    plan: StreamPlan
    begin: int  # position of the first one in the stream
    partners: list[int] | None  # own ids where both views show the sample; None: no sample has one
    partner_raws: list[Raw | None]  # that are in memory


class StreamReader:
    """The raw samples of one stream, one window at a time."""

    def __init__(self, order: Order, store: ImageStore, number: int) -> None:
        self._order = order
        self._store = store
        self._number = number
        self._window: tuple[int, int] = (-1, -1)
        self._raw: dict[int, Raw] = {}

    def take(self, step: int, partners: list[int] | None = None) -> Taken:
        """Read this stream's part of a global step; of the partners, what its window holds."""
        order = self._order
        holds = self._store.holds
        epoch, within = divmod(step, order.steps_per_epoch)
        plan = order.epoch(epoch).stream(self._number)
        share = order.batch_size // order.num_streams
        begin = within * share
        taken = Taken(ids=[], raws=[], plan=plan, begin=begin, partners=partners, partner_raws=[])
        for window, rows in plan.pieces(begin, begin + share):
            for sample_id in plan.window_ids(window)[rows].tolist():
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
            read_ids = ids[[not self._store.holds(i) for i in ids.tolist()]]
            shard = int(plan.windows[window, 0])
            raws = self._store.reader.rows(shard, read_ids - self._order.starts[shard])
            self._window = (epoch, window)
            self._raw = dict(zip(read_ids.tolist(), raws, strict=True))
        return self._raw


def batches(
    split: Split,
    order: Order,
    run: RunConfig,
    process: Rank,
    *,
    canvas_px: int,
    first_step: int = 0,
    device: torch.device = CPU,
    on_bad: OnBad,
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
        run: The recipe's [run]. cache = "device": everything is decoded first, into its memory.
        process: This process; it serves its share of the streams.
        canvas_px: Images with a longer side are reduced to it.
        first_step: The global step to begin with.
        device: Where the images are; all else is on the CPU.
        on_bad: Called once for each bad sample, from any thread.
        prepare: Called with each step and its batch where it is collated: plans its views.
        pairing: Of [pairs].

    Raises:
        DataError: A shard cannot be read, STAND_IN_TRIES samples in a row are bad, or the images do
            not fit the device.
    """
    streams = process.share(order.num_streams)

    def draw_partners(step: int) -> Integers | None:
        return None if pairing is None else pairing.partners_of_step(step, streams)

    has_partners = pairing is not None and pairing.partners is not None
    make_source = ResidentImages if run.cache == "device" else StreamedImages
    served = Served(
        split=split,
        order=order,
        run=run,
        canvas_px=canvas_px,
        streams=streams,
        device=device,
        on_bad=on_bad,
        draw_partners=draw_partners if has_partners else None,
    )
    source = make_source(served)

    def finish(step: int, parts: list[Any]) -> Batch:
        batch, shown = source.collate(step, parts)
        if pairing is not None:
            batch = pairing.describe(step, streams, batch, shown)
        return prepare(step, batch) if prepare else batch

    yield from pipelined(
        items=count(first_step),
        read=source.read,
        decode_part=source.decode,
        collate_parts=finish,
        num_workers=run.num_workers,
        device=device,
        ahead=BATCHES_AHEAD,
    )


class Served(NamedTuple):
    """What `batches` serves, and how; see its arguments."""

    split: Split
    order: Order
    run: RunConfig
    canvas_px: int
    streams: range  # of this rank
    device: torch.device
    on_bad: OnBad
    draw_partners: DrawPartners | None


class Decoded(NamedTuple):
    """One stream's part of a global step: id and image of the sample at each position.

    `partners` are those of second views that show another sample; empty: none does.
    """

    rows: list[tuple[int, Image]]
    partners: list[tuple[int, Image] | None]


class StreamedImages:
    """Reads the shards along the streams: stages of a step's batch for `pipelined`."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._store = ImageStore(
            reader=Reader(served.split),
            canvas_px=served.canvas_px,
            keep=served.run.cache == "memory",
            on_bad=served.on_bad,
            recent_bytes=RECENT_BYTES if served.draw_partners else 0,
        )
        self._readers = [
            StreamReader(served.order, self._store, number) for number in served.streams
        ]

    def read(self, step: int) -> list[Taken]:
        """Read each stream's part of a step."""
        count = len(self._readers)
        served = self._served
        ids = served.draw_partners(step) if served.draw_partners else None
        partners = [None] * count if ids is None else ids.reshape(count, -1).tolist()
        return [reader.take(step, row) for reader, row in zip(self._readers, partners, strict=True)]

    def decode(self, taken: Taken) -> Decoded:
        """Decode what was read of a stream; find stand-ins of bad samples."""
        ids = taken.ids
        partners = taken.partners or []
        paired = [row for row, partner in enumerate(partners) if partner != ids[row]]
        wanted = [*ids, *(partners[row] for row in paired)]
        raws = [*taken.raws, *(taken.partner_raws[row] for row in paired)]
        get = self._store.get
        images = [get(i, raw) for i, raw in zip(wanted, raws, strict=True)]
        rows = [
            (sample_id, image) if image is not None else stand_in(get, taken.plan, position)
            for position, (sample_id, image) in enumerate(
                zip(ids, images, strict=False), taken.begin
            )
        ]
        seconds: list[tuple[int, Image] | None] = [None] * len(partners)
        for row, image in zip(paired, images[len(ids) :], strict=True):
            if image is not None and rows[row][0] == ids[row]:
                seconds[row] = partners[row], image
        return Decoded(rows, seconds)

    def collate(self, step: int, parts: list[Decoded]) -> Shown:
        """Put the streams' parts together."""
        served = self._served
        pinned = served.device.type == "cuda"
        epoch, ids = served.order.ids(step, served.streams)
        rows = [row for part in parts for row in part.rows]
        partners = [partner for part in parts for partner in part.partners]
        shown = [(partner or row)[0] for row, partner in zip(rows, partners, strict=False)]
        batch = collate(served.split, ids, rows, epoch, partners=partners, pinned=pinned)
        return batch, np.array(shown, np.int64) if shown else None


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
    """
    wanted = np.arange(len(split)) if ids is None else np.asarray(ids, dtype=np.int64)
    share = process.share(len(wanted))
    wanted = wanted[share.start : share.stop]
    reader = reader or Reader(split)
    store = ImageStore(reader=reader, canvas_px=canvas_px, keep=False, on_bad=on_bad or _refuse)

    def read(start: int) -> list[tuple[Integers, list[Raw]]]:
        part = wanted[start : start + batch_size]
        shards, rows = split.locate(part)
        return [
            (part[shards == k], reader.rows(int(k), rows[shards == k])) for k in np.unique(shards)
        ]

    def decoded(taken: tuple[Integers, list[Raw]]) -> list[tuple[int, Image]]:
        ids = taken[0].tolist()
        images = [store.get(i, raw) for i, raw in zip(ids, taken[1], strict=True)]
        return [(i, image) for i, image in zip(ids, images, strict=True) if image is not None]

    def batch(start: int, parts: list[list[tuple[int, Image]]]) -> Batch:
        rows = [row for part in parts for row in part]
        return collate(split, np.array([i for i, _ in rows], np.int64), rows, 0)

    for result in pipelined(
        items=range(0, len(wanted), batch_size),
        read=read,
        decode_part=decoded,
        collate_parts=batch,
        num_workers=num_workers,
        ahead=BATCHES_AHEAD,
    ):
        if len(result.ids):
            yield result


def _refuse(bad: Quarantined) -> None:
    raise DataError(f"{bad.shard}, key {bad.key!r} (id {bad.id}): {bad.reason}")


def stand_in(get: Callable[[int], T | None], plan: StreamPlan, position: int) -> tuple[int, T]:
    """Find who takes a bad sample's place in its stream: the next good one half a segment on.

    `get` gives what there is of a sample by its id, None for a bad one; it is returned, too.

    Raises: DataError where STAND_IN_TRIES samples in a row are bad.
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
    """Return what pixels are in batches: uint8, or float32 in the units of `ImageType`."""
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
    """Put decoded images, each with its id, on one canvas, zeros around them.

    `ids` (B,) are the positions' samples, `rows` those that stand there. Of `partners`, of the
    second views, the images that are there come last. `pinned`: in memory where a copy to a GPU
    begins; torch reuses it after the copies.
    """
    sources = np.array([source for source, _ in rows], np.int64)
    pictures = [image for _, image in rows] + [partner[1] for partner in partners if partner]
    sizes = np.array([image.shape[1:] for image in pictures], np.int64).reshape(-1, 2)
    height, width = sizes.max(axis=0, initial=1).tolist()
    shape = (len(sizes), height, width, len(split.image_type.channels))
    dtype = pixel_dtype(split)
    images = torch.empty(shape, dtype=dtype, pin_memory=pinned)
    for canvas, picture, (h, w) in zip(images.numpy(), pictures, sizes.tolist(), strict=True):
        canvas[:h, :w] = picture.transpose(1, 2, 0)
        canvas[h:] = 0
        canvas[:h, w:] = 0
    return Batch(
        images=images.permute(0, 3, 1, 2),
        sizes=torch.from_numpy(sizes),
        labels=torch.from_numpy(split.labels_of(sources)),
        ids=torch.from_numpy(ids),
        source_ids=torch.from_numpy(sources),
        epoch=epoch,
    )


# run.cache = "device"


class ResidentImages:
    """Decodes all that is served into the device's memory; a step's batch then selects rows."""

    def __init__(self, served: Served) -> None:
        self._served = served
        self._bad: set[int] = set()

        def remember(record: Quarantined) -> None:
            self._bad.add(record.id)
            served.on_bad(record)

        split = served.split
        device = served.device
        ids = np.setdiff1d(np.arange(len(split)), served.order.without)
        decoded = one_pass(
            split,
            ids=ids,
            canvas_px=served.canvas_px,
            num_workers=served.run.num_workers,
            on_bad=remember,
        )
        self._images, self._sizes, held = _gather(decoded, split, len(ids), device)
        self._place = np.full(len(split), -1, np.int64)  # of a sample among the images held
        self._place[held] = np.arange(len(held))
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # rows are selected on another stream

    def read(self, step: int) -> list[Any]:
        """Read nothing: all is there."""
        return []

    def decode(self, part: Any) -> Any:
        """Decode nothing."""
        return part

    def collate(self, step: int, parts: list[Any]) -> Shown:
        """Select the images of a step on the device."""
        served = self._served
        epoch, ids = served.order.ids(step, served.streams)
        sources = self._with_stand_ins(step, ids) if self._bad else ids
        shown = None
        partners = ids[:0]
        others = served.draw_partners(step) if served.draw_partners else None
        if others is not None:
            is_held = self._place[others] >= 0
            shown = np.where((sources == ids) & is_held, others, sources)
            partners = shown[shown != sources]
        rows = torch.from_numpy(self._place[np.append(sources, partners)])
        images = self._images.index_select(0, send([rows], served.device)[0])
        batch = Batch(
            images=images.permute(0, 3, 1, 2),
            sizes=self._sizes[rows],
            labels=torch.from_numpy(served.split.labels_of(sources)),
            ids=torch.from_numpy(ids),
            source_ids=torch.from_numpy(sources),
            epoch=epoch,
        )
        return batch, shown

    def _with_stand_ins(self, step: int, ids: Integers) -> Integers:
        """Return the samples really served at a step's positions, (B,); ids: those planned."""
        order = self._served.order
        epoch, within = divmod(step, order.steps_per_epoch)
        share = order.batch_size // order.num_streams
        sources = ids.copy()
        for row, (number, place) in enumerate(product(self._served.streams, range(share))):
            if int(ids[row]) in self._bad:
                plan = order.epoch(epoch).stream(number)
                sources[row] = stand_in(self._good, plan, within * share + place)[0]
        return sources

    def _good(self, sample_id: int) -> int | None:
        return None if sample_id in self._bad else sample_id


def _gather(
    decoded: Iterator[Batch], split: Split, count_all: int, device: torch.device
) -> tuple[Tensor, Tensor, Integers]:
    """(count_all, H, W, C) pixels on the device; (n, 2) sizes and (n,) ids of the good samples."""
    images = torch.zeros(0, 1, 1, len(split.image_type.channels), dtype=pixel_dtype(split))
    images = images.to(device)
    sizes = list[Tensor]()
    held = list[int]()
    for batch in decoded:
        height, width = batch.images.shape[2:]
        # the first batch, or a larger image
        if height > images.shape[1] or width > images.shape[2]:
            images = _enlarged(
                images,
                count_all,
                height=max(height, images.shape[1]),
                width=max(width, images.shape[2]),
            )
        rows = slice(len(held), len(held) + len(batch.ids))
        images[rows, :height, :width] = batch.images.permute(0, 2, 3, 1).to(device)
        sizes.append(batch.sizes)
        held += batch.ids.tolist()
    if not held:
        raise DataError(
            f"none of the {count_all} samples can be decoded; `sslpipe shards verify` "
            "lists every bad one"
        )
    return images, torch.cat(sizes), np.array(held)


def _enlarged(images: Tensor, count_all: int, height: int, width: int) -> Tensor:
    """(count_all, height, width, C) with what `images` holds in the corners; zeros elsewhere."""
    shape = (count_all, height, width, images.shape[3])
    needed = math.prod(shape) * images.element_size()
    free = free_bytes(images.device)
    if needed > MOST_OF_MEMORY * free:
        raise DataError(
            f'run.cache = "device": {count_all} images of {height} x {width} px are '
            f"{gib(needed)}, and {gib(free)} of the {images.device.type}'s "
            'memory are free; use run.cache = "memory" or "none", or a smaller data.canvas_px'
        )
    larger = torch.zeros(shape, dtype=images.dtype, device=images.device)
    larger[: len(images), : images.shape[1], : images.shape[2]] = images
    return larger


def free_bytes(device: torch.device) -> int:
    """Return how much memory is free: of a CUDA device, else of the machine, which MPS shares."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()
