"""The view that weights were trained for: their own mean, std, size and interpolation."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import IMAGENET_MEAN, IMAGENET_STD
from sslpipe.errors import WeightsError, shown
from sslpipe.models.limits import check_side

UNKNOWN = (
    "mean, std and the crop (7/8 of the image) are ImageNet's usual ones: the source names none"
)
_OF_TIMM = ("input_size", "mean", "std", "crop_pct")  # keys that timm has defaults for


@dataclass(frozen=True)
class StatedView:
    """What a library says of the images that its weights were trained on.

    `resize` counts at `size`: at other sizes all of an image is seen, which finds more images of a
    class (docs/graded.md).
    """

    size: int = 224  # side of the images
    resize: int | None = None  # shorter side before the crop, with `squash` both; None: the same
    mean: Sequence[float] = IMAGENET_MEAN  # RGB in [0, 1], or one number
    std: Sequence[float] = IMAGENET_STD
    interpolation: str = "bilinear"  # or bicubic, which other names become
    squash: bool = False  # see EvalView
    notes: tuple[str, ...] = ()  # what it does not say, or no view does

    def make(self, what: str, crop_px: int | None) -> tuple[EvalView, list[str]]:
        """Make the view; and notes on what it could not take.

        Args:
            what: Names the source in messages.
            crop_px: Side of the views; None: `size`, which is judged then.
        """
        notes = list(self.notes)
        interpolation = self.interpolation
        if interpolation not in ("bilinear", "bicubic"):
            text = f"images are resized bicubically, not by the weights' own {interpolation}"
            notes.insert(0, text)
            interpolation = "bicubic"
        resize_px = self.size if self.resize is None else self.resize
        if crop_px is None:
            crop_px = self.size
            check_side(what, crop_px)
            check_side(what, resize_px)
        if resize_px < crop_px == self.size:
            notes.append(f"images fill the view, without the border of the weights' {resize_px} px")
        resize_px = max(crop_px, resize_px) if crop_px == self.size else crop_px
        mean, std = (list(each) * 3 if len(each) == 1 else each for each in (self.mean, self.std))
        view = EvalView(
            crop_px=crop_px,
            resize_px=resize_px,
            mean=mean,
            std=std,
            interpolation=interpolation,  # type: ignore[arg-type]  # one of both
            squash=self.squash,
        )
        return view, notes


def unknown_view(size: int = 224) -> StatedView:
    """Return ImageNet's view, for weights that name none, with a note."""
    return StatedView(size=size, resize=round(size * 8 / 7), notes=(UNKNOWN,))


def timm_view(what: str, config: Mapping[str, Any], img_size: Any = None) -> StatedView:
    """Read a pretrained_cfg of timm; `img_size`: a side or two of the network's own."""
    from timm.data import resolve_data_config

    # as create_transform reads it
    if not isinstance(config, Mapping):
        raise TypeError(f"{shown(config)} is no table")
    kinds = {"interpolation": (str,), "crop_mode": (str,), "crop_pct": (int, float)}
    for key, allowed in kinds.items():
        value = config.get(key)
        if value is not None and (type(value) not in allowed or value == 0):
            raise TypeError(f"{key} = {shown(value)}")
    data = resolve_data_config({}, pretrained_cfg=dict(config))
    sides = data["input_size"][-2:] if img_size is None else img_size
    height, width = (int(sides),) * 2 if isinstance(sides, int) else map(int, sides)
    if height != width:
        raise WeightsError(f"{what} takes images of {height} x {width}; only square ones are made")
    mode = data["crop_mode"]
    notes = []
    stated = config if img_size is None else {**config, "input_size": img_size}
    unknown = [key for key in _OF_TIMM if stated.get(key) is None]
    if unknown:
        notes.append(f"the source names no {', '.join(unknown)}: timm's defaults, {height} px")
    if mode not in ("center", "squash"):
        notes.append(f"images are cropped in the centre, not by the weights' {mode!r}")
    return StatedView(
        size=height,
        resize=math.floor(height / data["crop_pct"]),
        mean=data["mean"],
        std=data["std"],
        interpolation=data["interpolation"],
        squash=mode == "squash",
        notes=tuple(notes),
    )


def tag_of_file(architecture: str, file: str) -> str:
    """Return the tag of timm's weights that are published under a file's name; "": of none, or two.

    As DINO's and MAE's, which timm lists with their own mean and std.
    """
    import timm

    releases = [timm.get_pretrained_cfg(name) for name in timm.list_pretrained(f"{architecture}.*")]
    tags = [
        release.tag
        for release in releases
        if release is not None and release.url and release.url.rpartition("/")[2] == file
    ]
    return tags[0] if len(tags) == 1 and tags[0] else ""


def timm_remarks(architecture: str, tag: str) -> list[str]:
    """Return what timm itself says of its weights: that no tensor shows their QuickGELU, say."""
    import timm

    name = f"{architecture}.{tag}"
    if "quickgelu" in architecture or not timm.models.is_model_pretrained(name):
        return []  # the variant that its remark asks for has the remark, too
    release = timm.get_pretrained_cfg(name)
    return [f"timm says of {name}: {remark}" for remark in release.notes or ()]


def usual_timm_view(what: str, architecture: str, tag: str) -> StatedView | None:
    """Return the view of a release of timm's weights, without a `tag` the usual one; None: none."""
    import timm

    name = f"{architecture}.{tag}" if tag else architecture
    if not timm.models.is_model_pretrained(name):
        return None
    release = timm.get_pretrained_cfg(name)
    view = timm_view(what, release.to_dict())
    usual = "" if tag else ", timm's usual weights"
    note = f"the view is that of {architecture}.{release.tag}{usual}"
    return replace(view, notes=(note, *view.notes, *timm_remarks(architecture, tag)))


def torchvision_view(architecture: str, sha256: str) -> StatedView:
    """Return the view of the release of torchvision's weights that has this file's hash."""
    import torchvision

    if architecture not in torchvision.models.list_models(module=torchvision.models):
        return unknown_view()  # it will be refused when it is built
    for release in torchvision.models.get_model_weights(architecture):
        # its URL ends with the first digits of its sha256
        digits = release.url.rpartition("-")[2].partition(".")[0]
        if len(digits) >= 8 and sha256.startswith(digits):
            transforms = release.transforms()
            return StatedView(
                size=transforms.crop_size[0],
                resize=transforms.resize_size[0],
                mean=transforms.mean,
                std=transforms.std,
                interpolation=transforms.interpolation.value,
            )
    return unknown_view()
