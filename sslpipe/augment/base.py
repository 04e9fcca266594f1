"""What FusedViews and KorniaViews share: the constructor, and the plan that comes with a batch."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.augment.extra_ops import ExtraOps
from sslpipe.augment.op import Draws
from sslpipe.augment.ops import draws
from sslpipe.augment.presets import view_specs
from sslpipe.augment.spec import check_images, check_statistics
from sslpipe.data.image_type import RGB8
from sslpipe.data.pipeline import Batch


@dataclass(frozen=True)
class ViewPlan:
    """The plan of a batch's views.

    Args:
        draws: Their parameters, VB rows on the CPU.
        work: Who computes what, on one device: a plan that FusedViews makes from them, with `to`
            and `record_stream`; None: it is made when the views are.
    """

    draws: Draws
    work: Any = None

    def to(self, device: torch.device) -> "ViewPlan":
        """Move what the device needs; on CUDA without waiting for the copy."""
        return ViewPlan(self.draws, self.work and self.work.to(device))

    def rows(self, index: Tensor) -> "ViewPlan":
        """Select the views of some of the batch's images, (b,) int64 on the CPU."""
        images = self.draws.num_images
        views = torch.arange(len(self.draws.ids) // max(1, images))[:, None]
        return ViewPlan(self.draws.rows((views * images + index).flatten()))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that a stream other than the copy's reads what was moved."""
        if self.work is not None:
            self.work.record_stream(stream)


class BaseViews(nn.Module):
    """Hold the settings of both views; its arguments are those of `FusedViews`, like its errors."""

    mean: Tensor
    std: Tensor
    scale: Tensor
    shift: Tensor

    def __init__(
        self,
        preset: str = "simclr",
        crop_px: int = 224,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        normalize: bool = True,
        extra: Sequence[dict[str, Any]] = (),
        channels: Sequence[str] = RGB8.channels,
        **overrides: Any,
    ) -> None:
        super().__init__()
        self.channels, count = tuple(channels), len(channels)
        self.specs = view_specs(preset, crop_px, overrides, self.channels)
        mean = (0.0,) * count if mean is None else mean
        std = (1.0,) * count if std is None else std
        check_statistics(mean, std, count)
        self.crop_px = int(crop_px)
        if not normalize:
            mean, std = (0.0,) * count, (1.0,) * count
        self.extra = ExtraOps(extra) if extra else None
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)
        scale = self.std.reciprocal()  # (x - mean) / std = x scale + shift
        self.register_buffer("scale", scale, persistent=False)
        self.register_buffer("shift", -self.mean * scale, persistent=False)

    def prepare(self, batch: Batch, *, seed: int, number: int) -> Batch:
        """Return the batch with the plan of its views: what a loader's thread does ahead.

        Args:
            batch: All but its images on the CPU.
            seed: The run's.
            number: Names the random numbers beside seed and ids: the epoch, or the step where a
                sample may come twice in an epoch.
        """
        params = draws(seed, number, batch.ids, batch.view_sizes, self.specs)
        return batch._replace(plan=self.plan(params, batch))

    def plan(self, params: Draws, batch: Batch) -> ViewPlan:
        """Plan the views of a batch that have these parameters."""
        return ViewPlan(params)

    def plan_of(self, batch: Batch, params: Draws | None) -> ViewPlan:
        """Return the batch's plan, or one of these parameters.

        Raises:
            ValueError: There is neither, or the images are not those of these views.
        """
        check_images(batch.images, len(self.channels))
        if params is not None:
            return self.plan(params.to("cpu"), batch)
        if not isinstance(batch.plan, ViewPlan):
            raise ValueError("the batch has no plan of its views: call prepare, or give draws")
        return batch.plan
