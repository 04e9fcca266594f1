"""Fine-tuning: labelled images become embeddings, embeddings become a metric loss."""

from collections.abc import Generator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from sslpipe.data.pipeline import Batch
from sslpipe.distributed import all_gather_rows, to_device
from sslpipe.evaluation.label_free import effective_rank
from sslpipe.metric_learning.classes import class_numbers
from sslpipe.metric_learning.finetune_parts import FinetuningParts
from sslpipe.metric_learning.finetune_plan import Finetuning
from sslpipe.metric_learning.losses.metric_loss import MetricLoss
from sslpipe.metric_learning.losses.pairwise import LabelCounts, unit
from sslpipe.metric_learning.metric_task import MetricTask
from sslpipe.metric_learning.pk_loader import pk_batches
from sslpipe.run.opening import open_run
from sslpipe.run.run import Run


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
    # processes, lock and watchdog; parts on the device, resumed at the last checkpoint; the log
    with open_run(plan, run_dir, parts) as run:
        task = run.parts.model
        neighbours = run.parts.neighbours
        classes = torch.from_numpy(order.classes)  # (C,) labels that are trained on, ascending

        for step, batch in run.steps(open_batches(plan, run)):  # sets the learning rate; all ranks
            labels, ids, counts = view_labels(batch, classes, recipe.views, run.device)
            views = run.augment(batch)  # (views * B, 3, S, S), made as the model takes them
            # (), (views * B, D)
            loss, embeddings = run.model(views, labels, ids, counts)

            # backward, clip, optimizer; a non-finite step changes nothing, and is counted
            with run.step(batch, loss) as decision:
                rows = image_by_image(len(ids), recipe.views, ids.device)
                embeddings = embeddings[rows]
                labels = labels[rows]
                ids = ids[rows]
                if task.queue is not None:
                    task.queue.push(embeddings, labels, ids)
                if neighbours is not None:  # at an epoch's end the next table is made
                    neighbours.follow(embeddings, labels.masked_fill(decision.skipped, -1))
                    if (step + 1) % order.steps_per_epoch == 0:
                        neighbours.begin((step + 1) // order.steps_per_epoch)
            if run.is_log_step(step):  # all ranks compute, rank 0 writes
                run.log({**mining_stats(task), **similarities(embeddings, labels)})
            run.after(step)  # evaluate, save, stop: where due
        return run.finish()


def open_batches(plan: Finetuning, run: Run[FinetuningParts]) -> Generator[Batch]:
    """Open this rank's rows of every step's batch that is left, their views planned."""
    recipe = plan.recipe
    augment = run.parts.augment
    order = plan.order
    if run.parts.neighbours is not None:
        order = order.with_nearest(run.parts.neighbours.nearest_classes)

    def plan_views(step: int, batch: Batch) -> Batch:  # in the loader's threads
        # a sample may come twice in an epoch, never twice in a step: the step names its numbers
        return augment.prepare(batch, seed=recipe.seed, number=step)

    return pk_batches(
        split=plan.split,
        order=order,
        run=recipe.run,
        process=run.process,
        canvas_px=recipe.data.canvas_px,
        first_step=run.first_step,
        device=run.device,
        on_bad=run.quarantine.add,
        prepare=plan_views,
    )


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
