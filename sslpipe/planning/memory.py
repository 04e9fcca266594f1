"""The memory of a step, worked out before it, and a warning where the machine has not as much."""

import math
import os
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sslpipe.data.image_type import RGB8, ImageType
from sslpipe.data.pipeline import BATCHES_AHEAD
from sslpipe.distributed import Rank
from sslpipe.errors import RecipeError
from sslpipe.models.backbones import Backbone
from sslpipe.models.checkpointing import checkpoint_activations, checkpointed_blocks
from sslpipe.models.limits import within_memory
from sslpipe.portable import (
    free_memory_bytes,
    gib,
    memory_is_short,
    resident_bytes,
    total_memory_bytes,
)
from sslpipe.precision import AUTOCAST
from sslpipe.recipe.sections import RunRecipe
from sslpipe.run.contract import PartsT, Plan
from sslpipe.run.device import resolve_precision, training_device

HOPELESS = 8  # times all memory and swap: no swapping and no smaller canvas saves such a run
_LEAST_KEPT = 4  # times its views: what a first layer makes of them
_MOST_KEPT = 4096  # times its views; a ResNet-50 whose first layers keep the size keeps 2,075
_COUNTED = (2, 4)  # images of the forward passes that are counted; BatchNorm takes 2 or more


class Memory(NamedTuple):
    """Bytes that one process holds during a step; on CUDA the allocator's slack comes on top."""

    weights: int  # and buffers
    gradients: int  # and the block of them that some optimizers make on CUDA
    optimizer: int  # its state
    activations: int  # kept for backward
    views: int  # as floats
    batches: int  # images, of the steps ahead, too; on a CUDA device if that computes
    workspaces: int = 0  # of a CPU's backward: measured, about as much again as activations
    process: int = 0  # of a CPU: Python, torch and the other modules, without the weights

    @property
    def total(self) -> int:
        """Sum all parts, in bytes."""
        return sum(self)

    def of_images(self, images: int, recipe: RunRecipe) -> "Memory":
        """Scale what grows with the images at a time, of one process, down to so many."""
        share = min(1.0, images / recipe.load(1).together)
        return self._replace(
            activations=int(share * self.activations),
            workspaces=int(share * self.workspaces),
            views=int(share * self.views),
            batches=0,
        )


def estimate_memory(
    model: nn.Module,
    recipe: RunRecipe,
    *,
    crop_px: int,
    precision: str,
    world: int = 1,
    encoder: nn.Module | None = None,
    others: Iterable[nn.Module] = (),
    image_type: ImageType = RGB8,
    is_counted: bool = True,
) -> Memory:
    """Estimate the memory that one of `world` processes needs.

    What autograd saves is counted in forward passes of 2 and of 4 images on the CPU, and
    extrapolated linearly to the batch, or to the micro-batch. On a CPU the total is that of the
    whole process; on CUDA it is an estimate of what the device holds, from the same counts.

    Args:
        model: On the CPU, in its own dtype, what is trained.
        recipe: Batch, canvas, optimizer, cache.
        crop_px: Side of the views.
        precision: "bf16" and "fp16" mean autocast.
        world: Number of processes.
        encoder: The part of the model that takes the views; None: all of it.
        others: Further modules that hold buffers: a loss with a queue.
        image_type: Of the images.
        is_counted: False: no forward runs, and activations are more than networks keep.
    """
    load = recipe.load(world)
    channels = len(image_type.channels)
    encoder = model if encoder is None else encoder
    trained = sum(p.nbytes for p in model.parameters() if p.requires_grad)
    held = [*model.parameters(), *model.buffers(), *(b for o in others for b in o.buffers())]
    ahead = 1 if recipe.run.cache == "device" else BATCHES_AHEAD + 2  # one used, one made
    optim = recipe.optim
    on_cuda = training_device(recipe).type == "cuda"
    gathered = trained if optim.gathers_gradients and on_cuda else 0
    element_bytes = next(encoder.parameters()).element_size()
    pixel_bytes = 1 if image_type.dtype == "uint8" else 4
    views = load.views * load.together * channels * crop_px**2 * element_bytes
    images = load.images * channels * recipe.data.canvas_px**2 * pixel_bytes
    weights = sum(tensor.nbytes for tensor in held)
    activations = _MOST_KEPT * views
    if is_counted:
        count = partial(saved_bytes, encoder, crop_px=crop_px, precision=precision)
        if recipe.run.activation_checkpointing:
            backbone: Any = model.backbone
            count = partial(checkpointed_bytes, backbone, count)
        with within_memory("[backbone]"):
            small, large = (count(rows=load.views * n, channels=channels) for n in _COUNTED)
        activations = max(0, small + (large - small) * (load.together - 2) // 2)
    return Memory(
        weights=weights,
        gradients=trained + gathered,
        optimizer=optim.state_copies * trained,
        activations=activations,
        views=views,
        batches=ahead * images,
        workspaces=0 if on_cuda else activations,
        process=0 if on_cuda else max(0, resident_bytes() - weights),
    )


def memory_of_plan(
    plan: Plan[PartsT],
    parts: PartsT,
    precision: str,
    *,
    world: int = 1,
    is_counted: bool = True,
) -> Memory:
    """Estimate the memory of one of `world` processes of a plan: see `estimate_memory`."""
    return estimate_memory(
        parts.model,
        plan.recipe,
        crop_px=parts.augment.crop_px,
        precision=precision,
        world=world,
        encoder=parts.encoder,
        others=parts.others,
        image_type=plan.index.image_type,
        is_counted=is_counted,
    )


class Room(NamedTuple):
    """The memory that the steps of a run may take on this machine, in bytes."""

    free: int
    total: int
    processes: int  # that share it
    on_cuda: bool

    @classmethod
    def here(cls, device: torch.device, world: int = 1) -> "Room":
        """Look at the device; the processes of this machine share a CPU's memory."""
        if device.type == "cuda":
            free, total = torch.cuda.mem_get_info(device)
            return cls(free, total, processes=1, on_cuda=True)
        processes = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        return cls(free_memory_bytes(), total_memory_bytes(), processes, on_cuda=False)

    def needed(self, memory: Memory) -> int:
        """Return the bytes that the step of all processes needs and that are not taken yet."""
        if self.on_cuda:
            return memory.total
        return self.processes * (memory.total - memory.weights - memory.process)


def check_memory(memory: Memory, recipe: RunRecipe, room: Room, world: int = 1) -> str | None:
    """Return a warning where an estimate exceeds what is free; else None.

    Args:
        memory: Of one process, its weights not yet on the device.
        recipe: Named in the remedy.
        room: What there is.
        world: All processes.

    Raises:
        RecipeError: It exceeds all there is HOPELESS times.
    """
    needed = room.needed(memory)
    if needed <= room.free:
        return None
    several = room.processes > 1
    remedy = recipe.load(world).remedy
    sizes = memory._replace(process=0)._asdict()
    largest = sorted(sizes.items(), key=lambda size: -size[1])[:3]
    text = (
        f"{f'{room.processes} processes of a step need' if several else 'a step needs'} an "
        f"estimated {gib(needed)}, and {'the CUDA device' if room.on_cuda else 'this machine'} has "
        f"{gib(room.free)} free of {gib(room.total)}: "
        f"{', '.join(f'{name} {gib(size)}' for name, size in largest)}"
        f"{' a process' if several else ''}; set {remedy}, or smaller views "
        f"(augment.crop_px) or images (data.canvas_px, now {recipe.data.canvas_px})"
    )
    # images may be smaller than the canvas: what they take at most condemns no recipe
    if needed - room.processes * memory.batches > HOPELESS * room.total:
        raise RecipeError(f"{text}; this cannot run here")
    return f"{text}; without it the system may end the run"


def warn_of_memory(plan: Plan[PartsT], parts: PartsT, process: Rank) -> None:
    """Warn on rank 0 where a step is likely to need more memory than is free.

    No forward runs where there is room for more than networks keep.

    Args:
        plan: Of the run.
        parts: On the CPU.
        process: This process among all.
    """
    device = training_device(plan.recipe)
    world = process.world_size
    room = Room.here(device, world)
    precision = resolve_precision(plan.recipe.optim.precision, device)
    most = memory_of_plan(plan, parts, precision, world=world, is_counted=False)
    if room.needed(most) <= room.free:
        return
    memory = memory_of_plan(plan, parts, precision, world=world)
    text = check_memory(memory, plan.recipe, room, world)
    if text is not None and process.rank == 0:
        print(f"warning: {text}", file=sys.stderr, flush=True)


def checkpointed_bytes(
    backbone: Backbone, count: Callable[..., int], *, rows: int, channels: int = 3
) -> int:
    """Count what a forward with activation checkpointing keeps, and what backward makes again.

    That is the activations of one block, the one with the most.

    Args:
        backbone: With activation checkpointing.
        count: `saved_bytes` of a model that it is part of.
        rows: As in `saved_bytes`.
        channels: As there.
    """
    kept = count(rows=rows, channels=channels)
    blocks = checkpointed_blocks(backbone)
    checkpoint_activations(backbone, "", enabled=False)
    try:
        recomputed = count(rows=rows, channels=channels, largest_of=blocks)
    finally:
        checkpoint_activations(backbone, "")
    return kept + recomputed


def saved_bytes(
    model: nn.Module,
    *,
    rows: int,
    crop_px: int,
    precision: str,
    channels: int = 3,
    largest_of: Sequence[nn.Module] = (),
) -> int:
    """Count the bytes that a forward of `rows` views keeps for backward; the model stays as it is.

    Args:
        model: Takes the views.
        rows: How many.
        crop_px: Their side.
        precision: As in `estimate_memory`.
        channels: Of the views.
        largest_of: Modules of the model: count what the one of them keeps that keeps the most.

    Raises:
        RecipeError: The network cannot take such views, or keeps more than the machine has.
    """
    shape = (rows, channels, crop_px, crop_px)
    try:
        with torch.random.fork_rng(devices=[]):
            return _kept_by_forward(model, shape, precision, largest_of)
    except RecipeError:
        raise
    except Exception as error:  # a network may fail in any way
        if memory_is_short(error):
            raise
        raise RecipeError(
            f"[backbone] cannot take views of augment.crop_px = {crop_px}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _kept_by_forward(
    model: nn.Module, shape: tuple[int, ...], precision: str, largest_of: Sequence[nn.Module]
) -> int:
    """Run a forward on copies of the model's state, and count what autograd saves."""
    most = total_memory_bytes()
    kept: dict[int, Tensor] = {}  # the tensors stay alive, so no address is used twice

    def check(needed: int) -> None:
        if needed > most:
            raise RecipeError(
                f"{shape[0]} views of augment.crop_px = {shape[-1]} keep more than the "
                f"{gib(most)} that this machine has; set smaller views"
            )

    def address(tensor: Tensor) -> int:
        return int(tensor.untyped_storage()._cdata)

    def size() -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())

    before: dict[nn.Module, int] = {}
    by_module = dict.fromkeys(largest_of, 0)

    def enter(module: nn.Module, inputs: Any) -> None:
        before[module] = size()

    def leave(module: nn.Module, inputs: Any, output: Any) -> None:
        by_module[module] += size() - before[module]

    def pack(tensor: Tensor) -> Tensor:
        if address(tensor) not in counted and address(tensor) not in kept:
            kept[address(tensor)] = tensor
            check(size())
        return tensor

    dtype = next(model.parameters()).dtype
    check(_LEAST_KEPT * math.prod(shape) * dtype.itemsize)
    views = torch.zeros(shape, dtype=dtype)
    state = {
        name: tensor.detach().clone().requires_grad_(tensor.requires_grad)
        for name, tensor in (*model.named_parameters(), *model.named_buffers())
    }
    counted = {address(tensor) for tensor in (*state.values(), views)}  # views count elsewhere
    autocast = torch.autocast("cpu", dtype=AUTOCAST.get(precision), enabled=precision in AUTOCAST)
    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    modes = {module: module.training for module in model.modules()}
    handles = [module.register_forward_pre_hook(enter) for module in largest_of]
    handles += [module.register_forward_hook(leave) for module in largest_of]
    try:
        with hooks, autocast:
            torch.func.functional_call(model.train(), state, (views,))
    finally:
        for handle in handles:
            handle.remove()
        for module, mode in modes.items():
            module.training = mode
    return max(by_module.values()) if by_module else size()
