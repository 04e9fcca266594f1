"""Pretraining: images become views, views become embeddings, embeddings become a loss."""

from collections.abc import Callable, Generator
from functools import partial
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from sslpipe.augment.build import build_augment
from sslpipe.augment.two_views import Views
from sslpipe.data.decode import JpegDecoder
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.loader import batches
from sslpipe.data.nvjpeg import jpeg_decoder
from sslpipe.data.order import Order, held_out, repeated
from sslpipe.data.pairing import Pairing, plan_pairs, plan_version
from sslpipe.data.pipeline import Batch, Prepare
from sslpipe.data.resident import resident_batches
from sslpipe.distributed import all_gather_rows
from sslpipe.errors import RecipeError, naming
from sslpipe.evaluation.monitor import monitor
from sslpipe.export.initial import (
    copy_weights,
    describe_init,
    init_metadata,
    keep_init,
    run_view,
    with_init,
)
from sslpipe.export.load import FrozenBackbone
from sslpipe.losses import LOSSES, Objective
from sslpipe.losses.base import takes_groups
from sslpipe.models.averaged import averaged, follow_average
from sslpipe.models.backbones import Backbone, build_backbone, stem_warning
from sslpipe.models.limits import within_memory
from sslpipe.models.momentum import MomentumPair, momentum_at
from sslpipe.models.simclr import SimCLR
from sslpipe.models.tuning import (
    ProjectorFirst,
    freeze_layers,
    learning_rate_scale,
    pretrained_groups,
    tune_warnings,
)
from sslpipe.optim import build_optimizer
from sslpipe.recipe.base import RunRecipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.registry import build
from sslpipe.run.best import check_keeping
from sslpipe.run.flops import step_flops
from sslpipe.run.gradient_cache import PooledStatistics, cached_backward, micro_batch_rows
from sslpipe.run.health import Alarms, embedding_health
from sslpipe.run.launch import resolve_precision
from sslpipe.run.launcher import check_streams
from sslpipe.run.session import Run, open_run, seed_torch

Model = SimCLR | MomentumPair


def train(
    recipe: Recipe, index: DatasetIndex, run_dir: Path, init_from: FrozenBackbone | None = None
) -> int:
    """Pretrain up to the recipe's steps, resuming at run_dir's last checkpoint.

    Leaves DONE, PREEMPTED or FAILED in run_dir. Collective.

    Args:
        recipe: What `sslpipe.load_recipe` returns for a recipe without [sampler].
        index: The data set.
        run_dir: Where the run lives; the same one resumes.
        init_from: The weights that the backbone starts from; None: random ones of the recipe's
            [backbone], or those that the run started from before.

    Returns:
        The last step done: fewer than the recipe's where a stop was requested.

    Raises:
        UserError: For what the user can mend: recipe, data, launch, a directory in use.
    """
    with open_run(recipe, run_dir) as run:  # processes, lock, watchdog
        # data: the order of the whole run is known before anything is read
        check_streams(recipe.data.num_streams, run.process.world_size)
        split = index.split(recipe.data.split)
        index.check_files(split.name, allow_pipe=recipe.run.allow_pipe)
        order = plan_order(recipe, index)
        init_from = keep_init(run_dir, init_from, is_main=run.process.rank == 0)
        recipe = with_init(recipe, init_from, index, run_dir).resolved(order.steps_per_epoch)
        pairing = plan_pairs(recipe.pairs, split, order)  # partners, masks, labels of [pairs]

        # views, model, objective: the same numbers on every rank, from recipe.seed
        augment = build_augment(recipe, index, compiled=recipe.run.compile)
        view = run_view(recipe, index, augment.crop_px, init_from)  # of evaluations
        model, loss_fn = build_model(recipe, augment.crop_px, init_from), build_loss(recipe)
        run.check_memory(recipe, augment.crop_px, model, others=[loss_fn])  # and warns
        run.configure(recipe, resolve_precision(recipe, run_dir, model, augment.crop_px))
        augment, loss_fn = augment.to(run.device), loss_fn.to(run.device, run.dtype)
        jpeg = jpeg_decoder(recipe.data, run.device)  # refused before anything is written
        flops = recipe_flops(recipe, model, augment.crop_px)
        model = run.place(model)
        ddp, optimizer = run.prepare(model, freeze_and_optimize(model, recipe))
        projector_first = ProjectorFirst(backbones(model), recipe.tune.projector_first_steps)
        cached = build_gradient_cache(recipe, model, ddp, run, augment.crop_px)

        # resume: weights, optimizer and loss buffers; then the data from that step on
        first_step = run.restore(
            index,
            order,
            {"model": model, "optimizer": optimizer, "loss": loss_fn},
            order_version=plan_version(recipe.pairs),
            guarded=[model, loss_fn],
            alarms=Alarms(min(recipe.projector.out_dim, 2 * recipe.data.batch_size)),
            metadata=init_metadata(init_from, view),
        )
        run.announce(
            f"{order.samples} images, {order.steps_per_epoch} steps an epoch"
            + describe_init(init_from),
            plan_warnings(recipe, split, loss_fn, augment.crop_px, pairing),
        )
        score_holdout = run.monitor(
            monitor,
            model.backbone,
            view,
            split,
            holdout_ids(recipe, split),
            recipe.data.canvas_px,
            ema=model.ema,
        )

        def plan_views(step: int, batch: Batch) -> Batch:  # in the loader's threads
            # the views' parameters are a function of (seed, epoch, sample, view)
            return augment.prepare(batch, seed=recipe.seed, number=batch.epoch)

        run.evaluate_start(score_holdout)  # of a run from weights: it should not fall below
        stream = open_batches(recipe, split, order, run, first_step, jpeg, plan_views, pairing)

        for step, batch in run.steps(stream, step_flops=flops):  # sets the learning rate; all ranks
            projector_first.begin(step)  # the backbone is frozen in tune.projector_first_steps
            batch = batch.to(run.device)
            seed = partial(seed_torch, recipe.seed, step, run.process.rank)  # dropout and the like
            compute_loss = partial(loss_fn, **loss_arguments(loss_fn, batch))  # ids, labels

            if cached is None:
                seed(0)
                views = augment(batch, dtype=run.view_dtype)  # (2B, 3, S, S), first views first
                z_a, z_b = ddp(views).chunk(2)  # 2 x (B, D), one forward
                loss = compute_loss(z_a, z_b)  # (), over all ranks
                run.backward(loss)
            else:  # the same negatives and gradient, a slice of every stream at a time
                make_views = partial(views_of_rows, augment, batch, run.view_dtype)
                z_a, z_b, loss = cached(make_views=make_views, compute_loss=compute_loss, seed=seed)

            # a non-finite step moves no weight and restores the buffers; it counts as a step
            with run.optimizer_step(step, batch, loss):
                if isinstance(model, MomentumPair) and recipe.momentum:
                    model.follow(momentum_at(step, recipe.momentum, recipe.total_steps))
                if model.ema is not None and recipe.optim.ema:
                    follow_average(model.ema, model.backbone, recipe.optim.ema, step)
            if run.is_log_step(step):  # all ranks compute, rank 0 writes
                health = embedding_health(z_a, z_b)
                run.log(step, loss, {**health, **loss_fn.stats(), **partner_shares(batch)})
            run.evaluate_if_due(step, score_holdout)  # all ranks embed, rank 0 scores
            run.save_if_due(step)  # all ranks agree whether to stop, rank 0 writes
        return run.finish()


def views_of_rows(augment: Views, batch: Batch, dtype: torch.dtype, rows: Tensor) -> Tensor:
    """Make both views of some of the batch's rows, (2b, 3, S, S): the same whenever it is done."""
    views: Tensor = augment(batch.rows(rows), dtype=dtype)
    return views


def loss_arguments(loss_fn: Objective, batch: Batch) -> dict[str, Tensor]:
    """Return what the objective takes beside the embeddings; groups only where it knows them."""
    arguments = batch.loss_arguments
    if "groups" in arguments and not takes_groups(loss_fn):
        del arguments["groups"]  # it has no negatives
    return arguments


def partner_shares(batch: Batch) -> dict[str, float]:
    """Shares of the global batch whose second view is a partner's, and who has none. Collective.

    Returns:
        `partners` and `without_partner`; nothing without [pairs].
    """
    if batch.pairs is None:
        return {}
    ids, lonely = batch.pairs.ids, batch.pairs.lonely
    flags = all_gather_rows(torch.stack([ids[:, 0] != ids[:, 1], lonely], dim=1))  # (N, 2)
    partners, without = flags.double().mean(0).tolist()
    return {"partners": partners, "without_partner": without}


def plan_order(recipe: Recipe, index: DatasetIndex) -> Order:
    """Plan the order of a run: the split without held-out samples and those that are not kept."""
    split = index.split(recipe.data.split)
    return Order(
        split.starts,
        seed=recipe.seed,
        batch_size=recipe.data.batch_size,
        num_streams=recipe.data.num_streams,
        window=recipe.data.shuffle_window,
        without=untrained_ids(recipe, split),
    )


def draw_partners(
    recipe: RunRecipe, index: DatasetIndex
) -> Callable[[int, NDArray[np.int64]], NDArray[np.int64]] | None:
    """Return (epoch, ids) -> the samples that second views show; None where all show their own."""
    if not isinstance(recipe, Recipe) or recipe.pairs is None or not recipe.pairs.has_partners:
        return None
    split, order = index.split(recipe.data.split), plan_order(recipe, index)
    pairing = plan_pairs(recipe.pairs, split, order)
    assert pairing is not None
    partners = pairing.partners
    assert partners is not None
    return lambda epoch, ids: partners.of_samples(epoch, ids).ids


def holdout_ids(recipe: Recipe, split: Split) -> NDArray[np.int64]:
    """Return the ids held out from training, for the monitor.

    Without any, no label is read: those of a billion samples take 24 GB.
    """
    count, by = recipe.data.holdout, recipe.data.holdout_by
    if not count:
        return np.zeros(0, np.int64)
    with naming("data.holdout_by"):
        groups = split.column(by).groups.whole_split() if by else None
    # "all": those without a label, -1, are a class of their own
    labels = split.labels + 1 if recipe.data.holdout_from == "all" else split.labels
    return held_out(labels, count, groups)


def untrained_ids(recipe: Recipe, split: Split) -> NDArray[np.int64]:
    """Return the ids that are not trained on: held out, or not kept by data.keep."""
    ids, column = holdout_ids(recipe, split), recipe.data.keep_first_of
    if column is None:
        return ids
    with naming("data.keep"):
        groups = split.column(column).groups.whole_split()
    return np.union1d(ids, repeated(groups, ids))


def build_model(recipe: Recipe, crop_px: int, init_from: FrozenBackbone | None = None) -> Model:
    """Build encoder and projector: the same on every rank.

    Args:
        recipe: Random weights are drawn from its seed.
        crop_px: Side of the views.
        init_from: Weights that the backbone gets instead; None: random ones.
    """
    assert recipe.backbone is not None  # by `with_init`
    torch.manual_seed(recipe.seed)
    with within_memory("[backbone] and [projector]"):
        backbone = build_backbone(recipe.backbone, crop_px=crop_px)
        if init_from is not None:
            copy_weights(init_from.backbone, backbone, recipe.backbone.kind)
        model = (MomentumPair if recipe.momentum else SimCLR)(backbone, recipe.projector)
        model.ema = averaged(backbone) if recipe.optim.ema else None
        return model


def backbones(model: Model) -> list[Backbone]:
    """List the backbones that a run's weights go into: the trained one, and its slow copy."""
    copies = [model.momentum.backbone] if isinstance(model, MomentumPair) else []
    return [model.backbone, *copies]


def freeze_and_optimize(model: Model, recipe: Recipe) -> Optimizer:
    """Take what [tune] freezes out of training, in place; the optimizer is that of the rest."""
    tune = recipe.tune
    if not recipe.init:
        return build_optimizer(model, recipe.optim)
    still = tune.batchnorm == "frozen"
    for backbone in backbones(model):
        freeze_layers(backbone, frozen=False, last_blocks=tune.last_blocks, batchnorm=still)
    scale = learning_rate_scale(
        model.backbone,
        backbone_lr=tune.backbone_lr,
        layer_decay=tune.layer_decay,
        by_library=True,
    )
    return build_optimizer(model, recipe.optim, scale, **pretrained_groups(tune))


def build_loss(recipe: Recipe) -> Objective:
    """Build the recipe's objective; one with a queue learns how long its embeddings are.

    Raises:
        RecipeError: It needs a momentum encoder, and the recipe has none; or it cannot do what
            [pairs] says.
    """
    fixed = {"dim": recipe.projector.out_dim}
    masks = recipe.pairs.masks if recipe.pairs else ()
    if masks or "group_columns" in recipe.loss.arguments:  # of a queue: [pairs] alone decides it
        fixed["group_columns"] = len(masks)
    with within_memory("[loss]"):
        loss_fn = build(LOSSES, recipe.loss, section="loss", fixed=fixed)
    has_negatives = loss_fn.negatives_per_anchor(recipe.data.batch_size) > 0
    if masks and has_negatives and not takes_groups(loss_fn):
        raise RecipeError(
            f"loss.kind = {recipe.loss.kind!r} takes no groups, so that [pairs] cannot keep images "
            "from being negatives; leave pairs.positive and pairs.never_negative out"
        )
    if loss_fn.needs_momentum_encoder and recipe.momentum is None:
        raise RecipeError(
            f"loss.kind = {recipe.loss.kind!r} compares queries with keys of earlier steps, which "
            "only a momentum encoder keeps alike; add a section [momentum], or momentum.start=0.999"
        )
    return loss_fn


def recipe_flops(recipe: Recipe, model: Model, crop_px: int) -> float:
    """FLOPs of a step's forward and backward; what gradient caching repeats is not counted."""
    trained = nn.Sequential(model.backbone, model.projector)
    flops = step_flops(trained, recipe.data.batch_size, crop_px)
    # forward and twice as much backward for either view; the keys of a pair have no backward
    return flops * (4 / 6 if recipe.momentum else 1)


def build_gradient_cache(
    recipe: Recipe, model: Model, ddp: nn.Module, run: Run, crop_px: int
) -> Callable[..., tuple[Tensor, Tensor, Tensor]] | None:
    """Return `cached_backward` over the recipe's micro-batches; None without data.micro_batch."""
    data, world = recipe.data, run.process.world_size
    if data.micro_batches == 1:
        return None
    view = torch.zeros(2, 3, crop_px, crop_px, dtype=run.dtype, device=run.device)
    rows = micro_batch_rows(data.batch_size // world, data.num_streams // world, data.micro_batches)
    return partial(cached_backward, ddp, PooledStatistics(model, view), rows, backward=run.backward)


def open_batches(
    recipe: Recipe,
    split: Split,
    order: Order,
    run: Run,
    first_step: int,
    jpeg: JpegDecoder | None,
    prepare: Prepare,
    pairing: Pairing | None = None,
) -> Generator[Batch]:
    """Open this rank's part of every global step, from `first_step` on, its views planned."""
    on_device = recipe.run.cache == "device"
    if on_device:
        run.reporter.say(f"decoding {order.samples} images into the {run.device.type}'s memory")
    return (resident_batches if on_device else batches)(
        split if pairing is None else pairing.split,
        order,
        recipe.data,
        recipe.run,
        run.process,
        first_step=first_step,
        device=run.device,
        on_bad=run.quarantine.add,
        jpeg=jpeg,
        prepare=prepare,
        pairing=pairing,
    )


def plan_warnings(
    recipe: Recipe,
    split: Split,
    loss_fn: Objective,
    crop_px: int,
    pairing: Pairing | None = None,
) -> list[str]:
    """List what a user should know before the first step.

    Raises:
        RecipeError: run.keep or run.patience need an evaluation that is not made.
    """
    assert recipe.backbone is not None
    ids = holdout_ids(recipe, split)
    has_labels = bool((split.labels_of(ids) >= 0).any())
    check_keeping(recipe.run, scored=len(ids) > 0, labelled=has_labels)
    warnings = [stem_warning(recipe.backbone, crop_px)]
    if pairing is not None:
        split = pairing.split  # its labels are those of pairs.label
        warnings += pairing.warnings(recipe.run.cache)
    if loss_fn.uses_labels and not bool((split.labels >= 0).any()):
        masks = bool(recipe.loss.arguments.get("mask_labels"))
        setting = "loss.mask_labels = true" if masks else f"loss.kind = {recipe.loss.kind!r}"
        warnings.append(f"{setting}, but the split {split.name!r} has no labels: no effect")
    warnings += tune_warnings(recipe)
    if recipe.init and not (has_labels and recipe.run.monitor_steps):
        warnings.append(
            "the run starts from weights, and nothing watches whether it makes them worse: set "
            "run.monitor_steps, and data.holdout where there are labels"
        )
    if recipe.run.monitor_steps and not has_labels:
        warnings.append(
            "run.monitor_steps is set, but the data are unlabelled or data.holdout = 0: no kNN"
            + ("" if len(ids) else ", and without data.holdout_from = 'all' no other score")
        )
    return [warning for warning in warnings if warning]
