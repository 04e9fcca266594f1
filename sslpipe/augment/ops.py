"""The augmentations, in the order in which they are done: the list OPS.

Everything iterates over it: `draws`, FusedViews, KorniaViews and the preview. To add one, give
`register_op` a subclass of Op (or of MaskedOp: done with a probability).

The reference of each op is kornia's, with these differences:
- kornia's ColorJitter draws one order a batch: here each image's adjustments are called in its own;
- its crops shrink without antialiasing or after a Gaussian of its own: kornia cuts, torch resizes;
- its adjustments clamp to [0, 1]: channels that are no colours, which nothing clamps, are changed
  by the formulas; so is what its solarize is for values beyond 1;
- its gray is 0.299 R + ..., torchvision's 0.2989 R + ...: the one difference that stays, at most
  1e-3 in a view after the jitter's gains.
"""

import copyreg
import dataclasses
import itertools
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from sslpipe.augment import pixels
from sslpipe.augment.op import Array, Chunk, Draws, MaskedOp, Op, by_kornia
from sslpipe.augment.pixels import CONTRAST, HUE
from sslpipe.augment.resample import gaussian_blur
from sslpipe.augment.sensor_ops import (
    ChannelDrop,
    ChannelGain,
    Gamma,
    Noise,
    QuarterTurn,
    VerticalFlip,
)
from sslpipe.augment.spec import ViewSpec, extend_spec
from sslpipe.data.pipeline import send
from sslpipe.random import uniform
from sslpipe.registry import installed, load

CROP_ATTEMPTS = 10  # torchvision RandomResizedCrop, then a central crop


class CropFlip(Op):
    """Random resized crop and left-right flip, one antialiased resample. Makes views of images."""

    name = "crop"
    params = ("boxes", "flip")  # (B, 4) int64: top, left, height, width in the image; (B,) bool
    lanes = range(0, 23)  # ten areas, ten ratios, top, left, flip

    def draw(self, u: Array, sizes: Array, spec: ViewSpec) -> tuple[Array, ...]:
        """Draw which views are flipped, and boxes: the first of ten that fits, else central.

        Source:
            torchvision.transforms.v2.RandomResizedCrop.make_params.
        """
        height = sizes[:, 0]
        width = sizes[:, 1]
        area_lanes = u[:, :CROP_ATTEMPTS]
        ratio_lanes = u[:, CROP_ATTEMPTS : 2 * CROP_ATTEMPTS]
        area = (height * width)[:, None] * _between(spec.crop_area, area_lanes)  # (B, attempts)
        low, high = spec.crop_ratio
        ratio = np.exp(_between((math.log(low), math.log(high)), ratio_lanes))
        box_w = np.rint(np.sqrt(area * ratio)).astype(np.int64)
        box_h = np.rint(np.sqrt(area / ratio)).astype(np.int64)
        fits = (box_w > 0) & (box_w <= width[:, None]) & (box_h > 0) & (box_h <= height[:, None])

        # the first that fits, else the largest central box of an allowed ratio
        rows = np.arange(len(u))
        first = fits.argmax(1)
        any_fits = fits[rows, first]
        central_w = np.where(width > height * high, np.rint(height * high).astype(np.int64), width)
        central_h = np.where(width < height * low, np.rint(width / low).astype(np.int64), height)
        box_h = np.where(any_fits, box_h[rows, first], central_h)
        box_w = np.where(any_fits, box_w[rows, first], central_w)

        # its place, uniform in the room that is left
        room_h = height - box_h
        room_w = width - box_w
        top = np.where(any_fits, (u[:, 20] * (room_h + 1)).astype(np.int64), room_h // 2)
        left = np.where(any_fits, (u[:, 21] * (room_w + 1)).astype(np.int64), room_w // 2)
        return np.stack([top, left, box_h, box_w], axis=1), u[:, 22] < spec.flip_prob

    def apply(self, views: Tensor, chunk: Chunk) -> Tensor:
        return chunk.cut(views)

    def apply_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        top, left, height, width = draw.boxes[0].tolist()
        # kornia's corners belong to the box
        right = left + width - 1
        bottom = top + height - 1
        corners = torch.tensor([[[left, top], [right, top], [right, bottom], [left, bottom]]])
        crop = by_kornia("geometry.transform.crop_by_indices", view, corners)
        crop = F.interpolate(crop, (int(spec.crop_px),) * 2, mode="bilinear", antialias=True)
        return by_kornia("geometry.transform.hflip", crop) if draw.flip else crop

    def describe(self, draw: Draws, spec: ViewSpec, size: tuple[int, int]) -> list[str]:
        _, _, height, width = draw.boxes[0].tolist()
        words = [f"crop {height * width / math.prod(size):.0%} {width / height:.2f}:1"]
        return [*words, "mirrored"] if draw.flip else words


class Rotation(Op):
    """Rotation about the centre of the view; black outside."""

    name = "rotation"
    params = ("angle_deg",)  # (B,) float32, counter-clockwise
    lanes = range(23, 24)

    def draw(self, u: Array, sizes: Array, spec: ViewSpec) -> tuple[Array, ...]:
        return ((spec.rotation_deg * (2 * u[:, 0] - 1)).astype(np.float32),)

    def apply(self, views: Tensor, chunk: Chunk) -> Tensor:
        if not any(spec.rotation_deg for spec in chunk.specs):
            return views
        return pixels.rotate(views, chunk.params["angle_deg"])

    def apply_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        if not spec.rotation_deg:
            return view
        return by_kornia("geometry.transform.rotate", view, draw.angle_deg.to(view.device))

    def describe(self, draw: Draws, spec: ViewSpec, size: tuple[int, int]) -> list[str]:
        return [f"rotated {draw.angle_deg.item():+.0f}°"] if spec.rotation_deg else []


class ColorJitter(Op):
    """Brightness, contrast, saturation and hue, in an order of each view's own."""

    name = "jitter"
    # (B,) bool; (B, 4) float32: the factors of the first three, hue shift in cycles; (B, 4) int64:
    # the column of factors that is applied at each step. All drawn for all rows.
    params = ("jitter", "factors", "order")
    lanes = range(24, 30)  # jitter, four factors, order

    def draw(self, u: Array, sizes: Array, spec: ViewSpec) -> tuple[Array, ...]:
        strengths = np.array(spec.jitter_strengths)
        low = np.maximum(0, 1 - strengths)
        high = 1 + strengths
        low[HUE] = -spec.hue
        high[HUE] = spec.hue
        return (
            u[:, 0] < spec.jitter_prob,
            (low + (high - low) * u[:, 1:5]).astype(np.float32),
            _PERMUTATIONS[(u[:, 5] * len(_PERMUTATIONS)).astype(np.int64)],
        )

    def apply(self, views: Tensor, chunk: Chunk) -> Tensor:
        return views if chunk.jitter is None else chunk.jitter(views)

    def apply_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        if not draw.jitter:
            return view
        if not spec.rgb:
            return _jitter_channels(view, draw, spec)
        adjust = (
            "brightness_accumulative",  # multiplies, as torchvision does
            "contrast_with_mean_subtraction",
            "saturation_with_gray_subtraction",
            "hue",
        )
        for column in draw.order[0].tolist():
            if spec.jitter_strengths[column]:
                unit = 2 * math.pi if column == HUE else 1.0  # cycles -> radians
                value = float(draw.factors[0, column]) * unit
                view = by_kornia(f"enhance.adjust_{adjust[column]}", view, value)
        return view

    def describe(self, draw: Draws, spec: ViewSpec, size: tuple[int, int]) -> list[str]:
        if not draw.jitter:
            return []
        names = ("bright", "contrast", "satur.", "hue")
        factors = draw.factors[0].tolist()
        return [
            f"{names[column]} {factors[column]:{'+.2f' if column == HUE else '.2f'}}"
            for column in draw.order[0].tolist()
            if spec.jitter_strengths[column]
        ]


class Grayscale(MaskedOp):
    """All three channels become the gray."""

    name = "grayscale"
    label = "gray"
    params = ("grayscale",)  # (B,) bool
    lanes = range(30, 31)

    def change(self, views: Tensor, chunk: Chunk) -> Tensor:
        pixels.grayscale_(views)
        return views

    def change_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        return by_kornia("color.rgb_to_grayscale", view).expand(-1, 3, -1, -1)


class Blur(MaskedOp):
    """Gaussian blur with SimCLR's kernel, a tenth of the view."""

    name = "blur"
    params = ("blur", "sigma")  # (B,) bool; (B,) float32, pixels of the view
    lanes = range(31, 33)

    def draw_params(self, u: Array, spec: ViewSpec) -> tuple[Array, ...]:
        return (_between(spec.blur_sigma, u[:, 0]).astype(np.float32),)

    def change(self, views: Tensor, chunk: Chunk) -> Tensor:
        return gaussian_blur(
            views,
            chunk.params["sigma"],
            chunk.specs[0].blur_kernel_px,
            max(chunk.draws.sigma.tolist()),
        )

    def change_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        sigma = draw.sigma[:, None].expand(1, 2).to(view.device)
        return by_kornia("filters.gaussian_blur2d", view, spec.blur_kernel_px, sigma)

    def describe(self, draw: Draws, spec: ViewSpec, size: tuple[int, int]) -> list[str]:
        return [f"blur {draw.sigma.item():.1f} px"] if draw.blur else []


class Solarize(MaskedOp):
    """Pixels at or above solarize_threshold are inverted."""

    name = "solarize"
    label = "solarized"
    params = ("solarize",)  # (B,) bool
    lanes = range(33, 34)

    def change(self, views: Tensor, chunk: Chunk) -> Tensor:
        thresholds = [float(spec.solarize_threshold) for spec in chunk.specs]
        moved = any(
            getattr(spec, key, 0)
            for spec in chunk.specs
            for key in ("channel_gain", "channel_shift", "gamma")
        )
        rgb = chunk.specs[0].rgb and not moved
        if len(set(thresholds)) == 1:
            return pixels.solarize(views, thresholds[0], in_range=rgb)
        threshold = torch.tensor(thresholds)[chunk.draws.views]
        return pixels.solarize(views, send([threshold], views.device)[0], in_range=rgb)

    def change_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        return by_kornia("enhance.solarize", view, float(spec.solarize_threshold))


OPS: list[Op] = [
    CropFlip(),
    VerticalFlip(),
    QuarterTurn(),
    Rotation(),
    ColorJitter(),
    ChannelGain(),
    Gamma(),
    Grayscale(),
    Blur(),
    Solarize(),
    Noise(),
    ChannelDrop(),
]


_BUILT_IN = tuple(OPS)


def register_op(op: Op, *, before: str | None = None) -> None:
    """Add an op to OPS: views built from now on do it. Call it once, before views are built.

    Args:
        op: see Op.
        before: the op before which it is done, not "crop"; None: last. `augment.extra` and
            normalisation come after all ops.

    Raises:
        ValueError: where its name, a setting, a parameter or a lane belongs to another op, or
            there is no op `before`.
    """
    names = [other.name for other in OPS]
    if before is not None and before not in names[1:]:
        raise ValueError(f"there is no op {before!r} to come before; known: {names[1:]}")
    built_in = {field.name for field in dataclasses.fields(ViewSpec)}
    if taken := sorted(built_in & set(op.settings)):
        raise ValueError(f"op {op.name!r}: setting {taken[0]!r} is a field of ViewSpec already")
    for other in OPS:
        for kind in ("settings", "params", "lanes"):
            if shared := sorted(set(getattr(op, kind)) & set(getattr(other, kind))):
                raise ValueError(
                    f"op {op.name!r}: {kind} {shared} belong to op {other.name!r}; "
                    + ("use named_lanes()" if kind == "lanes" else "choose another name")
                )
        if op.name == other.name:
            raise ValueError(f"there is an op {op.name!r} already")
    OPS.insert(names.index(before) if before else len(OPS), op)


def register_installed(keys: Iterable[str]) -> None:
    """Register the ops of installed packages that some of these keys of [augment] belong to.

    A key begins with the name of its op's entry point: "posterize_prob" with "posterize".
    """
    there = {op.name for op in OPS}
    for name in installed("sslpipe.augmentations"):
        if name not in there and any(key.startswith(name) for key in keys):
            register_op(load("sslpipe.augmentations", name))


def current_spec(*, rgb: bool = True) -> type[ViewSpec]:
    """Return ViewSpec with the settings of all ops in OPS."""
    return _spec_of(tuple(OPS), rgb)


@cache
def _spec_of(ops: tuple[Op, ...], rgb: bool) -> type[ViewSpec]:
    settings = {name: field for op in ops for name, field in op.settings.items()}
    spec = extend_spec(settings, rgb=rgb)
    copyreg.pickle(spec, _reduce_spec)  # its class is made here, so no other process can import it
    return spec


def _reduce_spec(spec: ViewSpec) -> tuple[Any, ...]:
    """Pickle a spec as its values, with the registered ops that another process may lack."""
    values = {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec)}
    registered = [
        (op, following.name if following else None)
        for op, following in itertools.zip_longest(OPS, OPS[1:])
        if op not in _BUILT_IN and op.settings.keys() <= values.keys()
    ]
    return _make_spec, (spec.rgb, registered, values)


def _make_spec(
    rgb: bool, registered: Sequence[tuple[Op, str | None]], values: Mapping[str, Any]
) -> ViewSpec:
    """Build a spec that was pickled; ops that are missing here are registered, the last first."""
    for op, before in reversed(registered):
        names = {other.name for other in OPS}
        if op.name not in names:
            register_op(op, before=before if before in names else None)
    ops = tuple(op for op in OPS if op.settings.keys() <= values.keys())
    return _spec_of(ops, rgb)(**values)


def ops_for(specs: Sequence[ViewSpec]) -> list[Op]:
    """Return the ops, in order, whose settings these views have and, if optional, ask for."""

    def asks_for(spec: ViewSpec, op: Op) -> bool:
        return any(getattr(spec, name) for name in op.settings)

    known = [op for op in OPS if all(hasattr(specs[0], name) for name in op.settings)]
    return [op for op in known if not op.optional or any(asks_for(spec, op) for spec in specs)]


def draws(
    seed: int, epoch: int, ids: ArrayLike, sizes: ArrayLike, specs: tuple[ViewSpec, ...]
) -> Draws:
    """Draw the parameters of every view of the samples, on the CPU: all first views, then second.

    A row depends on (seed, epoch, its id, its view, its size) and the view's spec only.

    Args:
        seed: the run's.
        epoch: of all samples.
        ids: (B,) integers.
        sizes: (B, 2) valid height and width in pixels, or (views, B, 2) where the views of a row
            show different images; both on the CPU.
        specs: the settings of each view.
    """
    ids = np.asarray(ids, dtype=np.int64)
    sizes = np.asarray(sizes, dtype=np.int64)
    sizes = np.broadcast_to(sizes, (len(specs), len(ids), 2))
    ops = ops_for(specs)
    lanes = np.concatenate([np.asarray(op.lanes) for op in ops])
    params: dict[str, list[NDArray[np.generic]]] = {name: [] for op in ops for name in op.params}
    for view, spec in enumerate(specs):
        u = uniform(seed=seed, epoch=epoch, ids=ids, view=view, lanes=lanes)  # (B, lanes)
        first = 0
        for op in ops:
            last = first + len(op.lanes)
            for name, values in zip(
                op.params, op.draw(u[:, first:last], sizes[view], spec), strict=True
            ):
                params[name].append(values)
            first = last
    views = np.repeat(np.arange(len(specs)), len(ids))
    return Draws(
        seed=seed,
        epoch=epoch,
        ids=torch.from_numpy(np.tile(ids, len(specs))),
        views=torch.from_numpy(views),
        params={name: torch.from_numpy(np.concatenate(values)) for name, values in params.items()},
    )


def _jitter_channels(view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
    """Brightness and contrast of channels that are no colours, by their formulas, one at a time."""
    for column in draw.order[0].tolist():
        if spec.jitter_strengths[column]:
            factor = float(draw.factors[0, column])
            planes = view[0].unbind()
            means = [x.mean() if column == CONTRAST else 0.0 for x in planes]
            planes_means = zip(planes, means, strict=True)
            view = torch.stack([factor * x + (1 - factor) * m for x, m in planes_means])[None]
    return view


def _between(bounds: tuple[float, float], u: NDArray[np.float64]) -> NDArray[np.float64]:
    return bounds[0] + (bounds[1] - bounds[0]) * u


_PERMUTATIONS = np.array([*itertools.permutations(range(4))])
