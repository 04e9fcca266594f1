"""The training loop: images become views, views become embeddings, embeddings become a loss."""

import json
import math
import os
import warnings
from pathlib import Path
from typing import Any, cast

import torch

from sslpipe.augment.eval_view import eval_view_for
from sslpipe.augment.parameters import draws
from sslpipe.augment.two_views import AUGMENTS, Views
from sslpipe.batchnorm import sync_batchnorm
from sslpipe.checkpoint import Checkpointer
from sslpipe.data.index import DatasetIndex
from sslpipe.data.loader import Quarantined, batches
from sslpipe.data.order import ORDER_VERSION, Order, held_out
from sslpipe.distributed import Shard, agree, broadcast_object, gather_objects
from sslpipe.errors import DataError, UserError
from sslpipe.evaluation.monitor import monitor
from sslpipe.faults import fault
from sslpipe.flops import peak_flops, step_flops
from sslpipe.guard import StepGuard
from sslpipe.health import health
from sslpipe.log import RunLog
from sslpipe.losses import LOSSES
from sslpipe.meter import Meter
from sslpipe.models.backbones import build_backbone, stem_warning
from sslpipe.models.simclr import SimCLR
from sslpipe.ops.lock import RunLock
from sslpipe.ops.stop import StopRequest, clear_markers, write_marker
from sslpipe.optim import build_optimizer, lr_at, set_lr
from sslpipe.recipe import Recipe, digest
from sslpipe.registry import build
from sslpipe.start import environment, resolve_precision, start_accelerator, start_processes
from sslpipe.stateless import hash_integers


def plan_order(recipe: Recipe, index: DatasetIndex) -> Order:
    """The order of a run: the split without its held-out slice."""
    split = index.split(recipe.data.split)
    return Order(
        split.starts,
        seed=recipe.seed,
        batch_size=recipe.data.batch_size,
        num_streams=recipe.data.num_streams,
        window=recipe.data.shuffle_window,
        without=held_out(split.labels, recipe.data.holdout),
    )


def build_augment(recipe: Recipe, index: DatasetIndex) -> Views:
    """The recipe's views, with the data set's mean and std unless the recipe gives its own."""
    manifest = index.manifest
    return build(AUGMENTS, recipe.augment, section="augment", mean=manifest.mean, std=manifest.std)


def build_model(recipe: Recipe, crop_px: int) -> SimCLR:
    """Encoder and projector with weights drawn from recipe.seed: the same on every rank."""
    torch.manual_seed(recipe.seed)
    return SimCLR(build_backbone(recipe.backbone, crop_px=crop_px), recipe.projector)


def train(recipe: Recipe, index: DatasetIndex, run_dir: Path) -> int:
    """Pretrain up to the recipe's steps, going on from run_dir's last checkpoint.

    Returns the last step done: fewer than the recipe's where a stop was asked for. Leaves DONE,
    PREEMPTED or FAILED in run_dir. Raises: UserError for what the user can mend.
    """
    shard = start_processes(recipe)
    lock = _take_lock(run_dir, shard)
    try:
        return _train(recipe, index, run_dir, shard, lock)
    except BaseException as error:
        if shard.rank == 0:
            write_marker(run_dir, "FAILED", f"{type(error).__name__}: {error}")
        raise
    finally:
        if lock:
            lock.release()


def _train(
    recipe: Recipe, index: DatasetIndex, run_dir: Path, shard: Shard, lock: RunLock | None
) -> int:
    split = index.split(recipe.data.split)
    index.check_files(recipe.data.split, allow_pipe=recipe.run.allow_pipe)
    order = plan_order(recipe, index)
    recipe = recipe.resolved(order.steps_per_epoch)
    steps, every = recipe.total_steps, recipe.run

    augment = build_augment(recipe, index)
    model = build_model(recipe, augment.crop_px)
    precision = resolve_precision(recipe, run_dir, model, augment.crop_px)
    accelerator = start_accelerator(recipe, precision)
    device = accelerator.device
    augment, loss_fn = augment.to(device), build(LOSSES, recipe.loss, section="loss").to(device)

    flops = step_flops(model, recipe.data.batch_size, augment.crop_px)
    dtype = torch.float64 if precision == "fp64" else torch.float32
    model = model.to(device, dtype).to(memory_format=torch.channels_last)
    if recipe.batchnorm == "global":
        model = cast(SimCLR, sync_batchnorm(model, shard.world))
    optimizer = build_optimizer(model, recipe.optim)
    with warnings.catch_warnings():  # torch 2.15 renames broadcast_buffers, accelerate does not yet
        warnings.filterwarnings("ignore", ".*broadcast_buffers.*", FutureWarning)
        # never the data (the stream shards itself), never the schedule (it would step W times)
        wrapped, optimizer = accelerator.prepare(
            torch.compile(model) if every.compile else model, optimizer
        )

    parts: dict[str, Any] = {"model": model, "optimizer": optimizer, "loss": loss_fn}
    if accelerator.scaler is not None:
        parts["scaler"] = accelerator.scaler
    identity = {
        "digest": digest(recipe, index.sha256, ORDER_VERSION),
        "recipe": recipe.model_dump(mode="json", exclude={"run", "name"}),
        "index_sha256": index.sha256,
        "order_version": ORDER_VERSION,
    }
    checkpoints = Checkpointer(
        run_dir, keep=every.keep_checkpoints, identity=identity, shard=shard, warn=_warn
    )
    first = checkpoints.restore(parts)
    if shard.rank == 0:
        _describe_run(run_dir, recipe, index, precision, shard.world)

    log = RunLog(
        run_dir,
        name=recipe.name,
        config=recipe.model_dump(mode="json"),
        steps=steps,
        first_step=first,
        trackers=every.trackers,
        enabled=shard.rank == 0,
    )
    log.say(
        f"{recipe.name}: {shard.world} process{'es' * (shard.world > 1)} on {device.type}, "
        f"{precision}; {order.samples} images, {order.steps_per_epoch} steps an epoch; "
        f"{'from the start' if not first else f'going on from step {first}'} to step {steps}"
    )
    if warning := stem_warning(recipe.backbone, augment.crop_px):
        log.warn(warning)
    view = eval_view_for(augment.crop_px, augment.mean.tolist(), augment.std.tolist())
    holdout_ids = held_out(split.labels, recipe.data.holdout)
    if every.monitor_steps and not len(holdout_ids):
        log.warn(
            "run.monitor_steps is set, but the data are unlabelled or data.holdout = 0: no kNN"
        )
    log.event(first, "start", world=shard.world, precision=precision)

    bad: list[Quarantined] = []
    stream = batches(
        split,
        order,
        recipe.data,
        every,
        shard,
        first_step=first,
        pin=device.type == "cuda",
        on_bad=bad.append,
    )
    guard = StepGuard([model, loss_fn], max_bad_steps=every.max_bad_steps, folder=run_dir)
    meter = Meter(recipe.data.batch_size, flops, peak_flops(device, precision), shard.world)
    stop_requested = StopRequest(os.environ.get("SSLPIPE_STOP_FILE") if shard.rank == 0 else None)
    quarantined = 0
    if shard.rank == 0:
        clear_markers(run_dir)

    done, stop = first, False
    try:
        for step, batch in zip(range(first, steps), meter.waiting(stream), strict=False):
            lr = set_lr(optimizer, lr_at(step, recipe.optim, steps))
            guard.remember()
            _seed_forward(recipe.seed, step, shard.rank)  # dropout and the like

            drawn = draws(recipe.seed, batch.epoch, batch.ids, batch.sizes, augment.specs)
            batch = batch.to(device)
            views = augment(batch, drawn).to(dtype)  # (2B, 3, S, S)
            z_a, z_b = wrapped(views).chunk(2)  # 2 x (B, D), one forward
            loss = loss_fn(z_a, z_b, ids=batch.source_ids, labels=batch.labels)  # (), all ranks'
            accelerator.backward(loss)
            grad_norm = accelerator.clip_grad_norm_(
                model.parameters(), recipe.optim.clip_norm or math.inf
            )
            guard.step_or_undo(accelerator, optimizer, step, batch.ids, loss, grad_norm)

            done = step + 1
            fault("train.step")
            log.step_done(done)
            if _due(done, every.log_steps) or done == steps:  # all ranks; rank 0 writes
                quarantined += _collect(bad, log)
                _check_bad_fraction(quarantined, order.samples, every.max_bad_fraction)
                log.train(
                    done,
                    {
                        "loss": float(loss.detach()),
                        "lr": lr,
                        "grad_norm": float(grad_norm),
                        "epoch": done / order.steps_per_epoch,
                        **meter.read(done - first),
                        **health(z_a, z_b),
                        "negatives_per_anchor": loss_fn.last_negatives,
                        "skipped_steps": guard.skipped,
                        "quarantined": quarantined,
                    },
                )
                if lock:
                    lock.touch()
            if len(holdout_ids) and (
                _due(done, every.monitor_steps) or (every.monitor_steps and done == steps)
            ):
                with meter.paused():
                    numbers = monitor(
                        model.backbone,
                        view,
                        split,
                        holdout_ids,
                        shard,
                        canvas_px=recipe.data.canvas_px,
                        num_workers=every.num_workers,
                        device=device,
                    )
                log.evals(done, numbers)
            stop = agree(stop_requested())  # one number over all ranks
            if stop or done == steps or _due(done, every.save_steps):  # all ranks; rank 0 writes
                with meter.paused():
                    checkpoints.save(done, parts, {"world": shard.world, "precision": precision})
            if stop:
                break
        _collect(bad, log)
        log.event(done, "stop" if stop else "end")
        if shard.rank == 0:
            write_marker(run_dir, "PREEMPTED" if done < steps else "DONE", f"step {done}")
        log.say(
            f"stopped at step {done} of {steps}; the same command goes on from there"
            if done < steps
            else f"done: {steps} steps in {run_dir}"
        )
    finally:
        stop_requested.restore_handlers()
        stream.close()
        log.close()
    return done


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0


def _seed_forward(seed: int, step: int, rank: int) -> None:
    torch.manual_seed(int(hash_integers(seed, step, rank) >> 1))  # a positive int64


def _collect(bad: list[Quarantined], log: RunLog) -> int:
    """Hand every rank's new bad samples to rank 0's list; how many there are over all ranks."""
    new, bad[:] = list(bad), []
    everyone = [record for records in gather_objects(new) for record in records]
    log.quarantined(everyone)
    return len(everyone)


def _check_bad_fraction(bad: int, samples: int, most: float) -> None:
    if bad > most * samples:
        raise DataError(
            f"{bad} of {samples} samples are bad, more than run.max_bad_fraction = {most}; see "
            "quarantine.jsonl, or raise the limit"
        )


def _warn(text: str) -> None:
    print(f"warning: {text}", flush=True)


def _take_lock(run_dir: Path, shard: Shard) -> RunLock | None:
    """Rank 0 takes the run directory; where it cannot, every rank raises its error."""
    lock, problem = None, None
    if shard.rank == 0:
        try:
            lock = RunLock(run_dir)
        except (UserError, OSError) as error:
            problem = str(error)
    problem = broadcast_object(problem)
    if problem:
        raise UserError(f"cannot use the run directory: {problem}")
    return lock


def _describe_run(
    run_dir: Path, recipe: Recipe, index: DatasetIndex, precision: str, world: int
) -> None:
    """recipe.json, data.json, run.json: what export and report need, without the shards."""
    manifest = index.manifest.model_dump(mode="json", exclude={"splits"})
    manifest["samples"] = {
        name: sum(shard.samples for shard in shards)
        for name, shards in index.manifest.splits.items()
    }
    manifest["index_sha256"] = index.sha256
    files = {
        "recipe.json": recipe.model_dump(mode="json"),
        "data.json": manifest,
        "run.json": {"precision": precision, "world": world, "environment": environment()},
    }
    for name, tree in files.items():
        (run_dir / name).write_text(json.dumps(tree, indent=1) + "\n")
