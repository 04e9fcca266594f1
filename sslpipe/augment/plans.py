"""Which views are computed together: ChunkPlan on a CPU, BatchPlan on a GPU by torch's operations.

A CPU is fastest with chunks that stay in its cache. A GPU is with few operations on many pixels,
and when the host never waits for it: all that the host knows is made ahead and sent in one copy.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from functools import cache, partial
from itertools import groupby, pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sslpipe.augment.op import Chunk, Draws, MaskedOp, Op
from sslpipe.augment.pixels import (
    HUE,
    Colours,
    Planes,
    blend_channels_,
    blend_weights,
    change_colours,
    make_blends,
)
from sslpipe.augment.resample import TOGETHER_PX, crop_apart, crop_together, plan_crops
from sslpipe.augment.spec import ViewSpec
from sslpipe.data.pipeline import send
from sslpipe.precision import full_float32

_CHUNK_BYTES = 2**21  # of float views; measured from 2**19 to 2**22 at 32, 96 and 224 px
_PART_BYTES = 2**30  # of a GPU's float images or float views that are changed together
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

    `sizes` are (B, 2) of the images, `shown` (2B,) the image of each view, `jitter_ops` the colour
    ops that some view may do: the others cost nothing.
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


# on a GPU


class Lines(NamedTuple):
    """How n lines are resampled, as resample.crop_taps does it; each (n, 1) float32, in pixels.

    The lines down of all views stand before the lines across.
    """

    start: Tensor  # the box's first pixel
    last: Tensor  # the box's last pixel, counted from the first
    scale: Tensor  # input pixels an output pixel
    support: Tensor  # half the width of the triangles
    reach: Tensor  # support - 0.5
    offset: Tensor  # 0.5, or 0.5 - crop_px where the view is mirrored along the line


class Passes(NamedTuple):
    """The jitter of n views, the jittered ones first, sorted by how many blends precede their hue.

    Every view has k blends, some before its hue shift and the rest after it. All hues are shifted
    together: pass p before it does blend p of its views, counted so that all end with the last
    pass; pass p after it does their next blends. So each pass is one slice of the views.
    """

    spans: list[tuple[slice, bool]]  # rows of each pass; whether the mean gray is needed
    before: int  # passes before the hue shift
    hues: slice | None  # the rows whose hue is shifted


class Part(NamedTuple):
    """Some images and all their views, n, in the order of the passes.

    What is sent to the device: `plan`, of rows (n,), which of the views they are; gather (n,),
    where they are among the crops, which are image by image; terms (passes, 3, n), factor, gray and
    mean of the blends; shift (n,), of the hue, in sixths of a cycle; and where the views of a row
    show two images, shown (n,), that of each crop. `lines` of the crops, `params` of the draws, and
    the `masked` rows that each MaskedOp changes.
    """

    images: slice
    draws: Draws
    passes: Passes
    masked: Mapping[str, Tensor]
    sent: Mapping[str, Mapping[str, Tensor]]


class BatchPlan:
    """The views of a batch in a few parts, of images on a `canvas` (height, width).

    `shown` (VB,) is the image of each view; None: those of a row show one image, which is read
    once. `jitter_ops` as in ChunkPlan.
    """

    def __init__(
        self,
        draws: Draws,
        specs: tuple[ViewSpec, ...],
        canvas: tuple[int, int],
        jitter_ops: list[int],
        ops: Sequence[Op],
        bfloat16: bool,
        channels: int = 3,
        shown: Tensor | None = None,
    ) -> None:
        side, views = int(specs[0].crop_px), len(specs) if shown is None else 1
        images = len(draws.ids) // views  # with `shown`, each view is of an image of its own
        pixels = max(canvas[0] * canvas[1], views * side**2)  # of an image or its views
        parts = max(1, -(-images // max(1, _PART_BYTES // (channels * 4 * pixels))))
        bounds = [images * part // parts for part in range(parts + 1)]
        self._parts = [
            _plan_part(slice(*pair), shown, draws, views, side, jitter_ops, ops)
            for pair in pairwise(bounds)
        ]
        self._specs, self._bfloat16 = specs, bfloat16

    def to(self, device: torch.device) -> "BatchPlan":
        """Move all numbers in one copy, which the host does not wait for."""
        tables = [table for part in self._parts for table in part.sent.values()]
        flat = iter(send([tensor for table in tables for tensor in table.values()], device))
        moved = copy.copy(self)
        moved._parts = [
            part._replace(
                sent={key: {name: next(flat) for name in own} for key, own in part.sent.items()}
            )
            for part in self._parts
        ]
        return moved

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that a stream other than the copy's reads the numbers."""
        if self._parts and (rows := self._parts[0].sent["plan"]["rows"]).is_cuda:
            rows.record_stream(stream)  # all are parts of one block

    def chunks(self, dtype: torch.dtype) -> Iterator[Chunk]:
        """Give each part as a Chunk, for a result of this dtype.

        For bfloat16, crops are products of float16, whose rounding is an eighth of the result's.
        """
        for part in self._parts:
            crops = torch.float16 if dtype == torch.bfloat16 else torch.float32
            views = _PartViews(part, int(self._specs[0].crop_px), crops, self._specs[0].rgb)
            yield Chunk(
                draws=part.draws,
                specs=self._specs,
                rows=part.sent["plan"]["rows"],
                from_bytes=True,
                cut=views.cut,
                jitter=views.jitter if part.passes.spans or part.passes.hues else None,
                bfloat16=self._bfloat16,
                params=part.sent["params"],
                masked={
                    name: (rows, part.sent["masked"][name]) for name, rows in part.masked.items()
                },
            )


class _PartViews:
    """The views of a part, from the crop to the last colour."""

    def __init__(self, part: Part, crop_px: int, dtype: torch.dtype, rgb: bool) -> None:
        self._part, self._crop_px, self._dtype, self._rgb = part, crop_px, dtype, rgb

    def cut(self, images: Tensor) -> Tensor:
        """Crop the part's views, and bring them in the order of its passes; planar again."""
        part, side = self._part, self._crop_px
        plan = part.sent["plan"]
        shown = plan.get("shown")
        images = images[part.images] if shown is None else images.index_select(0, shown)
        # float16 holds bytes exactly, and no sensor's values
        dtype = self._dtype if images.dtype == torch.uint8 else torch.float32
        lines = Lines(**part.sent["lines"])
        crops = crop_by_products(images, lines, side, dtype).index_select(0, plan["gather"])
        if not self._rgb:
            return crops.transpose(1, 2).to(torch.float32).mul(1 / 255).contiguous()
        self._planes = Planes(len(crops), side, images.device)
        return torch.mul(crops.transpose(1, 2), 1 / 255, out=self._planes.views)

    def jitter(self, views: Tensor) -> Tensor:
        """Jitter colours, each view in its own order."""
        passes, plan = self._part.passes, self._part.sent["plan"]
        if not self._rgb:
            for number, (rows, needs_mean) in enumerate(passes.spans):
                factor, gray, mean = plan["terms"][number, :, rows]
                blend_channels_(views[rows], factor, gray, mean, False, needs_mean)
            return views
        planes = self._planes
        if views.data_ptr() != planes.views.data_ptr():  # a rotation's own memory
            planes.views.copy_(views)
        with full_float32():
            weights = blend_weights(plan["terms"])
            for number in range(len(passes.spans) + 1):
                if number == passes.before and passes.hues is not None:
                    planes.shift_hue_(passes.hues, plan["shift"][passes.hues])
                if number < len(passes.spans):
                    rows, needs_mean = passes.spans[number]
                    mean = plan["terms"][number, 2, rows] if needs_mean else None
                    planes.blend_(rows, weights[number, rows], mean)
        return planes.views


def crop_by_products(
    images: Tensor, lines: Lines, crop_px: int, dtype: torch.dtype = torch.float32
) -> Tensor:
    """Crop, resample (bilinear, antialiased) and mirror all views of images by dense products.

    An image's lines stand as (H, C, W), so both products read and write whole lines and nothing is
    copied between them; the first serves all views of an image. Factors and results are of `dtype`;
    float16 holds each byte exactly, and weights to 2^-11.

    Shape: (B, C, H, W), lines of VB views image by image -> (VB, crop_px, C, crop_px), same units.
    """
    count, channels, height, width = images.shape
    pixels = torch.empty(count, height, channels, width, dtype=dtype, device=images.device)
    pixels.copy_(images.transpose(1, 2))
    matrices = _matrices(lines, crop_px, max(height, width), dtype)
    down, across = matrices.chunk(2)  # (VB, S, longest) each
    with full_float32():
        down = down.view(count, -1, down.shape[2])[:, :, :height]  # (B, V S, H)
        rows = torch.bmm(down, pixels.view(count, height, -1))  # (B, V S, C W)
        views = torch.bmm(rows.view(len(across), -1, width), across[:, :, :width].mT)
    return views.view(-1, crop_px, channels, crop_px)


def _matrices(lines: Lines, out_px: int, in_px: int, dtype: torch.dtype) -> Tensor:
    """(n, out_px, in_px): what resamples each line; the formulas of resample.crop_taps."""
    device = lines.start.device
    centre = (_count(out_px, device) + lines.offset).abs_().mul_(lines.scale)  # (n, out)
    first = (centre - lines.reach).floor_().clamp_min_(0.0)
    # no box is larger than the canvas, so that is enough taps for all
    taps = -(-2 * in_px // out_px) + 1 if in_px > out_px else 3
    position = first + _count(taps, device)[:, None, None]  # (taps, n, out)
    weight = torch.rsub((position - centre.sub_(0.5)).abs_().div_(lines.support), 1.0)
    weight.clamp_min_(0.0).mul_(position <= lines.last)
    weight.div_(weight.sum(0))
    position = torch.minimum(position, lines.last).add_(lines.start).long()
    matrices = torch.zeros(*centre.shape, in_px, dtype=dtype, device=device)
    return matrices.scatter_add_(2, position.permute(1, 2, 0), weight.permute(1, 2, 0).to(dtype))


@cache
def _count(most: int, device: torch.device) -> Tensor:
    """0, 1, ... most - 1 as float32. Shared by all calls: not to be changed."""
    return torch.arange(float(most), device=device)


def _plan_part(
    images: slice,
    shown: Tensor | None,
    draws: Draws,
    views: int,
    side: int,
    jitter_ops: list[int],
    ops: Sequence[Op],
) -> Part:
    """Plan the views of some images, on the CPU."""
    count = images.stop - images.start
    natural = torch.arange(images.start, images.stop)[:, None]
    natural = (natural + draws.num_images * torch.arange(views)).flatten()  # image by image
    crops = draws.rows(natural)

    # the order of the passes
    kept = torch.isin(crops.order, torch.tensor(jitter_ops))
    order = crops.order[kept].view(count * views, -1)  # without the ops that no view does
    shifts = HUE in jitter_ops
    before = (order == HUE).int().argmax(1) if shifts else torch.zeros(len(order), dtype=torch.long)
    before = torch.where(crops.jitter, before, len(jitter_ops) + 1)  # behind all that are jittered
    gather = before.argsort(stable=True)
    rows, sorted_draws = natural[gather], crops.rows(gather)

    masked = {
        op.name: chosen
        for op in ops
        if isinstance(op, MaskedOp) and len(chosen := sorted_draws.params[op.name].nonzero()[:, 0])
    }
    passes, terms = _plan_passes(order[gather], before[gather], sorted_draws, shifts)
    shift = 6.0 * sorted_draws.factors[:, HUE]
    plan = {"rows": rows, "gather": gather, "terms": terms, "shift": shift}
    plan |= {} if shown is None else {"shown": shown[images]}
    lines = plan_lines(crops.boxes, crops.flip, side)._asdict()
    sent = {"plan": plan, "lines": lines, "params": sorted_draws.params, "masked": masked}
    return Part(images, sorted_draws, passes, masked, sent)


def plan_lines(boxes: Tensor, flip: Tensor, crop_px: int) -> Lines:
    """Plan how boxes are resampled: (n, 4) int64 top, left, height, width; (n,) bool."""
    start, length = (torch.cat([boxes[:, i], boxes[:, i + 1]]).float()[:, None] for i in (0, 2))
    mirrored = torch.cat([torch.zeros_like(flip), flip]).float()[:, None]
    scale = length / crop_px
    support = scale.clamp_min(1.0)
    return Lines(start, length - 1.0, scale, support, support - 0.5, 0.5 - crop_px * mirrored)


def _plan_passes(
    order: Tensor, before: Tensor, draws: Draws, shifts: bool
) -> tuple[Passes, Tensor]:
    """Plan the jitter of sorted views, and `terms`; before: (n,), blends that precede their hue."""
    blends = torch.stack(tuple(make_blends(order, draws.factors, draws.jitter)), dim=1)  # (n, 3, k)
    count = blends.shape[2]
    jittered = int(draws.jitter.sum())
    # the first row that has at least so many blends before its hue
    first = np.searchsorted(before[:jittered].numpy(), np.arange(count + 2)).tolist()
    early = range(count if shifts else 0)
    steps = [(slice(first[count - p], jittered), before - count + p) for p in early]
    steps += [(slice(0, first[count - p]), before + p) for p in range(count)]
    spans, terms, number_before = [], [], 0
    for number, (rows, step) in enumerate(steps):
        index = step.clamp(0, max(0, count - 1))[:, None, None].expand(-1, 3, 1)
        values = blends.gather(2, index)[:, :, 0].T.contiguous()  # (3, n)
        factor, gray, mean = values[:, rows]
        if (factor != 1).any() or gray.any() or mean.any():
            spans.append((rows, bool(mean.any())))
            terms.append(values)
            number_before += number < len(early)
    hues = slice(0, jittered) if shifts and jittered else None
    stacked = torch.stack(terms) if terms else torch.empty(0, 3, len(order))
    return Passes(spans, number_before, hues), stacked
