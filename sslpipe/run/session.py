"""What pretraining and fine-tuning share: what a process holds, and the loop around a step."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from sslpipe.augment.two_views import Views
from sslpipe.data.pipeline import Batch
from sslpipe.distributed import Rank, agree
from sslpipe.errors import UserError
from sslpipe.faults import fault
from sslpipe.optim import lr_at, set_lr
from sslpipe.recipe.finetune import FinetuneRecipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.run.checkpoint import Checkpointer
from sslpipe.run.guard import StepGuard
from sslpipe.run.health import Alarms
from sslpipe.run.launch import start_processes
from sslpipe.run.lock import take_lock
from sslpipe.run.log import RunLog
from sslpipe.run.quarantine import Quarantine
from sslpipe.run.stop import StopRequest, write_failure, write_marker
from sslpipe.run.throughput import Meter
from sslpipe.run.watchdog import Watchdog


@dataclass(frozen=True, kw_only=True)
class Session:
    """What one process holds while it trains; the only state of a run besides tensors is its step.

    wrapped: the model under DDP and torch.compile; run it, but save and read the model itself.
    dtype: of the views that go into the model. facts: stored beside each checkpoint.
    monitor: scores of samples that are not trained on. monitor_steps: how often; 0 without any.
    alarms: read the numbers of each log line.
    """

    recipe: Recipe | FinetuneRecipe

    run_dir: Path
    accelerator: Any
    device: torch.device
    dtype: torch.dtype
    augment: Views
    wrapped: nn.Module
    optimizer: Any
    parts: dict[str, Any]
    facts: dict[str, Any]
    checkpoints: Checkpointer
    first_step: int
    steps_per_epoch: int
    stream: Iterator[Batch]
    monitor: Callable[[], dict[str, float]]
    monitor_steps: int
    log: RunLog
    quarantine: Quarantine
    guard: StepGuard
    meter: Meter
    stop_requested: StopRequest
    alarms: Alarms | None = None


class Stepped(NamedTuple):
    """What a step leaves for the log."""

    loss: Tensor  # (), of all ranks
    grad_norm: Tensor
    numbers: Callable[[], dict[str, float]]  # further ones, where they are wanted; collective


Step = Callable[[int, Batch], Stepped]


def watched(
    recipe: Recipe | FinetuneRecipe, run_dir: Path, body: Callable[[Rank, Watchdog], int]
) -> int:
    """body(process, beat) in started processes, alone in run_dir; a failure leaves FAILED there."""
    process = start_processes(recipe)
    with take_lock(run_dir, process):
        try:
            with Watchdog(run_dir, process, recipe.run.timeout_s) as beat:
                return body(process, beat)
        except torch.OutOfMemoryError as error:
            text = f"{error}; {_LESS_MEMORY}"
            write_failure(run_dir, f"rank {process.rank}: UserError: {text}")
            raise UserError(text) from error
        except BaseException as error:
            write_failure(run_dir, f"rank {process.rank}: {type(error).__name__}: {error}")
            raise


def run_steps(run: Session, process: Rank, beat: Watchdog, train_step: Step) -> int:
    """train_step(step, batch) up to the recipe's steps or a request to stop, with all around it:
    log, alarms, monitor, checkpoints, and DONE or PREEMPTED at the end. Returns the last step done.
    """
    every, steps, log = run.recipe.run, run.recipe.total_steps, run.log
    done, stop = run.first_step, False
    beat(done, "waiting for data")

    for step, batch in zip(range(run.first_step, steps), run.stream, strict=False):
        beat(step, "training")
        lr = set_lr(run.optimizer, lr_at(step, run.recipe.optim, steps))
        run.guard.remember()
        stepped = train_step(step, batch)

        done = step + 1
        last = done == steps
        fault("train.step")
        log.step_done(done)
        if last or _due(done, every.log_steps):  # all ranks; rank 0 writes
            numbers = {
                "loss": float(stepped.loss.detach()),
                "lr": lr,
                "grad_norm": float(stepped.grad_norm),
                "epoch": done / run.steps_per_epoch,
                **run.meter.read(done - run.first_step),
                **stepped.numbers(),
                "skipped_steps": run.guard.skipped,
                "overflows": run.guard.overflows,
                "quarantined": run.quarantine.collect(),
            }
            log.train(done, numbers)
            if run.alarms is not None:
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
    if process.rank == 0:
        write_marker(run.run_dir, "PREEMPTED" if done < steps else "DONE", f"step {done}")
    log.say(
        f"stopped at step {done} of {steps}; the same command goes on from there"
        if done < steps
        else f"done: {steps} steps in {run.run_dir}"
    )
    return done


_LESS_MEMORY = (
    "the last checkpoint stands. Set data.micro_batch to a part of data.batch_size (pretraining: "
    "the same negatives, less memory), use optim.precision = 'bf16', or start more processes"
)


def _due(done: int, every: int) -> bool:
    return every > 0 and done % every == 0
