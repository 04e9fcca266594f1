"""What FusedViews and KorniaViews share: the constructor."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.augment.extra_ops import ExtraOps
from sslpipe.augment.presets import view_specs


class BaseViews(nn.Module):
    """Hold the settings of both views.

    Args:
        preset: a name of PRESETS.
        crop_px: side of the square views.
        mean: RGB in [0, 1]; the attribute of that name is 0 unless `normalize`.
        std: RGB in [0, 1]; the attribute of that name is 1 unless `normalize`.
        normalize: whether views leave as (x - mean) / std; else they stay in [0, 1].
        extra: see ExtraOps.
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
