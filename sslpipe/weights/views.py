"""The view that weights were trained for: their own mean, std, size and interpolation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import IMAGENET_MEAN, IMAGENET_STD
from sslpipe.errors import WeightsError, shown
from sslpipe.models.limits import check_side
from sslpipe.registry import REFUSALS

UNKNOWN = (
    "mean, std and the crop (7/8 of the image) are ImageNet's usual ones: the source names none"
)


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
    """Make a view from what a library says of its weights; and notes on what it could not take.

    Args:
        what: Names the source in messages.
        crop_px: Side of the views; None: `size`, which is judged then.
        size: Side that the weights were trained for.
        resize: Shorter side before the crop, at `size`; at other sizes the whole shorter side is
            seen, which finds more images of the same class (docs/graded.md).
        mean: RGB in [0, 1].
        std: RGB in [0, 1].
        interpolation: The library's name; others than bilinear and bicubic become bicubic.
        squash: See EvalView.
    """
    notes = []
    mean, std = (list(each) * 3 if len(each) == 1 else each for each in (mean, std))  # of grey
    if interpolation not in ("bilinear", "bicubic"):
        notes.append(f"images are resized bicubically, not by the weights' own {interpolation}")
        interpolation = "bicubic"
    resize_px = size if resize is None else resize
    if crop_px is None:
        crop_px = size
        check_side(what, size)
        check_side(what, resize_px)
    resize_px = crop_px if squash or crop_px != size else max(size, resize_px)
    config = {
        "crop_px": crop_px,
        "resize_px": resize_px,
        "mean": mean,
        "std": std,
        "interpolation": interpolation,
        "squash": squash,
    }
    try:
        return EvalView.from_config(config), notes
    except (ValueError, TypeError) as error:
        raise WeightsError(f"{what}: its own view cannot be made: {error}") from error


def unknown_view(what: str, crop_px: int | None, size: int = 224) -> tuple[EvalView, list[str]]:
    """Make ImageNet's view for weights that name none, and say so."""
    view, notes = make_view(what, crop_px, size=size, resize=round(size * 8 / 7))
    return view, [UNKNOWN, *notes]


def timm_view(
    what: str, crop_px: int | None, config: Mapping[str, Any], img_size: Any = None
) -> tuple[EvalView, list[str]]:
    """Make the view of a pretrained_cfg of timm; `img_size`: a side or two of the network's own."""
    from timm.data import resolve_data_config

    kinds = {"interpolation": (str,), "crop_mode": (str,), "crop_pct": (int, float)}
    try:  # as create_transform reads it
        if not isinstance(config, Mapping):
            raise TypeError(f"{shown(config)} is no table")
        for key, allowed in kinds.items():
            value = config.get(key)
            if value is not None and (type(value) not in allowed or value == 0):
                raise TypeError(f"{key} = {shown(value)}")
        data = resolve_data_config({}, pretrained_cfg=dict(config))
        sides = data["input_size"][-2:] if img_size is None else img_size
        height, width = (int(sides),) * 2 if isinstance(sides, int) else map(int, sides)
        resize = math.floor(height / data["crop_pct"])
    except REFUSALS as error:
        raise WeightsError(f"{what}: its pretrained_cfg is garbled: {error!r}") from error
    if height != width:
        raise WeightsError(f"{what} takes images of {height} x {width}; only square ones are made")
    view, notes = make_view(
        what,
        crop_px,
        size=height,
        resize=resize,
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
    """Make the view of the release of torchvision's weights that has this file's hash."""
    import torchvision

    if architecture not in torchvision.models.list_models(module=torchvision.models):
        return unknown_view(what, crop_px)  # it will be refused when it is built
    for release in torchvision.models.get_model_weights(architecture):
        # its URL ends with the first digits of its sha256
        digits = release.url.rpartition("-")[2].partition(".")[0]
        if len(digits) >= 8 and sha256.startswith(digits):
            transforms = release.transforms()
            return make_view(
                what,
                crop_px,
                size=transforms.crop_size[0],
                resize=transforms.resize_size[0],
                mean=transforms.mean,
                std=transforms.std,
                interpolation=transforms.interpolation.value,
            )
    return unknown_view(what, crop_px)
