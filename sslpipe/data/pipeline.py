"""What a batch is, and how batches are made ahead: read, decoded, collated, uploaded by threads.

Threads, because the decoders release the GIL: nothing is pickled, and no byte is read twice.
"""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import accumulate
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

CPU = torch.device("cpu")
BATCHES_AHEAD = 4  # decoded before the step that takes them
Read = TypeVar("Read")
Decoded = TypeVar("Decoded")


class PairRows(NamedTuple):
    """What [pairs] says of a batch's B rows; on the host.

    Views that share a number >= 0 in any column of `groups` are no negatives of each other.
    """

    image: Tensor  # (B,) int64, which of the batch's images the second view shows
    ids: Tensor  # (B, 2) int64, the samples that both views really show
    labels: Tensor  # (B, 2) int64, theirs; -1 for none
    groups: Tensor  # (B, 2, K) int64
    lonely: Tensor  # (B,) bool, rows whose sample should have a partner and has none

    def rows(self, index: Tensor) -> tuple[Tensor, "PairRows"]:
        """Select some of the rows, (b,): which images they need, and these rows of those images."""
        image = self.image[index]
        partner = image != index
        place = len(index) + partner.cumsum(0) - 1  # partners' images follow the rows' own
        place = torch.where(partner, place, torch.arange(len(index)))
        rows = PairRows(
            image=place,
            ids=self.ids[index],
            labels=self.labels[index],
            groups=self.groups[index],
            lonely=self.lonely[index],
        )
        return torch.cat([index, image[partner]]), rows


class Batch(NamedTuple):
    """One rank's part of a global step; B rows, stream-major.

    Images are (B, C, H, W), channels last; each is top left, the rest zero. The P of partners come
    last: (B + P, C, H, W). They are uint8, or float32 where `ImageType.dtype` is another, in its
    units: 0 to 255 in the range, not clamped.
    """

    images: Tensor
    sizes: Tensor  # (B, 2) or (B + P, 2) int64, the valid height and width of each image
    labels: Tensor  # (B,) int64, -1 for none
    ids: Tensor  # (B,) int64, the positions' samples: they name the random numbers
    source_ids: Tensor  # (B,) int64, the samples really read: others than ids where one was bad
    epoch: int  # of all rows
    plan: Any = None  # of its views, a ViewPlan; None: what makes views plans them
    pairs: PairRows | None = None  # None: both views of a row show its own image

    @property
    def view_sizes(self) -> Tensor:
        """Sizes of the image that each view shows: (2, B, 2) with `pairs`, else (B, 2) of both."""
        if self.pairs is None:
            return self.sizes
        return torch.stack([self.sizes[: len(self.ids)], self.sizes[self.pairs.image]])

    @property
    def loss_arguments(self) -> dict[str, Tensor]:
        """What an objective takes beside the embeddings; see `losses.base.Objective.forward`."""
        if self.pairs is None:
            return {"ids": self.source_ids, "labels": self.labels}
        arguments = {"ids": self.pairs.ids, "labels": self.pairs.labels}
        return arguments | ({"groups": self.pairs.groups} if self.pairs.groups.numel() else {})

    def view_images(self, views: int) -> Tensor:
        """Which of the images each of the first, then the second views shows: (views * B,)."""
        first = torch.arange(len(self.ids))
        second = first if self.pairs is None else self.pairs.image
        return torch.cat([first, second][:views])

    def to(self, device: torch.device) -> "Batch":
        """Move images and plan; on CUDA the host waits for no copy. All else stays on the host."""
        images = self.images.to(device, non_blocking=True)
        return self._replace(images=images, plan=self.plan and self.plan.to(device))

    def rows(self, index: Tensor) -> "Batch":
        """Select some of the rows, in the order of `index` (on the CPU), on the same device."""
        images, pairs = (index, None) if self.pairs is None else self.pairs.rows(index)
        wanted = (images, images, index, index, index)
        parts = zip(self[:5], wanted, strict=True)
        kept, sizes, *rest = [part[send([rows], part.device)[0]] for part, rows in parts]
        plan = self.plan and self.plan.rows(index)
        return Batch(
            images=kept,
            sizes=sizes,
            labels=rest[0],
            ids=rest[1],
            source_ids=rest[2],
            epoch=self.epoch,
            plan=plan,
            pairs=pairs,
        )


Prepare = Callable[[int, Batch], Batch]  # of a global step's batch, in the thread that collates


def send(tensors: Sequence[Tensor], device: torch.device) -> list[Tensor]:
    """Move small tensors; to CUDA in one copy from pinned memory: the host does not wait."""
    if device.type != "cuda":
        return [tensor.to(device) for tensor in tensors]
    outside = [tensor for tensor in tensors if not tensor.is_cuda]
    if not outside:
        return list(tensors)
    block = pack(outside, pinned=True).to(device, non_blocking=True)
    inside = iter(unpack(block, outside))
    return [tensor if tensor.is_cuda else next(inside) for tensor in tensors]


def pack(tensors: Sequence[Tensor], *, pinned: bool) -> Tensor:
    """Copy tensors of the host into one block of bytes, (n,) uint8; see `unpack`."""
    size = sum(map(_padded, tensors))
    block = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    for part, tensor in zip(unpack(block, tensors), tensors, strict=True):
        part.copy_(tensor)
    return block


def unpack(block: Tensor, like: Sequence[Tensor]) -> list[Tensor]:
    """Return a block's parts, of the shapes and dtypes of these tensors, in their order."""
    starts = [0, *accumulate(map(_padded, like))]
    return [
        block[start : start + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
        for start, tensor in zip(starts, like, strict=False)
    ]


def _padded(tensor: Tensor) -> int:
    """Its bytes, up to a multiple of 16: kernels like to read from such places."""
    return -(-tensor.nbytes // 16) * 16


class Upload:
    """Copies images and their views' plan to a CUDA device on a stream of its own; else nothing."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._device = torch.device("cuda", index)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """Call first in a new thread, whose device is 0 otherwise: that would cost memory there."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)

    def on_stream(self) -> AbstractContextManager[object]:
        """What is launched inside goes to the stream of the copies."""
        return nullcontext() if self._stream is None else torch.cuda.stream(self._stream)

    def begin(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Start the copy; in any thread."""
        if self._stream is None:
            return batch, None
        with self.on_stream():
            if not batch.images.is_cuda:
                batch = batch._replace(images=batch.images.pin_memory())
            return batch.to(self._device), self._stream.record_event()

    def end(self, batch: Batch, copied: torch.cuda.Event | None) -> Batch:
        """Call in the thread that computes: what it launches from here on sees the images."""
        if copied is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_event(copied)
            batch.images.record_stream(compute)  # or their memory would be free for the next copy
            if batch.plan is not None:
                batch.plan.record_stream(compute)
        return batch


def pipelined(
    items: Iterable[int],
    read: Callable[[int], list[Read]],
    decode_part: Callable[[Read], Decoded],
    collate_parts: Callable[[int, list[Decoded]], Batch],
    num_workers: int,
    device: torch.device = CPU,
    *,
    ahead: int,
) -> Iterator[Batch]:
    """Yield collate_parts(item, [decode_part(p) for p in read(item)]) for each item, in order.

    One thread reads in order, `num_workers` decode, one for every four of them makes batches; with
    none everything happens in the caller. `ahead` items are prepared before they are asked for.
    What `collate_parts` launches on the device goes to the stream of the copies.
    """
    upload = Upload(device)
    if not num_workers:
        for item in items:
            with upload.on_stream():
                batch = collate_parts(item, [decode_part(part) for part in read(item)])
            yield upload.end(*upload.begin(batch))
        return
    with ExitStack() as stack:
        enter = upload.enter_thread
        reading = ThreadPoolExecutor(1, "sslpipe-read", initializer=enter)
        decoding = ThreadPoolExecutor(num_workers, "sslpipe-decode")
        # to copy an image into its batch takes a fifth of the time of decoding it
        collators = 1 + num_workers // 4
        collating = ThreadPoolExecutor(collators, "sslpipe-collate", initializer=enter)
        # left in the opposite order: who waits for others first; what has not begun is dropped
        for pool in (decoding, reading, collating):
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)

        def start(item: int) -> list[Future[Decoded]]:
            return [decoding.submit(decode_part, part) for part in read(item)]

        def finish(
            item: int, parts: Future[list[Future[Decoded]]]
        ) -> tuple[Batch, torch.cuda.Event | None]:
            decoded = [part.result() for part in parts.result()]
            with upload.on_stream():
                batch = collate_parts(item, decoded)
            return upload.begin(batch)

        prepared: deque[Future[tuple[Batch, torch.cuda.Event | None]]] = deque()
        for item in items:
            prepared.append(collating.submit(finish, item, reading.submit(start, item)))
            if len(prepared) > ahead:
                yield upload.end(*prepared.popleft().result())
        while prepared:
            yield upload.end(*prepared.popleft().result())
