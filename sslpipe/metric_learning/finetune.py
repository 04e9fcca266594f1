"""Fine-tuning: labelled images become embeddings, embeddings become a metric loss."""

from collections.abc import Generator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sslpipe.augment.two_views import Views
from sslpipe.data.index import Split
from sslpipe.data.pipeline import Batch
from sslpipe.distributed import all_gather_rows, to_device
from sslpipe.evaluation.label_free import effective_rank
from sslpipe.evaluation.monitor import retrieval_monitor
from sslpipe.metric_learning.build import (
    Finetuning,
    FinetuningParts,
    class_neighbours,
    class_numbers,
    freeze_and_group,
    trained_labels,
)
from sslpipe.metric_learning.losses.base import MetricLoss
from sslpipe.metric_learning.losses.pairwise import LabelCounts, unit
from sslpipe.metric_learning.model import MetricTask
from sslpipe.metric_learning.sampling import PKOrder, pk_batches
from sslpipe.models.momentum import follow_average
from sslpipe.models.tuning import ProjectorFirst
from sslpipe.optim import optimizer_over
from sslpipe.recipe.finetune import FinetuneRecipe
from sslpipe.run.health import Alarms
from sslpipe.run.launch import seed_torch
from sslpipe.run.memory import warn_of_memory
from sslpipe.run.session import Run, open_run

ALARM_REMEDY = (
    "Lower optim.peak_lr (and tune.loss_lr, of proxies), lengthen optim.warmup_steps, or use "
    "another loss.kind: sup_con with temperature = 0.1 learns from many shapes of labels"
)


def finetune(plan: Finetuning, run_dir: Path, parts: FinetuningParts | None = None) -> int:
    """Train embeddings up to the plan's steps, resuming at run_dir's last checkpoint. Collective.

    The run directory is then what `load_backbone`, exports, `sslpipe embed` and the gallery take.
    Leaves DONE, PREEMPTED or FAILED in it.

    Args:
        plan: What `Finetuning.make` returned, for this run directory.
        run_dir: Where the run lives; the same one resumes.
        parts: What is trained; None: what the plan builds.

    Returns:
        The last step done: fewer than the recipe's where a stop was requested.

    Raises:
        UserError: For what the user can mend: launch, memory, a directory in use.
    """
    recipe = plan.recipe
    order = plan.order
    with open_run(recipe, run_dir) as run:  # processes, lock, watchdog
        if run.process.rank == 0:
            plan.start.keep(run_dir)

        # views, backbone with losses, optimizer of what is not frozen
        parts = parts or plan.build()
        augment = parts.augment
        task = parts.model
        remarks = plan.remarks(parts)  # or refused
        warn_of_memory(
            recipe,
            augment.crop_px,
            task,
            run.process,
            encoder=task.backbone,
            image_type=plan.index.image_type,
        )
        run.configure(recipe, recipe.optim.precision)
        augment = augment.to(run.device)
        task = run.place(task)
        neighbours = class_neighbours(recipe, task, order)
        groups = freeze_and_group(task, recipe)
        ddp, optimizer = run.prepare(task, optimizer_over(groups, recipe.optim))
        first_steps = recipe.tune.projector_first_steps
        projector_first = ProjectorFirst([task.backbone.network], first_steps)

        # resume: weights, optimizer, losses, queue; then the data from that step on
        view = plan.start.view(recipe, plan.index, augment.crop_px)  # of evaluations
        first_step = run.restore(
            plan,
            {**finetuning_parts(task, optimizer), "neighbours": neighbours},
            guarded=[task],  # the neighbours follow only steps that were taken
            alarms=Alarms(
                recipe.total_steps,
                most_rank=recipe.sampler.classes_per_batch / 2,
                grows="queue_rows" if recipe.queue is not None else "",
                remedy=ALARM_REMEDY,
            ),
            metadata={  # data set labels that are trained on; the start
                "classes": trained_labels(order, plan.split),
                **plan.start.metadata(view),
            },
        )
        run.announce(describe_start(plan), remarks)
        score = partial(retrieval_monitor, canvas_px=recipe.data.canvas_px, bank=plan.bank)
        run.monitor(score, task.backbone, view, plan.split, plan.watched, ema=task.ema)
        run.evaluate_start()  # of a run from weights: it should not fall below
        classes = torch.from_numpy(order.classes)  # (C,) labels that are trained on, ascending
        stream = open_batches(recipe, plan.split, order, run, first_step, augment)

        for step, batch in run.steps(stream):  # sets the learning rate; all ranks
            run.guard.remember()  # the buffers, for a step that is skipped
            projector_first.begin(step)  # the backbone is frozen in tune.projector_first_steps
            seed_torch(run.device, recipe.seed, step, run.process.rank)  # dropout and the like
            labels, ids, counts = view_labels(batch, classes, recipe.views, run.device)
            use_queue = recipe.queue is not None and step >= recipe.queue.start_step

            # views, embeddings, losses, gradient
            views = augment(batch.to(run.device), dtype=run.view_dtype)  # (views * B, 3, S, S)
            loss, embeddings = ddp(views, labels, ids, use_queue, counts)  # (), (views * B, D)
            run.backward(loss)

            # queue, weights, their average: a skipped step changes nothing
            rows = image_by_image(len(ids), recipe.views, ids.device)
            embeddings, labels, ids = embeddings[rows], labels[rows], ids[rows]
            if task.queue is not None:
                task.queue.push(embeddings, labels, ids)
            with run.optimizer_step(loss) as decision:
                if task.ema is not None and recipe.optim.ema:
                    follow_average(task.ema, task.backbone, recipe.optim.ema, step)
                if neighbours is not None:  # at an epoch's end the next table is made
                    neighbours.follow(embeddings, labels.masked_fill(decision.skipped, -1))
                    if (step + 1) % order.steps_per_epoch == 0:
                        neighbours.begin((step + 1) // order.steps_per_epoch)
            run.step_done(step, batch, decision)
            if run.is_log_step(step):  # all ranks compute, rank 0 writes
                run.log(step, {**mining_stats(task), **similarities(embeddings, labels)})
            run.evaluate_if_due(step)  # all ranks embed, rank 0 scores
            run.save_if_due(step)  # all ranks agree whether to stop, rank 0 writes
        return run.finish()


def describe_start(plan: Finetuning) -> str:
    """Return how many images of how many classes are trained on, and from which weights."""
    order = plan.order
    start = plan.start.describe(plan.recipe.tune) or "; random weights"
    return (
        f"{order.samples} images of {len(order.classes)} classes, {order.steps_per_epoch} steps an "
        f"epoch of {order.batch_size} images{start}"
    )


def open_batches(
    recipe: FinetuneRecipe, split: Split, order: PKOrder, run: Run, first_step: int, augment: Views
) -> Generator[Batch]:
    """Open this rank's rows of every step's batch, from `first_step` on, their views planned."""

    def plan_views(step: int, batch: Batch) -> Batch:  # in the loader's threads
        # a sample may come twice in an epoch, never twice in a step: the step names its numbers
        return augment.prepare(batch, seed=recipe.seed, number=step)

    return pk_batches(
        split,
        order,
        recipe.run,
        run.process,
        canvas_px=recipe.data.canvas_px,
        first_step=first_step,
        device=run.device,
        on_bad=run.quarantine.add,
        prepare=plan_views,
    )


def finetuning_parts(task: MetricTask, optimizer: Any) -> dict[str, Any]:
    """Return what a checkpoint holds; `model` is what an export takes."""
    average = {} if task.ema is None else {"ema": task.ema}
    return {
        "model": nn.ModuleDict({"backbone": task.backbone, **average}),
        "optimizer": optimizer,
        "losses": task.losses,
        "miner": task.miner,
        "queue": task.queue,
    }


def image_by_image(rows: int, views: int, device: torch.device) -> Tensor:
    """Return the order (rows,) in which the views of an image follow one another.

    Rows come view by view; in this order the ranks' rows, concatenated, are one process's.
    """
    return torch.arange(rows, device=device).view(views, -1).T.flatten()


def view_labels(
    batch: Batch, classes: Tensor, views: int, device: torch.device
) -> tuple[Tensor, Tensor, LabelCounts]:
    """Label each of the views that are made of a batch. Collective.

    Args:
        batch: Of this rank, B images.
        classes: (C,) int64, the labels that are trained on, ascending.
        views: Of each image.
        device: Where the labels are wanted.

    Returns:
        Class indices, -1 for a class that is not trained on, and sample ids: both (views * B,)
        int64, view by view. And what losses ask of the labels of all ranks, counted on the host.
    """
    labels = class_numbers(batch.labels, classes).repeat(views)
    ids = batch.source_ids.repeat(views)
    everyone = all_gather_rows(labels)
    sizes = everyone[everyone >= 0].bincount()  # of the classes
    most_positives = int(sizes.max()) - 1 if len(sizes) else 0
    counts = LabelCounts(int((labels < 0).sum()), most_positives)
    return to_device(labels, device), to_device(ids, device), counts


def mining_stats(task: MetricTask) -> Mapping[str, float]:
    """Count what the step's losses compared, and how much of it still costs something.

    Returns:
        `compared` and `active`: pairs, triplets or tuples of the global batch, and those with a
        loss above 0, of the first loss that counts them; near 0 active, the step teaches nothing.
        `queue_rows`: rows of the queue.
    """
    numbers: dict[str, float] = {}
    for loss in task.losses:
        if isinstance(loss, MetricLoss):  # heads have no pairs
            numbers = {"compared": loss.last_count, "active": loss.last_active}
            break
    if task.queue is not None:
        numbers["queue_rows"] = float(task.queue.count)
    return numbers


@torch.no_grad()
def similarities(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """Average the cosines of pairs of one class and of two, and the effective rank. Collective.

    Args:
        embeddings: (B, D) of this rank, any scale.
        labels: (B,) int64.
    """
    u = unit(all_gather_rows(embeddings).float())  # (N, D)
    labels = all_gather_rows(labels)
    cosines = u @ u.T
    same = labels[:, None] == labels
    other = ~same
    same.fill_diagonal_(False)
    return {
        "positive_similarity": float(cosines[same].mean()),
        "negative_similarity": float(cosines[other].mean()),
        "effective_rank": float(effective_rank(u)),
    }
