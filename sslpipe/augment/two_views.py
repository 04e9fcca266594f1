"""Two views of each image: by kornia, the table of both ways, and TwoViews for a notebook."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from sslpipe.augment.base import BaseViews
from sslpipe.augment.fused_views import FusedViews
from sslpipe.augment.op import Draws
from sslpipe.augment.ops import draws, ops_for
from sslpipe.data.index import DatasetIndex
from sslpipe.data.pipeline import Batch
from sslpipe.recipe.base import RunRecipe
from sslpipe.registry import build

__all__ = ["AUGMENTS", "FusedViews", "KorniaViews", "TwoViews", "Views", "build_augment"]


class KorniaViews(BaseViews):
    """Make FusedViews' views by kornia's ops: same arguments, draws and rows.

    Slow: it loops over rows. ops.py says where kornia differs.
    """

    @torch.no_grad()
    def forward(
        self, batch: Batch, draws: Draws | None = None, dtype: torch.dtype = torch.float32
    ) -> Tensor:
        """Return the views of a batch: see `FusedViews.forward`."""
        import kornia

        draws = self.plan_of(batch, draws).draws
        images, shown = batch.images, batch.view_images(len(self.specs)).tolist()
        with torch.autocast(images.device.type, enabled=False):
            views = torch.cat(
                [
                    self._make_view(images[shown[row]], draws.rows(slice(row, row + 1)))
                    for row in range(len(draws.ids))
                ]
            )
            if self.extra is not None:
                views = self.extra(views, draws)
            views = kornia.enhance.normalize(views, self.mean, self.std)
        out: Tensor = views.to(dtype).contiguous(memory_format=torch.channels_last)
        return out

    def _make_view(self, image: Tensor, draw: Draws) -> Tensor:
        """(C, H, W) and one row of draws -> (1, C, S, S) in units / 255."""
        spec, view = self.specs[int(draw.views)], image[None].float() / 255
        for op in ops_for(self.specs):
            view = op.apply_one(view, draw, spec)
            if op.name == "crop" and spec.rgb and image.dtype == torch.float32:
                view = view.clamp(0, 1)
        return view


Views = FusedViews | KorniaViews
AUGMENTS: dict[str, Callable[..., Views]] = {"fused": FusedViews, "kornia": KorniaViews}


def build_augment(
    recipe: RunRecipe, index: DatasetIndex | None = None, *, compiled: bool = False
) -> Views:
    """Build the recipe's views, on the CPU.

    Args:
        recipe: Its own mean and std win.
        index: The data set whose mean and std are used otherwise, and whose channels the images
            have; None: 0 and 1, and red, green and blue.
        compiled: On a CPU, compile the colour operations at their first use.

    Raises:
        RecipeError: A preset, key or value of [augment] is wrong.
    """
    statistics: dict[str, Any] = {}
    channels: dict[str, Any] = {}
    if index is not None:
        statistics = {"mean": index.manifest.mean, "std": index.manifest.std}
        channels = {"channels": index.image_type.channels}
    augment = build(AUGMENTS, recipe.augment, section="augment", fixed=channels, **statistics)
    if compiled and isinstance(augment, FusedViews):
        augment.compile_colours()
    return augment


class TwoViews(nn.Module):
    """Make two views of images in one line: `TwoViews("simclr", crop_px=224)(images)`.

    The views are those that training makes of the same pixels, seed, epoch and ids.

    Args:
        preset: as in FusedViews, like its errors.
        crop_px: side of the square views.
        settings: its others: channels, mean, std, extra, blur, and fields of ViewSpec. Without mean
            and std, views are in [0, 1].
    """

    def __init__(self, preset: str = "simclr", crop_px: int = 224, **settings: Any) -> None:
        super().__init__()
        self.views = FusedViews(preset, crop_px, **settings)
        self._next_id = 0

    def forward(
        self,
        images: Tensor | Sequence[Tensor],
        *,
        seed: int = 0,
        epoch: int = 0,
        ids: ArrayLike | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Return the first and the second view of each image.

        Args:
            images: (B, C, H, W) uint8 or float32 of 0..255, or a list of (C, H, W) of different
                sizes; C is 3, RGB, or the number of `channels`.
            seed: names the random numbers, with epoch and ids.
            epoch: the same.
            ids: (B,) integers. None: consecutive ones over all calls, so that two calls differ.

        Returns:
            Two tensors (B, C, crop_px, crop_px) float32, on the device of the images.

        Raises:
            ValueError: images of another dtype or shape, or not an id for each.
        """
        canvas, sizes = _to_canvas(images, len(self.views.channels))
        if ids is None:
            ids = range(self._next_id, self._next_id + len(canvas))
            self._next_id += len(canvas)
        numbers = torch.as_tensor(ids, dtype=torch.int64)
        if numbers.shape != (len(canvas),):
            raise ValueError(f"ids has shape {tuple(numbers.shape)}; give {len(canvas)} integers")
        self.views.to(canvas.device)
        params = draws(seed, epoch, numbers, sizes, self.views.specs)
        batch = Batch(canvas, sizes, torch.full_like(numbers, -1), numbers, numbers, epoch)
        first, second = self.views(batch, params).chunk(2)
        return first, second


def _to_canvas(images: Tensor | Sequence[Tensor], channels: int) -> tuple[Tensor, Tensor]:
    """Images as a loader's batch has them: (B, C, H, W) channels_last, and (B, 2) sizes."""
    if isinstance(images, Tensor) and images.ndim != 4:
        raise ValueError(
            f"images has shape {tuple(images.shape)}; give (B, {channels}, H, W) "
            f"or a list of ({channels}, H, W)"
        )
    if not len(images):
        raise ValueError("images is empty; give at least one")
    for row, image in enumerate(images):
        if not isinstance(image, Tensor):
            raise ValueError(
                f"images[{row}] is a {type(image).__name__}; give uint8 tensors ({channels}, H, W)"
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
    # what nearly is a picture in [0, 1]; a black one is none
    if images[0].dtype == torch.float32 and 0.1 < float(max(i.max() for i in images)) <= 1:
        raise ValueError("images are float32 of at most 1; give values of 0..255, as images * 255")
    sizes = torch.tensor([image.shape[1:] for image in images])
    if isinstance(images, Tensor):
        return images.contiguous(memory_format=torch.channels_last), sizes
    height, width = sizes.amax(0).tolist()
    canvas = images[0].new_zeros(len(images), channels, height, width)
    canvas = canvas.contiguous(memory_format=torch.channels_last)
    for row, image in enumerate(images):
        canvas[row, :, : image.shape[1], : image.shape[2]] = image
    return canvas, sizes
