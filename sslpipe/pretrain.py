"""Pretraining: images become views, views become embeddings, embeddings become a loss."""

from collections.abc import Callable, Generator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn

from sslpipe.augment.two_views import Views
from sslpipe.data.loader import batches
from sslpipe.data.pipeline import Batch
from sslpipe.data.plan import bank_ids, holdout_ids
from sslpipe.distributed import all_gather_rows
from sslpipe.evaluation.monitor import monitor
from sslpipe.losses import Objective
from sslpipe.losses.base import takes_groups
from sslpipe.models.momentum import MomentumPair, decay_at, follow, momentum_at
from sslpipe.models.tuning import ProjectorFirst
from sslpipe.optim import optimizer_over
from sslpipe.plan import Model, Parts, Pretraining, backbones, freeze_and_group, recipe_flops
from sslpipe.recipe.pretrain import Recipe
from sslpipe.run.gradient_cache import PooledStatistics, cached_backward, micro_batch_rows
from sslpipe.run.guard import Decision
from sslpipe.run.health import Alarms, embedding_health
from sslpipe.run.launch import resolve_precision, seed_torch, training_device
from sslpipe.run.launcher import check_streams
from sslpipe.run.memory import warn_of_memory
from sslpipe.run.session import Run, open_run

LEAST_RANK_SHARE = 0.05  # (rank - 1) / (highest possible - 1) of embeddings: 0 in one direction
ALARM_REMEDY = (
    "Look at the views with `sslpipe preview`, lengthen optim.warmup_steps, or lower optim.peak_lr"
)

CachedBackward = Callable[..., tuple[Tensor, Tensor, Tensor]]  # see run.gradient_cache


def pretrain(plan: Pretraining, run_dir: Path, parts: Parts | None = None) -> int:
    """Pretrain up to the plan's steps, resuming at run_dir's last checkpoint. Collective.

    Leaves DONE, PREEMPTED or FAILED in run_dir.

    Args:
        plan: What `Pretraining.make` returned, for this run directory.
        run_dir: Where the run lives; the same one resumes.
        parts: What is trained; None: what the plan builds.

    Returns:
        The last step done: fewer than the recipe's where a stop was requested.

    Raises:
        UserError: For what the user can mend: launch, memory, a directory in use.
    """
    recipe = plan.recipe
    with open_run(recipe, run_dir) as run:  # processes, lock, watchdog
        check_streams(recipe.data.num_streams, run.process.world_size)
        if run.process.rank == 0:
            plan.start.keep(run_dir)

        # views, model, objective: the same numbers on every rank, from recipe.seed
        parts = parts or plan.build()
        augment = parts.augment
        loss_fn = parts.loss
        negatives = plan.negatives(parts)  # or refused
        remarks = plan.remarks(parts)  # or refused
        warn_of_memory(
            recipe,
            augment.crop_px,
            parts.model,
            run.process,
            others=[loss_fn],
            image_type=plan.index.image_type,
        )
        run.configure(recipe, resolve_precision(recipe.optim.precision, training_device(recipe)))
        augment = augment.to(run.device)
        loss_fn = loss_fn.to(run.device, run.dtype)
        flops = recipe_flops(recipe, parts.model, augment.crop_px)
        model = run.place(parts.model)
        groups = freeze_and_group(model, recipe)
        ddp, optimizer = run.prepare(model, optimizer_over(groups, recipe.optim))
        projector_first = ProjectorFirst(backbones(model), recipe.tune.projector_first_steps)
        cached = build_gradient_cache(recipe, model, ddp, run, augment.crop_px)

        # resume: weights, optimizer and loss buffers; then the data from that step on
        view = plan.start.view(recipe, plan.index, augment.crop_px)  # of evaluations
        highest_rank = min(recipe.projector.out_dim, 2 * recipe.data.batch_size)
        first_step = run.restore(
            plan,
            {"model": model, "optimizer": optimizer, "loss": loss_fn},
            guarded=[model, loss_fn],
            alarms=Alarms(
                recipe.total_steps,
                least_rank=1 + LEAST_RANK_SHARE * (highest_rank - 1),
                grows="negatives_per_anchor" if loss_fn.needs_momentum_encoder else "",
                remedy=ALARM_REMEDY + (", or tune.backbone_lr" if recipe.init else ""),
            ),
            metadata=plan.start.metadata(view),
        )
        # a batch without negatives is then chance: its step teaches nothing, and the run continues
        # (a GPU is not asked in the first step: the host would wait, and the plan has counted)
        by_chance = first_step > 0 or 0 in negatives
        loss_fn.had_negatives = by_chance or run.device.type != "cpu"
        size = f"{plan.order.samples} images, {plan.order.steps_per_epoch} steps an epoch"
        run.announce(size + plan.start.describe(recipe.tune), remarks)
        score = partial(monitor, canvas_px=recipe.data.canvas_px, bank=bank_ids(recipe, plan.split))
        held_out = holdout_ids(recipe, plan.split)
        run.monitor(score, model.backbone, view, plan.split, held_out, ema=model.ema)
        run.evaluate_start()  # of a run from weights: it should not fall below

        # batches, their views planned
        stream = open_batches(plan, run, first_step, augment)
        take_step = TrainingStep(run, augment, model, ddp, loss_fn, cached)

        for step, batch in run.steps(stream, step_flops=flops):  # sets the learning rate; all ranks
            projector_first.begin(step)  # the backbone is frozen in tune.projector_first_steps
            seed = partial(seed_torch, run.device, recipe.seed, step, run.process.rank)
            seed(0)  # dropout and the like
            # views, embeddings, loss, gradient, weights
            z_a, z_b, decision = take_step(batch.to(run.device), seed, *rates_at(step, recipe))
            run.step_done(step, batch, decision)
            if run.is_log_step(step):  # all ranks compute, rank 0 writes
                health = embedding_health(z_a, z_b) if loss_fn.embeds else {}
                run.log(step, {**health, **loss_fn.stats(), **partner_shares(batch)})
            run.evaluate_if_due(step)  # all ranks embed, rank 0 scores
            run.save_if_due(step)  # all ranks agree whether to stop, rank 0 writes
        return run.finish()


class Step(NamedTuple):
    """What a step leaves: (B, D) embeddings of either view, and what became of it."""

    z_a: Tensor
    z_b: Tensor
    decision: Decision


@dataclass(frozen=True)
class TrainingStep:
    """Takes a step, from images to weights.

    Args:
        run: Of this process.
        augment: Makes the views.
        model: What is trained.
        ddp: The same, wrapped.
        loss_fn: The objective.
        cached: Takes the place of one forward and backward, see `build_gradient_cache`; or None.
    """

    run: Run
    augment: Views
    model: Model
    ddp: nn.Module
    loss_fn: Objective
    cached: CachedBackward | None

    def make_views(self, batch: Batch) -> Tensor:
        """Make both views of a batch, (2B, 3, S, S), first views first; the same ones each time."""
        views: Tensor = self.augment(batch, dtype=self.run.view_dtype)
        return views

    def __call__(
        self, batch: Batch, seed: Callable[[int], None], momentum: float, decay: float
    ) -> Step:
        """Take the step.

        Args:
            batch: On the device.
            seed: Sets torch's generators for a micro-batch.
            momentum: How much a momentum encoder keeps of itself.
            decay: How much an average of the backbone keeps.
        """
        run, model = self.run, self.model
        run.guard.remember()  # the buffers, for a step that is skipped
        compute_loss = partial(self.loss_fn, **loss_arguments(self.loss_fn, batch))  # ids, labels
        if self.cached is None:
            z_a, z_b = self.ddp(self.make_views(batch)).chunk(2)  # 2 x (B, D), one forward
            loss = compute_loss(z_a, z_b)  # (), over all ranks
            run.backward(loss)
        else:  # the same negatives and gradient, a slice of every stream at a time
            z_a, z_b, loss = self.cached(
                make_views=lambda rows: self.make_views(batch.rows(rows)),
                compute_loss=compute_loss,
                seed=seed,
            )

        # a non-finite step moves no weight and restores the buffers; it counts as a step
        with run.optimizer_step(loss) as decision:
            if isinstance(model, MomentumPair):
                model.follow(momentum)
            if model.ema is not None:
                follow(model.ema, model.backbone, decay, buffers=True)
        return Step(z_a, z_b, decision)


def build_gradient_cache(
    recipe: Recipe, model: Model, ddp: nn.Module, run: Run, crop_px: int
) -> CachedBackward | None:
    """Return `cached_backward` over the recipe's micro-batches; None without data.micro_batch."""
    data, world = recipe.data, run.process.world_size
    if data.micro_batches == 1:
        return None
    shape = (2, model.backbone.channels, crop_px, crop_px)
    view = torch.zeros(shape, dtype=run.dtype, device=run.device)
    rows = micro_batch_rows(data.batch_size // world, data.num_streams // world, data.micro_batches)
    return partial(cached_backward, ddp, PooledStatistics(model, view), rows, backward=run.backward)


def rates_at(step: int, recipe: Recipe) -> tuple[float, float]:
    """Return how much a momentum encoder and an average keep of themselves in a step; 1: all."""
    momentum, decay = recipe.momentum, recipe.optim.ema
    return (
        momentum_at(step, momentum, recipe.total_steps) if momentum else 1.0,
        decay_at(step, decay) if decay else 1.0,
    )


def loss_arguments(loss_fn: Objective, batch: Batch) -> dict[str, Tensor]:
    """Return what the objective takes beside the embeddings; groups only where it knows them."""
    arguments = batch.loss_arguments
    if "groups" in arguments and not takes_groups(loss_fn):
        del arguments["groups"]  # it has no negatives
    return arguments


def partner_shares(batch: Batch) -> dict[str, float]:
    """Return whose second view is a partner's in the global batch, and who has none. Collective.

    Shares of the batch, `partners` and `without_partner`; nothing without [pairs].
    """
    if batch.pairs is None:
        return {}
    ids, lonely = batch.pairs.ids, batch.pairs.lonely
    flags = all_gather_rows(torch.stack([ids[:, 0] != ids[:, 1], lonely], dim=1))  # (N, 2)
    partners, without = flags.double().mean(0).tolist()
    return {"partners": partners, "without_partner": without}


def open_batches(plan: Pretraining, run: Run, first_step: int, augment: Views) -> Generator[Batch]:
    """Open this rank's part of every global step, from `first_step` on, its views planned."""
    recipe = plan.recipe

    def plan_views(step: int, batch: Batch) -> Batch:  # in the loader's threads
        # their parameters are a function of (seed, epoch, sample, view)
        return augment.prepare(batch, seed=recipe.seed, number=batch.epoch)

    if recipe.run.cache == "device":
        run.reporter.say(
            f"decoding {plan.order.samples} images into the {run.device.type}'s memory"
        )
    return batches(
        plan.split if plan.pairing is None else plan.pairing.split,
        plan.order,
        recipe.data,
        recipe.run,
        run.process,
        first_step=first_step,
        device=run.device,
        on_bad=run.quarantine.add,
        prepare=plan_views,
        pairing=plan.pairing,
    )
