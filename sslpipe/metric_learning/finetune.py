"""Fine-tuning: labelled images become embeddings, embeddings become a metric loss."""

from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

import torch
from torch import Tensor, nn

from sslpipe.augment.build import build_augment
from sslpipe.augment.eval_view import eval_view_for
from sslpipe.augment.params import draws
from sslpipe.augment.two_views import Views
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.loader import open_reader
from sslpipe.distributed import all_gather_rows
from sslpipe.evaluation.geometry import effective_rank
from sslpipe.evaluation.monitor import retrieval_monitor
from sslpipe.export.load import FrozenBackbone
from sslpipe.metric_learning.build import (
    ORDER_AND_PK_VERSION,
    build_task,
    class_index,
    class_neighbours,
    freeze_and_optimize,
    plan_batches,
    plan_warnings,
    validation_ids,
    with_backbone,
)
from sslpipe.metric_learning.losses.base import MetricLoss
from sslpipe.metric_learning.losses.pairwise import unit
from sslpipe.metric_learning.model import MetricTask
from sslpipe.metric_learning.sampling.batches import pk_batches
from sslpipe.recipe.finetune import FinetuneRecipe
from sslpipe.run.session import Run, open_run, seed_torch

MOST_VALIDATED = 4000  # samples of the validation classes that are scored: evenly spaced ones


def finetune(
    recipe: FinetuneRecipe,
    index: DatasetIndex,
    run_dir: Path,
    init_from: FrozenBackbone | None = None,
) -> int:
    """Train embeddings up to the recipe's steps, resuming at run_dir's last checkpoint.

    The run directory is then what `load_backbone`, exports, `sslpipe embed` and the gallery take.
    Leaves DONE, PREEMPTED or FAILED in it. Collective.

    Args:
        recipe: What `sslpipe.load_recipe` returns for a recipe with [sampler].
        index: The labelled data set.
        run_dir: Where the run lives; the same one resumes.
        init_from: The pretrained backbone; None: random weights of the recipe's [backbone].

    Returns:
        The last step done: fewer than the recipe's where a stop was asked for.

    Raises:
        UserError: For what the user can mend: recipe, data, launch, a directory in use.
    """
    with open_run(recipe, run_dir) as run:  # processes, lock, watchdog
        # data: the batches of an epoch are planned from its labels before anything is read
        split = index.split(recipe.data.split)
        index.check_files(split.name, allow_pipe=recipe.run.allow_pipe)
        order = plan_batches(recipe, index)
        recipe = with_backbone(recipe, init_from).resolved(order.steps_per_epoch)

        # views, backbone with losses, optimizer of what is not frozen
        augment = build_augment(recipe, index, compiled=recipe.run.compile)
        augment.specs = augment.specs[: recipe.views]  # type: ignore[assignment]
        task = build_task(recipe, augment.crop_px, init_from, len(order.classes))
        run.configure(recipe, recipe.optim.precision)
        augment, task = augment.to(run.device), run.place(task)
        neighbours = class_neighbours(recipe, task, order, run)
        ddp, optimizer = run.prepare(task, freeze_and_optimize(task, recipe))

        # resume: weights, optimizer, losses, queue; then the data from that step on
        parts = {
            "model": nn.ModuleDict({"backbone": task.backbone}),  # what an export takes
            "optimizer": optimizer,
            "losses": task.losses,
            "miner": task.miner,
            "queue": task.queue,
            "neighbours": neighbours,
        }
        first_step = run.restore(
            index,
            order,
            parts,
            order_version=ORDER_AND_PK_VERSION,
            guarded=[task],  # the neighbours follow only steps that were taken
            metadata={"classes": order.classes.tolist()},  # data set labels that are trained on
        )
        source = "pretrained" if init_from is not None else "random"
        run.announce(
            f"{order.samples} images of {len(order.classes)} classes, {order.steps_per_epoch} "
            f"steps an epoch of {order.batch_size} images; from {source} weights",
            plan_warnings(recipe, index, order, augment.crop_px),
        )
        validate = build_monitor(recipe, index, task, augment, run)
        index_of = class_index(order, split)  # (labels,): 0..C-1 of the trained classes, or -1
        stream = pk_batches(
            split,
            order,
            recipe.run,
            run.process,
            canvas_px=recipe.data.canvas_px,
            first_step=first_step,
            device=run.device,
            on_bad=run.quarantine.add,
        )

        for step, batch in run.steps(stream):  # all ranks
            seed_torch(recipe.seed, step, run.process.rank)  # dropout and the like
            # a sample may come twice in an epoch, never twice in a step: the step names its numbers
            params = draws(recipe.seed, step, batch.ids, batch.sizes, augment.specs)
            labels = index_of[batch.labels].repeat(recipe.views).to(run.device)  # (views * B,)
            ids = batch.source_ids.repeat(recipe.views).to(run.device)
            use_queue = recipe.queue is not None and step >= recipe.queue.start_step

            views = augment(batch.to(run.device), params).to(run.dtype)  # (views * B, 3, S, S)
            loss, embeddings = ddp(views, labels, ids, use_queue)  # (), (views * B, D)
            run.backward(loss)

            # image by image, so that the ranks put together are one process's rows
            rows = torch.arange(len(ids), device=ids.device).view(recipe.views, -1).T.flatten()
            embeddings, labels, ids = embeddings[rows], labels[rows], ids[rows]
            if task.queue is not None:
                task.queue.push(embeddings, labels, ids)
            moved = run.optimizer_step(step, batch, loss)  # a non-finite step changes nothing
            if neighbours is not None:
                if moved:
                    neighbours.follow(embeddings, labels)
                if run.last_step % order.steps_per_epoch == 0:
                    neighbours.begin(run.last_step // order.steps_per_epoch)
            if run.is_log_step(step):  # all ranks compute, rank 0 writes
                run.log(step, loss, {**mining_stats(task), **similarities(embeddings, labels)})
            run.evaluate_if_due(step, validate)  # all ranks embed, rank 0 scores
            run.save_if_due(step)  # all ranks agree whether to stop, rank 0 writes
        return run.finish()


def build_monitor(
    recipe: FinetuneRecipe, index: DatasetIndex, task: MetricTask, augment: Views, run: Run
) -> Callable[[], dict[str, float]] | None:
    """Return retrieval among samples of the validation classes; None without such classes."""
    split: Split = index.split(recipe.data.split)
    ids = validation_ids(split, recipe.data.validation_classes, index.manifest.classes)
    if not len(ids):
        return None
    return partial(
        retrieval_monitor,
        task.backbone,
        eval_view_for(augment.crop_px, augment.mean.tolist(), augment.std.tolist()),
        split,
        ids[:: -(-len(ids) // MOST_VALIDATED)],
        run.process,
        canvas_px=recipe.data.canvas_px,
        num_workers=recipe.run.num_workers,
        device=run.device,
        reader=open_reader(split, recipe.run),
    )


def mining_stats(task: MetricTask) -> Mapping[str, float]:
    """What the step's losses compared, and how much of it still costs something.

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
    """Mean cosine of the global batch's pairs of one class and of two, and the effective rank.

    Equal on all ranks; collective.

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
