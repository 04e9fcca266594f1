"""Which views torch's operations compute together, on any device: ChunkPlan.

A CPU is fastest with chunks that stay in its cache, another device with few large ones. What the
host knows is made ahead, and sent in one copy.
"""

import copy
from collections.abc import Iterator
from functools import partial
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from sslpipe.augment.op import Chunk, Draws
from sslpipe.augment.pixels import HUE, Blend, Blends, change_colours, make_blends
from sslpipe.augment.resample import (
    TOGETHER_PX,
    Crops,
    Taps,
    crop_apart,
    crop_gathered,
    crop_together,
    plan_crops,
)
from sslpipe.augment.spec import ViewSpec
from sslpipe.data.pipeline import send

_CHUNK_BYTES = 2**21  # of float views; measured from 2**19 to 2**22 at 32, 96 and 224 px
_DEVICE_BYTES = 2**28  # of the float images of a chunk, or of its views, where no CPU computes
# beside the steps 0..3 of hue: jittered without hue, not jittered
_NO_HUE = 4
_UNTOUCHED = 5


class ChunkPlan:
    """Sort the views of a batch and cut them into chunks: iterating gives each Chunk.

    The trick: rows that need the same work stand side by side, so that it is paid by those rows
    only, on slices instead of gathered copies. The rows are sorted

    1. by the step at which the jitter shifts their hue (the most expensive op), then by the way
       their image is read (large ones by their boxes). A chunk never spans two such groups: in a
       chunk, hue is one call on all rows, at one step.
    2. in a group: untouched, blurred, blurred and gray, gray. In a chunk both the blurred and the
       gray rows are then one slice each.
    3. among the blurred by sigma: a chunk's kernels are only as long as its largest sigma needs.

    On a CPU a chunk is so small that its images stay in the processor's cache from the crop to the
    last op. The result does not depend on the chunks, but for float32's last bits.

    Args:
        draws: (2B,), on the CPU.
        specs: Of the first views, of the second.
        sizes: (B, 2) of the images.
        shown: (2B,), the image of each view.
        jitter_ops: The colour ops that some view may do: the others cost nothing.
        blend: What does them, but for hue.
        channels: Of the images.
        canvas: Height and width of the batch's images, whose device is no CPU: chunks are large,
            and each gathers its images. None: small chunks for a CPU.
    """

    def __init__(
        self,
        draws: Draws,
        specs: tuple[ViewSpec, ...],
        sizes: Tensor,
        shown: Tensor,
        jitter_ops: list[int],
        blend: Blend,
        channels: int = 3,
        canvas: tuple[int, int] | None = None,
    ) -> None:
        crop_px = int(specs[0].crop_px)
        if canvas is None:
            # Large images are read by their boxes. That is a property of the image, not of the
            # batch: its views must not depend on the batch.
            large = (sizes.amax(1) > TOGETHER_PX)[shown]
            most_rows = _CHUNK_BYTES // (channels * 4 * crop_px**2)
        else:
            large = torch.zeros_like(draws.jitter)
            most_rows = _DEVICE_BYTES // (channels * 4 * max(canvas[0] * canvas[1], crop_px**2))
        self._gathers = canvas is not None
        kept = torch.isin(draws.order, torch.tensor(jitter_ops))
        order = draws.order[kept].view(len(kept), -1)  # without the ops that no view does
        step = (order == HUE).int().argmax(1) if HUE in jitter_ops else _NO_HUE
        step = torch.where(draws.jitter, step, _UNTOUCHED)

        # the order of the rows; lexsort's last key is the first to count
        blurred = draws.blur.int()
        place = torch.where(draws.grayscale, 3 - blurred, blurred)
        sigma = torch.where(draws.blur, draws.sigma, 0)
        self.rows = torch.from_numpy(
            np.lexsort([key.numpy() for key in (sigma, place, large, step)])
        )
        self._draws = draws.rows(self.rows)
        self._large = large[self.rows]
        self._groups = list(zip(step[self.rows].tolist(), self._large.tolist(), strict=True))

        # the chunks, and what each of them needs of the jitter and the crop
        self._parts = list(self._cut(max(1, most_rows)))
        self._blends = make_blends(order[self.rows], self._draws.factors, self._draws.jitter)
        needs = np.stack([part.numpy() for part in self._blends], axis=2) != (1, 0, 0)  # (2B, k, 3)
        needs = np.logical_or.reduceat(needs, [part.start for part in self._parts])
        self._needs = needs.tolist()  # (chunks, k, 3)
        self._crops = plan_crops(
            source=shown[self.rows],
            boxes=self._draws.boxes,
            flip=self._draws.flip,
            apart=self._large,
            crop_px=crop_px,
        )
        self._specs = specs
        self._blend = blend
        self._params = self._draws.params  # on the views' device

    @property
    def reads_together(self) -> bool:
        """Whether some image is read whole, as one of all images in float32."""
        return not self._gathers and not bool(self._large.all())

    def to(self, device: torch.device) -> "ChunkPlan":
        """Move all numbers; to CUDA in one copy, which the host does not wait for."""
        crops = self._crops
        blends = self._blends
        params = self._params
        tensors = [self.rows, *blends, crops.source, *crops.down, *crops.across, *params.values()]
        sent = iter(send(tensors, device))
        moved = copy.copy(self)
        moved.rows = next(sent)
        moved._blends = Blends(next(sent), next(sent), next(sent))
        moved._crops = Crops(
            source=next(sent),
            boxes=crops.boxes,  # the host reads them
            down=Taps(next(sent), next(sent)),
            across=Taps(next(sent), next(sent)),
        )
        moved._params = dict(zip(params, sent, strict=True))
        return moved

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Record that a stream other than the copy's reads the numbers."""
        if self.rows.is_cuda:
            self.rows.record_stream(stream)  # all are parts of one block

    def _cut(self, most_rows: int) -> Iterator[slice]:
        """Slices of the sorted rows, each of one group, of about equal length in a group."""
        first = 0
        for _, members in groupby(self._groups):
            count = len(list(members))
            pieces = -(-count // most_rows)
            bounds = [first + count * piece // pieces for piece in range(pieces + 1)]
            yield from (slice(start, stop) for start, stop in pairwise(bounds))
            first += count

    def __iter__(self) -> Iterator[Chunk]:
        for part, needs in zip(self._parts, self._needs, strict=True):
            step, large = self._groups[part.start]
            params = {name: values[part] for name, values in self._params.items()}
            hue_step = step if step < _NO_HUE else None
            jitter = partial(
                change_colours,
                blends=self._blends.rows(part),
                hue_shift=params["factors"][:, HUE],
                hue_step=hue_step,
                needs=needs,
                blend=self._blend,
            )
            jittered = hue_step is not None or any(done for done, _, _ in needs)
            crop_whole = crop_gathered if self._gathers else crop_together
            yield Chunk(
                draws=self._draws.rows(part),
                specs=self._specs,
                rows=self.rows[part],
                from_bytes=large or self._gathers,
                cut=partial(crop_apart if large else crop_whole, crops=self._crops.rows(part)),
                jitter=jitter if jittered else None,
                params=params,
            )
