"""The views of evaluation: the same at every call, for training's monitor, tools and exports."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Self

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.augment.ops import draws
from sslpipe.augment.pixels import normalize_
from sslpipe.augment.spec import check_images, check_statistics
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.image_type import RGB8
from sslpipe.data.pipeline import Batch
from sslpipe.errors import shown
from sslpipe.recipe.sections import LONGEST_SIDE_PX
from sslpipe.registry.schema import SparseSettings

Interpolation = Literal["bilinear", "bicubic"]
_SEED = 0x5C0BE  # of no run


class EvalView(nn.Module):
    """Resize the shorter side (antialiased), crop the centre, normalise.

    Equals torchvision.transforms.v2 resize + center_crop + normalize on a float image; what
    "bicubic" makes of bytes outside of [0, 1] is clamped, of float32 nothing.

    Args:
        crop_px: side of the square view.
        resize_px: the shorter side before the crop, at least crop_px.
        mean, std: one number a channel, of values in [0, 1].
        interpolation: of the resize, "bilinear" or "bicubic".
        squash: resize both sides to resize_px, whatever the image's aspect ratio.

    Raises:
        ValueError: naming argument and value.
    """

    mean: Tensor
    std: Tensor
    views_per_image = 1

    def __init__(
        self,
        crop_px: int,
        resize_px: int,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
        interpolation: Interpolation = "bilinear",
        squash: bool = False,
    ) -> None:
        super().__init__()
        for name, value in (("crop_px", crop_px), ("resize_px", resize_px)):
            if isinstance(value, bool) or not isinstance(value, int):
                raise ValueError(f"{name} = {value!r} is no whole number")
        if not 0 < crop_px <= resize_px:
            raise ValueError(f"crop_px = {crop_px} is not in 1..resize_px = {resize_px}")
        if resize_px > LONGEST_SIDE_PX:
            raise ValueError(f"resize_px = {resize_px} is more than {LONGEST_SIDE_PX}")
        check_statistics(mean, std)
        if interpolation not in ("bilinear", "bicubic"):
            raise ValueError(
                f"interpolation = {interpolation!r} is unknown; known: bilinear, bicubic"
            )
        self.crop_px = crop_px
        self.resize_px = resize_px
        self.interpolation = interpolation
        self.squash = bool(squash)
        self._config: dict[str, Any] = {
            "crop_px": crop_px,
            "resize_px": resize_px,
            "mean": [float(value) for value in mean],
            "std": [float(value) for value in std],
            **({} if interpolation == "bilinear" else {"interpolation": interpolation}),
            **({"squash": True} if squash else {}),
        }
        self._register_statistics("cpu")

    def _register_statistics(self, device: torch.device | str) -> None:
        for name in ("mean", "std"):
            values = torch.tensor(self._config[name], dtype=torch.float32, device=device)
            self.register_buffer(name, values, persistent=False)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Move to another device; views are made in float32, also for weights in half precision."""
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        self._register_statistics(self.mean.device)
        return self

    @staticmethod
    def from_config(config: Mapping[str, Any]) -> "EvalView":
        """Make the view, or the `JoinedView`, whose `config()` this was.

        Raises:
            ValueError: Naming argument and value.
            TypeError: These are no arguments of a view.
        """
        if "views" not in config:
            return EvalView(**config)
        views = config["views"]
        if not isinstance(views, list):
            raise TypeError(f"views = {shown(views)} is no list of views")
        return JoinedView([EvalView.from_config(each) for each in views])

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of one image that the network gets."""
        return len(self.mean), self.crop_px, self.crop_px

    @property
    def sides(self) -> list[int]:
        """Sides of the images that it makes, in px: one, or those of each view of a join."""
        return [self.crop_px]

    @property
    def canvas_px(self) -> int:
        """Longer side to decode to, in px: no picture of at most 2 : 1 loses anything by it."""
        return max(256, 2 * self.resize_px)

    def extra_repr(self) -> str:
        """Return the arguments."""
        return ", ".join(f"{name}={value!r}" for name, value in self._config.items())

    def config(self) -> dict[str, Any]:
        """Return plain values; `EvalView.from_config` of them is the same view."""
        return dict(self._config)

    @torch.no_grad()
    def forward(self, images: Tensor, sizes: Tensor) -> Tensor:
        """Return the views of a batch; of several an image all first ones, then all second.

        (B, C, H, W) uint8, or float32 in its units, top left, with (B, 2) heights and widths ->
        (n B, C, crop_px, crop_px) float32, channels_last. Raises: ValueError for other channels.
        """
        check_images(images, len(self.mean))
        views = torch.empty(
            (self.views_per_image * len(images), len(self.mean), self.crop_px, self.crop_px),
            dtype=torch.float32,
            device=images.device,
            memory_format=torch.channels_last,
        )
        with torch.autocast(images.device.type, enabled=False):
            sizes = sizes.cpu()
            for height, width in sorted({(int(h), int(w)) for h, w in sizes.tolist()}):
                same = (sizes == torch.tensor([height, width])).all(1)
                rows = same.nonzero()[:, 0].to(images.device)
                pixels = self._resized(images[rows, :, :height, :width])
                for number, crop in enumerate(self._crops(pixels)):
                    views[number * len(images) + rows] = crop
        return views

    def make_views(self, batch: Batch) -> Tensor:
        """Return the views of a loader's batch."""
        return self.forward(batch.images, batch.sizes)

    def reduced(self, features: Tensor) -> Tensor:
        """Return features of the views, (n B, F), as one row an image."""
        return features

    def _crops(self, pixels: Tensor) -> list[Tensor]:
        """Cut resized images, (b, C, h, w): (b, C, crop_px, crop_px) each view."""
        top, left = (round((side - self.crop_px) / 2) for side in pixels.shape[-2:])
        return [pixels[:, :, top : top + self.crop_px, left : left + self.crop_px]]

    def _resized(self, images: Tensor) -> Tensor:
        """(n, C, h, w), all of one size -> float, the shorter side of resize_px."""
        height, width = images.shape[-2:]
        longer = int(self.resize_px * max(height, width) / min(height, width))
        longer = self.resize_px if self.squash else longer
        size = (longer, self.resize_px) if height > width else (self.resize_px, longer)
        pixels = images.float().div_(255)
        if size != (height, width):
            pixels = F.interpolate(pixels, size, mode=self.interpolation, antialias=True)
            if self.interpolation == "bicubic" and images.dtype == torch.uint8:  # it overshoots
                pixels = pixels.clamp_(0, 1)
        return normalize_(pixels, self.mean, self.std)


class JoinedView(EvalView):
    """Several views of an image in one tensor, for a `JoinedBackbone`, which takes it apart.

    Args:
        views: Two or more. Mean, std and sizes of the largest are this view's own, for whoever
            asks for one number.

    Raises:
        ValueError: They are fewer, or of different channels.
    """

    def __init__(self, views: Sequence[EvalView]) -> None:
        configs = [view.config() for view in views]
        if len(configs) < 2:
            raise ValueError("a joined view is of two or more views")
        if len({len(view.mean) for view in views}) > 1:
            raise ValueError("a joined view is of views of the same channels")
        largest = max(views, key=lambda view: (view.crop_px, view.resize_px))
        super().__init__(**largest.config())
        self._config["views"] = configs
        self.views: nn.Module = nn.ModuleList(views)

    @property
    def image_shape(self) -> tuple[int, int, int]:
        """Shape of one image that the network gets: all views' pixels, one after the other."""
        return len(self.mean), 1, sum(side**2 for side in self.sides)

    @property
    def sides(self) -> list[int]:
        """Sides of the images of each view, in px."""
        return [each["crop_px"] for each in self._config["views"]]

    @torch.no_grad()
    def forward(self, images: Tensor, sizes: Tensor) -> Tensor:
        """Return all views of a batch, (B, C, 1, sum of crop_px^2); arguments as EvalView's."""
        views: list[Tensor] = [view(images, sizes) for view in self.views.children()]
        return torch.cat([view.flatten(2) for view in views], dim=2)[:, :, None]


def eval_view_for(
    crop_px: int, mean: Sequence[float] = (0.0, 0.0, 0.0), std: Sequence[float] = (1.0, 1.0, 1.0)
) -> EvalView:
    """Return the evaluation view that belongs to training views of crop_px.

    It resizes the shorter side to the crop up to 96 px, else to 8/7 of it: to 256 for 224, as
    torchvision's and SimCLR's ImageNet evaluation.
    """
    resize_px = crop_px if crop_px <= 96 else round(crop_px * 8 / 7)
    return EvalView(crop_px, resize_px, mean, std)


def normalisation(augment: SparseSettings, mean: Sequence[float], std: Sequence[float]) -> Any:
    """Return the mean and std of evaluations: what [augment] says, else those of the data."""
    if not augment.arguments.get("normalize", True):
        return {"mean": (0.0,) * len(mean), "std": (1.0,) * len(std)}
    data = {"mean": mean, "std": std}
    return {key: augment.arguments.get(key, value) for key, value in data.items()}


class ProbeViews(nn.Module):
    """Make two views of each image, which label-free scores compare, whatever the recipe.

    A view is a function of the image's id alone, so that two checkpoints, or two runs on the same
    data, see the same pixels. A View of `embed`; see FusedViews.
    """

    def __init__(
        self,
        crop_px: int,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
        channels: Sequence[str] = RGB8.channels,
    ) -> None:
        super().__init__()
        self.canvas_px = max(256, 2 * crop_px)  # as EvalView's
        # what nearly every recipe's own views do, and mildly: crops, and light. Nothing is
        # mirrored, turned or recoloured, which on some images changes what they show
        self.views = FusedViews(
            "simclr",
            crop_px=crop_px,
            mean=mean,
            std=std,
            kernels="torch",
            channels=channels,
            crop_area=(0.3, 1.0),
            flip_prob=0.0,
            brightness=0.4,
            contrast=0.4,
            saturation=0.0,
            hue=0.0,
            grayscale_prob=0.0,
            blur_prob=0.0,
        )

    def make_views(self, batch: Batch) -> Tensor:
        """Return (2B, C, S, S): the first views of all images, then the second."""
        params = draws(
            seed=_SEED, epoch=0, ids=batch.ids, sizes=batch.view_sizes, specs=self.views.specs
        )
        views: Tensor = self.views(batch, params)
        return views

    def reduced(self, features: Tensor) -> Tensor:
        """Join the features of an image's views: (2B, F) -> (B, 2F)."""
        return torch.cat([*features.chunk(2)], dim=1)


def by_view(rows: Tensor) -> Tensor:
    """Return the features of `embed` by view: (N, 2F) -> (2, N, F)."""
    return torch.stack([*rows.chunk(2, dim=1)])
