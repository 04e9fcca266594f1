"""What a batch is, and how batches are made ahead: read, decoded, collated, uploaded by threads.

Threads, because the decoders release the GIL: nothing is pickled, and no byte is read twice.
"""

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

CPU = torch.device("cpu")
Read = TypeVar("Read")
Decoded = TypeVar("Decoded")


class Batch(NamedTuple):
    """One rank's part of a global step; B rows, stream-major.

    Args:
        images: (B, 3, H, W) uint8 RGB, channels last; each image is top left, the rest zero.
        sizes: (B, 2) int64, the valid height and width.
        labels: (B,) int64, -1 for none.
        ids: (B,) int64, the positions' samples: they name the random numbers.
        source_ids: (B,) int64, the samples really read: others than ids where one was bad.
        epoch: Of all rows.
    """

    images: Tensor
    sizes: Tensor
    labels: Tensor
    ids: Tensor
    source_ids: Tensor
    epoch: int

    def to(self, device: torch.device) -> "Batch":
        """Move all tensors; on CUDA without waiting for the copies."""
        moved = [part.to(device, non_blocking=True) for part in self[:5]]
        return Batch(moved[0], moved[1], moved[2], moved[3], moved[4], self.epoch)

    def rows(self, index: Tensor) -> "Batch":
        """Select some of the rows, in the order of `index`, on the same device."""
        some = [part[index.to(part.device)] for part in self[:5]]
        return Batch(some[0], some[1], some[2], some[3], some[4], self.epoch)


class Upload:
    """Copies images to a CUDA device on a stream of their own, so that it computes meanwhile.

    On any other device there is nothing to do.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._stream = device, None
        if device.type == "cuda":
            index = torch.cuda.current_device() if device.index is None else device.index
            self._device = torch.device("cuda", index)
            self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]

    def enter_thread(self) -> None:
        """Call first in a new thread, whose device is 0 otherwise: that would cost memory there."""
        if self._stream is not None:
            torch.cuda.set_device(self._device)

    def begin(self, batch: Batch) -> tuple[Batch, torch.cuda.Event | None]:
        """Start the copy; in any thread."""
        if self._stream is None:
            return batch, None
        with torch.cuda.stream(self._stream):
            images = batch.images.pin_memory().to(self._device, non_blocking=True)
            return batch._replace(images=images), self._stream.record_event()

    def end(self, batch: Batch, copied: torch.cuda.Event | None) -> Batch:
        """Call in the thread that computes: what it launches from here on sees the images."""
        if copied is not None:
            compute = torch.cuda.current_stream(self._device)
            compute.wait_event(copied)
            batch.images.record_stream(compute)  # or their memory would be free for the next copy
        return batch


def pipelined(
    items: Iterator[int],
    read: Callable[[int], list[Read]],
    decode_part: Callable[[Read], Decoded],
    collate_parts: Callable[[int, list[Decoded]], Batch],
    num_workers: int,
    prefetch: int,
    device: torch.device = CPU,
) -> Iterator[Batch]:
    """Yield collate_parts(item, [decode_part(p) for p in read(item)]) for each item, in order.

    One thread reads in order, `num_workers` decode, one makes batches.

    Args:
        items: What the batches are made of: step numbers, say.
        read: The parts of an item, as bytes.
        decode_part: One part, decoded; called in several threads at once.
        collate_parts: The batch of an item and its decoded parts.
        num_workers: Threads that decode; 0: everything happens in the caller.
        prefetch: How many items are prepared ahead.
        device: Where the batches' images are.
    """
    upload = Upload(device)
    if not num_workers:
        for item in items:
            batch = collate_parts(item, [decode_part(part) for part in read(item)])
            yield upload.end(*upload.begin(batch))
        return
    with ExitStack() as stack:
        reading = ThreadPoolExecutor(1, "sslpipe-read")
        decoding = ThreadPoolExecutor(num_workers, "sslpipe-decode")
        collating = ThreadPoolExecutor(1, "sslpipe-collate", initializer=upload.enter_thread)
        # left in the opposite order: who waits for others first; what has not begun is dropped
        for pool in (decoding, reading, collating):
            stack.callback(pool.shutdown, wait=True, cancel_futures=True)

        def start(item: int) -> list[Future[Decoded]]:
            return [decoding.submit(decode_part, part) for part in read(item)]

        def finish(
            item: int, parts: Future[list[Future[Decoded]]]
        ) -> tuple[Batch, torch.cuda.Event | None]:
            return upload.begin(collate_parts(item, [part.result() for part in parts.result()]))

        ahead: deque[Future[tuple[Batch, torch.cuda.Event | None]]] = deque()
        for item in items:
            ahead.append(collating.submit(finish, item, reading.submit(start, item)))
            if len(ahead) > prefetch:
                yield upload.end(*ahead.popleft().result())
        while ahead:
            yield upload.end(*ahead.popleft().result())
