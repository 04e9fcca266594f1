"""What a run of any kind costs: its parts in bytes, and seconds of a step, measured on a small one.

`planning.memory` counts the bytes. `check_of` makes the Check of a run of any kind.
"""

import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from sslpipe.augment.ops import draws
from sslpipe.check.outcome import (
    Check,
    Rows,
    memory_parts,
    memory_text,
    straddle_warning,
)
from sslpipe.data.image_type import RGB8, ImageType
from sslpipe.data.pipeline import Batch
from sslpipe.errors import duration
from sslpipe.optim.parameter_groups import describe_groups
from sslpipe.planning.memory import Memory, Room, check_memory, memory_of_plan
from sslpipe.precision import AUTOCAST
from sslpipe.recipe.sections import RunRecipe
from sslpipe.run.contract import Plan
from sslpipe.run.device import check_precision, resolve_precision, training_device
from sslpipe.run.run import halved

_LONG_ENOUGH_S = 0.1  # a measured step that takes this long is not grown further
_EFFICIENCY = 0.8  # of threads that share a step: between 0.6 and 1 where measured


class Estimate(NamedTuple):
    """The parts of a plan, and whether this machine can train them."""

    parts: Any  # on the CPU, in the run's precision
    remarks: list[str]
    digest: str
    groups: list[str]  # of the optimizer's parameters, a line each
    device: torch.device
    precision: str  # fp64, fp32, bf16 or fp16
    memory: Memory
    too_much: str | None  # that the memory is not enough


def estimate_parts(plan: Plan[Any]) -> Estimate:
    """Build every part of a plan, and count what a step holds; train nothing.

    Raises:
        UserError: The plan cannot be trained, or this machine cannot train it.
    """
    recipe = plan.recipe
    device = training_device(recipe)
    check_precision(recipe.optim.precision, device.type)
    parts = plan.build()
    if recipe.optim.precision == "fp64":
        parts.model.double()
    remarks = plan.remarks(parts)  # or refused
    digest = plan.identity()["digest"]  # all are built: it covers the source of those of plug-ins
    groups = describe_groups(plan.groups(parts), parts.model).splitlines()
    precision = resolve_precision(recipe.optim.precision, device)
    memory = memory_of_plan(plan, parts, precision)
    return Estimate(
        parts=parts,
        remarks=remarks,
        digest=digest,
        groups=groups,
        device=device,
        precision=precision,
        memory=memory,
        too_much=check_memory(memory, recipe, Room.here(device)),
    )


def check_of(
    plan: Plan[Any],
    estimate: Estimate,
    *,
    watch: str,
    rows: Rows,
    details: Sequence[tuple[str, str]] = (),
    warnings: Sequence[str | None] = (),
    in_several: Sequence[str] = (),
    step_flops: float = 0.0,
) -> Check:
    """Time a step, and put what is known of a run of any kind around what is known of this one.

    Args:
        plan: Of the run.
        estimate: Of the plan.
        watch: Which number to watch.
        rows: What else people come for.
        details: What else they look at when something is odd.
        warnings: Further ones; None: it does not apply.
        in_several: Columns whose values are meant to be in several splits.
        step_flops: Of a step; 0: not counted.
    """
    recipe = plan.recipe
    parts = estimate.parts
    step_s = step_seconds(
        parts.model if parts.encoder is None else parts.encoder,
        parts.augment,
        canvas_px=recipe.data.canvas_px,
        batch_size=plan.order.batch_size,
        precision=estimate.precision,
        device=estimate.device,
        image_type=plan.index.image_type,
        cached=len(plan.micro_batches(1)) > 1,
        half_size_share=recipe.half_size_steps / recipe.total_steps,
    )
    all_warnings = [
        *estimate.remarks,
        straddle_warning(plan.index, plan.split.name, in_several),
        estimate.too_much,
        *warnings,
    ]
    return Check(
        recipe=recipe,
        views=tuple(dataclasses.asdict(spec) for spec in parts.augment.specs),
        rows=[
            ("time", time_text(step_s, recipe, estimate.precision, estimate.device)),
            ("memory", memory_text(estimate.memory)),
            ("watch", watch),
            *rows,
        ],
        details=[
            ("memory", memory_parts(estimate.memory)),
            *(("parameter group", line) for line in estimate.groups),
            *details,
            ("digest", estimate.digest),
        ],
        warnings=tuple(text for text in all_warnings if text),
        memory=estimate.memory,
        digest=estimate.digest,
        step_flops=step_flops,
        step_seconds=step_s,
    )


def step_seconds(
    model: Any,
    augment: Any,
    *,
    canvas_px: int,
    batch_size: int,
    precision: str,
    device: torch.device,
    image_type: ImageType = RGB8,
    cached: bool = False,
    half_size_share: float = 0.0,
) -> float:
    """Measure the time of a global step on one process of this machine.

    Views, forward and backward of some images of noise are timed and scaled to the batch. Loss,
    optimizer, communication and decoding are not.

    Args:
        model: Takes the views alone. It is moved to the device; its buffers change.
        augment: The views.
        canvas_px: The longest side of a decoded image.
        batch_size: Images of a global step.
        precision: fp64, fp32, bf16 or fp16.
        device: Where to compute.
        image_type: Of the images.
        cached: Time views and forward twice, as gradient caching computes them.
        half_size_share: Part of the steps whose views are halved; they are timed as well.

    Returns:
        Seconds, the mean over the run's steps.
    """
    model = model.to(device, memory_format=torch.channels_last).train()
    augment = augment.to(device)
    image_px = min(canvas_px, augment.crop_px * 8 // 7)

    kind = AUTOCAST.get(precision)
    low = precision in AUTOCAST

    def one_step(batch: Batch, half_size: bool) -> None:
        numbers = draws(
            seed=0, epoch=batch.epoch, ids=batch.ids, sizes=batch.sizes, specs=augment.specs
        )
        batch = batch.to(device)
        dtype = next(model.parameters()).dtype
        for last in (False, True) if cached else (True,):  # gradient caching: first without
            views = augment(batch, numbers).to(dtype)
            if half_size:
                views = halved(views)
            with torch.set_grad_enabled(last), torch.autocast(device.type, kind, enabled=low):
                value = model(views).float().square().mean()
        if value.requires_grad:  # not where only the loss has weights that are trained
            value.backward()
        float(value.detach())  # waits for the device
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # backward too

    def measure(half_size: bool) -> float:
        images = min(4, batch_size)
        while True:
            batch = noise_batch(image_px, images, image_type)
            measured_s = _seconds(device, partial(one_step, batch, half_size))
            if measured_s >= _LONG_ENOUGH_S or images == batch_size:
                return measured_s * batch_size / images
            growth = max(2, 2 * _LONG_ENOUGH_S / max(measured_s, 1e-9))
            images = min(math.ceil(growth * images), batch_size)

    step_s = (1 - half_size_share) * measure(half_size=False)
    if half_size_share:
        step_s += half_size_share * measure(half_size=True)
    model.zero_grad(set_to_none=True)
    return step_s


def time_text(step_s: float, recipe: RunRecipe, precision: str, device: torch.device) -> str:
    """Return how long a run takes: a step, all of them, and what was timed."""
    in_all = f"{duration(step_s * recipe.total_steps)} in all"
    if recipe.half_size_steps:
        in_all += f" (the first {recipe.half_size_steps:,} steps with views of half the size)"
    timed = f"one {device.type} process of this machine, without reading, loss and optimizer"
    digits = ".0f" if step_s >= 10 else ".2g"  # not 1.2e+02
    return f"{in_all}, {step_s:{digits}} s/step ({precision}, {timed})"


def _seconds(device: torch.device, step: Callable[[], None]) -> float:
    """Time a step, on the CPU also while other programs keep its cores busy."""
    if device.type != "cpu":
        return min(_elapsed(time.perf_counter, step) for _ in range(3))
    # on a busy machine threads spin while they wait for each other: the clock and the CPU time of
    # all threads tell no cost (a step of 1.6 s was timed at 23 s), the CPU time of one thread does
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone_s = min(_elapsed(time.thread_time, step) for _ in range(2))
    finally:
        torch.set_num_threads(threads)
    return alone_s / (1 if threads == 1 else _EFFICIENCY * threads)


def _elapsed(clock: Callable[[], float], step: Callable[[], None]) -> float:
    begin_s = clock()
    step()
    return clock() - begin_s


def noise_batch(image_px: int, images: int = 8, image_type: ImageType = RGB8) -> Batch:
    """Square images of noise, for timing."""
    generator = torch.Generator().manual_seed(0)
    shape = (images, len(image_type.channels), image_px, image_px)
    dtype = torch.uint8 if image_type.dtype == "uint8" else torch.float32
    return Batch(
        images=torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator).to(dtype),
        sizes=torch.full((images, 2), image_px),
        labels=torch.full((images,), -1),
        ids=torch.arange(images),
        source_ids=torch.arange(images),
        epoch=0,
    )
