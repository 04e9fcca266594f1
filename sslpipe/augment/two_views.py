"""A batch of uint8 images becomes two float views of each image.

The order of the ops in both pipelines: crop + flip, rotation (corners black), colour jitter,
grayscale, blur, solarize, `extra`, normalise. Rows: all first views, then all second.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from sslpipe.augment import ops
from sslpipe.augment.compiled import compiled_colours
from sslpipe.augment.kornia_views import ExtraOps, KorniaViews
from sslpipe.augment.params import HUE, Draws
from sslpipe.augment.presets import view_specs
from sslpipe.augment.resample import (
    TOGETHER_PX,
    bfloat16_pays,
    crop_apart,
    crop_together,
    gaussian_blur,
    plan_crops,
    turned,
)
from sslpipe.data.pipeline import Batch

_SMALL_PX = 64  # views up to this long are written together, larger ones faster one by one
_NO_HUE, _UNTOUCHED = 4, 5  # beside the steps 0..3 of hue: jittered without hue, not jittered
_CPU_CHUNK_BYTES = 2**21  # of float views; measured from 2**19 to 2**22 at 32, 96 and 224 px
_GPU_CHUNK_BYTES = 2**28


class FusedViews(nn.Module):
    """Two views of each image, batched, equal to torchvision's ops at the same parameters.

    preset: a name of PRESETS; overrides: fields of ViewSpec and jitter_strength (see view_specs).
    mean, std: RGB in [0, 1]; the attributes of that name are 0 and 1 unless `normalize`.
    extra: see ExtraOps. blur: "exact", or "bf16": products in bfloat16 where that is quicker (see
    bfloat16_pays), off by at most 2 levels of 255 and by 0.3 on average (white noise; tested).
    forward: Batch of B images, Draws of 2B rows -> (2B, 3, S, S) float32 or `dtype`, channels_last,
    no gradient, on the batch's device. Images are fastest channels_last, as the loader gives them.
    Raises: RecipeError on an unknown preset or key, ValueError naming key and value.
    """

    mean: Tensor
    std: Tensor
    threshold: Tensor

    def __init__(
        self,
        preset: str = "simclr",
        crop_px: int = 224,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
        normalize: bool = True,
        extra: Sequence[dict[str, Any]] = (),
        blur: str = "exact",
        **overrides: Any,
    ) -> None:
        super().__init__()
        if blur not in ("exact", "bf16"):
            raise ValueError(f"blur = {blur!r} is not 'exact' or 'bf16'")
        self.blur = blur
        self.specs = view_specs(preset, crop_px, overrides)
        self.crop_px = int(crop_px)
        if not normalize:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
        self.extra = ExtraOps(extra) if extra else None
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)
        threshold = torch.tensor([spec.solarize_threshold for spec in self.specs])
        self.register_buffer("threshold", threshold, persistent=False)
        # the colour ops that some view may do; the others cost nothing
        strengths = torch.tensor([spec.jitter_strengths for spec in self.specs])
        self.jitter_ops = strengths.amax(0).nonzero()[:, 0].tolist()
        self.colours = ops.EAGER

    def compile_colours(self, **options: Any) -> None:
        """Compile the colour ops at their first use: for batches of any size, at most four graphs.

        Crop and blur are native kernels already. options: torch.compile's. Needs a C++ compiler on
        a CPU.
        """
        self.colours = compiled_colours(**options)

    @torch.no_grad()
    def forward(self, batch: Batch, draws: Draws, dtype: torch.dtype = torch.float32) -> Tensor:
        images = batch.images
        views = torch.empty(
            (len(draws.ids), 3, self.crop_px, self.crop_px),
            dtype=dtype,
            device=images.device,
            memory_format=torch.channels_last,
        )
        host = draws.to("cpu")  # the host decides which rows go together
        kept = torch.isin(host.order, torch.tensor(self.jitter_ops))
        order = host.order[kept].view(len(kept), -1)  # without the ops that no view does
        group = self._groups(host, order, batch.sizes, images.device)
        # the last of a group are gray, and the blurred stand together: slices of each chunk
        place = torch.where(host.grayscale, 3 - host.blur.int(), host.blur.int())
        # by sigma among them: a chunk's kernels are as long as its largest needs
        sigma = torch.where(host.blur, host.sigma, 0).double()
        place = place + sigma / (sigma.max() + 1)
        sorted_rows = (group * 4 + place).argsort(stable=True)
        host, group = host.rows(sorted_rows), group[sorted_rows]
        blends = ops.blends_of(order[sorted_rows], host.factors, host.jitter)
        needs = np.stack([field.numpy() for field in blends], axis=2) != (1, 0, 0)  # (2B, k, 3)
        chunks = list(self._chunks(group, images.device))
        needs = np.logical_or.reduceat(needs, [rows.start for rows, _, _ in chunks])  # a chunk's
        crops = plan_crops(
            sorted_rows % len(images),  # the image of each row
            host.boxes,
            host.flip,
            group % 2 == 1,
            self.crop_px,
            images.device,
        )
        small = images
        if not images.is_cuda and not all(large for _, _, large in chunks):  # once for all chunks
            small = images[:, :, :TOGETHER_PX, :TOGETHER_PX].to(
                torch.float32, memory_format=torch.channels_last
            )
        with torch.autocast(images.device.type, enabled=False):
            for (rows, hue_step, large), needed in zip(chunks, needs.tolist(), strict=True):
                crop, pixels = (crop_apart, images) if large else (crop_together, small)
                chunk = crop(pixels, crops.rows(rows))  # (n, 3, S, S)
                chunk = self._changed(chunk, host.rows(rows), blends.rows(rows), needed, hue_step)
                self._write(chunk, sorted_rows[rows], views)
        return views

    def _groups(self, draws: Draws, order: Tensor, sizes: Tensor, device: torch.device) -> Tensor:
        """(2B,) int64: what is done together: the way to crop, hue at the same step.

        Large images are read by their boxes, on a CPU. That is a property of the image, not of the
        batch: its views must not depend on the batch.
        """
        if HUE in self.jitter_ops:
            step = (order == HUE).int().argmax(1)
        else:
            step = torch.full_like(draws.ids, _NO_HUE)
        large = sizes.cpu().amax(1).repeat(len(self.specs)) > TOGETHER_PX
        large &= device.type == "cpu"
        return torch.where(draws.jitter, step, _UNTOUCHED) * 2 + large

    def _chunks(self, groups: Tensor, device: torch.device) -> Iterator[tuple[slice, int, bool]]:
        """Slices of the sorted rows, each of one group, with its step of hue and its largeness."""
        most, first = self._most_rows(device), 0
        for group, members in groupby(groups.tolist()):
            count = len(list(members))
            pieces = -(-count // most)
            bounds = [first + count * piece // pieces for piece in range(pieces + 1)]
            for start, stop in pairwise(bounds):
                yield slice(start, stop), group // 2, group % 2 == 1
            first += count

    def _changed(
        self, views: Tensor, draws: Draws, blends: ops.Blends, needs: ops.Needs, hue_step: int
    ) -> Tensor:
        """(n, 3, S, S), planar: all ops after the crop; draws and blends are on the CPU."""
        device = views.device
        if any(spec.rotation_deg for spec in self.specs):
            views = ops.rotate(views, draws.angle_deg.to(device))
        views = self._colours_changed(views, draws, blends, needs, hue_step)
        gray, blur = sum(draws.grayscale.tolist()), draws.blur.tolist()  # see the order of the rows
        if gray:
            ops.grayscale_(views[-gray:])
        if any(blur):
            blurred = slice(blur.index(True), blur.index(True) + sum(blur))
            sigma = draws.sigma[blurred]
            views[blurred] = gaussian_blur(
                views[blurred],
                sigma.to(device),
                self.specs[0].blur_kernel_px,
                max(sigma.tolist()),
                bfloat16=self.blur == "bf16" and bfloat16_pays(device),
            )
        if any(draws.solarize.tolist()):
            chosen = draws.solarize.nonzero()[:, 0].to(device)
            threshold = self.threshold[draws.views.to(device)[chosen]]
            views[chosen] = ops.solarize(views[chosen], threshold)
        if self.extra is not None:
            views = self.extra(views, draws)
        return ops.normalize_(views, self.mean, self.std)

    def _colours_changed(
        self, views: Tensor, draws: Draws, blends: ops.Blends, needs: ops.Needs, hue_step: int
    ) -> Tensor:
        if not any(done for done, _, _ in needs) and hue_step >= _NO_HUE:
            return views
        return ops.change_colours(
            views,
            blends.to(views.device),
            draws.factors[:, HUE].to(views.device),
            hue_step if hue_step < _NO_HUE else None,
            needs,
            self.colours,
        )

    def _most_rows(self, device: torch.device) -> int:
        """Of a chunk, whose images stay in the processor's cache from the crop to the last op."""
        limit = _GPU_CHUNK_BYTES if device.type == "cuda" else _CPU_CHUNK_BYTES
        return max(1, limit // (3 * 4 * self.crop_px**2))

    def _write(self, chunk: Tensor, rows: Tensor, views: Tensor) -> None:
        """chunk (n, 3, S, S) becomes these rows (n,) of the views, pixel by pixel."""
        planes = chunk.flatten(2)  # (n, 3, S S)
        pixels = planes.mT if planes.is_cuda else turned(planes)
        pixels = pixels.to(views.dtype).reshape(len(rows), -1)  # (n, 3 S S)
        lines = views.permute(0, 2, 3, 1).view(len(views), -1)  # (2B, 3 S S)
        if views.is_cuda or self.crop_px <= _SMALL_PX:
            lines.index_copy_(0, rows.to(views.device), pixels)
        else:
            for row, line in zip(rows.tolist(), pixels, strict=True):
                lines[row].copy_(line)


Views = FusedViews | KorniaViews
AUGMENTS: dict[str, Callable[..., Views]] = {"fused": FusedViews, "kornia": KorniaViews}
