"""Ops of images without an up, or whose channels are no colours: done only where asked for.

Their references are kornia's or torch's; each takes any number of channels, and clamps nothing but
what its docstring says.
"""

from collections.abc import Mapping
from functools import cache
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from sslpipe.augment.op import (
    Array,
    Chunk,
    Draws,
    MaskedOp,
    Op,
    by_kornia,
    masked_rows,
    named_lanes,
)
from sslpipe.augment.spec import ViewSpec, setting
from sslpipe.data.image_type import MOST_CHANNELS
from sslpipe.data.pipeline import send


class VerticalFlip(MaskedOp):
    """Top and bottom change places."""

    name = "vertical_flip"
    label = "upside down"
    optional = True
    settings: ClassVar[Mapping[str, Any]] = {
        "vertical_flip_prob": setting(0.0, "probability of a top-bottom flip")
    }
    params = ("vertical_flip",)
    lanes = named_lanes("vertical_flip", 1)

    def change(self, views: Tensor, chunk: Chunk) -> Tensor:
        return views.flip(2)

    def change_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        return by_kornia("geometry.transform.vflip", view)


class QuarterTurn(MaskedOp):
    """A rotation by 90, 180 or 270 degrees, equally often: no pixel is interpolated."""

    name = "quarter_turn"
    optional = True
    settings: ClassVar[Mapping[str, Any]] = {
        "quarter_turn_prob": setting(
            0.0, "probability of a rotation by 90, 180 or 270 degrees; 0.75: all four equally often"
        )
    }
    params = ("quarter_turn", "turns")  # (B,) bool, (B,) int64 in 1..3
    lanes = named_lanes("quarter_turn", 2)

    def draw_params(self, u: Array, spec: ViewSpec) -> tuple[Array, ...]:
        return (1 + (3 * u[:, 0]).astype(np.int64),)

    def change(self, views: Tensor, chunk: Chunk) -> Tensor:
        turned = torch.empty_like(views)
        for turns in (1, 2, 3):
            rows = masked_rows(chunk.draws.turns == turns)
            if rows is not None:
                rows = send([rows], views.device)[0] if isinstance(rows, Tensor) else rows
                turned[rows] = views[rows].rot90(turns, (2, 3))
        return turned

    def change_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        return view.rot90(int(draw.turns), (2, 3))

    def describe(self, draw: Draws, spec: ViewSpec, size: tuple[int, int]) -> list[str]:
        return [f"turned {90 * int(draw.turns)}°"] if draw.quarter_turn else []


class ChannelGain(Op):
    """Each channel x of a view becomes f x + s, with numbers of its own."""

    name = "channel_gain"
    optional = True
    settings: ClassVar[Mapping[str, Any]] = {
        "channel_gain": setting(
            0.0, "each channel's factor, uniform in [max(0, 1 - x), 1 + x]", most=100
        ),
        "channel_shift": setting(
            0.0, "what each channel is shifted by, uniform in +- x, of values in [0, 1]", most=100
        ),
    }
    # (B, MOST_CHANNELS) float32 each: a channel's numbers do not depend on how many there are
    params = ("gains", "shifts")
    lanes = named_lanes("channel_gain", 2 * MOST_CHANNELS)

    def draw(self, u: Array, sizes: Array, spec: Any) -> tuple[Array, ...]:
        low = max(0.0, 1 - spec.channel_gain)
        high = 1 + spec.channel_gain
        gains = low + (high - low) * u[:, :MOST_CHANNELS]
        shifts = spec.channel_shift * (2 * u[:, MOST_CHANNELS:] - 1)
        return gains.astype(np.float32), shifts.astype(np.float32)

    def apply(self, views: Tensor, chunk: Chunk) -> Tensor:
        gains, shifts = (
            chunk.params[name][:, : views.shape[1], None, None] for name in self.params
        )
        return views.mul_(gains).add_(shifts)

    def apply_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        numbers = zip(view.unbind(1), draw.gains[0].tolist(), draw.shifts[0].tolist(), strict=False)
        return torch.stack([plane * gain + shift for plane, gain, shift in numbers], dim=1)

    def describe(self, draw: Draws, spec: ViewSpec, size: tuple[int, int]) -> list[str]:
        return [f"gain {draw.gains[0, 0]:.2f}{draw.shifts[0, 0]:+.2f}, ..."]


class Gamma(Op):
    """Values below 0 become 0, and then x becomes x^g, the same g in all channels."""

    name = "gamma"
    optional = True
    settings: ClassVar[Mapping[str, Any]] = {
        "gamma": setting(
            0.0, "exponent log-uniform in [1 / (1 + x), 1 + x]; values below 0 become 0", most=100
        )
    }
    params = ("exponent",)  # (B,) float32
    lanes = named_lanes("gamma", 1)

    def draw(self, u: Array, sizes: Array, spec: Any) -> tuple[Array, ...]:
        return (((1 + spec.gamma) ** (2 * u[:, 0] - 1)).astype(np.float32),)

    def apply(self, views: Tensor, chunk: Chunk) -> Tensor:
        strengths = [getattr(spec, self.name) for spec in chunk.specs]
        if all(strengths):
            return views.clamp_min_(0.0).pow_(chunk.params["exponent"][:, None, None, None])
        rows = masked_rows(torch.tensor(strengths)[chunk.draws.views] > 0)
        if rows is not None:
            rows = send([rows], views.device)[0] if isinstance(rows, Tensor) else rows
            exponent = chunk.params["exponent"][rows, None, None, None]
            views[rows] = views[rows].clamp_min(0.0).pow_(exponent)
        return views

    def apply_one(self, view: Tensor, draw: Draws, spec: Any) -> Tensor:
        """Change one view by torch: kornia's adjust_gamma clamps above 1 too."""
        return torch.pow(view.clamp_min(0.0), float(draw.exponent)) if spec.gamma else view

    def describe(self, draw: Draws, spec: Any, size: tuple[int, int]) -> list[str]:
        return [f"gamma {draw.exponent.item():.2f}"] if spec.gamma else []


_NOISE_PLACES = 2**20  # where a view's numbers may begin in the table
_NOISE_SEED = 0x7A81E


@cache
def _noise_table(numbers: int, device: torch.device) -> Tensor:
    """Normal numbers, the same on every device: enough for `numbers` from any place on."""
    generator = torch.Generator().manual_seed(_NOISE_SEED)
    table = torch.randn(_NOISE_PLACES + numbers, generator=generator)
    return send([table], device)[0]


class Noise(Op):
    """Gaussian noise, independent in each pixel and channel, of a strength drawn for each view.

    It is a piece of one table of normal numbers, from a place drawn for each view: no generator's
    state, the same on every device.
    """

    name = "noise"
    optional = True
    settings: ClassVar[Mapping[str, Any]] = {
        "noise_std": setting(
            0.0, "Gaussian noise of a standard deviation uniform in [0, x], of values in [0, 1]",
            most=100,
        )
    }  # fmt: skip
    # (B,) float32, the standard deviation; (B,) int64, where in the table it begins
    params = ("noise", "noise_place")
    lanes = named_lanes("noise", 2)

    def draw(self, u: Array, sizes: Array, spec: Any) -> tuple[Array, ...]:
        places = (_NOISE_PLACES * u[:, 1]).astype(np.int64)
        return (spec.noise_std * u[:, 0]).astype(np.float32), places

    def apply(self, views: Tensor, chunk: Chunk) -> Tensor:
        std, places = (chunk.params[name] for name in self.params)
        numbers = views[0].numel()
        pieces = _noise_table(numbers, views.device).unfold(0, numbers, 1)  # a view of all places
        noise = pieces.index_select(0, places).view(views.shape)
        return views.addcmul_(noise, std[:, None, None, None].to(views.dtype))

    def apply_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        place = int(draw.noise_place)
        table = _noise_table(view.numel(), view.device)
        return view + table[place : place + view.numel()].view(view.shape) * float(draw.noise)

    def describe(self, draw: Draws, spec: ViewSpec, size: tuple[int, int]) -> list[str]:
        return [f"noise {draw.noise.item():.3f}"] if draw.noise else []


class ChannelDrop(MaskedOp):
    """One channel of the view becomes 0, each equally often; after the noise."""

    name = "channel_drop"
    label = "a channel dropped"
    optional = True
    settings: ClassVar[Mapping[str, Any]] = {
        "channel_drop_prob": setting(0.0, "probability that one channel becomes 0")
    }
    params = ("channel_drop", "dropped")  # (B,) bool; (B,) float32 in [0,1)
    lanes = named_lanes("channel_drop", 2)

    def draw_params(self, u: Array, spec: ViewSpec) -> tuple[Array, ...]:
        return (np.minimum(u[:, 0].astype(np.float32), np.float32(1 - 2**-24)),)

    def change(self, views: Tensor, chunk: Chunk) -> Tensor:
        count = views.shape[1]
        dropped = (chunk.params["dropped"] * count).long().clamp_max_(count - 1)
        kept = torch.arange(count, device=views.device) != dropped[:, None]  # (n, C)
        return torch.where(kept[:, :, None, None], views, 0.0)

    def change_one(self, view: Tensor, draw: Draws, spec: ViewSpec) -> Tensor:
        view = view.clone()
        view[:, min(int(draw.dropped * view.shape[1]), view.shape[1] - 1)] = 0.0
        return view
