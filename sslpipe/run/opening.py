"""Opening a run: its directory is held, its parts come to the device, its last checkpoint is read.

`open_run` tells it from top to bottom. What it makes, a `Run`, executes the steps.
"""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from sslpipe.data.decode import pillow_remarks
from sslpipe.portable import ignores_hang_up
from sslpipe.random import permutation
from sslpipe.run.accelerator import (
    Placed,
    accelerate_kept,
    describe_run,
    launcher_remarks,
    place,
)
from sslpipe.run.best import Best
from sslpipe.run.checkpoint import Checkpointer
from sslpipe.run.contract import PartsT, Plan
from sslpipe.run.directory import HeldDirectory, hold_directory
from sslpipe.run.gradient_cache import GradientCache, PooledStatistics
from sslpipe.run.guard import StepGuard
from sslpipe.run.lock import alone_in_process
from sslpipe.run.log import read_metrics
from sslpipe.run.monitoring import Monitor
from sslpipe.run.quarantine import Quarantine
from sslpipe.run.reporter import Reporter, RunLog
from sslpipe.run.run import ProjectorFirst, Run
from sslpipe.run.stop import StopRequest
from sslpipe.run.throughput import Meter

PREVIEWED = 8  # images whose views a tracker shows


@contextmanager
def open_run(
    plan: Plan[PartsT], run_dir: Path, parts: PartsT | None = None
) -> Iterator[Run[PartsT]]:
    """Start or resume a run; inside, its directory is held. Collective.

    Args:
        plan: For this run directory.
        run_dir: As in `hold_directory`.
        parts: What is trained; None: what the plan builds.

    Raises:
        UserError: As `hold_directory`; what the plan or this machine refuses; the run was another
            one, or all its checkpoints are damaged.
    """
    with alone_in_process(), accelerate_kept(), hold_directory(plan.recipe, run_dir) as held:
        plan.recipe.data.check_processes(held.process.world_size)
        if held.process.rank == 0:
            plan.start.keep(run_dir)

        # views, model, losses: the same numbers on every rank, from recipe.seed
        parts = parts or plan.build()
        remarks = plan.remarks(parts)  # or refused
        plan.warn_of_memory(parts, held.process)

        run = _place_and_resume(plan, parts, held)
        _announce(run, remarks)
        _show_views(run)
        if plan.recipe.init and run.first_step == 0 and run.monitor.is_on:
            run.score_start()  # a run from weights should not fall below them
        yield run


def _place_and_resume(plan: Plan[PartsT], parts: PartsT, held: HeldDirectory) -> Run[PartsT]:
    """Move the parts to the device, restore the newest checkpoint, and open the log."""
    recipe = plan.recipe
    config = recipe.run
    process = held.process

    # from here on the device is known
    placed = place(plan, parts)
    parts = placed.parts
    projector_first = ProjectorFirst(parts.first_frozen(), recipe.tune.projector_first_steps)
    cache = _gradient_cache(plan, placed, process.world_size)

    # resume: what a checkpoint holds is restored
    launch = {"world": process.world_size, "precision": placed.precision}
    metadata = {**launch, **plan.metadata(parts)}
    saved = {**parts.saved(), "optimizer": placed.optimizer}
    if placed.accelerator.scaler is not None:  # of fp16
        saved["scaler"] = placed.accelerator.scaler
    checkpoints = Checkpointer(
        held.run_dir,
        keep=config.keep_checkpoints,
        identity=plan.identity(),
        process=process,
        warn=lambda text: print(f"warning: {text}", flush=True),
    )
    first_step = checkpoints.restore(saved)

    # the log, at that step; rank 0 writes it
    if process.rank == 0:
        sha256 = checkpoints.identity["index_sha256"]
        describe_run(
            run_dir=held.run_dir,
            recipe=recipe,
            index=plan.index,
            index_sha256=sha256,
            metadata=metadata,
        )
    reporter = _open_log(plan, held, first_step)
    held.opened.callback(reporter.close)
    alarms = plan.alarms(parts)
    if first_step and process.rank == 0:  # rank 0 reads them: with what the run began
        for line in read_metrics(held.run_dir)[:1]:
            alarms.read(line["step"], line)
    held.began = True
    reporter.event(first_step, "start", launch)
    monitor = Monitor(
        plan=plan,
        parts=parts,
        device=placed.accelerator.device,
        held=held,
        reporter=reporter,
        best=Best(config, checkpoints.best, plan.recipe.half_size_steps),
    )
    guard = StepGuard(
        parts.guarded(),
        placed.accelerator,
        placed.optimizer,
        max_bad_steps=config.max_bad_steps,
        folder=held.run_dir,
        first_step=first_step,
        rank=process.rank,
        warn=reporter.warn,
        optim=recipe.optim,
        precision=placed.precision,
    )
    return Run(
        plan=plan,
        held=held,
        placed=placed,
        projector_first=projector_first,
        cache=cache,
        guard=guard,
        reporter=reporter,
        alarms=alarms,
        quarantine=Quarantine(reporter, held.run_dir, plan.order.samples, config.max_bad_fraction),
        meter=Meter(plan.order.batch_size),
        monitor=monitor,
        checkpoints=checkpoints,
        saved=saved,
        metadata=metadata,
        stop_requested=_listen_for_a_stop(held, reporter),
        first_step=first_step,
    )


def _gradient_cache(
    plan: Plan[PartsT], placed: Placed[PartsT], world_size: int
) -> GradientCache | None:
    """Return what takes micro-batches one by one; None where the batch is not cut."""
    rows = plan.micro_batches(world_size)
    if len(rows) < 2:
        return None
    parts = placed.parts
    channels = len(plan.index.image_type.channels)
    crop_px = parts.augment.crop_px
    weight = next(parts.model.parameters())
    statistics = {}
    for px in (crop_px, crop_px // 2) if plan.recipe.half_size_steps else (crop_px,):
        views = torch.zeros((2, channels, px, px), dtype=weight.dtype, device=weight.device)
        statistics[px] = PooledStatistics(parts.model, views)
    return GradientCache(placed.wrapped, statistics, rows)


def _open_log(plan: Plan[PartsT], held: HeldDirectory, first_step: int) -> Reporter:
    """Open what the run reports to; on ranks other than 0 it writes nothing."""
    if held.process.rank > 0:
        return Reporter()
    recipe = plan.recipe
    return RunLog(
        held.run_dir,
        name=recipe.name,
        config=recipe.model_dump(mode="json"),
        steps=recipe.total_steps,
        first_step=first_step,
        trackers=recipe.run.trackers,
        evaluated_every=(recipe.run.monitor_steps or 0) if len(plan.watched) else 0,
        cheaper_steps=max(recipe.tune.projector_first_steps, plan.recipe.half_size_steps),
    )


def _listen_for_a_stop(held: HeldDirectory, reporter: Reporter) -> StopRequest:
    """Handle the signals that ask for a stop, until the directory is given up."""
    stop_file = os.environ.get("SSLPIPE_STOP_FILE") if held.process.rank == 0 else None
    stop_requested = StopRequest(stop_file)
    held.opened.callback(stop_requested.restore_handlers)
    if not stop_requested.handles_signals:
        reporter.say(
            "this is not the main thread: signals do not stop the run; a file that the "
            "environment's SSLPIPE_STOP_FILE names does"
        )
    return stop_requested


def _show_views(run: Run[PartsT]) -> None:
    """Show the views of some images in the trackers, at the start of a run."""

    def draw() -> Image.Image:
        samples = len(run.plan.split)
        ids = np.sort(permutation(samples, [run.recipe.seed])[:PREVIEWED])  # as `sslpipe preview`
        return run.plan.draw_views(ids)

    if run.first_step == 0:
        run.reporter.picture(0, "views", draw)


def _announce(run: Run[PartsT], remarks: Sequence[str]) -> None:
    """Print what begins: machine, data, then warnings."""
    world = run.process.world_size
    recipe = run.recipe
    resumed = f"resumed at step {run.first_step} of " if run.first_step else ""
    run.reporter.say(
        f"{recipe.name}: {world} process{'es' * (world > 1)} on {run.device.type}, "
        f"{run.placed.precision}; {run.plan.describe()}; {resumed}{recipe.total_steps} steps"
    )
    if ignores_hang_up():
        run.reporter.say("SIGHUP is ignored (nohup): closing the terminal does not stop the run")
    for remark in [*pillow_remarks(), *launcher_remarks(run.placed.precision), *remarks]:
        run.reporter.warn(remark)
