"""The views on a GPU by the kernels of triton_kernels.py: what they read, and their launches."""

import importlib.util
import os
from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from sslpipe.augment.op import Draws, Op
from sslpipe.augment.pixels import BLEND, CONTRAST, HUE, SATURATION, SHIFT_HUE
from sslpipe.augment.spec import ViewSpec
from sslpipe.data.pipeline import pack, unpack
from sslpipe.errors import RecipeError

COVERED = ("crop", "rotation", "jitter", "grayscale", "blur", "solarize")  # in this order
_WORKSPACE_BYTES = 2**31  # of float views that are changed together
_BLOCK = 512  # pixels of a program
_FUSED = True  # enable_fp_fusion: Triton 3.9 warns where nothing is said


def chosen(kernels: str, device: torch.device, ops: Sequence[Op], extra: bool, rgb8: bool) -> bool:
    """Decide whether the kernels make the views; `extra`: whether `augment.extra` has something.

    Raises:
        RecipeError: `kernels` is "triton", and it cannot do it.
    """
    others = [op.name for op in ops if op.name not in COVERED]
    if extra:
        others.append("extra")
    if not rgb8:
        others.append("images other than 8-bit RGB")
    on_device = device.type == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
    there = importlib.util.find_spec("triton") is not None
    if kernels == "auto":
        return device.type == "cuda" and there and not others
    if kernels == "triton" and not (on_device and there and not others):
        reason = f"views are made on the {device.type}, not on a CUDA device"
        if not there:
            reason = "triton is not installed"
        elif others:
            reason = f"it has no kernel for {others[0]!r}"
        raise RecipeError(
            f'augment.kernels = "triton", but {reason}; use augment.kernels = "auto" or "torch"'
        )
    return kernels == "triton"


class Tables(NamedTuple):
    """What the kernels read: n views, a row each."""

    boxes: Tensor  # (n, 6) int32: image, top, left, height, width, mirrored
    kinds: Tensor  # (n, steps) int32: 0, BLEND or SHIFT_HUE
    terms: Tensor  # (n, steps, 3) float32: f, g, m of a blend, or the hue shift in cycles
    contrast: Tensor  # (n,) int32: the step of the contrast, which needs the mean gray; else 0
    sines: Tensor  # (n,) float32, of the rotation
    cosines: Tensor  # (n,) float32
    threshold: Tensor  # (n,) float32 of solarize; infinite where it is not done
    blurred: Tensor  # (n,) int32: 0, or 1 where it is blurred, 2 where its colours stay as well
    sigmas: Tensor  # (n,) float32, read where it is blurred


class TritonPlan:
    """The views of a batch, planned for the kernels; they take rows in the order of the result.

    Launches, and shapes of tables, depend on settings and the number of views only: what a batch's
    views need stands in the tables.

    `jitter_ops` are the colour ops that some view may do, `shown` (VB,) the image of each view,
    `block` the bytes on the device that hold all tables; None: they are not moved yet.
    """

    def __init__(
        self, draws: Draws, specs: Sequence[ViewSpec], jitter_ops: list[int], shown: Tensor
    ) -> None:
        side = int(specs[0].crop_px)
        self.side = side
        self.reach = specs[0].blur_kernel_px // 2
        self.rotates = any(spec.rotation_deg for spec in specs)
        self.solarizes = any(spec.solarize_prob for spec in specs)
        self.blurs = any(spec.blur_prob for spec in specs)
        self.rows = len(draws.ids)
        most = max(1, _WORKSPACE_BYTES // (3 * 4 * side**2))
        parts = max(1, -(-self.rows // most))
        bounds = [self.rows * part // parts for part in range(parts + 1)]
        self.parts = [slice(begin, end) for begin, end in pairwise(bounds)]
        whole = _tables(draws, specs, jitter_ops, shown)
        self.tables = [Tables(*(table[part] for table in whole)) for part in self.parts]
        self.block: Tensor | None = None

    def to(self, device: torch.device) -> "TritonPlan":
        """Move the tables in one copy, which the host does not wait for."""
        if self.block is not None and self.block.device.type == device.type:
            return self
        pinned = device.type == "cuda"
        block = pack(self._flat, pinned=pinned).to(device, non_blocking=True)
        moved = object.__new__(TritonPlan)
        moved.__dict__.update(self.__dict__)
        flat = unpack(block, self._flat)
        size = len(Tables._fields)
        moved.tables = [Tables(*flat[i : i + size]) for i in range(0, len(flat), size)]
        moved.block = block
        return moved

    def record_stream(self, stream: torch.cuda.Stream) -> None:
        """Record that a stream other than the copy's reads the tables."""
        if self.block is not None and self.block.is_cuda:
            self.block.record_stream(stream)

    @property
    def _flat(self) -> list[Tensor]:
        return [table for part in self.tables for table in part]


def make_views(images: Tensor, plan: TritonPlan, mean: Tensor, std: Tensor, views: Tensor) -> None:
    """Write the views (VB, 3, S, S), channels_last, of uint8 images (B, 3, H, W) of any strides.

    The plan's tables are on the images' device.
    """
    device = images.device if images.is_cuda else -1
    with torch.cuda.device(device):  # Triton launches on the current one; -1: on no other
        for part, tables in zip(plan.parts, plan.tables, strict=True):
            _make_part(
                images=images, plan=plan, tables=tables, mean=mean, std=std, views=views[part]
            )


def _make_part(
    images: Tensor, plan: TritonPlan, tables: Tables, mean: Tensor, std: Tensor, views: Tensor
) -> None:
    """Launch the kernels for some of the views, (n, 3, S, S)."""
    from sslpipe.augment import triton_kernels as kernels  # only where Triton is

    count = len(views)
    side = plan.side
    steps = tables.kinds.shape[1]
    blocks = -(-(side**2) // _BLOCK)
    grid = (count, blocks)
    float32 = torch.float32
    work = torch.empty(count, 3, side, side, dtype=float32, device=images.device)
    sums = torch.empty(count, blocks, dtype=float32, device=images.device)

    kernels.crop_kernel[grid](
        images=images,
        stride_n=images.stride(0),
        stride_c=images.stride(1),
        stride_y=images.stride(2),
        stride_x=images.stride(3),
        boxes=tables.boxes,
        kinds=tables.kinds,
        terms=tables.terms,
        contrast=tables.contrast,
        views=work,
        sums=sums,
        side=side,
        STEPS=steps,
        BLOCK=_BLOCK,
        enable_fp_fusion=_FUSED,
    )
    if plan.rotates:
        cropped = work
        work = torch.empty_like(work)
        kernels.rotate_kernel[grid](
            views=cropped,
            sines=tables.sines,
            cosines=tables.cosines,
            kinds=tables.kinds,
            terms=tables.terms,
            contrast=tables.contrast,
            rotated=work,
            sums=sums,
            side=side,
            STEPS=steps,
            BLOCK=_BLOCK,
            enable_fp_fusion=_FUSED,
        )
    kernels.colour_kernel[grid](
        views=work,
        kinds=tables.kinds,
        terms=tables.terms,
        sums=sums,
        blurred=tables.blurred,
        out=views,
        threshold=tables.threshold,
        mean=mean,
        std=std,
        side=side,
        STEPS=steps,
        PARTS=1 << (blocks - 1).bit_length(),
        SOLARIZE=plan.solarizes,
        BLOCK=_BLOCK,
        enable_fp_fusion=_FUSED,
    )
    if plan.blurs:
        down = torch.empty_like(work)
        kernels.blur_down_kernel[grid](
            views=work,
            blurred=tables.blurred,
            sigmas=tables.sigmas,
            down=down,
            side=side,
            reach=plan.reach,
            BLOCK=_BLOCK,
            enable_fp_fusion=_FUSED,
        )
        kernels.blur_across_kernel[grid](
            down=down,
            blurred=tables.blurred,
            sigmas=tables.sigmas,
            out=views,
            threshold=tables.threshold,
            mean=mean,
            std=std,
            side=side,
            reach=plan.reach,
            SOLARIZE=plan.solarizes,
            BLOCK=_BLOCK,
            enable_fp_fusion=_FUSED,
        )


def _tables(
    draws: Draws, specs: Sequence[ViewSpec], jitter_ops: list[int], shown: Tensor
) -> Tables:
    """Write the draws of all views as the kernels read them."""
    boxes = torch.cat([shown[:, None], draws.boxes, draws.flip[:, None]], dim=1)
    kinds, terms = _colour_steps(draws, jitter_ops)
    angle = np.deg2rad(draws.angle_deg.double().numpy())
    limits = torch.tensor([float(spec.solarize_threshold) for spec in specs])[draws.views]
    return Tables(
        boxes=boxes.int(),
        kinds=kinds,
        terms=terms,
        contrast=(terms[:, :, 2] != 0).int().argmax(1).int(),
        sines=torch.from_numpy(np.sin(angle)).float(),
        cosines=torch.from_numpy(np.cos(angle)).float(),
        threshold=torch.where(draws.solarize, limits, torch.inf),
        blurred=(draws.blur * (1 + (kinds == 0).all(1).int())).int(),
        sigmas=draws.sigma.float(),
    )


def _colour_steps(draws: Draws, jitter_ops: list[int]) -> tuple[Tensor, Tensor]:
    """Write jitter and grayscale as the kernels' steps: (n, steps) kinds, (n, steps, 3) terms."""
    order = draws.order[torch.isin(draws.order, torch.tensor(jitter_ops))]
    order = order.view(len(draws.ids), -1)  # without the ops that no view does
    factor = draws.factors.gather(1, order)
    rest = 1.0 - draws.factors.gather(1, order)
    done = draws.jitter[:, None]
    kinds = torch.where(order == HUE, SHIFT_HUE, BLEND) * done
    terms = (
        torch.stack([factor, rest * (order == SATURATION), rest * (order == CONTRAST)], dim=2)
        * done[:, :, None]
    )  # (n, k, 3)
    gray = draws.grayscale[:, None]  # 0 x + 1 gray + 0 mean gray
    kinds = torch.cat([kinds, BLEND * gray], dim=1)
    return kinds.int(), torch.cat([terms, gray[:, :, None] * torch.tensor([0.0, 1.0, 0.0])], dim=1)
