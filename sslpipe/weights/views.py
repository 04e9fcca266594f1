"""The view that weights were trained for: their own mean, std, size and interpolation."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from sslpipe.augment.eval_view import EvalView
from sslpipe.errors import WeightsError, shown
from sslpipe.models.limits import check_side
from sslpipe.registry import REFUSALS

IMAGENET_MEAN, IMAGENET_STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
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
    """Make a view from what a library says of its weights.

    Args:
        what: Names the source in messages.
        crop_px: Side of the views; None: `size`, which is judged then.
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
    mean, std = (list(each) * 3 if len(each) == 1 else each for each in (mean, std))  # of grey
    if interpolation not in ("bilinear", "bicubic"):
        notes.append(f"images are resized bicubically, not by the weights' own {interpolation}")
        interpolation = "bicubic"
    crop = size if crop_px is None else crop_px
    resize_px = size if resize is None else resize
    if crop_px is None:
        check_side(what, size)
        check_side(what, resize_px)
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


def unknown_view(
    what: str, crop_px: int | None, *, size: int = 224, **known: Any
) -> tuple[EvalView, list[str]]:
    """Make ImageNet's view for weights that name none, and say so."""
    view, notes = make_view(what, crop_px, size=size, resize=round(size * 8 / 7), **known)
    return view, [UNKNOWN, *notes]


def timm_view(
    what: str, crop_px: int | None, config: Mapping[str, Any], img_size: Any = None
) -> tuple[EvalView, list[str]]:
    """Make the view of a pretrained_cfg of timm.

    Args:
        what: Names the source in messages.
        crop_px: Side of the views; None: its own.
        config: The pretrained_cfg.
        img_size: That the network was built for, a side or two, if it says so.
    """
    from timm.data import resolve_data_config

    kinds = {"interpolation": str, "crop_mode": str, "crop_pct": int | float}
    try:  # as create_transform reads it
        if not isinstance(config, Mapping):
            raise TypeError(f"{shown(config)} is no table")
        for key, kind in kinds.items():
            value = config.get(key)
            wrong = isinstance(value, bool) or not isinstance(value, kind) or value == 0
            if value is not None and wrong:
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
    """Make the view of the release of torchvision's weights that this file is, told by its hash."""
    import torchvision

    if architecture not in torchvision.models.list_models(module=torchvision.models):
        return unknown_view(what, crop_px)  # it will be refused when it is built
    weights = list(torchvision.models.get_model_weights(architecture))
    # the URL of a release ends with the first digits of its sha256
    digits = [w.url.rpartition("/")[2].rpartition("-")[2].partition(".")[0] for w in weights]
    known = [
        w for w, d in zip(weights, digits, strict=True) if len(d) >= 8 and sha256.startswith(d)
    ]
    if not known:
        return unknown_view(what, crop_px)
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


def transformers_view(
    what: str, crop_px: int | None, config: Mapping[str, Any], stated: Mapping[str, Any]
) -> tuple[EvalView, list[str]]:
    """Make the view of a folder of transformers.

    Args:
        what: Names the source in messages.
        crop_px: Side of the views; None: its own.
        config: Its config.json.
        stated: Its preprocessor_config.json; {} where it has none.
    """
    if not stated:
        return unknown_view(what, crop_px, size=_image_size(what, config))
    try:
        size, crop = _sides(stated.get("size", 224)), _sides(stated.get("crop_size", 224))
        cropped = bool(stated.get("do_center_crop", False))
        share = stated.get("crop_pct")  # of ConvNeXt: a crop below 384 px, squashed from there on
        if share is not None and size < (384,):
            cropped, crop, size = True, size, (int(size[0] / float(share)),)
        normalised = bool(stated.get("do_normalize", True))
        return make_view(
            what,
            crop_px,
            size=crop[0] if cropped else size[0],
            resize=size[0],
            mean=stated["image_mean"] if normalised else (0, 0, 0),
            std=stated["image_std"] if normalised else (1, 1, 1),
            interpolation=_PIL[int(stated.get("resample", 2))],
            squash=len(size) == 2 or (share is not None and not cropped),
        )
    except WeightsError:
        raise
    except REFUSALS as error:
        raise WeightsError(f"{what}: its preprocessor_config.json is garbled: {error!r}") from error


def _image_size(what: str, config: Mapping[str, Any]) -> int:
    """Take transformers' image_size: a number, or a list of height and width."""
    stated = config.get("image_size", 224)
    sides = stated if isinstance(stated, list) else [stated]
    whole = all(isinstance(side, int) and not isinstance(side, bool) for side in sides)
    if not whole or len(set(sides)) != 1:
        raise WeightsError(
            f"{what}: its config.json has image_size = {shown(stated)}; one number, or two equal "
            "ones, is read"
        )
    return int(sides[0])


_PIL = ("nearest", "lanczos", "bilinear", "bicubic", "box", "hamming")  # by PIL's numbers


def _sides(value: Any) -> tuple[int, ...]:
    """Take a size of transformers: (shorter side,), or (height, width)."""
    if not isinstance(value, Mapping):
        return (int(value), int(value))
    if "shortest_edge" in value:
        return (int(value["shortest_edge"]),)
    height, width = int(value["height"]), int(value["width"])
    if height != width:
        raise ValueError(f"images of {height} x {width}, and only square ones are made")
    return height, width
