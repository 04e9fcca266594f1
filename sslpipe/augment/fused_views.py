"""A batch of images becomes two float views of each image, all rows of a chunk at once.

The order: the ops of OPS (crop + flip, rotation, colour jitter, grayscale, blur, solarize, and
between them those that are asked for), then `extra`, then normalisation. Rows: all first views,
then all second.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from sslpipe.augment import pixels, triton_views
from sslpipe.augment.base import BaseViews, ViewPlan
from sslpipe.augment.batched import BatchPlan
from sslpipe.augment.chunks import ChunkPlan
from sslpipe.augment.op import Draws
from sslpipe.augment.ops import ops_for
from sslpipe.augment.resample import TOGETHER_PX, transposed
from sslpipe.augment.triton_views import TritonPlan
from sslpipe.data.image_type import RGB8
from sslpipe.data.pipeline import Batch

Plan = ChunkPlan | BatchPlan | TritonPlan

_SMALL_PX = 64  # views up to this long are written together, larger ones faster one by one


class FusedViews(BaseViews):
    """Make two views of each image, batched, equal to torchvision's ops at the same parameters.

    Args:
        preset: simclr, simclr_small (no blur, weaker colours), mocov2, byol or grayscale; of
            sensors' images: microscopy, satellite, grey, xray.
        crop_px: side of the square views.
        mean: one number a channel, of values in [0, 1]; None: 0. The attribute of that name is 0
            unless `normalize`.
        std: the same; None: 1. The attribute of that name is 1 unless `normalize`.
        normalize: whether views leave as (x - mean) / std; else they stay in [0, 1].
        extra: further augmentations of kornia, in order, one table each: name (a class of
            kornia.augmentation), view (1, 2 or "both", the default), args (its keyword arguments).
        blur: "exact", or "bf16": products in bfloat16 where that is faster (see bfloat16_pays), off
            by at most 2 levels of 255 and by 0.3 on average (white noise; tested).
        kernels: what makes views on a GPU. "torch": its operations, also for any op that is plugged
            in. "triton": kernels of the library's own, which read and write each view a few times
            instead of some forty; only built-in ops and no `extra`. "auto": triton where it is
            installed and does all ops. A CPU takes torch's operations. The views differ in the last
            bits, as those of any two devices do, so it is no part of a run's digest.
        channels: names of the images' channels. Other than red, green and blue, in this order, they
            have neither saturation nor hue nor gray: presets leave these out. Brightness and
            contrast then are one factor an image, each channel about its own mean, and no value is
            clamped; those of RGB, float32 too, are clamped to [0, 1] as a byte's.
        overrides: fields of ViewSpec, settings of registered ops and jitter_strength: see
            `view_specs`.

    Raises:
        RecipeError: an unknown preset or key.
        ValueError: naming key and value.
    """

    def __init__(
        self,
        preset: str = "simclr",
        crop_px: int = 224,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        normalize: bool = True,
        extra: Sequence[dict[str, Any]] = (),
        blur: str = "exact",
        kernels: str = "auto",
        channels: Sequence[str] = RGB8.channels,
        **overrides: Any,
    ) -> None:
        super().__init__(preset, crop_px, mean, std, normalize, extra, channels, **overrides)
        if blur not in ("exact", "bf16"):
            raise ValueError(f"blur = {blur!r} is not 'exact' or 'bf16'")
        if kernels not in ("auto", "torch", "triton"):
            raise ValueError(f"kernels = {kernels!r} is not 'auto', 'torch' or 'triton'")
        self.blur, self.kernels = blur, kernels
        # the colour ops that some view may do; the others cost nothing
        strengths = torch.tensor([spec.jitter_strengths for spec in self.specs])
        self.jitter_ops: list[int] = strengths.amax(0).nonzero()[:, 0].tolist()
        self.rgb = self.specs[0].rgb
        self.colours = pixels.EAGER if self.rgb else pixels.CHANNELS

    def compile_colours(self, **options: Any) -> None:
        """Compile a CPU's colour ops at their first use, with torch.compile's options.

        For batches of any size, at most four graphs; it needs a C++ compiler. Channels that are no
        colours have two ops that are one pass already: they stay as they are.
        """
        if self.rgb:
            self.colours = pixels.compiled_colours(**options)

    def plan(self, params: Draws, batch: Batch) -> ViewPlan:
        """Plan the views of a batch that have these parameters.

        Raises:
            RecipeError: `kernels` is "triton", and it cannot make these views here.
        """
        return ViewPlan(params, self._planned(params, batch, self.mean.device))

    def _planned(self, params: Draws, batch: Batch, device: torch.device) -> Plan:
        bfloat16 = self.blur == "bf16"
        ops, shown = ops_for(self.specs), batch.view_images(len(self.specs))
        rgb8 = self.rgb and batch.images.dtype == torch.uint8
        if triton_views.chosen(self.kernels, device, ops, self.extra is not None, rgb8):
            return TritonPlan(params, self.specs, self.jitter_ops, shown)
        if device.type == "cpu":
            options = self.jitter_ops, self.colours, bfloat16, len(self.channels)
            return ChunkPlan(params, self.specs, batch.sizes, shown, *options)
        height, width = batch.images.shape[2:]
        each = None if batch.pairs is None else shown
        wanted = self.jitter_ops, ops, bfloat16, len(self.channels)
        return BatchPlan(params, self.specs, (height, width), *wanted, shown=each)

    @torch.no_grad()
    def forward(
        self, batch: Batch, draws: Draws | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the views of a batch: row i and row B + i are those of its row i.

        Args:
            batch: of B rows; fastest channels_last, as the loader gives them.
            draws: of 2B rows, by `draws(seed, epoch, batch.ids, batch.view_sizes, self.specs)`;
                None: those that `prepare` has put into the batch's plan.
            dtype: of the result.

        Returns:
            (2B, C, S, S) of dtype, channels_last, without gradient, on the batch's device.
        """
        images, given = batch.images, self.plan_of(batch, draws)
        plan: Plan = given.work or self._planned(given.draws, batch, images.device)
        plan = plan.to(images.device)
        shape = (len(given.draws.ids), len(self.channels), self.crop_px, self.crop_px)
        memory_format = torch.channels_last
        views = torch.empty(shape, dtype=dtype, device=images.device, memory_format=memory_format)
        if isinstance(plan, TritonPlan):
            triton_views.make_views(images, plan, self.mean, self.std, views)
            return views

        small = images
        if isinstance(plan, ChunkPlan) and not plan.all_large:  # converted once for all chunks
            small = images[:, :, :TOGETHER_PX, :TOGETHER_PX].to(
                torch.float32, memory_format=memory_format
            )

        ops = ops_for(self.specs)
        with torch.autocast(images.device.type, enabled=False):
            for chunk in plan.chunks(dtype) if isinstance(plan, BatchPlan) else plan:
                changed = images if chunk.from_bytes else small
                for op in ops:  # the first cuts the chunk's views out of the images
                    if op.name not in triton_views.COVERED:  # a plugged-in one may flatten them
                        changed = changed.contiguous()
                    changed = op.apply(changed, chunk)  # (n, C, S, S), planar
                    if op is ops[0] and self.rgb and images.dtype == torch.float32:
                        changed = changed.clamp_(0, 1)  # as colour ops need it, and bytes are
                if self.extra is not None:
                    changed = self.extra(changed.contiguous(), chunk.draws)
                if isinstance(plan, ChunkPlan):
                    self._write(pixels.normalize_(changed, self.mean, self.std), chunk.rows, views)
                else:
                    self._write_all(changed, chunk.rows, views)
        return views

    def _write(self, chunk: Tensor, rows: Tensor, views: Tensor) -> None:
        """Write a chunk (n, C, S, S) to these rows (n,) of the views, pixel by pixel."""
        planes = chunk.flatten(2)  # (n, C, S S)
        flat = transposed(planes).to(views.dtype).reshape(len(rows), -1)  # (n, C S S)
        lines = views.permute(0, 2, 3, 1).view(len(views), -1)  # (2B, C S S)
        if self.crop_px <= _SMALL_PX:
            lines.index_copy_(0, rows, flat)
        else:
            for row, line in zip(rows.tolist(), flat, strict=True):
                lines[row].copy_(line)

    def _write_all(self, part: Tensor, rows: Tensor, views: Tensor) -> None:
        """Normalise (n, C, S, S), and write it to these rows (n,) of the views."""
        written = torch.empty_like(part, dtype=views.dtype, memory_format=torch.channels_last)
        scale, shift = self.scale[:, None, None], self.shift[:, None, None]
        torch.addcmul(shift, part, scale, out=written)
        lines = views.permute(0, 2, 3, 1).view(len(views), -1)  # (2B, C S S)
        lines.index_copy_(0, rows, written.permute(0, 2, 3, 1).view(len(rows), -1))
