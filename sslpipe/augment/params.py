"""What is drawn for a view: the law (ViewSpec) and the numbers (Draws). No images here.

The laws are torchvision's (RandomResizedCrop, RandomHorizontalFlip, RandomRotation, ColorJitter,
RandomGrayscale, GaussianBlur, RandomSolarize); the numbers come from sslpipe.random.
"""

import dataclasses
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import ArrayLike, NDArray

from sslpipe.random import uniform

BRIGHTNESS, CONTRAST, SATURATION, HUE = range(4)  # columns of Draws.factors, values of Draws.order
CROP_ATTEMPTS = 10  # torchvision RandomResizedCrop, then a central crop

# Lanes of stateless.uniform: which random number serves what. A new op gets a new lane at the end,
# so that the old ones keep their numbers.
_AREA = slice(0, CROP_ATTEMPTS)
_RATIO = slice(CROP_ATTEMPTS, 2 * CROP_ATTEMPTS)
_TOP, _LEFT, _FLIP, _ANGLE, _JITTER = 20, 21, 22, 23, 24
_FACTORS = slice(25, 29)
_ORDER, _GRAYSCALE, _BLUR, _SIGMA, _SOLARIZE = 29, 30, 31, 32, 33
_LANES = 34

PAIR_FIELDS = ("crop_area", "crop_ratio", "blur_sigma")  # of ViewSpec: [low, high]


@dataclass(frozen=True)
class ViewSpec:
    """The law of one view. Probabilities in [0, 1]; a strength of 0 leaves the op out.

    Source of the laws: torchvision.transforms.v2. Raises: ValueError naming field and value.
    """

    crop_px: int = 224  # side of the square view
    crop_area: tuple[float, float] = (0.08, 1.0)  # part of the image's area, uniform
    crop_ratio: tuple[float, float] = (3 / 4, 4 / 3)  # width / height of the box, log-uniform
    rotation_deg: float = 0.0  # angle uniform in +- this, after the crop; corners become black
    flip_prob: float = 0.5  # left-right
    jitter_prob: float = 0.8  # the four colour ops together, in random order
    brightness: float = 0.8  # factor uniform in [max(0, 1 - x), 1 + x]
    contrast: float = 0.8  # the same
    saturation: float = 0.8  # the same
    hue: float = 0.2  # shift uniform in +- this, in turns, <= 0.5
    grayscale_prob: float = 0.2
    blur_prob: float = 0.5
    blur_sigma: tuple[float, float] = (0.1, 2.0)  # pixels of the view, uniform
    solarize_prob: float = 0.0
    solarize_threshold: float = 0.5  # in [0, 1]: values at or above it are inverted

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            if field.name in PAIR_FIELDS:
                value = _pair(field.name, value)
                object.__setattr__(self, field.name, value)
            elif isinstance(value, bool) or not isinstance(value, int | float):
                raise ValueError(f"{field.name} = {value!r} is not a number")
            elif not math.isfinite(value) or value < 0:
                raise ValueError(f"{field.name} = {value!r} is negative or not finite")
            if field.name.endswith("_prob") and value > 1:
                raise ValueError(f"{field.name} = {value!r} is not a probability in [0, 1]")
        if self.crop_px != int(self.crop_px) or self.crop_px < 2:
            raise ValueError(f"crop_px = {self.crop_px!r} is not a whole number of pixels >= 2")
        if self.crop_area[1] > 1:
            raise ValueError(f"crop_area = {list(self.crop_area)} is more than the image (1)")
        if self.hue > 0.5:
            raise ValueError(f"hue = {self.hue!r} is more than half a turn (0.5)")
        if self.rotation_deg > 180:
            raise ValueError(f"rotation_deg = {self.rotation_deg!r} is more than 180")
        if self.solarize_threshold > 1:
            raise ValueError(f"solarize_threshold = {self.solarize_threshold!r} is not in [0, 1]")

    @property
    def blur_kernel_px(self) -> int:
        """A tenth of the view, made odd: 23 at 224 px. SimCLR code, `random_blur`: height // 10."""
        return int(self.crop_px) // 10 // 2 * 2 + 1

    @property
    def jitter_strengths(self) -> tuple[float, float, float, float]:
        """Brightness, contrast, saturation, hue."""
        return self.brightness, self.contrast, self.saturation, self.hue


def _pair(name: str, value: Any) -> tuple[float, float]:
    if (
        not isinstance(value, list | tuple)
        or len(value) != 2
        or not all(isinstance(item, int | float) and math.isfinite(item) for item in value)
        or not 0 < value[0] <= value[1]
    ):
        shown = list(value) if isinstance(value, tuple) else value
        raise ValueError(f"{name} = {shown!r} is not [low, high] with 0 < low <= high")
    return float(value[0]), float(value[1])


class Draws(NamedTuple):
    """The parameters of 2B views: rows 0..B-1 are the first views, B..2B-1 the second.

    seed, epoch, ids (2B,) int64 and views (2B,) int64 in {0, 1} name the row's random numbers.
    """

    seed: int
    epoch: int
    ids: torch.Tensor
    views: torch.Tensor
    boxes: torch.Tensor  # (2B, 4) int64: top, left, height, width, in pixels of the image
    flip: torch.Tensor  # (2B,) bool
    angle_deg: torch.Tensor  # (2B,) float32, counter-clockwise
    jitter: torch.Tensor  # (2B,) bool; factors and order are drawn either way
    factors: torch.Tensor  # (2B, 4) float32: brightness, contrast, saturation, hue in turns
    order: torch.Tensor  # (2B, 4) int64: the op (column of factors) done at each of four steps
    grayscale: torch.Tensor  # (2B,) bool
    blur: torch.Tensor  # (2B,) bool
    sigma: torch.Tensor  # (2B,) float32, pixels of the view
    solarize: torch.Tensor  # (2B,) bool

    def rows(self, index: torch.Tensor | slice) -> "Draws":
        """Some of the rows, in the order of `index`."""
        return Draws(self.seed, self.epoch, *(field[index] for field in self[2:]))

    def to(self, device: torch.device | str) -> "Draws":
        return Draws(
            self.seed, self.epoch, *(field.to(device, non_blocking=True) for field in self[2:])
        )


def draws(
    seed: int, epoch: int, ids: ArrayLike, sizes: ArrayLike, specs: tuple[ViewSpec, ...]
) -> Draws:
    """Parameters of every view of the samples: all first views, then all second.

    ids: (B,) integers; sizes: (B, 2) valid height and width. Both on the CPU.
    A row depends on (seed, epoch, its id, its view, its size) and the view's spec only.
    """
    ids = np.asarray(ids, dtype=np.int64)
    sizes = np.asarray(sizes, dtype=np.int64)
    views = [_draw_view(seed, epoch, ids, view, sizes, spec) for view, spec in enumerate(specs)]
    return Draws(
        seed,
        epoch,
        *(torch.from_numpy(np.concatenate(field)) for field in zip(*views, strict=True)),
    )


def _draw_view(
    seed: int,
    epoch: int,
    ids: NDArray[np.int64],
    view: int,
    sizes: NDArray[np.int64],
    spec: ViewSpec,
) -> tuple[NDArray[Any], ...]:
    u = uniform(seed, epoch, ids, view, _LANES)  # (B, lanes)
    strengths = np.array(spec.jitter_strengths)
    low, high = np.maximum(0, 1 - strengths), 1 + strengths
    low[HUE], high[HUE] = -spec.hue, spec.hue
    return (
        ids,
        np.full(len(ids), view, np.int64),
        _draw_boxes(u, sizes, spec),
        u[:, _FLIP] < spec.flip_prob,
        (spec.rotation_deg * (2 * u[:, _ANGLE] - 1)).astype(np.float32),
        u[:, _JITTER] < spec.jitter_prob,
        (low + (high - low) * u[:, _FACTORS]).astype(np.float32),
        _PERMUTATIONS[(u[:, _ORDER] * len(_PERMUTATIONS)).astype(np.int64)],
        u[:, _GRAYSCALE] < spec.grayscale_prob,
        u[:, _BLUR] < spec.blur_prob,
        _between(spec.blur_sigma, u[:, _SIGMA]).astype(np.float32),
        u[:, _SOLARIZE] < spec.solarize_prob,
    )


_PERMUTATIONS = np.array(
    [[a, b, c, d] for a in range(4) for b in range(4) for c in range(4) for d in range(4)
     if {a, b, c, d} == {0, 1, 2, 3}],
    dtype=np.int64,
)  # fmt: skip


def _between(bounds: tuple[float, float], u: NDArray[np.float64]) -> NDArray[np.float64]:
    return bounds[0] + (bounds[1] - bounds[0]) * u


def _draw_boxes(
    u: NDArray[np.float64], sizes: NDArray[np.int64], spec: ViewSpec
) -> NDArray[np.int64]:
    """(B, 4) top, left, height, width: the first of ten attempts that fits, else a central crop.

    Source: torchvision.transforms.v2.RandomResizedCrop.make_params.
    """
    height, width = sizes[:, 0], sizes[:, 1]
    area = (height * width)[:, None] * _between(spec.crop_area, u[:, _AREA])  # (B, attempts)
    low, high = spec.crop_ratio
    ratio = np.exp(_between((math.log(low), math.log(high)), u[:, _RATIO]))
    box_w = np.rint(np.sqrt(area * ratio)).astype(np.int64)
    box_h = np.rint(np.sqrt(area / ratio)).astype(np.int64)
    fits = (box_w > 0) & (box_w <= width[:, None]) & (box_h > 0) & (box_h <= height[:, None])

    rows, first = np.arange(len(u)), fits.argmax(1)
    found = fits[rows, first]
    central_w = np.where(width > height * high, np.rint(height * high).astype(np.int64), width)
    central_h = np.where(width < height * low, np.rint(width / low).astype(np.int64), height)
    box_h = np.where(found, box_h[rows, first], central_h)
    box_w = np.where(found, box_w[rows, first], central_w)

    room_h, room_w = height - box_h, width - box_w
    top = np.where(found, (u[:, _TOP] * (room_h + 1)).astype(np.int64), room_h // 2)
    left = np.where(found, (u[:, _LEFT] * (room_w + 1)).astype(np.int64), room_w // 2)
    return np.stack([top, left, box_h, box_w], axis=1)
