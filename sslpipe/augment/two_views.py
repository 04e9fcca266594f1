"""Two views of each image: the table of ways to make them, and TwoViews for a notebook."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from numpy.typing import ArrayLike
from torch import Tensor, nn

from sslpipe.augment.fused_views import FusedViews
from sslpipe.augment.kornia_views import KorniaViews
from sslpipe.augment.params import draws
from sslpipe.data.pipeline import Batch

__all__ = ["AUGMENTS", "FusedViews", "KorniaViews", "TwoViews", "Views"]

Views = FusedViews | KorniaViews
AUGMENTS: dict[str, Callable[..., Views]] = {"fused": FusedViews, "kornia": KorniaViews}


class TwoViews(nn.Module):
    """Make two views of images in one line: `TwoViews("simclr", crop_px=224)(images)`.

    The views are those that training makes of the same pixels, seed, epoch and ids.

    Args:
        preset: simclr, simclr_small (no blur, weaker colours), mocov2, byol or grayscale.
        crop_px: side of the square views.
        settings: those of FusedViews: mean, std, extra, blur, and fields of ViewSpec. Without mean
            and std, views are in [0, 1].

    Raises:
        RecipeError: an unknown preset or key.
        ValueError: naming key and value.
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
            images: (B, 3, H, W) uint8 RGB, or a list of (3, H, W) of different sizes.
            seed: names the random numbers, with epoch and ids.
            epoch: the same.
            ids: (B,) integers. None: consecutive ones over all calls, so that two calls differ.

        Returns:
            Two tensors (B, 3, crop_px, crop_px) float32, on the device of the images.

        Raises:
            ValueError: images of another dtype or shape, or not an id for each.
        """
        canvas, sizes = _to_canvas(images)
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


def _to_canvas(images: Tensor | Sequence[Tensor]) -> tuple[Tensor, Tensor]:
    """Images as a loader's batch has them: (B, 3, H, W) uint8 channels_last, and (B, 2) sizes."""
    if isinstance(images, Tensor) and images.ndim != 4:
        raise ValueError(
            f"images has shape {tuple(images.shape)}; give (B, 3, H, W) or a list of (3, H, W)"
        )
    if not len(images):
        raise ValueError("images is empty; give at least one")
    for row, image in enumerate(images):
        if not isinstance(image, Tensor):
            raise ValueError(
                f"images[{row}] is a {type(image).__name__}; give uint8 tensors (3, H, W)"
            )
        if image.dtype != torch.uint8:
            raise ValueError(
                f"images are {str(image.dtype).removeprefix('torch.')}; give uint8 in 0..255"
                + (", as (images * 255).round().to(torch.uint8)" * image.is_floating_point())
            )
        if image.ndim != 3 or image.shape[0] != 3 or not image.numel():
            raise ValueError(
                f"images[{row}] has shape {tuple(image.shape)}; give RGB, channels first: (3, H, W)"
            )
    sizes = torch.tensor([image.shape[1:] for image in images])
    if isinstance(images, Tensor):
        return images.contiguous(memory_format=torch.channels_last), sizes
    height, width = sizes.amax(0).tolist()
    canvas = images[0].new_zeros(len(images), 3, height, width)
    canvas = canvas.contiguous(memory_format=torch.channels_last)
    for row, image in enumerate(images):
        canvas[row, :, : image.shape[1], : image.shape[2]] = image
    return canvas, sizes
