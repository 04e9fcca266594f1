"""Fine-tuning: labelled images become embeddings, embeddings become a metric loss."""

import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sslpipe.augment.params import draws
from sslpipe.data.index import DatasetIndex
from sslpipe.data.pipeline import Batch
from sslpipe.distributed import Rank, all_gather_rows
from sslpipe.evaluation.geometry import effective_rank
from sslpipe.export.load import FrozenBackbone
from sslpipe.metric_learning.build import FinetuneSession, set_up_finetune
from sslpipe.metric_learning.losses.base import MetricLoss
from sslpipe.metric_learning.losses.pairwise import unit
from sslpipe.random import hash_integers
from sslpipe.recipe.finetune import FinetuneRecipe
from sslpipe.run.session import Stepped, run_steps, watched
from sslpipe.run.watchdog import Watchdog


def finetune(
    recipe: FinetuneRecipe,
    index: DatasetIndex,
    run_dir: Path,
    backbone: FrozenBackbone | None = None,
) -> int:
    """Train embeddings up to the recipe's steps, going on from run_dir's last checkpoint.

    backbone: the pretrained one to start from; None: random weights of the recipe's [backbone].
    The run directory is then what `load_backbone`, exports, sslpipe.cli.embed and the gallery take.
    Returns the last step done. Leaves DONE, PREEMPTED or FAILED in run_dir. Collective.
    Raises: UserError for what the user can mend.
    """

    def body(process: Rank, beat: Watchdog) -> int:
        with set_up_finetune(recipe, index, run_dir, process, backbone) as run:
            return run_steps(run, process, beat, partial(_train_step, run, process))

    return watched(recipe, run_dir, body)


def _train_step(run: FinetuneSession, process: Rank, step: int, batch: Batch) -> Stepped:
    recipe, task = run.recipe, run.task
    uses_queue = recipe.queue is not None and step >= recipe.queue.start_step
    torch.manual_seed(int(hash_integers(recipe.seed, step, process.rank) >> 1))  # dropout

    # a sample may come twice in an epoch, never twice in a step: the step names its numbers
    drawn = draws(recipe.seed, step, batch.ids, batch.sizes, run.augment.specs)
    labels = run.class_of[batch.labels].repeat(recipe.views).to(run.device)  # (views * B,)
    ids = batch.source_ids.repeat(recipe.views).to(run.device)
    views = run.augment(batch.to(run.device), drawn).to(run.dtype)  # (views * B, 3, S, S)
    loss, embeddings = run.wrapped(views, labels, ids, uses_queue)  # (), (.., D)
    run.accelerator.backward(loss)
    grad_norm = run.accelerator.clip_grad_norm_(
        task.parameters(), recipe.optim.clip_norm or math.inf
    )
    # image by image, so that ranks put together are one process's rows
    rows = torch.arange(len(ids), device=ids.device).view(recipe.views, -1).T.flatten()
    embeddings, labels, ids = embeddings[rows], labels[rows], ids[rows]
    if task.queue is not None:
        task.queue.push(embeddings, labels, ids)
    # a non-finite step leaves weights, statistics and queue as they were
    moved = run.guard.step_or_undo(
        run.accelerator, run.optimizer, step, batch.ids, batch.source_ids, loss, grad_norm
    )
    if run.neighbours is not None:
        if moved:
            run.neighbours.follow(embeddings, labels)
        if (step + 1) % run.steps_per_epoch == 0:
            run.neighbours.begin((step + 1) // run.steps_per_epoch)
    return Stepped(loss, grad_norm, lambda: {**_mined(run), **similarities(embeddings, labels)})


def _mined(run: FinetuneSession) -> dict[str, float]:
    """What the step's losses compared, and how much of it still costs something.

    active: pairs, triplets or tuples of the global batch with a loss above 0, of the first loss
    that counts them; near 0, the step teaches nothing.
    """
    numbers: dict[str, float] = {}
    for loss in run.task.losses:
        if isinstance(loss, MetricLoss):  # heads have no pairs
            numbers = {"compared": loss.last_count, "active": loss.last_active}
            break
    if run.task.queue is not None:
        numbers["queue_rows"] = float(run.task.queue.count)
    return numbers


@torch.no_grad()
def similarities(embeddings: Tensor, labels: Tensor) -> dict[str, float]:
    """Mean cosine of the global batch's pairs of one class and of two, and the effective rank of
    its directions. embeddings: (B, D), any scale; labels: (B,). Equal on all ranks; collective."""
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
