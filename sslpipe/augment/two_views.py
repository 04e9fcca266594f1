"""Two views of each image: fused, by kornia, and TwoViews for a notebook.

The order: the ops of OPS (crop + flip, rotation, colour jitter, grayscale, blur, solarize, and
between them those that are asked for), then `extra`, then normalisation. Rows: all first views,
then all second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray
from PIL import Image
from pydantic import ConfigDict, Field, ValidationInfo, model_validator
from pydantic.annotated_handlers import GetJsonSchemaHandler
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema
from torch import Tensor, nn
from torch.utils.data import get_worker_info

from sslpipe.augment import pixels, triton_views
from sslpipe.augment.chunks import ChunkPlan
from sslpipe.augment.extra_ops import ExtraOps
from sslpipe.augment.op import Draws, by_kornia
from sslpipe.augment.ops import draws, ops_for
from sslpipe.augment.presets import setting_docs, view_specs
from sslpipe.augment.resample import TOGETHER_PX, transposed
from sslpipe.augment.spec import ViewSpec, check_images, check_statistics
from sslpipe.augment.triton_views import TritonPlan
from sslpipe.data.decode import rgb_pixels
from sslpipe.data.image_type import RGB8
from sslpipe.data.index import DatasetIndex
from sslpipe.data.pipeline import Batch
from sslpipe.distributed import current_rank
from sslpipe.errors import shown
from sslpipe.precision import torch_defaults
from sslpipe.random import hash_integers
from sslpipe.recipe.sections import LONGEST_SIDE_PX, RunRecipe
from sslpipe.registry import Table
from sslpipe.registry.schema import SparseSettings, refusals

Work = ChunkPlan | TritonPlan  # of FusedViews: by torch's operations, or by kernels
Pictures = Tensor | NDArray[Any] | Sequence[Tensor | NDArray[Any] | Image.Image]

_SMALL_PX = 64  # views up to this long are written together, larger ones faster one by one


@dataclass(frozen=True)
class ViewPlan:
    """The plan of a batch's views: their parameters, VB rows on the CPU, and who computes what."""

    draws: Draws
    work: Work | None = None  # on one device; None: it is planned when the views are made

    def to(self, device: torch.device) -> ViewPlan:
        """Move what the device needs; on CUDA without waiting for the copy."""
        return ViewPlan(self.draws, None if self.work is None else self.work.to(device))

    def rows(self, index: Tensor) -> ViewPlan:
        """Select the views of some of the batch's images, (b,) int64 on the CPU."""
        images = self.draws.num_images
        views = torch.arange(len(self.draws.ids) // max(1, images))[:, None]
        return ViewPlan(self.draws.rows((views * images + index).flatten()))

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Record that a stream other than the copy's reads what was moved."""
        if self.work is not None:
            self.work.record_stream(stream)


class FusedViews(nn.Module):
    """Make two views of each image, batched, equal to torchvision's ops at the same parameters.

    Args:
        preset: simclr, simclr_small (no blur, weaker colours), mocov2, byol or grayscale; of
            sensors' images: microscopy, satellite, grey, xray.
        crop_px: side of the square views.
        mean: one number a channel, of values in [0, 1]; None: 0. The attribute of that name is 0
            unless `normalize`.
        std: the same; None: 1. The attribute of that name is 1 unless `normalize`.
        normalize: whether views leave as (x - mean) / std; else they stay in [0, 1].
        extra: further augmentations of kornia, as in `ViewSettings`.
        kernels: what makes views on a GPU: "torch", "triton" or "auto", as in `FusedSettings`. The
            views differ in the last bits, as those of any two devices do, so it is no part of a
            run's digest.
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

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        preset: str = "simclr",
        crop_px: int = 224,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        normalize: bool = True,
        extra: Sequence[dict[str, Any]] = (),
        kernels: str = "auto",
        channels: Sequence[str] = RGB8.channels,
        **overrides: Any,
    ) -> None:
        super().__init__()
        self.channels = tuple(channels)
        count = len(channels)
        self.specs: tuple[ViewSpec, ...] = view_specs(preset, crop_px, overrides, self.channels)
        mean = (0.0,) * count if mean is None else mean
        std = (1.0,) * count if std is None else std
        check_statistics(mean, std, count)
        if normalize and self.channels == RGB8.channels and max(max(mean), max(std)) > 1:
            raise ValueError(
                f"mean = {shown(mean)} and std = {shown(std)} are of values in [0, 1]; divide "
                "those of 0..255 by 255"
            )
        self.crop_px = int(crop_px)
        if not normalize:
            mean = (0.0,) * count
            std = (1.0,) * count
        self.extra = ExtraOps(extra) if extra else None
        self.register_buffer("mean", torch.tensor(mean), persistent=False)
        self.register_buffer("std", torch.tensor(std), persistent=False)
        if kernels not in ("auto", "torch", "triton"):
            raise ValueError(f"kernels = {kernels!r} is not 'auto', 'torch' or 'triton'")
        self.kernels = kernels
        # the colour ops that some view may do; the others cost nothing
        strengths = torch.tensor([spec.jitter_strengths for spec in self.specs])
        self.jitter_ops: list[int] = strengths.amax(0).nonzero()[:, 0].tolist()
        self.rgb = self.specs[0].rgb

    def keep_first(self, count: int) -> None:
        """Make only the first `count` views of an image from now on."""
        self.specs = self.specs[:count]

    def prepare(self, batch: Batch, *, seed: int, number: int) -> Batch:
        """Return the batch with the plan of its views: what a loader's thread does ahead.

        `number` names the random numbers beside seed and ids: the epoch, or the step where a sample
        may come twice in an epoch.
        """
        params = draws(
            seed=seed, epoch=number, ids=batch.ids, sizes=batch.view_sizes, specs=self.specs
        )
        return batch._replace(plan=self.plan(params, batch))

    def plan_of(self, batch: Batch, params: Draws | None) -> ViewPlan:
        """Return the batch's plan, or one of these parameters. Raises: ValueError for neither."""
        check_images(batch.images, len(self.channels))
        if params is not None:
            return self.plan(params.to("cpu"), batch)
        if not isinstance(batch.plan, ViewPlan):
            raise ValueError("the batch has no plan of its views: call prepare, or give draws")
        return batch.plan

    def plan(self, params: Draws, batch: Batch) -> ViewPlan:
        """Plan the views of a batch. Raises: RecipeError where triton is asked for and cannot."""
        return ViewPlan(params, self._plan_work(params, batch, self.mean.device))

    def _plan_work(self, params: Draws, batch: Batch, device: torch.device) -> Work:
        ops = ops_for(self.specs)
        shown = batch.view_images(len(self.specs))
        rgb8 = self.rgb and batch.images.dtype == torch.uint8
        if triton_views.chosen(
            kernels=self.kernels, device=device, ops=ops, extra=self.extra is not None, rgb8=rgb8
        ):
            return TritonPlan(params, self.specs, self.jitter_ops, shown)
        height, width = batch.images.shape[2:]
        return ChunkPlan(
            params,
            self.specs,
            batch.sizes,
            shown,
            jitter_ops=self.jitter_ops,
            blend=pixels.blend_ if self.rgb else pixels.blend_channels_,
            channels=len(self.channels),
            canvas=None if device.type == "cpu" else (height, width),
        )

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
        images = batch.images
        plan = self.plan_of(batch, draws)
        work = plan.work
        if work is None:
            work = self._plan_work(plan.draws, batch, images.device)
        work = work.to(images.device)
        shape = (len(plan.draws.ids), len(self.channels), self.crop_px, self.crop_px)
        memory_format = torch.channels_last
        views = torch.empty(shape, dtype=dtype, device=images.device, memory_format=memory_format)
        if isinstance(work, TritonPlan):
            triton_views.make_views(
                images=images, plan=work, mean=self.mean, std=self.std, views=views
            )
            return views

        small = images
        if work.reads_together:  # converted once for all chunks
            small = images[:, :, :TOGETHER_PX, :TOGETHER_PX].to(
                torch.float32, memory_format=memory_format
            )

        ops = ops_for(self.specs)
        with torch.autocast(images.device.type, enabled=False):
            for chunk in work:
                changed = images if chunk.from_bytes else small
                for op in ops:  # the first cuts the chunk's views out of the images
                    if op.name not in triton_views.COVERED:  # a plugged-in one may flatten them
                        changed = changed.contiguous()
                    changed = op.apply(changed, chunk)  # (n, C, S, S), planar
                    if op is ops[0] and self.rgb and images.dtype == torch.float32:
                        changed = changed.clamp_(0, 1)  # as colour ops need it, and bytes are
                if self.extra is not None:
                    changed = self.extra(changed.contiguous(), chunk.draws)
                self._write(pixels.normalize_(changed, self.mean, self.std), chunk.rows, views)
        return views

    def _write(self, chunk: Tensor, rows: Tensor, views: Tensor) -> None:
        """Write a chunk (n, C, S, S) to these rows (n,) of the views, pixel by pixel."""
        planes = chunk.flatten(2)  # (n, C, S S)
        flat = transposed(planes).to(views.dtype).reshape(len(rows), -1)  # (n, C S S)
        lines = views.permute(0, 2, 3, 1).view(len(views), -1)  # (2B, C S S)
        if self.crop_px <= _SMALL_PX or views.device.type != "cpu":
            lines.index_copy_(0, rows, flat)
        else:
            for row, line in zip(rows.tolist(), flat, strict=True):
                lines[row].copy_(line)


class KorniaViews(FusedViews):
    """Make FusedViews' views by kornia's ops, row by row; ops.py says where kornia differs.

    Args:
        preset: as in FusedViews, like its errors.
        crop_px: side of the square views.
        mean: as in FusedViews, like std.
        std: of each channel.
        settings: its others, but for kernels.
    """

    def __init__(
        self,
        preset: str = "simclr",
        crop_px: int = 224,
        mean: Sequence[float] | None = None,
        std: Sequence[float] | None = None,
        **settings: Any,
    ) -> None:
        if "kernels" in settings:
            raise ValueError(f"kernels = {settings['kernels']!r} is for FusedViews; leave it out")
        super().__init__(preset, crop_px, mean, std, **settings)

    def plan(self, params: Draws, batch: Batch) -> ViewPlan:
        """Plan the views of a batch that have these parameters."""
        return ViewPlan(params)

    @torch.no_grad()
    def forward(
        self, batch: Batch, draws: Draws | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the views of a batch: see `FusedViews.forward`."""
        draws = self.plan_of(batch, draws).draws
        images = batch.images
        shown = batch.view_images(len(self.specs)).tolist()
        with torch.autocast(images.device.type, enabled=False):
            views = torch.cat(
                [
                    self._make_view(images[shown[row]], draws.rows(slice(row, row + 1)))
                    for row in range(len(draws.ids))
                ]
            )
            if self.extra is not None:
                views = self.extra(views, draws)
            views = by_kornia("enhance.normalize", views, self.mean, self.std)
        return views.to(dtype).contiguous(memory_format=torch.channels_last)

    def _make_view(self, image: Tensor, draw: Draws) -> Tensor:
        """(C, H, W) and one row of draws -> (1, C, S, S) in units / 255."""
        spec = self.specs[int(draw.views)]
        view = image[None].float() / 255
        for op in ops_for(self.specs):
            view = op.apply_one(view, draw, spec)
            if op.name == "crop" and spec.rgb and image.dtype == torch.float32:
                view = view.clamp(0, 1)
        return view


_NOT_OF_THE_VIEWS = ("kind", "half_size_share")  # settings that a run uses itself


class ViewSettings(SparseSettings):
    """What both kinds of views take; further keys are settings of the ops, see `setting_docs`."""

    model_config = ConfigDict(extra="allow")

    preset: str = "simclr"
    """simclr, simclr_small (no blur, weaker colours), mocov2, byol or grayscale; of sensors'
    images: microscopy, satellite, grey, xray."""
    crop_px: Annotated[int, Field(ge=2, le=LONGEST_SIDE_PX)] = 224
    """Side of the square views, in pixels."""
    half_size_share: Annotated[float, Field(ge=0, lt=1)] = 0.0
    """Part of the run's steps, its first ones, whose views are reduced to half of crop_px, each
    pixel the mean of 2 x 2 (progressive resizing; EfficientNetV2, Tan and Le 2021,
    arXiv:2104.00298): 0 to below 1. A convolutional network takes about a quarter of the time
    there. The last steps, evaluations and the export are of crop_px."""
    mean: list[float] | None = None
    """One number a channel, of values in [0, 1]; none: the data's."""
    std: list[float] | None = None
    """The same; none: the data's."""
    normalize: bool = True
    """Whether views leave as (x - mean) / std; else they stay in [0, 1]."""
    extra: list[dict[str, Any]] = Field([])
    """Further augmentations of kornia, in order, one table each: name (a class of
    kornia.augmentation), view (1, 2 or "both", the default), args (its keyword arguments)."""

    derived: ClassVar[frozenset[str]] = frozenset({"mean", "std", "channels"})
    views: ClassVar[type[FusedViews]]

    @model_validator(mode="after")
    def _of_known_ops(self, info: ValidationInfo) -> Self:
        if info.context != "recorded":  # a run's ops may be of a module that is not named here
            beside = type(self).model_fields
            view_specs(self.preset, self.crop_px, self.model_extra, beside=beside)
        if self.half_size_share and (self.crop_px % 2 or self.crop_px < 4):
            raise ValueError(
                f"half_size_share = {self.half_size_share:g} halves views of crop_px = "
                f"{self.crop_px}; use an even crop_px of 4 or more, or half_size_share = 0"
            )
        return self

    def build(self, **known: Any) -> FusedViews:
        """Make the views; `mean` and `std` of the data count where the recipe has none."""
        settings = {name: value for name, value in self if name not in _NOT_OF_THE_VIEWS}
        for name in ("mean", "std"):
            if settings[name] is None:
                settings[name] = known.get(name)
        return self.views(**settings, channels=known.get("channels", RGB8.channels))

    @classmethod
    def __get_pydantic_json_schema__(
        cls, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        """Add the settings of ops, which their own declarations describe."""
        shown = handler.resolve_ref_schema(handler(schema))
        for name, text in setting_docs().items():
            shown["properties"].setdefault(name, {"description": text})
        return {**shown, "additionalProperties": False}


class FusedSettings(ViewSettings):
    """Batched views, the usual ones: `FusedViews`."""

    kind: Literal["fused"] = "fused"
    kernels: Literal["auto", "torch", "triton"] = "auto"
    """What makes views on a GPU. torch: its operations, also for any op that is plugged in. triton:
    kernels of the library's own, which read and write each view a few times instead of some forty;
    only built-in ops and no `extra`. auto: triton where it is installed and does all ops. A CPU
    takes torch's operations. No part of a run's digest."""

    views: ClassVar[type[FusedViews]] = FusedViews


class KorniaSettings(ViewSettings):
    """The slow reference, row by row: `KorniaViews`."""

    kind: Literal["kornia"] = "kornia"

    views: ClassVar[type[FusedViews]] = KorniaViews


AUGMENTS = Table("view", {"fused": FusedSettings, "kornia": KorniaSettings})


def build_augment(recipe: RunRecipe, index: DatasetIndex) -> FusedViews:
    """Build the recipe's views, on the CPU.

    Args:
        recipe: Its own mean and std win.
        index: The data set whose mean and std are used otherwise, and whose channels the images
            have.

    Raises:
        RecipeError: A preset, key or value of [augment] is wrong.
    """
    with refusals("augment", recipe.augment.kind):
        augment: FusedViews = recipe.augment.build(
            mean=index.manifest.mean,
            std=index.manifest.std,
            channels=index.image_type.channels,
        )
        return augment


class TwoViews(nn.Module):
    """Make two views of images in one line: `TwoViews("simclr", crop_px=224)(images)`.

    The views are those that training makes of the same pixels, seed, epoch and ids.

    Args:
        preset: as in FusedViews, like its errors.
        crop_px: side of the square views.
        settings: its others: channels, mean, std, extra, and fields of ViewSpec. Without mean
            and std, views are in [0, 1]; a loaded backbone has its own, `backbone.view.mean` and
            `backbone.view.std`.
    """

    @torch_defaults()
    def __init__(self, preset: str = "simclr", crop_px: int = 224, **settings: Any) -> None:
        super().__init__()
        for name in {"mean", "std"} & settings.keys():  # a tensor, as of a backbone's view
            if hasattr(settings[name], "tolist"):
                settings[name] = settings[name].tolist()
        self.views = FusedViews(preset, crop_px, **settings)
        self._next_id = 0
        self._given = {"crop_px": crop_px, **settings}
        self._preset = preset

    def __repr__(self) -> str:
        settings = ", ".join(f"{name}={value!r}" for name, value in self._given.items())
        return f"TwoViews({self._preset!r}, {settings})"

    @torch_defaults()
    def forward(
        self,
        images: Pictures,
        *,
        seed: int = 0,
        epoch: int = 0,
        ids: ArrayLike | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the first and the second view of each image.

        Args:
            images: A tensor (B, C, H, W) or an array (B, H, W, C), uint8 or float32 of 0..255; or a
                list of tensors (C, H, W), arrays (H, W, C) or PIL images, of different sizes. C is
                3, RGB, or the number of `channels`.
            seed: names the random numbers, with epoch and ids.
            epoch: the same.
            ids: (B,) integers. None: consecutive ones over all calls, so that two calls differ; in
                workers of a DataLoader, by its seed in each epoch, and in other ranks others.

        Returns:
            Two tensors (B, C, crop_px, crop_px) float32, on the device of the images.

        Raises:
            ValueError: images of another dtype or shape, or not an id for each.
        """
        canvas, sizes = _to_canvas(images, len(self.views.channels))
        if ids is None:
            first_id = _first_id() + self._next_id
            ids = range(first_id, first_id + len(canvas))
            self._next_id += len(canvas)
        numbers = torch.as_tensor(ids, dtype=torch.int64)
        if numbers.shape != (len(canvas),):
            raise ValueError(f"ids has shape {tuple(numbers.shape)}; give {len(canvas)} integers")
        self.views.to(canvas.device)
        params = draws(seed=seed, epoch=epoch, ids=numbers, sizes=sizes, specs=self.views.specs)
        batch = Batch(
            images=canvas,
            sizes=sizes,
            labels=torch.full_like(numbers, -1),
            ids=numbers,
            source_ids=numbers,
            epoch=epoch,
        )
        first, second = self.views(batch, params).chunk(2)
        return first, second


def _first_id() -> int:
    """Return where this process begins to count: copies of one object make views of their own.

    A worker of a DataLoader is a copy, made anew in each epoch, as is each rank of a launch.
    """
    worker = get_worker_info()
    rank = current_rank().rank or int(os.environ.get("RANK", "0"))  # a worker has no group
    if worker is None and rank == 0:
        return 0
    return int(hash_integers((0 if worker is None else worker.seed, rank))) >> 2


def _channels_first(image: Any, name: str, channels: int) -> Any:
    """Return PIL images and arrays (..., H, W, C) as tensors (..., C, H, W), others as they are."""
    if isinstance(image, Image.Image):
        image = rgb_pixels(image)
    if isinstance(image, np.ndarray) and image.ndim > 2:
        if image.shape[-1] != channels:
            raise ValueError(
                f"{name} is an array of shape {image.shape}; arrays have their {channels} channels "
                "last, tensors first"
            )
        return torch.from_numpy(np.ascontiguousarray(np.moveaxis(image, -1, -3)))
    return image


def _to_canvas(pictures: Pictures, channels: int) -> tuple[Tensor, Tensor]:
    """Images as a loader's batch has them: (B, C, H, W) channels_last, and (B, 2) sizes."""
    images = _channels_first(pictures, "images", channels)
    if isinstance(images, list | tuple):
        images = [
            _channels_first(image, f"images[{place}]", channels)
            for place, image in enumerate(images)
        ]
    _check_pictures(images, channels)
    sizes = torch.tensor([image.shape[1:] for image in images])
    if isinstance(images, Tensor):
        return images.contiguous(memory_format=torch.channels_last), sizes
    height, width = sizes.amax(0).tolist()
    canvas = images[0].new_zeros(len(images), channels, height, width)
    canvas = canvas.contiguous(memory_format=torch.channels_last)
    for row, image in enumerate(images):
        canvas[row, :, : image.shape[1], : image.shape[2]] = image
    return canvas, sizes


def _check_pictures(images: Any, channels: int) -> None:
    """Raise ValueError unless these are images in 0..255, (C, H, W) each, of one dtype."""
    if not isinstance(images, Tensor | Sequence):
        raise ValueError(
            f"images is a {type(images).__name__}; give a tensor (B, {channels}, H, W), or a list "
            f"of ({channels}, H, W), of arrays or of PIL images"
        )
    if isinstance(images, Tensor) and images.ndim != 4:
        raise ValueError(
            f"images has shape {tuple(images.shape)}; give (B, {channels}, H, W) "
            f"or a list of ({channels}, H, W); one image alone is [image]"
        )
    if not len(images):
        raise ValueError("images is empty; give at least one")
    for row, image in enumerate(images):
        if not isinstance(image, Tensor):
            raise ValueError(
                f"images[{row}] is a {type(image).__name__}; give uint8 tensors ({channels}, H, "
                f"W), arrays (H, W, {channels}) or PIL images"
            )
        if image.dtype not in (torch.uint8, torch.float32) or image.dtype != images[0].dtype:
            raise ValueError(
                f"images are {str(image.dtype).removeprefix('torch.')}; give uint8 in 0..255"
                ", or float32 in the same units, all of one dtype"
            )
        if image.ndim != 3 or image.shape[0] != channels or not image.numel():
            raise ValueError(
                f"images[{row}] has shape {tuple(image.shape)}; give "
                f"{'RGB' if channels == 3 else 'images'}, channels first: ({channels}, H, W)"
            )
    if images[0].dtype == torch.float32:
        low = float(min(i.min() for i in images))
        high = float(max(i.max() for i in images))
        # what nearly is a picture in [0, 1], resized perhaps, or normalised; a black one is not
        if 0.1 < high < 2 or (low < 0 and high < 10):
            raise ValueError(
                f"images are float32 of {low:.3g} to {high:.3g}; give values of 0..255: those in "
                "[0, 1] as images * 255, and all before they are normalised"
            )
