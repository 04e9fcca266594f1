"""Two views of an image that never change: what label-free scores compare, whatever the recipe.

A view is a function of the image's id alone, so that two checkpoints, or two runs on the same
data, see the same pixels.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.augment.fused_views import FusedViews
from sslpipe.augment.ops import draws
from sslpipe.data.image_type import RGB8
from sslpipe.data.pipeline import Batch

# what nearly every recipe's own views do, and mildly: crops, and light. Nothing is mirrored, turned
# or recoloured, which on some images changes what they show
SETTINGS: dict[str, Any] = {
    "crop_area": (0.3, 1.0),
    "flip_prob": 0.0,
    "brightness": 0.4,
    "contrast": 0.4,
    "saturation": 0.0,
    "hue": 0.0,
    "grayscale_prob": 0.0,
    "blur_prob": 0.0,
}
_SEED = 0x5C0BE  # of no run


class ProbeViews(nn.Module):
    """Make two views of each image, the same at every call: a View of `embed`; see FusedViews."""

    def __init__(
        self,
        crop_px: int,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
        channels: Sequence[str] = RGB8.channels,
    ) -> None:
        super().__init__()
        options = {**SETTINGS, "kernels": "torch", "channels": channels}
        self.views = FusedViews("simclr", crop_px, mean, std, **options)

    def make_views(self, batch: Batch) -> Tensor:
        """Return (2B, C, S, S): the first views of all images, then the second."""
        params = draws(_SEED, 0, batch.ids, batch.view_sizes, self.views.specs)
        views: Tensor = self.views(batch, params)
        return views

    def reduced(self, features: Tensor) -> Tensor:
        """Join the features of an image's views: (2B, F) -> (B, 2F)."""
        return torch.cat([*features.chunk(2)], dim=1)


def by_view(rows: Tensor) -> Tensor:
    """Return the features of `embed` by view: (N, 2F) -> (2, N, F)."""
    return torch.stack([*rows.chunk(2, dim=1)])
