"""The fine-tuning loop: labelled images become embeddings, embeddings become a metric loss."""

import math
from pathlib import Path

import torch
from torch import Tensor

from sslpipe.augment.parameters import draws
from sslpipe.data.index import DatasetIndex
from sslpipe.distributed import Shard, agree, all_gather_rows
from sslpipe.faults import fault
from sslpipe.finetune_recipe import FinetuneRecipe
from sslpipe.finetune_setup import FinetuneSession, set_up_finetune
from sslpipe.frozen import FrozenBackbone
from sslpipe.health import effective_rank
from sslpipe.metric_learning.compare import unit
from sslpipe.metric_learning.loss import MetricLoss
from sslpipe.ops.lock import take_lock
from sslpipe.ops.stop import write_failure, write_marker
from sslpipe.optim import lr_at, set_lr
from sslpipe.start import start_processes
from sslpipe.stateless import hash_integers


def finetune(
    recipe: FinetuneRecipe,
    index: DatasetIndex,
    run_dir: Path,
    backbone: FrozenBackbone | None = None,
) -> int:
    """Train embeddings up to the recipe's steps, going on from run_dir's last checkpoint.

    backbone: the pretrained one to start from; None: random weights of the recipe's [backbone].
    The run directory is then what `load_backbone`, exports, tools.embed and the gallery take.
    Returns the last step done. Leaves DONE, PREEMPTED or FAILED in run_dir. Collective.
    Raises: UserError for what the user can mend.
    """
    shard = start_processes(recipe)
    with take_lock(run_dir, shard):
        try:
            with set_up_finetune(recipe, index, run_dir, shard, backbone) as session:
                return _loop(session, shard)
        except BaseException as error:
            write_failure(run_dir, f"rank {shard.rank}: {type(error).__name__}: {error}")
            raise


def _loop(run: FinetuneSession, shard: Shard) -> int:
    recipe, every, steps = run.recipe, run.recipe.run, run.recipe.total_steps
    log, task, done, stop = run.log, run.task, run.first_step, False
    queue_from = recipe.queue.start_step if recipe.queue else steps

    for step, batch in zip(range(run.first_step, steps), run.stream, strict=False):
        lr = set_lr(run.optimizer, lr_at(step, recipe.optim, steps))
        run.guard.remember()
        torch.manual_seed(int(hash_integers(recipe.seed, step, shard.rank) >> 1))  # dropout

        # a sample may come twice in an epoch, never twice in a step: the step names its numbers
        drawn = draws(recipe.seed, step, batch.ids, batch.sizes, run.augment.specs)
        labels = run.class_of[batch.labels].repeat(recipe.views).to(run.device)  # (views * B,)
        ids = batch.source_ids.repeat(recipe.views).to(run.device)
        views = run.augment(batch.to(run.device), drawn).to(run.dtype)  # (views * B, 3, S, S)
        loss, embeddings = run.wrapped(views, labels, ids, step >= queue_from)  # (), (.., D)
        run.accelerator.backward(loss)
        grad_norm = run.accelerator.clip_grad_norm_(
            task.parameters(), recipe.optim.clip_norm or math.inf
        )
        if task.queue is not None:
            # image by image, so that ranks put together are one process's rows
            rows = torch.arange(len(ids), device=ids.device).view(recipe.views, -1).T.flatten()
            task.queue.push(embeddings[rows], labels[rows], ids[rows])
        # a non-finite step leaves weights, statistics and queue as they were
        run.guard.step_or_undo(
            run.accelerator, run.optimizer, step, batch.ids, batch.source_ids, loss, grad_norm
        )

        done = step + 1
        last = done == steps
        fault("train.step")
        log.step_done(done)
        if last or _due(done, every.log_steps):  # all ranks; rank 0 writes
            numbers = {
                "loss": float(loss.detach()),
                "lr": lr,
                "grad_norm": float(grad_norm),
                "epoch": done / run.steps_per_epoch,
                **run.meter.read(done - run.first_step),
                **_mined(run),
                **similarities(embeddings, labels),
                "skipped_steps": run.guard.skipped,
                "overflows": run.guard.overflows,
                "quarantined": run.quarantine.collect(),
            }
            log.train(done, numbers)
        if run.monitor_steps and (last or _due(done, run.monitor_steps)):
            with run.meter.paused():  # all ranks embed, rank 0 scores
                log.evals(done, run.monitor())
        stop = agree(run.stop_requested())  # one number over all ranks
        if stop or last or _due(done, every.save_steps):  # all ranks; rank 0 writes
            with run.meter.paused():
                run.checkpoints.save(done, run.parts, run.facts, needed=stop or last)
        if stop:
            break

    run.quarantine.collect()
    log.event(done, "stop" if stop else "end")
    if shard.rank == 0:
        write_marker(run.run_dir, "PREEMPTED" if done < steps else "DONE", f"step {done}")
    log.say(
        f"stopped at step {done} of {steps}; the same command goes on from there"
        if done < steps
        else f"done: {steps} steps in {run.run_dir}"
    )
    return done


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


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
