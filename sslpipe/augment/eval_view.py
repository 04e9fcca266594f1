"""The one view of evaluation: no randomness, the same for training's monitor, tools and exports."""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from sslpipe.augment.ops import normalize_


def eval_resize_px(crop_px: int) -> int:
    """The shorter side before the central crop: the crop itself up to 96 px, else 8/7 of it.

    256 for 224, as torchvision's and SimCLR's ImageNet evaluation.
    """
    return crop_px if crop_px <= 96 else round(crop_px * 8 / 7)


class EvalView(nn.Module):
    """Shorter side to resize_px (bilinear, antialiased), central crop, normalise.

    crop_px <= resize_px; mean, std: RGB in [0, 1].
    forward: (B, 3, H, W) uint8, each image in the top-left corner, and (B, 2) its height and width
    -> (B, 3, crop_px, crop_px) float32, channels_last.
    Equals torchvision.transforms.v2 resize + center_crop + normalize on a float image.
    """

    mean: Tensor
    std: Tensor

    def __init__(
        self,
        crop_px: int,
        resize_px: int,
        mean: Sequence[float] = (0.0, 0.0, 0.0),
        std: Sequence[float] = (1.0, 1.0, 1.0),
    ) -> None:
        super().__init__()
        if not 0 < crop_px <= resize_px:
            raise ValueError(f"crop_px = {crop_px} is not in 1..resize_px = {resize_px}")
        self._config = {
            "crop_px": int(crop_px),
            "resize_px": int(resize_px),
            "mean": [float(value) for value in mean],
            "std": [float(value) for value in std],
        }
        self.crop_px, self.resize_px = int(crop_px), int(resize_px)
        self.register_buffer("mean", torch.tensor(self._config["mean"]), persistent=False)
        self.register_buffer("std", torch.tensor(self._config["std"]), persistent=False)

    def config(self) -> dict[str, Any]:
        """Plain values; EvalView(**view.config()) is the same view."""
        return dict(self._config)

    @torch.no_grad()
    def forward(self, images: Tensor, sizes: Tensor) -> Tensor:
        views = torch.empty(
            (len(images), 3, self.crop_px, self.crop_px),
            device=images.device,
            memory_format=torch.channels_last,
        )
        with torch.autocast(images.device.type, enabled=False):
            sizes = sizes.cpu()
            for height, width in sorted({(int(h), int(w)) for h, w in sizes.tolist()}):
                same = (sizes == torch.tensor([height, width])).all(1)
                rows = same.nonzero()[:, 0].to(images.device)
                views[rows] = self._resized(images[rows, :, :height, :width])
        return views

    def _resized(self, images: Tensor) -> Tensor:
        """(n, 3, h, w) uint8, all of one size -> (n, 3, crop_px, crop_px)."""
        height, width = images.shape[-2:]
        longer = int(self.resize_px * max(height, width) / min(height, width))
        size = (longer, self.resize_px) if height > width else (self.resize_px, longer)
        pixels = images.float().div_(255)
        if size != (height, width):
            pixels = F.interpolate(pixels, size, mode="bilinear", antialias=True)
        top, left = round((size[0] - self.crop_px) / 2), round((size[1] - self.crop_px) / 2)
        pixels = pixels[:, :, top : top + self.crop_px, left : left + self.crop_px]
        return normalize_(pixels, self.mean, self.std)


def eval_view_for(
    crop_px: int,
    mean: Sequence[float] = (0.0, 0.0, 0.0),
    std: Sequence[float] = (1.0, 1.0, 1.0),
) -> EvalView:
    """The evaluation view that belongs to training views of crop_px."""
    return EvalView(crop_px, eval_resize_px(crop_px), mean, std)
