"""Which views a CPU computes together: ChunkPlan."""

from collections.abc import Iterator
from functools import partial
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from sslpipe.augment.op import Chunk, Draws
from sslpipe.augment.pixels import HUE, Colours, change_colours, make_blends
from sslpipe.augment.resample import TOGETHER_PX, crop_apart, crop_together, plan_crops
from sslpipe.augment.spec import ViewSpec

_CHUNK_BYTES = 2**21  # of float views; measured from 2**19 to 2**22 at 32, 96 and 224 px
_NO_HUE, _UNTOUCHED = 4, 5  # beside the steps 0..3 of hue: jittered without hue, not jittered


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

    A chunk is so small that its images stay in the processor's cache from the crop to the last op.
    The result does not depend on the chunks, but for float32's last bits.

    Args:
        draws: of all 2B views.
        specs: the settings of each view.
        sizes: (B, 2), height and width of each image in pixels.
        shown: (2B,) int64, the image of each view.
        jitter_ops: the colour ops that some view may do; the others cost nothing.
        colours: the jitter's kernels.
        bfloat16: as in Chunk.
        channels: C of the images.
    """

    def __init__(
        self,
        draws: Draws,
        specs: tuple[ViewSpec, ...],
        sizes: Tensor,
        shown: Tensor,
        jitter_ops: list[int],
        colours: Colours,
        bfloat16: bool,
        channels: int = 3,
    ) -> None:
        crop_px = int(specs[0].crop_px)
        # Large images are read by their boxes. That is a property of the image, not of the batch:
        # its views must not depend on the batch.
        large = (sizes.amax(1) > TOGETHER_PX)[shown]
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
        self._draws, self._large = draws.rows(self.rows), large[self.rows]
        self._groups = list(zip(step[self.rows].tolist(), self._large.tolist(), strict=True))

        # the chunks, and what each of them needs of the jitter and the crop
        self._parts = list(self._cut(max(1, _CHUNK_BYTES // (channels * 4 * crop_px**2))))
        self._blends = make_blends(order[self.rows], self._draws.factors, self._draws.jitter)
        needs = np.stack([part.numpy() for part in self._blends], axis=2) != (1, 0, 0)  # (2B, k, 3)
        needs = np.logical_or.reduceat(needs, [part.start for part in self._parts])
        self._needs = needs.tolist()  # (chunks, k, 3)
        self._crops = plan_crops(
            shown[self.rows], self._draws.boxes, self._draws.flip, self._large, crop_px
        )
        self._specs, self._colours, self._bfloat16 = specs, colours, bfloat16

    @property
    def all_large(self) -> bool:
        """Whether every image is read by its boxes."""
        return bool(self._large.all())

    def to(self, device: torch.device) -> "ChunkPlan":
        """Move nothing: the plan is of one device."""
        return self

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Do nothing: nothing was copied."""

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
            draws = self._draws.rows(part)
            hue_step = step if step < _NO_HUE else None
            jitter = partial(
                change_colours,
                blends=self._blends.rows(part),
                hue_shift=draws.factors[:, HUE],
                hue_step=hue_step,
                needs=needs,
                colours=self._colours,
            )
            jittered = hue_step is not None or any(done for done, _, _ in needs)
            yield Chunk(
                draws=draws,
                specs=self._specs,
                rows=self.rows[part],
                from_bytes=large,
                cut=partial(crop_apart if large else crop_together, crops=self._crops.rows(part)),
                jitter=jitter if jittered else None,
                bfloat16=self._bfloat16,
                params=draws.params,
                masked={},
            )
