"""The settings of one view: what the augmentations are drawn from. No images, no random numbers."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor

from sslpipe.data.image_type import MOST_CHANNELS
from sslpipe.errors import shown
from sslpipe.recipe.sections import LONGEST_SIDE_PX

_LEAST_STD = 1e-6
_MOST_LEVEL = 1e3


LEAST = 1e-6  # of an interval's low: areas, ratios and lengths so small are slips


def setting(default: float | tuple[float, float], doc: str, *, most: float = math.inf) -> Any:
    """Declare a setting of a view: a field of ViewSpec, or one that an Op brings along.

    A name that ends in `_prob` is a probability in [0, 1]; a default of two numbers makes the
    setting an interval [low, high] with 0 < low <= high; all others are >= 0.

    Args:
        default: the value where neither preset nor recipe gives one.
        doc: what it means, in what unit; shown by `sslpipe check --explain augment.<name>`.
        most: the largest value that is accepted.

    Returns:
        A field of a dataclass.
    """
    return dataclasses.field(default=default, metadata={"doc": doc, "most": most})


@dataclass(frozen=True)
class ViewSpec:
    """The distribution of one view; a strength or probability of 0 leaves the op out.

    The fields say what each setting means; `setting_docs()` returns the same as strings.

    Raises:
        ValueError: naming field and value.

    Source:
        torchvision.transforms.v2: RandomResizedCrop, RandomHorizontalFlip, RandomRotation,
        ColorJitter, RandomGrayscale, GaussianBlur, RandomSolarize.

    Attributes:
        rgb: whether the channels are red, green and blue. Colour ops mix them, and clamp to [0, 1]
            as for bytes; of other channels each stands alone, and nothing is clamped.
    """

    rgb: ClassVar[bool] = True

    crop_px: int = setting(224, "side of the square view, in pixels", most=LONGEST_SIDE_PX)
    crop_area: tuple[float, float] = setting(
        (0.08, 1.0), "crop's part of the image's area, uniform in [low, high]", most=1
    )
    crop_ratio: tuple[float, float] = setting(
        (3 / 4, 4 / 3), "width / height of the crop, log-uniform in [low, high]", most=1000
    )
    rotation_deg: float = setting(
        0.0, "angle uniform in +- this, in degrees, after the crop; corners become black", most=180
    )
    flip_prob: float = setting(0.5, "probability of a left-right flip")
    jitter_prob: float = setting(
        0.8, "probability of the four colour ops, done together in random order"
    )
    brightness: float = setting(0.8, "factor uniform in [max(0, 1 - x), 1 + x]", most=100)
    contrast: float = setting(0.8, "factor uniform in [max(0, 1 - x), 1 + x]", most=100)
    saturation: float = setting(0.8, "factor uniform in [max(0, 1 - x), 1 + x]", most=100)
    hue: float = setting(0.2, "hue shift uniform in +- this, in cycles", most=0.5)
    grayscale_prob: float = setting(0.2, "probability that all three channels become the gray")
    blur_prob: float = setting(0.5, "probability of a Gaussian blur")
    blur_sigma: tuple[float, float] = setting(
        (0.1, 2.0), "the blur's sigma in pixels of the view, uniform in [low, high]", most=1000
    )
    solarize_prob: float = setting(0.0, "probability that bright pixels are inverted")
    solarize_threshold: float = setting(
        0.5, "values in [0, 1] at or above it are inverted by solarize", most=1
    )

    def __post_init__(self) -> None:
        """Check every field, those of plugged-in ops too."""
        for field in dataclasses.fields(self):
            value = _check(field.name, getattr(self, field.name), field)
            object.__setattr__(self, field.name, value)
        if self.crop_px != int(self.crop_px) or self.crop_px < 2:
            raise ValueError(f"crop_px = {self.crop_px!r} is not a whole number of pixels >= 2")

    @property
    def blur_kernel_px(self) -> int:
        """A tenth of the view, made odd: 23 at 224 px. SimCLR code, `random_blur`: height // 10."""
        return int(self.crop_px) // 10 // 2 * 2 + 1

    @property
    def jitter_strengths(self) -> tuple[float, float, float, float]:
        """Brightness, contrast, saturation, hue."""
        return self.brightness, self.contrast, self.saturation, self.hue


def extend_spec(settings: Mapping[str, Any], *, rgb: bool = True) -> type[ViewSpec]:
    """Return ViewSpec with further fields, each made by `setting`, checked in the same way."""
    fields = [(name, Any, field) for name, field in settings.items()]
    return dataclasses.make_dataclass(
        "ViewSpec", fields, bases=(ViewSpec,), frozen=True, namespace={"rgb": rgb}
    )


def is_interval(field: "dataclasses.Field[Any]") -> bool:
    """Whether a setting is [low, high]."""
    return isinstance(field.default, tuple)


def _check(name: str, value: Any, field: "dataclasses.Field[Any]") -> Any:
    """The value, an interval as a tuple of floats; raises ValueError where it is out of range."""
    most = field.metadata["most"]
    shown = list(value) if isinstance(value, tuple) else value
    if is_interval(field):
        if (
            not isinstance(value, list | tuple)
            or len(value) != 2
            or not all(_is_number(item) and math.isfinite(item) for item in value)
            or not LEAST <= value[0] <= value[1]
        ):
            raise ValueError(f"{name} = {shown!r} is not [low, high], {LEAST:g} <= low <= high")
        value = float(value[0]), float(value[1])
    elif not _is_number(value):
        raise ValueError(f"{name} = {value!r} is not a number")
    elif not math.isfinite(value) or value < 0:
        raise ValueError(f"{name} = {value!r} is negative or not finite")
    elif name.endswith("_prob") and value > 1:
        raise ValueError(f"{name} = {value!r} is not a probability in [0, 1]")
    if (value[1] if isinstance(value, tuple) else value) > most:
        raise ValueError(f"{name} = {shown!r} is more than {most:g} ({field.metadata['doc']})")
    return value


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def check_statistics(
    mean: Sequence[float], std: Sequence[float], channels: int | None = None
) -> None:
    """Refuse a mean or a standard deviation that images cannot be normalised by.

    Each has one number a channel; `channels` None: any number, from 1 to MOST_CHANNELS.

    Raises: ValueError naming which and its value.
    """
    count = channels or (len(mean) if isinstance(mean, Sequence) else 3)
    if not 0 < count <= MOST_CHANNELS:
        raise ValueError(f"mean has {count} numbers; use one a channel, 1 to {MOST_CHANNELS}")
    if isinstance(std, Sequence) and len(std) != count and channels is None:
        raise ValueError(f"mean has {count} numbers and std {len(std)}; use one a channel in both")
    for name, values, low in (("mean", mean, -_MOST_LEVEL), ("std", std, _LEAST_STD)):
        if (
            not isinstance(values, Sequence)
            or len(values) != count
            or not all(_is_number(value) and low <= value <= _MOST_LEVEL for value in values)
        ):
            raise ValueError(
                f"{name} = {shown(values)} is not {count} numbers, one a channel, of values in "
                "[0, 1]" + (", each above 0" if name == "std" else "")
            )


def check_images(images: Tensor, channels: int) -> None:
    """Refuse a batch that views of so many channels cannot be made of. Raises: ValueError."""
    if images.shape[1] != channels:
        raise ValueError(f"images have {images.shape[1]} channels, and the views {channels}")
    if images.dtype not in (torch.uint8, torch.float32):
        raise ValueError(
            f"images are {str(images.dtype).removeprefix('torch.')}; give uint8, or float32, "
            "in units of 0..255"
        )
