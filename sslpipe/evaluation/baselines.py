"""What a trained backbone has to beat: the pixels themselves, and the same network untrained."""

from typing import Any

import torch
from torch import nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import Split
from sslpipe.evaluation.embed import Embeddings, embed
from sslpipe.models.backbones import Backbone, build_backbone
from sslpipe.recipe.base import Component

PIXELS_PX = 32  # larger images are reduced: 3 x 224 x 224 numbers a sample are no baseline


def pixel_features(*splits: Split, view: EvalView, **options: Any) -> list[Embeddings]:
    """Flatten each split's pixels, in [0, 1] at the view's size: (N, 3 S S) features.

    Views larger than PIXELS_PX are made again at that size. Where red, green and blue are equal
    in every image of all splits, one channel is kept, (N, S S): cosines do not change.

    Args:
        *splits: Whose samples to take.
        view: Of the backbone that is compared.
        **options: Those of `embed`.
    """
    scale = min(1.0, PIXELS_PX / view.crop_px)
    raw = EvalView(
        crop_px=round(view.crop_px * scale),
        resize_px=round(view.resize_px * scale),
        mean=(0.0, 0.0, 0.0),
        std=(1.0, 1.0, 1.0),
    )
    splits_rows = [embed(nn.Flatten(), raw, split, **options) for split in splits]
    channels = [rows.features.view(len(rows.ids), 3, -1) for rows in splits_rows]
    if all(bool((c == c[:, :1]).all()) for c in channels):
        return [
            rows._replace(features=c[:, 0].contiguous())
            for rows, c in zip(splits_rows, channels, strict=True)
        ]
    return splits_rows


def random_backbone(component: Component, crop_px: int, seed: int = 0) -> Backbone:
    """Build the recipe's network with weights drawn from `seed`; torch's generator stays."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return build_backbone(component, crop_px=crop_px)
