"""A batch of uint8 images becomes two float views of each image.

The order of the ops in both pipelines: crop + flip, rotation (corners black), colour jitter,
grayscale, blur, solarize, `extra`, normalise. Rows: all first views, then all second.
"""

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby, pairwise
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.augment import ops
from sslpipe.augment.kornia_views import ExtraOps, KorniaViews
from sslpipe.augment.parameters import HUE, SATURATION, Draws
from sslpipe.augment.presets import view_specs
from sslpipe.data.loader import Batch

_NO_HUE, _UNTOUCHED = 4, 5  # beside the steps 0..3 of hue: jittered without hue, not jittered
_CPU_CHUNK_BYTES = 2**21  # of float views; measured from 2**17 to 2**22 at 32 and 96 px
_GPU_CHUNK_BYTES = 2**28


class FusedViews(nn.Module):
    """Two views of each image, batched, equal to torchvision's ops at the same parameters.

    preset: a name of PRESETS; overrides: fields of ViewSpec and jitter_strength (see view_specs).
    mean, std: RGB in [0, 1]; the attributes of that name are 0 and 1 unless `normalize`.
    extra: see ExtraOps.
    forward: Batch of B images, Draws of 2B rows -> (2B, 3, S, S) float32, channels_last, no
    gradient, on the batch's device.
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
        **overrides: Any,
    ) -> None:
        super().__init__()
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

    @torch.no_grad()
    def forward(self, batch: Batch, draws: Draws) -> Tensor:
        images = batch.images
        views = torch.empty(
            (len(draws.ids), 3, self.crop_px, self.crop_px),
            device=images.device,
            memory_format=torch.channels_last,
        )
        host = draws.to("cpu")  # the host decides which rows go together
        host = host._replace(order=self._steps(host.order))
        group = self._groups(host, batch.sizes)
        sorted_rows = group.argsort(stable=True)
        host = host.rows(sorted_rows)
        draws = host.to(images.device)
        source = (sorted_rows % len(images)).to(images.device)  # the image of each row
        with torch.autocast(images.device.type, enabled=False):
            for part, hue_step, large in self._chunks(group[sorted_rows], images.device):
                these = draws.rows(part)
                chunk = _crop(images, source[part], these, self.crop_px, large)  # (n, 3, S, S)
                chunk = self._changed(chunk, host.rows(part), these, hue_step)
                if images.is_cuda:
                    views[sorted_rows[part]] = chunk
                else:  # one copy a row: twice as fast as an indexed one
                    for row, view in zip(sorted_rows[part].tolist(), chunk, strict=True):
                        views[row].copy_(view)
        return views

    def _groups(self, draws: Draws, sizes: Tensor) -> Tensor:
        """(2B,) int64: what can be done together: hue at the same step, blur, the way to crop.

        Large is a property of the image, not of the batch: its views must not depend on the batch.
        """
        if HUE in self.jitter_ops:
            step = (draws.order == HUE).int().argmax(1)
        else:
            step = torch.full_like(draws.ids, _NO_HUE)
        large = sizes.cpu().amax(1).repeat(len(self.specs)) > ops.MATRICES_PX
        return (torch.where(draws.jitter, step, _UNTOUCHED) * 2 + large) * 2 + draws.blur

    def _chunks(self, groups: Tensor, device: torch.device) -> Iterator[tuple[slice, int, bool]]:
        """Slices of the sorted rows, each of one group, with its step of hue and its largeness.

        A chunk's images stay in the processor's cache from the crop to the last op.
        """
        limit = _GPU_CHUNK_BYTES if device.type == "cuda" else _CPU_CHUNK_BYTES
        most = max(1, limit // (3 * 4 * self.crop_px**2))  # rows
        first = 0
        for group, members in groupby(groups.tolist()):
            count = len(list(members))
            pieces = -(-count // most)
            bounds = [first + count * piece // pieces for piece in range(pieces + 1)]
            for start, stop in pairwise(bounds):
                yield slice(start, stop), group // 4, group // 2 % 2 == 1
            first += count

    def _steps(self, order: Tensor) -> Tensor:
        """(n, 4) op orders -> (n, k): without the ops that no view does."""
        kept = torch.isin(order, torch.tensor(self.jitter_ops))
        return order[kept].view(len(order), len(self.jitter_ops))

    def _changed(self, views: Tensor, host: Draws, draws: Draws, hue_step: int) -> Tensor:
        """(n, 3, S, S), planar: all ops after the crop. host: the same draws, on the CPU."""
        if any(spec.rotation_deg for spec in self.specs):
            views = ops.rotate(views, draws.angle_deg)
        if hue_step != _UNTOUCHED and self.jitter_ops:
            saturation = SATURATION in self.jitter_ops
            ops.color_jitter_(views, draws.factors, draws.order, hue_step, saturation=saturation)
        if host.grayscale.any():
            gray = host.grayscale.nonzero()[:, 0].to(views.device)
            views[gray] = ops.gray_of(views[gray]).expand(-1, 3, -1, -1)
        if host.blur.any():  # then of every row: see _groups
            views = ops.gaussian_blur(views, draws.sigma, self.specs[0].blur_kernel_px)
        if host.solarize.any():
            chosen = host.solarize.nonzero()[:, 0].to(views.device)
            threshold = self.threshold[draws.views[chosen]]
            views[chosen] = ops.solarize(views[chosen], threshold)
        if self.extra is not None:
            views = self.extra(views, host)
        return ops.normalize_(views, self.mean, self.std)


def _crop(images: Tensor, source: Tensor, draws: Draws, crop_px: int, large: bool) -> Tensor:
    crop = ops.crop_by_matrices
    if not images.is_cuda:
        if large:
            crop = ops.crop_by_resampling
        else:  # a canvas may be larger than the images in question
            images = images[:, :, : ops.MATRICES_PX, : ops.MATRICES_PX]
    return crop(images, source, draws.boxes, draws.flip, crop_px)


Views = FusedViews | KorniaViews
AUGMENTS: dict[str, Callable[..., Views]] = {"fused": FusedViews, "kornia": KorniaViews}
