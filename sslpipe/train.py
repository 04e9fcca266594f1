"""Pretraining: images become views, views become embeddings, embeddings become a loss."""

import math
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from sslpipe.augment.params import Draws, draws
from sslpipe.data.index import DatasetIndex
from sslpipe.data.pipeline import Batch
from sslpipe.distributed import Rank
from sslpipe.models.momentum import MomentumPair, momentum_at
from sslpipe.random import hash_integers
from sslpipe.recipe.pretrain import Recipe
from sslpipe.run.health import embedding_health
from sslpipe.run.launch import check_split
from sslpipe.run.session import Stepped, run_steps, watched
from sslpipe.run.setup import PretrainSession, set_up
from sslpipe.run.watchdog import Watchdog


def train(recipe: Recipe, index: DatasetIndex, run_dir: Path) -> int:
    """Pretrain up to the recipe's steps, going on from run_dir's last checkpoint.

    Returns the last step done: fewer than the recipe's where a stop was asked for. Leaves DONE,
    PREEMPTED or FAILED in run_dir. Collective. Raises: UserError for what the user can mend.
    """

    def body(process: Rank, beat: Watchdog) -> int:
        check_split(recipe, process.world_size)
        with set_up(recipe, index, run_dir, process) as run:
            return run_steps(run, process, beat, partial(_train_step, run, process))

    return watched(recipe, run_dir, body)


def _train_step(run: PretrainSession, process: Rank, step: int, batch: Batch) -> Stepped:
    recipe, steps = run.recipe, run.recipe.total_steps
    seed = partial(_seed_forward, recipe.seed, step, process.rank)  # dropout and the like

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
    return Stepped(
        loss,
        grad_norm,
        lambda: {**embedding_health(z_a, z_b), "negatives_per_anchor": run.loss_fn.last_negatives},
    )


def _views_of_rows(run: PretrainSession, batch: Batch, drawn: Draws, rows: Tensor) -> Tensor:
    """Both views of some of the batch's rows, (2b, 3, S, S): the same whenever they are made."""
    both = torch.cat([rows, rows + len(batch.ids)])
    views: Tensor = run.augment(batch.rows(rows), drawn.rows(both))
    return views.to(run.dtype)


def _seed_forward(seed: int, step: int, rank: int, micro_batch: int) -> None:
    torch.manual_seed(int(hash_integers(seed, step, rank, micro_batch) >> 1))  # a positive int64
