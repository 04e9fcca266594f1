"""What a step costs: bytes counted on a small forward pass, seconds measured on a small step."""

import time
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from sslpipe.augment.params import draws
from sslpipe.data.index import Split
from sslpipe.data.loader import one_pass, open_reader
from sslpipe.data.pipeline import Batch
from sslpipe.errors import DataError
from sslpipe.recipe.pretrain import Recipe

_AUTOCAST = {"bf16": torch.bfloat16, "fp16": torch.float16}  # the others compute as weights are
_LONG_ENOUGH_S = 0.3  # a measured step that takes this long is not grown further


class Memory(NamedTuple):
    """Bytes that one process holds during a step; workspaces and allocator slack come on top."""

    weights: int  # and buffers
    gradients: int
    optimizer: int  # its state
    activations: int  # kept for backward
    views: int  # as floats
    batches: int  # uint8 images, of the steps ahead, too; on a CUDA device if that computes

    @property
    def total(self) -> int:
        """Sum all parts, in bytes."""
        return sum(self)


def estimate_memory(
    model: nn.Module, recipe: Recipe, crop_px: int, precision: str, world: int = 1
) -> Memory:
    """Estimate the memory that one of `world` processes needs.

    Activations are counted on 2 and on 4 images and extrapolated linearly to the batch, or to the
    micro-batch: what a forward pass saves grows with its rows alone.

    Args:
        model: On the CPU, in its own dtype; its buffers may change.
        recipe: Batch, canvas, optimizer, cache.
        crop_px: Side of the views.
        precision: "bf16" and "fp16" mean autocast.
        world: Number of processes.
    """
    images = -(-(recipe.data.micro_batch or recipe.data.batch_size) // world)
    small, large = (_saved_bytes(model, 2 * n, crop_px, precision) for n in (2, 4))
    parameters = sum(p.numel() * p.element_size() for p in model.parameters())
    buffers = sum(b.numel() * b.element_size() for b in model.buffers())
    element_bytes = next(model.parameters()).element_size()
    held = 1 if recipe.run.cache == "device" else recipe.run.prefetch + 2  # one used, one made
    optim = recipe.optim
    copies = {"adamw": 2, "lars": 1, "sgd": int(optim.momentum > 0)}[optim.kind]
    return Memory(
        weights=parameters + buffers,
        gradients=parameters,
        optimizer=copies * parameters,
        activations=max(0, small + (large - small) * (images - 2) // 2),
        views=2 * images * 3 * crop_px**2 * element_bytes,
        batches=held * -(-recipe.data.batch_size // world) * 3 * recipe.data.canvas_px**2,
    )


def step_seconds(
    model: Any, augment: Any, batch: Batch, recipe: Recipe, device: torch.device
) -> tuple[str, float]:
    """Measure the time of a global step on one process of this machine.

    Views, forward and backward of a few images are timed and scaled to the batch, with
    micro-batches views and forward twice. Not included: loss, optimizer, communication, and
    decoding, which runs in parallel. The images are doubled until a step is long enough to time.

    Args:
        model: Moved to the device; its buffers change.
        augment: The views.
        batch: Some images, on the CPU.
        recipe: With precision "auto", fp32 and bf16 are both timed.
        device: Where to compute.

    Returns:
        The precision (of "auto" the faster one) and the seconds.
    """
    named = recipe.optim.precision
    model = model.to(device, memory_format=torch.channels_last).train()
    augment = augment.to(device)
    times = {}
    for precision in ("fp32", "bf16") if named == "auto" else (named,):
        images = min(4, recipe.data.batch_size)
        while True:
            some = _repeated(batch, images)
            elapsed_s = min(
                _one_step(model, augment, some, precision, device, recipe.data.micro_batches > 1)
                for _ in range(3)
            )
            if elapsed_s >= _LONG_ENOUGH_S or images == recipe.data.batch_size:
                break
            images = min(2 * images, recipe.data.batch_size)
        times[precision] = elapsed_s * recipe.data.batch_size / images
    model.zero_grad(set_to_none=True)
    fastest = min(times, key=lambda name: times[name])
    return fastest, times[fastest]


def first_images(recipe: Recipe, split: Split) -> Batch:
    """The first few images that can be decoded, for timing."""
    first = np.arange(min(16, len(split)))
    passes = one_pass(
        split,
        ids=first,
        canvas_px=recipe.data.canvas_px,
        num_workers=0,
        reader=open_reader(split, recipe.run),
        on_bad=lambda bad: None,  # training quarantines and counts it
    )
    batch = next(passes, None)
    if batch is None:
        raise DataError(
            f"none of the first {len(first)} images of split {split.name!r} can be decoded; "
            "`sslpipe shards verify` lists every bad one"
        )
    return batch


def noise_batch(image_px: int) -> Batch:
    """Eight square images of noise, for timing without data."""
    generator = torch.Generator().manual_seed(0)
    shape = (8, 3, image_px, image_px)
    return Batch(
        images=torch.randint(0, 256, shape, dtype=torch.uint8, generator=generator),
        sizes=torch.full((8, 2), image_px),
        labels=torch.full((8,), -1),
        ids=torch.arange(8),
        source_ids=torch.arange(8),
        epoch=0,
    )


def _one_step(
    model: nn.Module,
    augment: Any,
    batch: Batch,
    precision: str,
    device: torch.device,
    cached: bool,
) -> float:
    begin_s = time.perf_counter()
    numbers = draws(0, batch.epoch, batch.ids, batch.sizes, augment.specs)
    batch, dtype = batch.to(device), next(model.parameters()).dtype
    if cached:  # gradient caching embeds everything once without gradient
        with torch.no_grad(), _autocast(device.type, precision):
            model(augment(batch, numbers).to(dtype))
    views = augment(batch, numbers).to(dtype)
    with _autocast(device.type, precision):
        value = model(views).float().square().mean()
    value.backward()
    float(value.detach())  # waits for the device
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # backward too
    return time.perf_counter() - begin_s


def _repeated(batch: Batch, images: int) -> Batch:
    rows = torch.arange(images) % len(batch.ids)
    parts = [part[rows] for part in batch[:3]]
    ids = torch.arange(images)
    return Batch(parts[0], parts[1], parts[2], ids, ids, batch.epoch)


def _saved_bytes(model: nn.Module, rows: int, crop_px: int, precision: str) -> int:
    """Bytes of the different storages that a forward of `rows` views keeps for backward."""
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers()]}
    kept: dict[int, Tensor] = {}  # the tensors stay alive, so no address is used twice

    def pack(tensor: Tensor) -> Tensor:
        address = tensor.untyped_storage().data_ptr()
        if address not in own:
            kept.setdefault(address, tensor)
        return tensor

    dtype = next(model.parameters()).dtype
    views = torch.zeros(rows, 3, crop_px, crop_px, dtype=dtype)
    own.add(views.untyped_storage().data_ptr())  # counted as views
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t), _autocast("cpu", precision):
        model.train()(views)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values())


def _autocast(device: str, precision: str) -> AbstractContextManager[None]:
    return torch.autocast(device, dtype=_AUTOCAST.get(precision), enabled=precision in _AUTOCAST)
