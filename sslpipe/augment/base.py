"""What FusedViews and KorniaViews share: the constructor, and the plan that comes with a batch."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Generic, Protocol, Self, TypeVar, cast

import torch
from torch import Tensor, nn

from sslpipe.augment.extra_ops import ExtraOps
from sslpipe.augment.op import Draws
from sslpipe.augment.params import draws
from sslpipe.augment.presets import view_specs
from sslpipe.augment.spec import ViewSpec, check_statistics
from sslpipe.data.pipeline import Batch


class Work(Protocol):
    """Who computes what of a batch's views, on one device."""

    def to(self, device: torch.device) -> Self:
        """Move what the device needs; on CUDA without waiting for the copy."""

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that a stream other than the copy's reads what was moved."""


WorkT = TypeVar("WorkT", bound=Work)


@dataclass(frozen=True)
class ViewPlan(Generic[WorkT]):
    """The plan of a batch's views.

    Args:
        draws: Their parameters, VB rows on the CPU.
        work: Made from them by FusedViews; None: it is made when the views are.
        small: Of the small views; None: there are none.
    """

    draws: Draws
    work: WorkT | None = None
    small: "ViewPlan[WorkT] | None" = None

    def to(self, device: torch.device) -> "ViewPlan[WorkT]":
        """Move what the device needs; on CUDA without waiting for the copy."""
        small = self.small and self.small.to(device)
        return ViewPlan(self.draws, self.work and self.work.to(device), small)

    def rows(self, index: Tensor) -> "ViewPlan[WorkT]":
        """Select the large views of some of the batch's images, (b,) int64 on the CPU."""
        images = self.draws.num_images
        views = torch.arange(len(self.draws.ids) // max(1, images))[:, None]
        return ViewPlan(self.draws.rows((views * images + index).flatten()))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Say that a stream other than the copy's reads what was moved."""
        if self.work is not None:
            self.work.record_stream(stream)
        if self.small is not None:
            self.small.record_stream(stream)


class BaseViews(nn.Module):
    """Hold the settings of both views; its arguments are those of `FusedViews`, like its errors.

    Attributes:
        small: Makes the small views of the same images; None: there are none.
        first_view: The number of the first of its views, which names their random numbers.
    """

    mean: Tensor
    std: Tensor
    scale: Tensor
    shift: Tensor

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
        self.specs: tuple[ViewSpec, ...] = view_specs(preset, crop_px, overrides)
        check_statistics(mean, std)
        self.crop_px = int(crop_px)
        self.small: BaseViews | None = None
        self.first_view = 0
        if not normalize:
            mean, std = (0.0, 0.0, 0.0), (1.0, 1.0, 1.0)
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
        params = draws(seed, number, batch.ids, batch.view_sizes, self.specs, self.first_view)
        plan = self.plan(params, batch)
        if self.small is not None:  # each of its row's own image
            own = batch._replace(sizes=batch.sizes[: len(batch.ids)], pairs=None)
            planned = self.small.prepare(own, seed=seed, number=number).plan
            plan = replace(plan, small=cast(ViewPlan[Any], planned))
        return batch._replace(plan=plan)

    def make_small(self, batch: Batch, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
        """Make the small views of a batch from `prepare`, by that same plan.

        Returns:
            One tensor (k B, 3, s, s) of dtype, the first small view of each image first; or none.
        """
        if self.small is None:
            return ()
        small = cast(ViewPlan[Any], batch.plan).small
        return (self.small(batch._replace(plan=small, pairs=None), dtype=dtype),)

    @property
    def small_size(self) -> tuple[int, int]:
        """How many small views each image has, and their side in pixels; (0, 0): none."""
        return (0, 0) if self.small is None else (len(self.small.specs), self.small.crop_px)

    def plan(self, params: Draws, batch: Batch) -> ViewPlan[Any]:
        """Plan the views of a batch that have these parameters."""
        return ViewPlan(params)

    def plan_of(self, batch: Batch, params: Draws | None) -> ViewPlan[Any]:
        """Return the batch's plan, or one of these parameters.

        Raises:
            ValueError: There is neither.
        """
        if params is not None:
            return self.plan(params.to("cpu"), batch)
        if not isinstance(batch.plan, ViewPlan):
            raise ValueError("the batch has no plan of its views: call prepare, or give draws")
        return batch.plan
