"""The view that weights were trained for: their own mean, std, size and interpolation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import WeightsError

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
UNKNOWN = "mean and std are ImageNet's and images have 224 of 256 px: the source names none"


def make_view(
    what: str,
    crop_px: int | None,
    *,
    size: int = 224,
    resize: int | None = None,
    mean: Sequence[float] = IMAGENET_MEAN,
    std: Sequence[float] = IMAGENET_STD,
    interpolation: str = "bilinear",
    squash: bool = False,
) -> tuple[EvalView, list[str]]:
    """Make a view from what a library says of its weights.

    Args:
        what: Names the source in messages.
        crop_px: Side of the views; None: `size`.
        size: Side that the weights were trained for.
        resize: Shorter side before the crop, at `size`; keeps its share at other sizes.
        mean: RGB in [0, 1].
        std: RGB in [0, 1].
        interpolation: The library's name of it; others than bilinear and bicubic become bicubic.
        squash: See EvalView.

    Returns:
        The view, and sentences on what it could not take over.
    """
    notes = []
    if interpolation not in ("bilinear", "bicubic"):
        notes.append(f"images are resized bicubically, not by the weights' own {interpolation}")
        interpolation = "bicubic"
    crop = size if crop_px is None else crop_px
    resize_px = size if resize is None else resize
    if crop != size:
        resize_px = math.floor(crop * resize_px / size)
    resize_px = crop if squash else max(crop, resize_px)
    try:
        view = EvalView(
            crop,
            resize_px,
            mean,
            std,
            interpolation=interpolation,  # type: ignore[arg-type]
            squash=squash,
        )
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{what}: its own view cannot be made: {error}") from error
    return view, notes


def timm_view(
    what: str, crop_px: int | None, config: Mapping[str, Any]
) -> tuple[EvalView, list[str]]:
    """Make the view of a pretrained_cfg of timm."""
    from timm.data import resolve_data_config

    # as create_transform reads it
    data = resolve_data_config({}, pretrained_cfg=dict(config))
    height, width = data["input_size"][-2:]
    if height != width:
        raise WeightsError(f"{what} takes images of {height} x {width}; only square ones are made")
    view, notes = make_view(
        what,
        crop_px,
        size=height,
        resize=math.floor(height / data["crop_pct"]),
        mean=data["mean"],
        std=data["std"],
        interpolation=data["interpolation"],
        squash=data["crop_mode"] == "squash",
    )
    if data["crop_mode"] not in ("center", "squash"):
        notes.append(f"images are cropped in the centre, not by the weights' {data['crop_mode']!r}")
    return view, notes


def torchvision_view(
    what: str, crop_px: int | None, architecture: str, sha256: str
) -> tuple[EvalView, list[str]]:
    """Make the view of the release of torchvision's weights that this file is, told by its hash."""
    import torchvision

    weights = list(torchvision.models.get_model_weights(architecture))
    # the URL of a release ends with the first digits of its sha256
    known = [w for w in weights if f"-{sha256[:8]}." in w.url]
    if not known:
        view, notes = make_view(what, crop_px, resize=256)
        return view, [UNKNOWN, *notes]
    transforms = known[0].transforms()
    return make_view(
        what,
        crop_px,
        size=transforms.crop_size[0],
        resize=transforms.resize_size[0],
        mean=transforms.mean,
        std=transforms.std,
        interpolation=transforms.interpolation.value,
    )
