"""From a recipe to everything that the training loop uses, checked before the first step."""

import json
import os
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from sslpipe.augment.eval_view import eval_view_for
from sslpipe.augment.two_views import AUGMENTS, FusedViews, Views
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.loader import batches, open_reader
from sslpipe.data.nvjpeg import jpeg_decoder
from sslpipe.data.order import ORDER_VERSION, Order, held_out
from sslpipe.data.resident import resident_batches
from sslpipe.distributed import Rank
from sslpipe.errors import RecipeError
from sslpipe.evaluation.monitor import monitor
from sslpipe.losses import LOSSES, Objective
from sslpipe.models.backbones import build_backbone, stem_warning
from sslpipe.models.momentum import MomentumPair
from sslpipe.models.simclr import SimCLR
from sslpipe.models.sync_batchnorm import sync_batchnorm
from sslpipe.optim import build_optimizer, describe_groups
from sslpipe.portable import write_atomically
from sslpipe.recipe.base import digest
from sslpipe.recipe.finetune import FinetuneRecipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.registry import build
from sslpipe.run.checkpoint import Checkpointer
from sslpipe.run.flops import peak_flops, step_flops
from sslpipe.run.gradient_cache import PooledStatistics, cached_backward, micro_batch_rows
from sslpipe.run.guard import StepGuard
from sslpipe.run.health import Alarms
from sslpipe.run.launch import environment, resolve_precision, start_accelerator
from sslpipe.run.log import RunLog
from sslpipe.run.quarantine import Quarantine
from sslpipe.run.session import Session
from sslpipe.run.stop import StopRequest
from sslpipe.run.throughput import Meter

Model = SimCLR | MomentumPair


@dataclass(frozen=True, kw_only=True)
class PretrainSession(Session):
    """model: inside `wrapped`. cached_backward: gradient_cache.cached_backward over the recipe's
    micro-batches, if it has some."""

    recipe: Recipe
    model: Model
    loss_fn: Objective
    cached_backward: Callable[..., tuple[Tensor, Tensor, Tensor]] | None


def plan_order(recipe: Recipe, index: DatasetIndex) -> Order:
    """The order of a run: the split without its held-out slice."""
    split = index.split(recipe.data.split)
    return Order(
        split.starts,
        seed=recipe.seed,
        batch_size=recipe.data.batch_size,
        num_streams=recipe.data.num_streams,
        window=recipe.data.shuffle_window,
        without=_holdout_ids(recipe, split),
    )


def _holdout_ids(recipe: Recipe, split: Split) -> NDArray[np.int64]:
    """Ids kept for the kNN monitor; without any, no label is read (24 GB of them for a billion)."""
    count = recipe.data.holdout
    return held_out(split.labels, count) if count else np.zeros(0, np.int64)


def labels_warning(recipe: Recipe, split: Split) -> str | None:
    """What to say of an objective that asks for labels where the split has none."""
    masks = bool(recipe.loss.arguments.get("mask_labels"))
    if not (masks or recipe.loss.kind == "sup_con") or bool((split.labels >= 0).any()):
        return None
    setting = "loss.mask_labels = true" if masks else "loss.kind = 'sup_con'"
    return f"{setting}, but the split {split.name!r} has no labels: it changes nothing here"


def build_augment(recipe: Recipe | FinetuneRecipe, index: DatasetIndex) -> Views:
    """The recipe's views, with the data set's mean and std unless the recipe gives its own."""
    manifest = index.manifest
    return build(AUGMENTS, recipe.augment, section="augment", mean=manifest.mean, std=manifest.std)


def build_model(recipe: Recipe, crop_px: int) -> Model:
    """Encoder and projector with weights drawn from recipe.seed: the same on every rank."""
    torch.manual_seed(recipe.seed)
    backbone = build_backbone(recipe.backbone, crop_px=crop_px)
    return (MomentumPair if recipe.momentum else SimCLR)(backbone, recipe.projector)


def recipe_flops(recipe: Recipe, model: Model, crop_px: int) -> float:
    """FLOPs of a step's forward and backward; what gradient caching does again is not counted."""
    trained = nn.Sequential(model.backbone, model.projector)
    flops = step_flops(trained, recipe.data.batch_size, crop_px)
    # forward and twice as much backward for either view; the keys of a pair have no backward
    return flops * (4 / 6 if recipe.momentum else 1)


def build_loss(recipe: Recipe) -> Objective:
    """The recipe's objective; one with a queue learns how long its embeddings are."""
    if recipe.loss.kind == "moco" and recipe.momentum is None:
        raise RecipeError(
            "loss.kind = 'moco' compares queries with keys of earlier steps, which only a momentum "
            "encoder keeps alike; add a section [momentum], or momentum.start=0.999"
        )
    return build(LOSSES, recipe.loss, section="loss", dim=recipe.projector.out_dim)


@contextmanager
def set_up(
    recipe: Recipe, index: DatasetIndex, run_dir: Path, process: Rank
) -> Iterator[PretrainSession]:
    """Build, check and restore all parts of a run; on leaving, close what was opened."""
    split = index.split(recipe.data.split)
    index.check_files(recipe.data.split, allow_pipe=recipe.run.allow_pipe)
    order = plan_order(recipe, index)
    recipe = recipe.resolved(order.steps_per_epoch)
    every = recipe.run

    augment = build_augment(recipe, index)
    if every.compile and isinstance(augment, FusedViews):
        augment.compile_colours()
    model = build_model(recipe, augment.crop_px)
    precision = resolve_precision(recipe, run_dir, model, augment.crop_px)
    accelerator = start_accelerator(recipe, precision)
    device = accelerator.device
    augment, loss_fn = augment.to(device), build_loss(recipe).to(device)
    jpeg = jpeg_decoder(recipe.data, device)

    flops = recipe_flops(recipe, model, augment.crop_px)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    loss_fn = loss_fn.to(dtype)  # a queue holds what the model gives
    model = model.to(device, dtype).to(memory_format=torch.channels_last)
    if recipe.batchnorm == "global":
        model = cast(Model, sync_batchnorm(model, process.world_size))
    optimizer = build_optimizer(model, recipe.optim)
    with warnings.catch_warnings():  # torch 2.15 renames broadcast_buffers, accelerate does not yet
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
        # never the data (the stream shards itself), never the schedule (it would step W times)
        wrapped, optimizer = accelerator.prepare(
            torch.compile(model) if every.compile else model, optimizer
        )

    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loss": loss_fn}
    if accelerator.scaler is not None:
        parts["scaler"] = accelerator.scaler
    identity = {
        "digest": digest(recipe, index.sha256, ORDER_VERSION),
        "recipe": recipe.model_dump(mode="json", exclude={"run", "name"}),
        "index_sha256": index.sha256,
        "order_version": ORDER_VERSION,
    }
    checkpoints = Checkpointer(
        run_dir, keep=every.keep_checkpoints, identity=identity, process=process, warn=warn
    )
    first_step = checkpoints.restore(parts)
    if process.rank == 0:
        describe_run(run_dir, recipe, index, precision, process.world_size)

    log = RunLog(
        run_dir,
        name=recipe.name,
        config=recipe.model_dump(mode="json"),
        steps=recipe.total_steps,
        first_step=first_step,
        trackers=every.trackers,
        enabled=process.rank == 0,
    )
    holdout_ids = _holdout_ids(recipe, split)
    world = process.world_size
    log.event(first_step, "start", world=world, precision=precision)
    log.say(
        f"{recipe.name}: {world} process{'es' * (world > 1)} on {device.type}, "
        f"{precision}; {order.samples} images, {order.steps_per_epoch} steps an epoch; "
        f"{f'going on from step {first_step}' if first_step else 'from the start'} "
        f"to step {recipe.total_steps}"
    )
    log.say(describe_groups(optimizer, model))
    if warning := stem_warning(recipe.backbone, augment.crop_px):
        log.warn(warning)
    if warning := labels_warning(recipe, split):
        log.warn(warning)
    if every.monitor_steps and not len(holdout_ids):
        log.warn(
            "run.monitor_steps is set, but the data are unlabelled or data.holdout = 0: no kNN"
        )

    quarantine = Quarantine(log, order.samples, every.max_bad_fraction)
    if every.cache == "device":
        log.say(f"decoding {order.samples} images into the {device.type}'s memory")
    source = resident_batches if every.cache == "device" else batches
    stream = source(
        split,
        order,
        recipe.data,
        every,
        process,
        first_step=first_step,
        device=device,
        on_bad=quarantine.add,
        jpeg=jpeg,
    )
    meter = Meter(recipe.data.batch_size, flops, peak_flops(device, precision), process.world_size)
    stop_requested = StopRequest(os.environ.get("SSLPIPE_STOP_FILE") if process.rank == 0 else None)
    try:
        yield PretrainSession(
            recipe=recipe,
            run_dir=run_dir,
            accelerator=accelerator,
            device=device,
            dtype=dtype,
            augment=augment,
            model=model,
            wrapped=wrapped,
            loss_fn=loss_fn,
            optimizer=optimizer,
            parts=parts,
            facts={"world": process.world_size, "precision": precision},
            checkpoints=checkpoints,
            first_step=first_step,
            steps_per_epoch=order.steps_per_epoch,
            stream=meter.waiting(stream),
            monitor=partial(
                monitor,
                model.backbone,
                eval_view_for(augment.crop_px, augment.mean.tolist(), augment.std.tolist()),
                split,
                holdout_ids,
                process,
                canvas_px=recipe.data.canvas_px,
                num_workers=every.num_workers,
                device=device,
                reader=open_reader(split, every),
            ),
            monitor_steps=every.monitor_steps if len(holdout_ids) else 0,
            log=log,
            quarantine=quarantine,
            guard=StepGuard(
                [model, loss_fn],
                max_bad_steps=every.max_bad_steps,
                folder=run_dir,
                first_step=first_step,
                rank=process.rank,
            ),
            cached_backward=_cached_backward(
                recipe, model, wrapped, accelerator, process, augment.crop_px
            ),
            alarms=Alarms(min(recipe.projector.out_dim, 2 * recipe.data.batch_size)),
            meter=meter,
            stop_requested=stop_requested,
        )
    finally:
        quarantine.write_own()
        stop_requested.restore_handlers()
        stream.close()
        log.close()


def _cached_backward(
    recipe: Recipe, model: nn.Module, wrapped: nn.Module, accelerator: Any, process: Rank, px: int
) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """gradient_cache.cached_backward with what stays the same from step to step."""
    data, weight = recipe.data, next(model.parameters())
    if data.micro_batches == 1:
        return None
    view = torch.zeros(2, 3, px, px, dtype=weight.dtype, device=weight.device)
    return partial(
        cached_backward,
        wrapped,
        PooledStatistics(model, view),
        micro_batch_rows(
            data.batch_size // process.world_size,
            data.num_streams // process.world_size,
            data.micro_batches,
        ),
        backward=accelerator.backward,
    )


def warn(text: str) -> None:
    print(f"warning: {text}", flush=True)


def describe_run(
    run_dir: Path, recipe: Recipe | FinetuneRecipe, index: DatasetIndex, precision: str, world: int
) -> None:
    """recipe.json, data.json, run.json: what export and report need, without the shards."""
    manifest = index.manifest.model_dump(mode="json", exclude={"splits"})
    manifest["samples"] = {
        name: sum(shard.samples for shard in shards)
        for name, shards in index.manifest.splits.items()
    }
    manifest["index_sha256"] = index.sha256
    files = {
        "recipe.json": recipe.model_dump(mode="json"),
        "data.json": manifest,
        "run.json": {"precision": precision, "world": world, "environment": environment()},
    }
    for name, tree in files.items():
        write_atomically(run_dir / name, json.dumps(tree, indent=1) + "\n")
