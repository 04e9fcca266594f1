"""The same views by kornia's ops, one image at a time: the reference for FusedViews, and `extra`.

Where kornia's pipeline is not torchvision's, kornia is given our parameters instead of its own:
- its ColorJitter draws one order a batch: here each image's adjustments are called in its own;
- its crops shrink without antialiasing or after a Gaussian of its own: kornia cuts, torch resizes;
- its gray is 0.299 R + ..., torchvision's 0.2989 R + ...: the one difference that stays, at most
  1e-3 in a view after the jitter's gains.
"""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import kornia
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.augment.params import Draws
from sslpipe.augment.presets import view_specs
from sslpipe.data.pipeline import Batch
from sslpipe.errors import RecipeError, did_you_mean
from sslpipe.random import hash_integers


class KorniaViews(nn.Module):
    """FusedViews by kornia's ops: same arguments, draws and rows. Slow: it loops over rows."""

    mean: Tensor
    std: Tensor

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

    @torch.no_grad()
    def forward(self, batch: Batch, draws: Draws, dtype: torch.dtype = torch.float32) -> Tensor:
        """-> (2B, 3, S, S) of dtype, channels_last."""
        draws = draws.to("cpu")
        images = batch.images
        with torch.autocast(images.device.type, enabled=False):
            rows = range(len(draws.ids))
            views = torch.cat(
                [
                    self._view(images[row % len(images)], draws.rows(slice(row, row + 1)))
                    for row in rows
                ]
            )
            if self.extra is not None:
                views = self.extra(views, draws)
            views = kornia.enhance.normalize(views, self.mean, self.std)
        out: Tensor = views.to(dtype).contiguous(memory_format=torch.channels_last)
        return out

    def _view(self, image: Tensor, draw: Draws) -> Tensor:
        """(3, H, W) uint8 and one row of draws -> (1, 3, S, S) in [0, 1]."""
        spec = self.specs[int(draw.views)]
        view = _crop(image, draw.boxes[0].tolist(), self.crop_px)
        if draw.flip:
            view = kornia.geometry.transform.hflip(view)
        if spec.rotation_deg:
            view = kornia.geometry.transform.rotate(view, draw.angle_deg.to(view.device))
        if draw.jitter:
            view = _jitter(view, draw, spec.jitter_strengths)
        if draw.grayscale:
            view = kornia.color.rgb_to_grayscale(view).expand(-1, 3, -1, -1)
        if draw.blur:
            sigma = draw.sigma[:, None].expand(1, 2).to(view.device)
            view = kornia.filters.gaussian_blur2d(view, spec.blur_kernel_px, sigma)
        if draw.solarize:
            view = kornia.enhance.solarize(view, float(spec.solarize_threshold))
        return view


def _crop(image: Tensor, box: list[int], crop_px: int) -> Tensor:
    top, left, height, width = box
    right, bottom = left + width - 1, top + height - 1  # kornia's corners belong to the box
    corners = torch.tensor([[[left, top], [right, top], [right, bottom], [left, bottom]]])
    pixels = kornia.geometry.transform.crop_by_indices(image[None].float() / 255, corners)
    return F.interpolate(pixels, (crop_px, crop_px), mode="bilinear", antialias=True)


def _jitter(view: Tensor, draw: Draws, strengths: tuple[float, float, float, float]) -> Tensor:
    adjust = (
        kornia.enhance.adjust_brightness_accumulative,  # multiplies, as torchvision does
        kornia.enhance.adjust_contrast_with_mean_subtraction,
        kornia.enhance.adjust_saturation_with_gray_subtraction,
        kornia.enhance.adjust_hue,
    )
    for op in draw.order[0].tolist():
        if strengths[op]:
            unit = (
                2 * math.pi if adjust[op] is kornia.enhance.adjust_hue else 1.0
            )  # turns -> radians
            view = adjust[op](view, float(draw.factors[0, op]) * unit)
    return view


class ExtraOps(nn.Module):
    """Further kornia augmentations, drawn one image at a time: slow (some 0.5 ms an op and view).

    extra: one table an op: name (a class of kornia.augmentation), view (1, 2 or "both", the
    default), args (its keyword arguments; its p decides whether it is done). They see images in
    [0, 1] and must keep their shape.
    An op's random numbers come from torch's generator, forked and seeded by a hash of
    (seed, epoch, id, view, place in the list): the rows of a batch do not touch each other.
    Raises: RecipeError on an unknown name or key; ValueError on arguments that kornia refuses.
    """

    def __init__(self, extra: Sequence[dict[str, Any]]) -> None:
        super().__init__()
        self.names = [_checked(entry, place) for place, entry in enumerate(extra)]
        self.views = [
            {1: (0,), 2: (1,), "both": (0, 1)}[entry.get("view", "both")] for entry in extra
        ]
        self.ops = nn.ModuleList(_constructed(entry, place) for place, entry in enumerate(extra))

    def forward(self, views: Tensor, draws: Draws) -> Tensor:
        """(n, 3, S, S) in [0, 1], and their draws on the CPU -> the same shape."""
        devices = [views.device] if views.is_cuda else []
        done = []
        for row, (sample, number) in enumerate(
            zip(draws.ids.tolist(), draws.views.tolist(), strict=True)
        ):
            view = views[row : row + 1]
            for place, op in enumerate(self.ops):
                if number not in self.views[place]:
                    continue
                word = hash_integers(draws.seed, draws.epoch, sample, number, place)
                with torch.random.fork_rng(devices=devices):
                    torch.manual_seed(int(word) >> 1)
                    changed = op(view)
                if changed.shape != view.shape:
                    raise ValueError(
                        f"augment.extra[{place}] ({self.names[place]}) turns {tuple(view.shape)} "
                        f"into {tuple(changed.shape)}; use one that keeps the shape"
                    )
                view = changed
            done.append(view)
        return torch.cat(done)


def _augmentations() -> dict[str, type[nn.Module]]:
    """kornia's augmentations of single images by name."""
    base: type[nn.Module] = kornia.augmentation.AugmentationBase2D
    members = vars(kornia.augmentation).items()
    return {name: cls for name, cls in members if inspect.isclass(cls) and issubclass(cls, base)}


def _checked(entry: dict[str, Any], place: int) -> str:
    for key in entry:
        if key not in ("name", "view", "args"):
            raise RecipeError(
                f"augment.extra[{place}].{key} is unknown"
                f"{did_you_mean(key, ('name', 'view', 'args'))}; known: name, view, args"
            )
    name, view = entry.get("name"), entry.get("view", "both")
    if name not in _augmentations():
        raise RecipeError(
            f"augment.extra[{place}].name = {name!r} is not an augmentation of kornia"
            f"{did_you_mean(str(name), _augmentations())}"
        )
    if view not in (1, 2, "both"):
        raise RecipeError(f"augment.extra[{place}].view = {view!r}; use 1, 2 or 'both'")
    return str(name)


def _constructed(entry: dict[str, Any], place: int) -> nn.Module:
    arguments = entry.get("args", {})
    try:
        return _augmentations()[entry["name"]](**arguments)
    except (TypeError, ValueError, AssertionError) as error:
        raise RecipeError(f"augment.extra[{place}].args = {arguments!r}: {error}") from error
