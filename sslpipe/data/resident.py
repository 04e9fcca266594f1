"""A data set that fits, decoded once into the device's memory: `run.cache = "device"`.

The batches are those of `loader.batches`: same order, same stand-ins for bad samples.
"""

import math
from collections.abc import Generator
from itertools import count, product

import numpy as np
import torch
from torch import Tensor

from sslpipe.data.decode import JpegDecoder
from sslpipe.data.index import Split
from sslpipe.data.loader import Integers, one_pass, open_reader, pixel_dtype, stand_in
from sslpipe.data.order import Order
from sslpipe.data.pairing import Pairing
from sslpipe.data.pipeline import Batch, Prepare, pipelined, send
from sslpipe.data.store import OnBad, Quarantined
from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.portable import free_memory_bytes
from sslpipe.recipe.base import RunConfig
from sslpipe.recipe.pretrain import Data

MOST_OF_MEMORY = 0.5  # of what is free: the rest is for the model and its activations


def resident_batches(
    split: Split,
    order: Order,
    data: Data,
    run: RunConfig,
    process: Rank,
    *,
    first_step: int = 0,
    device: torch.device,
    on_bad: OnBad,
    jpeg: JpegDecoder | None = None,
    prepare: Prepare | None = None,
    pairing: Pairing | None = None,
) -> Generator[Batch]:
    """Yield the batches of `batches`, with the images on the device; arguments as there.

    Every process holds all images that are served. Raises: DataError, also where they do not fit.
    """
    # decode everything once, into the device's memory
    bad: set[int] = set()

    def remember(record: Quarantined) -> None:
        bad.add(record.id)
        on_bad(record)

    ids = np.setdiff1d(np.arange(len(split)), order.without)
    images, sizes, held = _read(split, ids, data, run, device, remember, jpeg)
    place = np.full(len(split), -1, np.int64)  # of a sample among the images held
    place[held] = np.arange(len(held))

    # then every step selects rows
    streams = process.share(data.num_streams)

    def batch(step: int, parts: list[None]) -> Batch:
        epoch, ids = order.ids(step, streams)
        sources = _with_stand_ins(order, step, streams, ids, bad) if bad else ids
        shown, partners = None, ids[:0]
        if pairing is not None and (drawn := pairing.drawn(step, streams)) is not None:
            paired = (sources == ids) & (place[drawn.ids] >= 0)
            shown = np.where(paired, drawn.ids, sources)
            partners = shown[shown != sources]
        rows = torch.from_numpy(place[np.append(sources, partners)])
        selected = Batch(
            images.index_select(0, send([rows], device)[0]).permute(0, 3, 1, 2),
            sizes[rows],
            torch.from_numpy(split.labels_of(sources)),
            torch.from_numpy(ids),
            torch.from_numpy(sources),
            epoch,
        )
        if pairing is not None:
            selected = pairing.describe(step, streams, selected, shown)
        return prepare(step, selected) if prepare else selected

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # rows are selected on another stream
    steps, nothing = iter(count(first_step)), list[None]()
    yield from pipelined(
        steps, lambda step: nothing, lambda part: part, batch, run.num_workers, run.prefetch, device
    )


def _with_stand_ins(
    order: Order, step: int, streams: range, ids: Integers, bad: set[int]
) -> Integers:
    """The samples really served at each of a step's positions, (B,) int64; ids: those planned."""
    epoch, within = divmod(step, order.steps_per_epoch)
    share, sources = order.batch_size // order.num_streams, ids.copy()
    for row, (number, place) in enumerate(product(streams, range(share))):
        if int(ids[row]) in bad:
            plan, position = order.epoch(epoch).stream(number), within * share + place
            sources[row] = stand_in(lambda i: None if i in bad else i, plan, position)[0]
    return sources


def _read(
    split: Split,
    ids: Integers,
    data: Data,
    run: RunConfig,
    device: torch.device,
    on_bad: OnBad,
    jpeg: JpegDecoder | None,
) -> tuple[Tensor, Tensor, Integers]:
    """(at least n, H, W, C) pixels on the device; (n, 2) sizes and (n,) ids of the good samples."""
    decoded = one_pass(
        split,
        ids=ids,
        canvas_px=data.canvas_px,
        num_workers=run.num_workers,
        reader=open_reader(split, run),
        on_bad=on_bad,
        jpeg=jpeg,
    )
    empty = (0, 1, 1, len(split.image_type.channels))
    images = torch.zeros(empty, dtype=pixel_dtype(split), device=device)
    sizes, held, count_held = [], [], 0
    for batch in decoded:
        height, width = batch.images.shape[2:]
        canvas = max(height, images.shape[1]), max(width, images.shape[2])
        if canvas != images.shape[1:3]:  # the first batch, or a larger image
            images = _enlarged(images, len(ids), *canvas)
        first, count_held = count_held, count_held + len(batch.ids)
        images[first:count_held, :height, :width] = batch.images.permute(0, 2, 3, 1).to(device)
        sizes.append(batch.sizes)
        held.append(batch.ids.numpy())
    if not count_held:
        raise DataError(
            f"none of the {len(ids)} samples can be decoded; `sslpipe shards verify` "
            "lists every bad one"
        )
    return images, torch.cat(sizes), np.concatenate(held)


def _enlarged(images: Tensor, count_all: int, height: int, width: int) -> Tensor:
    """(count_all, height, width, C) with what `images` holds in the corners; zeros elsewhere."""
    shape = (count_all, height, width, images.shape[3])
    needed, free = math.prod(shape) * images.element_size(), free_bytes(images.device)
    if needed > MOST_OF_MEMORY * free:
        raise DataError(
            f'run.cache = "device": {count_all} images of {height} x {width} px are '
            f"{needed / 2**30:.1f} GB, and {free / 2**30:.1f} GB of the {images.device.type}'s "
            'memory are free; use run.cache = "memory" or "none", or a smaller data.canvas_px'
        )
    larger = torch.zeros(shape, dtype=images.dtype, device=images.device)
    larger[: len(images), : images.shape[1], : images.shape[2]] = images
    return larger


def free_bytes(device: torch.device) -> int:
    """Say how much memory is free: of a CUDA device, else of the machine, which MPS shares."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return free_memory_bytes()
