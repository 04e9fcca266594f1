"""From a fine-tuning recipe to everything that its loop uses, checked before the first step."""

import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from sslpipe.augment.eval_view import eval_view_for
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.loader import open_reader
from sslpipe.data.order import ORDER_VERSION
from sslpipe.distributed import Rank
from sslpipe.errors import RecipeError, did_you_mean
from sslpipe.evaluation.monitor import retrieval_monitor
from sslpipe.export.load import FrozenBackbone
from sslpipe.metric_learning import METRIC_LOSSES, MINERS
from sslpipe.metric_learning.heads import HEADS
from sslpipe.metric_learning.memory import EmbeddingQueue
from sslpipe.metric_learning.model import MetricTask, freeze_layers, learning_rate_scale
from sslpipe.metric_learning.sampling.batches import PK_VERSION, PKOrder, pk_batches
from sslpipe.metric_learning.sampling.neighbours import ClassNeighbours
from sslpipe.models.backbones import Backbone, build_backbone
from sslpipe.models.sync_batchnorm import sync_batchnorm
from sslpipe.optim import build_optimizer
from sslpipe.random import permutation
from sslpipe.recipe.base import Component, digest
from sslpipe.recipe.finetune import FinetuneRecipe
from sslpipe.registry import build
from sslpipe.run.checkpoint import Checkpointer
from sslpipe.run.guard import StepGuard
from sslpipe.run.launch import start_accelerator
from sslpipe.run.log import RunLog
from sslpipe.run.quarantine import Quarantine
from sslpipe.run.session import Session
from sslpipe.run.setup import build_augment, describe_run, warn
from sslpipe.run.stop import StopRequest
from sslpipe.run.throughput import Meter

Integers = NDArray[np.int64]

PLAN_VERSION = ORDER_VERSION * 1000 + PK_VERSION
MOST_VALIDATED = 4000  # samples of the validation classes that are scored: evenly spaced ones
_VALIDATION = 0x7A  # names the draw of validation classes


@dataclass(frozen=True, kw_only=True)
class FinetuneSession(Session):
    """task: the backbone with its losses, inside `wrapped`. class_of: dataset label -> 0..C-1 of
    the classes that are trained on, -1 for the others. neighbours: of the classes, for the
    sampler; it follows steps that were taken, so no guard has to put it back."""

    recipe: FinetuneRecipe
    task: MetricTask
    class_of: Tensor
    neighbours: ClassNeighbours | None


def validation_ids(split: Split, classes: int | Sequence[str], names: Sequence[str]) -> Integers:
    """Sorted ids of every sample of the validation classes.

    classes: their names, or how many of those that have samples: the first of a fixed shuffle.
    """
    present = np.unique(split.labels[split.labels >= 0])
    if isinstance(classes, int):
        chosen = present[permutation(len(present), _VALIDATION)[:classes]]
        if classes >= len(present):
            raise RecipeError(
                f"data.validation_classes = {classes} leaves no class to train on; split "
                f"{split.name!r} has {len(present)}"
            )
    else:
        for name in classes:
            if name not in names:
                raise RecipeError(
                    f"data.validation_classes names {name!r}, which is no class of the data"
                    f"{did_you_mean(name, names)}; it has: {', '.join(names) or 'no names'}"
                )
        chosen = np.array([names.index(name) for name in classes], np.int64)
    return np.flatnonzero(np.isin(split.labels, chosen))


def plan_batches(recipe: FinetuneRecipe, index: DatasetIndex) -> PKOrder:
    """The batches of a run: the split without its validation classes."""
    split, sampler = index.split(recipe.data.split), recipe.sampler
    names = index.manifest.classes
    order = PKOrder(
        split,
        seed=recipe.seed,
        classes_per_batch=sampler.classes_per_batch,
        images_per_class=sampler.images_per_class,
        random_images=sampler.random_images,
        neighbours=sampler.neighbours,
        buffer=sampler.buffer,
        num_streams=sampler.num_streams,
        window=sampler.shuffle_window,
        without=validation_ids(split, recipe.data.validation_classes, names),
    )
    if sampler.neighbours and order.steps_per_epoch < recipe.run.prefetch:
        raise RecipeError(
            f"sampler.neighbours plans an epoch ahead, and run.prefetch = {recipe.run.prefetch} "
            f"reads farther: an epoch has {order.steps_per_epoch} steps; use at most so many"
        )
    return order


def with_backbone(recipe: FinetuneRecipe, given: FrozenBackbone | None) -> FinetuneRecipe:
    """The recipe with the backbone it starts from and the embedding layer in one component.

    given: a pretrained backbone, whose kind and arguments then count. A recipe that names another
    one is refused.
    """
    wanted = recipe.backbone
    if given is None:
        if wanted is None:
            raise RecipeError(
                "the recipe has no [backbone]; name a pretrained one with --backbone, or give one"
            )
        source, init = wanted, ""
    else:
        source, init = given.config.backbone, given.config.weights_sha256
        theirs = {"kind": source.kind, **source.arguments}
        for key, value in ({"kind": wanted.kind, **wanted.arguments} if wanted else {}).items():
            found = theirs.get(key)
            if (list(found) if isinstance(found, tuple) else found) != value:
                raise RecipeError(
                    f"backbone.{key} = {value!r}, but the given backbone has {found!r}; leave "
                    "[backbone] out, or give another one"
                )
    if recipe.init not in ("", init):
        raise RecipeError(
            f"init = {recipe.init[:16]!r}..., but the given backbone's weights have sha256 "
            f"{init[:16] or 'none: they are random'}; give the one that the recipe was made for"
        )
    arguments = {
        key: value
        for key, value in source.arguments.items()
        if key not in ("embedding_dim", "normalize")
    }
    embedding = recipe.embedding
    if embedding.dim is not None:
        arguments["embedding_dim"] = embedding.dim
    arguments["normalize"] = embedding.normalize
    component = Component.model_validate({"kind": source.kind, **arguments})
    return FinetuneRecipe.model_validate(
        {**recipe.model_dump(), "backbone": component.model_dump(), "init": init}
    )


def build_task(
    recipe: FinetuneRecipe, crop_px: int, given: FrozenBackbone | None, num_classes: int
) -> MetricTask:
    """Backbone, losses, miner and queue; random weights are drawn from recipe.seed."""
    assert recipe.backbone is not None
    torch.manual_seed(recipe.seed)
    backbone = build_backbone(recipe.backbone, crop_px=crop_px)
    if given is not None:
        _copy_weights(given.backbone, backbone)
    dim = backbone.num_features
    components = [("loss", recipe.loss)]
    components += [(f"also.{n}.loss", term.loss) for n, term in enumerate(recipe.also)]
    table = {**METRIC_LOSSES, **HEADS}
    losses = [
        build(table, component, section=section, num_classes=num_classes, dim=dim)
        for section, component in components
    ]
    for section, component in components:
        for key, what in (("miner", recipe.miner), ("queue", recipe.queue)):
            if what is not None and component.kind in HEADS and len(components) == 1:
                raise RecipeError(
                    f"{section}.kind = {component.kind!r} compares rows with weights, so "
                    f"[{key}] has nothing to do; leave it out"
                )
    miner = None if recipe.miner is None else build(MINERS, recipe.miner, section="miner")
    queue = None if recipe.queue is None else EmbeddingQueue(recipe.queue.size, dim)
    weights = [1.0, *(term.weight for term in recipe.also)]
    return MetricTask(backbone, losses, weights, miner, queue)


def freeze_and_optimize(task: MetricTask, recipe: FinetuneRecipe) -> Optimizer:
    """Take what [tune] freezes out of training, in place; the optimizer is that of the rest."""
    tune = recipe.tune
    freeze_layers(
        task.backbone,
        frozen=tune.backbone == "frozen",
        last_blocks=tune.last_blocks,
        batchnorm=tune.batchnorm == "frozen",
    )
    if not any(p.requires_grad for p in task.parameters()):
        raise RecipeError(
            "nothing is trained: tune.backbone = 'frozen', no embedding.dim, and a loss without "
            "weights of its own; set embedding.dim"
        )
    scale = learning_rate_scale(
        task.backbone,
        backbone_lr=tune.backbone_lr,
        layer_decay=tune.layer_decay,
        loss_lr=tune.loss_lr,
    )
    return build_optimizer(task, recipe.optim, scale)


def plan_warnings(recipe: FinetuneRecipe, order: PKOrder, held: Integers) -> list[str]:
    """What the plan leaves out. held: ids of the validation classes."""
    told = []
    if order.small_classes:
        told.append(
            f"{order.small_classes} classes have fewer than sampler.images_per_class = "
            f"{order.images_per_class} images and are left out"
        )
    if order.used < 0.8 * order.samples:
        told.append(
            f"an epoch uses {order.used} of {order.samples} images ({order.dropped} had to leave "
            f"sampler.buffer = {order.buffer}): a larger buffer, or fewer classes a batch than "
            "there are, uses more"
        )
    if recipe.run.monitor_steps and not len(held):
        told.append("run.monitor_steps is set, but data.validation_classes = 0: no validation")
    return told


def plan_digest(recipe: FinetuneRecipe, index: DatasetIndex) -> str:
    """Over everything that decides the trained weights. recipe: with its backbone and steps."""
    return digest(recipe, index.sha256, PLAN_VERSION)


def _copy_weights(source: Backbone, target: Backbone) -> None:
    """The pretrained network; its embedding layer too where it has the same width."""
    target.network.load_state_dict(source.network.state_dict(), strict=True)
    theirs, ours = source.embedding, target.embedding
    if theirs is not None and ours is not None and theirs.weight.shape == ours.weight.shape:
        ours.load_state_dict(theirs.state_dict())


@contextmanager
def set_up_finetune(
    recipe: FinetuneRecipe,
    index: DatasetIndex,
    run_dir: Path,
    process: Rank,
    given: FrozenBackbone | None,
) -> Iterator[FinetuneSession]:
    """Build, check and restore all parts of a run; on leaving, close what was opened."""
    split = index.split(recipe.data.split)
    index.check_files(recipe.data.split, allow_pipe=recipe.run.allow_pipe)
    order = plan_batches(recipe, index)
    recipe = with_backbone(recipe, given).resolved(order.steps_per_epoch)
    every, precision = recipe.run, recipe.optim.precision

    augment = build_augment(recipe, index)
    augment.specs = augment.specs[: recipe.views]  # type: ignore[assignment]
    task = build_task(recipe, augment.crop_px, given, len(order.classes))
    accelerator = start_accelerator(recipe, precision)
    device = accelerator.device
    augment = augment.to(device)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    task = task.to(device, dtype).to(memory_format=torch.channels_last)
    if recipe.batchnorm == "global":
        task = cast(MetricTask, sync_batchnorm(task, process.world_size))
    neighbours = None
    if recipe.sampler.neighbours:
        size, dim = recipe.sampler.classes_per_batch, task.backbone.num_features
        neighbours = ClassNeighbours(len(order.classes), dim, size).to(device, dtype)
        order.nearest = neighbours.of
    optimizer: Any = freeze_and_optimize(task, recipe)
    with warnings.catch_warnings():  # torch 2.15 renames broadcast_buffers, accelerate does not yet
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
        wrapped, optimizer = accelerator.prepare(
            torch.compile(task) if every.compile else task, optimizer
        )

    parts: dict[str, Any] = {
        "model": nn.ModuleDict({"backbone": task.backbone}),  # what an export takes
        "optimizer": optimizer,
        "losses": task.losses,
    }
    optional = {
        "miner": task.miner,
        "queue": task.queue,
        "neighbours": neighbours,
        "scaler": accelerator.scaler,
    }
    parts |= {name: part for name, part in optional.items() if part is not None}
    identity = {
        "digest": plan_digest(recipe, index),
        "recipe": recipe.model_dump(mode="json", exclude={"run", "name"}),
        "index_sha256": index.sha256,
        "order_version": PLAN_VERSION,
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
    world = process.world_size
    log.event(first_step, "start", world=world, precision=precision)
    log.say(
        f"{recipe.name}: {world} process{'es' * (world > 1)} on {device.type}, "
        f"{precision}; {order.samples} images of {len(order.classes)} classes, "
        f"{order.steps_per_epoch} steps an epoch of {order.batch_size} images; from "
        f"{'pretrained' if given is not None else 'random'} weights; "
        f"{f'going on from step {first_step}' if first_step else 'from the start'} "
        f"to step {recipe.total_steps}"
    )
    held = validation_ids(split, recipe.data.validation_classes, index.manifest.classes)
    for text in plan_warnings(recipe, order, held):
        log.warn(text)
    held = held[:: -(-len(held) // MOST_VALIDATED) or 1]

    quarantine = Quarantine(log, order.samples, every.max_bad_fraction)
    stream = pk_batches(
        split,
        order,
        every,
        process,
        canvas_px=recipe.data.canvas_px,
        first_step=first_step,
        device=device,
        on_bad=quarantine.add,
    )
    meter = Meter(order.batch_size, 0.0, None, process.world_size)
    stop_requested = StopRequest(os.environ.get("SSLPIPE_STOP_FILE") if process.rank == 0 else None)
    class_of = torch.full((int(split.labels.max()) + 1,), -1)
    class_of[torch.from_numpy(order.classes)] = torch.arange(len(order.classes))
    try:
        yield FinetuneSession(
            recipe=recipe,
            run_dir=run_dir,
            accelerator=accelerator,
            device=device,
            dtype=dtype,
            augment=augment,
            task=task,
            wrapped=wrapped,
            class_of=class_of,
            neighbours=neighbours,
            optimizer=optimizer,
            parts=parts,
            facts={
                "world": process.world_size,
                "precision": precision,
                "classes": order.classes.tolist(),  # dataset labels that are trained on
            },
            checkpoints=checkpoints,
            first_step=first_step,
            steps_per_epoch=order.steps_per_epoch,
            stream=meter.waiting(stream),
            monitor=partial(
                retrieval_monitor,
                task.backbone,
                eval_view_for(augment.crop_px, augment.mean.tolist(), augment.std.tolist()),
                split,
                held,
                process,
                canvas_px=recipe.data.canvas_px,
                num_workers=every.num_workers,
                device=device,
                reader=open_reader(split, every),
            ),
            monitor_steps=every.monitor_steps if len(held) else 0,
            log=log,
            quarantine=quarantine,
            guard=StepGuard(
                [task],
                max_bad_steps=every.max_bad_steps,
                folder=run_dir,
                first_step=first_step,
                rank=process.rank,
            ),
            meter=meter,
            stop_requested=stop_requested,
        )
    finally:
        quarantine.write_own()
        stop_requested.restore_handlers()
        stream.close()
        log.close()
