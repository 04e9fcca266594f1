"""Read PK batches: the streams are followed window by window, every process the same ones.

Each process decodes only what its own rows need; `sampling` plans which samples these are.
"""

from collections.abc import Generator
from itertools import count

import numpy as np
import torch

from sslpipe.data.index import Split
from sslpipe.data.loader import STAND_IN_TRIES, StreamReader, collate
from sslpipe.data.pipeline import BATCHES_AHEAD, CPU, Batch, Prepare, pipelined
from sslpipe.data.reader import Image, ImageStore, OnBad, Raw, Reader
from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.metric_learning.sampling import PKOrder
from sslpipe.recipe.sections import RunConfig


def pk_batches(
    split: Split,
    order: PKOrder,
    run: RunConfig,
    process: Rank,
    *,
    canvas_px: int,
    first_step: int = 0,
    device: torch.device = CPU,
    on_bad: OnBad,
    prepare: Prepare | None = None,
) -> Generator[Batch]:
    """Yield this rank's rows of every step's batch from `first_step` on, endless.

    The ranks' rows, put together in rank order, are the one-process batch; their numbers may differ
    by one. A bad sample's place is taken by its class's next good one that is not in the batch.
    `prepare` is called with each step and its batch where it is collated: it plans the views.

    Raises:
        DataError: a shard cannot be read, or STAND_IN_TRIES samples in a row are bad.
    """
    reader = Reader(split)
    store = ImageStore(
        reader=reader, canvas_px=canvas_px, keep=run.cache == "memory", on_bad=on_bad
    )
    share = process.share(order.batch_size)
    rows = slice(share.start, share.stop)
    held = _ReadAhead(order, store, rows)

    def decoded(taken: tuple[int, int, Raw | None]) -> tuple[int, Image]:
        step, sample, raw = taken
        image = store.get(sample, raw)
        return (sample, image) if image is not None else _stand_in(store, order, step, sample)

    def batch(step: int, images: list[tuple[int, Image]]) -> Batch:
        epoch = step // order.steps_per_epoch
        pinned = device.type == "cuda"
        collated = collate(split, order.ids(step)[rows], images, epoch, pinned=pinned)
        return prepare(step, collated) if prepare else collated

    # neighbours plan an epoch ahead, and know nothing of the one after it
    ahead = min(BATCHES_AHEAD, order.steps_per_epoch)
    yield from pipelined(
        items=count(first_step),
        read=held.take,
        decode_part=decoded,
        collate_parts=batch,
        num_workers=run.num_workers,
        device=device,
        ahead=ahead,
    )


class _ReadAhead:
    """Reads along the streams and keeps the bytes of this process's rows until their step."""

    def __init__(self, order: PKOrder, store: ImageStore, rows: slice) -> None:
        self._order = order
        self._rows = rows
        streams = range(order.order.num_streams)
        self._readers = [StreamReader(order.order, store, number) for number in streams]
        self._epoch = -1
        self._next_chunk = 0
        self._wanted: set[tuple[int, int]] = set()  # (sample, chunk) of the epoch's steps to come
        self._raw: dict[tuple[int, int], Raw | None] = {}  # None: its image is kept already

    def take(self, step: int) -> list[tuple[int, int, Raw | None]]:
        epoch, within = divmod(step, self._order.steps_per_epoch)
        plan = self._order.epoch(epoch)
        ids = plan.ids[:, self._rows]
        chunks = plan.chunks[:, self._rows]
        if self._epoch != epoch:  # a new epoch, or the first step of a resumed run
            self._epoch = epoch
            self._raw = {}
            ids_to_come = ids[within:].ravel().tolist()
            self._wanted = set(zip(ids_to_come, chunks[within:].ravel().tolist(), strict=True))
            self._next_chunk = int(chunks[within:].min())
        while self._next_chunk <= int(chunks[within].max()):
            for reader in self._readers:
                taken = reader.take(self._next_chunk)
                for sample, raw in zip(taken.ids, taken.raws, strict=True):
                    if (sample, self._next_chunk) in self._wanted:
                        self._raw[sample, self._next_chunk] = raw
            self._next_chunk += 1
        keys = zip(ids[within].tolist(), chunks[within].tolist(), strict=True)
        return [(step, sample, self._raw.pop((sample, chunk))) for sample, chunk in keys]


def _stand_in(store: ImageStore, order: PKOrder, step: int, sample: int) -> tuple[int, Image]:
    """The next good sample of the same class, by id, that is not in the batch."""
    members = order.members[int(order.labels[sample])]
    place = int(np.searchsorted(members, sample))
    tries = np.roll(members, -place)[1 : 1 + STAND_IN_TRIES]
    batch = set(order.ids(step).tolist())
    for candidate in tries.tolist():
        if candidate in batch:
            continue
        image = store.get(candidate)
        if image is not None:
            return candidate, image
    raise DataError(
        f"no good sample of class {int(order.labels[sample])} is left to stand in for id {sample}, "
        f"after {len(tries)} tries; `sslpipe shards verify` lists every bad one"
    )
