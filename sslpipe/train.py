"""The training loop: images become views, views become embeddings, embeddings become a loss."""

import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sslpipe.augment.parameters import Draws, draws
from sslpipe.data.index import DatasetIndex
from sslpipe.data.loader import Batch
from sslpipe.distributed import Shard, agree
from sslpipe.errors import UserError
from sslpipe.faults import fault
from sslpipe.health import health
from sslpipe.models.momentum import MomentumPair, momentum_at
from sslpipe.ops.lock import take_lock
from sslpipe.ops.stop import write_failure, write_marker
from sslpipe.ops.watchdog import Watchdog
from sslpipe.optim import lr_at, set_lr
from sslpipe.recipe import Recipe
from sslpipe.setup import Session, set_up
from sslpipe.start import check_split, start_processes
from sslpipe.stateless import hash_integers


def train(recipe: Recipe, index: DatasetIndex, run_dir: Path) -> int:
    """Pretrain up to the recipe's steps, going on from run_dir's last checkpoint.

    Returns the last step done: fewer than the recipe's where a stop was asked for. Leaves DONE,
    PREEMPTED or FAILED in run_dir. Collective. Raises: UserError for what the user can mend.
    """
    shard = start_processes(recipe)
    with take_lock(run_dir, shard):
        try:
            check_split(recipe, shard.world)
            with (
                Watchdog(run_dir, shard, recipe.run.timeout_s) as beat,
                set_up(recipe, index, run_dir, shard) as session,
            ):
                return _loop(session, shard, beat)
        except torch.OutOfMemoryError as error:
            text = f"{error}; {_LESS_MEMORY}"
            write_failure(run_dir, f"rank {shard.rank}: UserError: {text}")
            raise UserError(text) from error
        except BaseException as error:
            write_failure(run_dir, f"rank {shard.rank}: {type(error).__name__}: {error}")
            raise


def _loop(run: Session, shard: Shard, beat: Watchdog) -> int:
    recipe, every, steps = run.recipe, run.recipe.run, run.recipe.total_steps
    log, done, stop = run.log, run.first_step, False
    beat(done, "waiting for data")

    for step, batch in zip(range(run.first_step, steps), run.stream, strict=False):
        beat(step, "training")
        lr = set_lr(run.optimizer, lr_at(step, recipe.optim, steps))
        run.guard.remember()
        seed = partial(_seed_forward, recipe.seed, step, shard.rank)  # dropout and the like

        drawn = draws(recipe.seed, batch.epoch, batch.ids, batch.sizes, run.augment.specs)
        batch = batch.to(run.device)
        loss_of = partial(run.loss_fn, ids=batch.source_ids, labels=batch.labels)
        if run.cached_backward is None:
            seed(0)
            views = run.augment(batch, drawn).to(run.dtype)  # (2B, 3, S, S)
            z_a, z_b = run.wrapped(views).chunk(2)  # 2 x (B, D), one forward
            loss = loss_of(z_a, z_b)  # (), of all ranks
            run.accelerator.backward(loss)
        else:  # data.micro_batch: the same, a slice of every stream at a time
            views_of = partial(_views_of_rows, run, batch, drawn)
            z_a, z_b, loss = run.cached_backward(views_of=views_of, loss_of=loss_of, seed=seed)
        grad_norm = run.accelerator.clip_grad_norm_(
            run.model.parameters(), recipe.optim.clip_norm or math.inf
        )
        # a non-finite step leaves weights and buffers as they were
        moved = run.guard.step_or_undo(
            run.accelerator, run.optimizer, step, batch.ids, batch.source_ids, loss, grad_norm
        )
        if moved and recipe.momentum and isinstance(run.model, MomentumPair):
            run.model.follow(momentum_at(step, recipe.momentum, steps))

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
                **health(z_a, z_b),
                "negatives_per_anchor": run.loss_fn.last_negatives,
                "skipped_steps": run.guard.skipped,
                "overflows": run.guard.overflows,
                "quarantined": run.quarantine.collect(),
            }
            log.train(done, numbers)
            log.alarms(done, run.alarms.read(numbers))
        if run.monitor_steps and (last or _due(done, run.monitor_steps)):
            beat(done, "evaluating")
            fault("train.monitor")
            with run.meter.paused():  # all ranks embed, rank 0 scores
                log.evals(done, run.monitor())
        stop = agree(run.stop_requested())  # one number over all ranks
        if stop or last or _due(done, every.save_steps):  # all ranks; rank 0 writes
            beat(done, "saving")
            with run.meter.paused():
                run.checkpoints.save(done, run.parts, run.facts, needed=stop or last)
        if stop:
            break
        beat(done, "waiting for data")

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


_LESS_MEMORY = (
    "the last checkpoint stands. Set data.micro_batch to a part of data.batch_size (the same "
    "negatives, less memory), use optim.precision = 'bf16', or start more processes"
)


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _views_of_rows(run: Session, batch: Batch, drawn: Draws, rows: Tensor) -> Tensor:
    """Both views of some of the batch's rows, (2b, 3, S, S): the same whenever they are made."""
    both = torch.cat([rows, rows + len(batch.ids)])
    views: Tensor = run.augment(batch.rows(rows), drawn.rows(both))
    return views.to(run.dtype)


def _seed_forward(seed: int, step: int, rank: int, micro_batch: int) -> None:
    torch.manual_seed(int(hash_integers(seed, step, rank, micro_batch) >> 1))  # a positive int64
