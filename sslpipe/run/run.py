"""One training run, whatever is trained: what a step repeats, and what follows a step.

The loops of `sslpipe.pretrain` and `sslpipe.metric_learning.finetune` show the order of a step.
"""

import signal
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Generic, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import avg_pool2d

from sslpipe.data.pipeline import Batch
from sslpipe.distributed import agree
from sslpipe.faults import fault
from sslpipe.optim.step import clip_gradient, lr_at, ramp_at, set_lr
from sslpipe.run.accelerator import Placed, seed_torch
from sslpipe.run.checkpoint import Checkpointer
from sslpipe.run.contract import PartsT, Plan, Views
from sslpipe.run.directory import HeldDirectory
from sslpipe.run.gradient_cache import GradientCache
from sslpipe.run.guard import Decision, StepGuard
from sslpipe.run.health import Alarms
from sslpipe.run.log import is_due
from sslpipe.run.monitoring import Monitor
from sslpipe.run.quarantine import Quarantine
from sslpipe.run.reporter import Reporter
from sslpipe.run.stop import FROM_A_KEYBOARD, StopRequest, note_stop, write_marker
from sslpipe.run.throughput import Meter


class StepViews(NamedTuple):
    """The views of a batch, made when they are asked for: the same ones each time."""

    augment: Views
    batch: Batch  # on the device
    dtype: torch.dtype
    half_size: bool  # of augment.crop_px, in the first steps of augment.half_size_share

    def whole(self) -> Tensor:
        """Make all, (2B, 3, S, S), first views first."""
        return self._views_of(self.batch)

    def of_rows(self, rows: Tensor) -> Tensor:
        """Make those of some rows (b,) of the batch, (2b, 3, S, S)."""
        return self._views_of(self.batch.rows(rows))

    def _views_of(self, batch: Batch) -> Tensor:
        views: Tensor = self.augment(batch, dtype=self.dtype)
        return halved(views) if self.half_size else views


def halved(views: Tensor) -> Tensor:
    """Reduce views (V, C, S, S) to (V, C, S / 2, S / 2): each pixel is the mean of 2 x 2."""
    return avg_pool2d(views, 2)


class ProjectorFirst:
    """Keeps networks out of training in tune.projector_first_steps, and in eval mode.

    What is frozen for good, see `sslpipe.models.tuning.freeze_layers`, stays so.

    Args:
        networks: Those of the run's weights, and of a momentum encoder.
        steps: How many.
    """

    def __init__(self, networks: Sequence[nn.Module], steps: int) -> None:
        self._parameters = [p for net in networks for p in net.parameters() if p.requires_grad]
        self._modules = [m for net in networks for m in net.modules() if m.training]
        self._steps = steps
        self._frozen = False

    def begin(self, step: int) -> None:
        """Prepare a step; call it before the step's forward."""
        frozen = step < self._steps
        if frozen == self._frozen:
            return
        for parameter in self._parameters:
            parameter.requires_grad_(not frozen)
        for module in self._modules:
            module.training = not frozen
        self._frozen = frozen


@dataclass(kw_only=True, eq=False, repr=False)
class Run(Generic[PartsT]):
    """This process's part of a run, from the restored step to DONE: `open_run` makes it.

    `steps` yields what a step trains on; inside the loop come `augment`, `model`, `step`, `after`,
    and `finish` behind it.

    Attributes:
        recipe: The plan's.
        run_dir: The path of the run directory.
        process: This process among all.
        parts: What is trained, on the device.
        device: Where it computes.
        last_step: Steps done so far, those before a resume included.
    """

    plan: Plan[PartsT]  # what is executed
    held: HeldDirectory  # the run directory, with watchdog and what is closed at the end
    placed: Placed[PartsT]  # what is trained, on the device, and its optimizer
    projector_first: ProjectorFirst  # freezes the backbone in tune.projector_first_steps
    cache: GradientCache | None  # takes micro-batches one by one; None without data.micro_batch
    guard: StepGuard  # decides which steps are taken
    reporter: Reporter  # metrics.jsonl, the console and trackers; rank 0 writes
    alarms: Alarms  # read the numbers of each log line
    quarantine: Quarantine  # collects bad samples
    meter: Meter  # measures the speed
    monitor: Monitor[PartsT]  # scores held-out samples, and follows which scores were the best
    checkpoints: Checkpointer  # saves and restores
    saved: dict[str, Any]  # what a checkpoint holds
    metadata: Mapping[str, Any]  # stored beside each checkpoint
    stop_requested: StopRequest  # whether somebody asked this rank to stop
    first_step: int  # where this start begins: 0 where there was no checkpoint

    def __post_init__(self) -> None:
        """Add what follows from these, and what the steps change."""
        self.recipe = self.plan.recipe
        self.run_dir = self.held.run_dir
        self.process = self.held.process
        self.parts = self.placed.parts
        self.device: torch.device = self.placed.accelerator.device
        self.last_step = self.first_step
        self._parameters = list(self.parts.model.parameters())
        self._stopping = False
        self._lr = 0.0
        self._numbers = torch.zeros(2)  # loss and gradient norm of the last step

    def score_start(self) -> None:
        """Score the weights that a run starts from, before its first step.

        With run.keep = "best" they are a candidate, saved as step-00000000.
        """
        self.monitor.score_start()
        if self.monitor.best.wants_checkpoint:
            self._save(needed=True)

    # each step

    def steps(self, batches: Generator[Batch]) -> Iterator[tuple[int, Batch]]:
        """Set the learning rate and yield (step, batch), until all are done or ranks agree to stop.

        Args:
            batches: Endless, from `first_step` on; closed with the run.
        """
        self.held.opened.callback(batches.close)
        self.held.opened.callback(self.quarantine.write_own)
        total = self.recipe.total_steps
        end = self.first_step if self.monitor.best.exhausted else total  # it was ended early before
        self.held.watchdog(self.first_step, "waiting for data")
        self.meter.begin()
        waiting = self.meter.waiting(batches)
        for step, batch in zip(range(self.first_step, end), waiting, strict=False):
            self.held.watchdog(step, "training")
            lr = lr_at(step, self.recipe.optim, total)
            ramp = ramp_at(step, self.recipe.tune)
            self._lr = set_lr(self.placed.optimizer, lr, ramp)
            self.projector_first.begin(step)
            yield step, batch
            if self._stopping or self.monitor.best.exhausted:
                break
            self.held.watchdog(step + 1, "waiting for data")

    def augment(self, batch: Batch) -> StepViews:
        """Take a batch to the device; its views are made when the model takes them."""
        return StepViews(
            augment=self.parts.augment,
            batch=batch.to(self.device),
            dtype=self.placed.view_dtype,
            half_size=self.last_step < self.plan.recipe.half_size_steps,
        )

    def model(self, views: StepViews, *more: Any) -> Any:
        """Run the model on a step's views, (2B, 3, S, S) -> z (2B, D), first views first.

        With data.micro_batch a slice of every stream at a time, without gradient: `step` then
        carries dL/dz back. The negatives and the gradient are those of the whole batch.

        Args:
            views: From `augment`.
            more: What else the model's forward takes.
        """
        self.guard.remember()  # the buffers, for a step that is skipped
        if self.cache is not None:
            return self.cache.embed(views.of_rows, self._seed)
        self._seed(0)
        return self.placed.wrapped(views.whole(), *more)

    def _seed(self, micro_batch: int) -> None:
        """Seed torch's generators, for dropout and the like."""
        words = self.plan.torch_seed(self.last_step, self.process.rank, micro_batch)
        seed_torch(self.device, words)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss (), scaled where fp16 needs it."""
        self.placed.accelerator.backward(loss)
        if self.cache is not None:
            self.cache.backward()

    @contextmanager
    def step(self, batch: Batch, loss: Tensor) -> Iterator[Decision]:
        """Move the weights by a loss (), equal on all ranks: backward, clip, optimizer.

        A non-finite step changes nothing; what the block does to the guarded buffers is part of it.
        It counts as a step, and the ids of its batch are written.

        Raises:
            UserError: After run.max_bad_steps skipped steps in a row, on CUDA one step later.
        """
        self.backward(loss)
        self.placed.accelerator.unscale_gradients()
        most = self.recipe.optim.clip_norm
        norm = clip_gradient(self.placed.optimizer.optimizer, self._parameters, most)
        with self.guard.step(loss, norm) as decision:
            yield decision
        self._numbers = decision.numbers
        step = self.last_step
        self.guard.count(step, batch.ids, batch.source_ids, decision, epoch=batch.epoch)
        self.last_step = step + 1
        fault("train.step")
        self.reporter.step_done(self.last_step)

    def is_log_step(self, step: int) -> bool:
        """Return whether this step's numbers are logged; the same on all ranks."""
        return self._is_due(step, self.recipe.run.log_steps)

    def log(self, numbers: Mapping[str, float]) -> None:
        """Log the last step, with further numbers, and read the alarms. Collective."""
        self.guard.settle()
        loss_value, grad_norm = self._numbers.tolist()
        values = {
            "loss": loss_value,
            "lr": self._lr,
            "grad_norm": grad_norm,
            "epoch": self.last_step / self.plan.order.steps_per_epoch,
            **self.meter.read(self.last_step - self.first_step),
            **numbers,
            "skipped_steps": self.guard.skipped,
            "overflows": self.guard.overflows,
            "quarantined": self.quarantine.collect(),
        }
        self.reporter.train(self.last_step, values)
        self.reporter.alarms(self.last_step, self.alarms.read(self.last_step, values))

    def after(self, step: int) -> None:
        """Evaluate, save, and vote on a stop, where each is due. Collective."""
        if self.monitor.is_on and self._is_due(step, self.recipe.run.monitor_steps or 0):
            fault("train.monitor")
            with self.meter.paused():
                self.monitor.evaluate(self.last_step)  # all ranks embed, rank 0 scores
        self._stopping = agree(self.stop_requested())  # of any rank; all vote at every step
        is_last = step + 1 == self.recipe.total_steps
        needed = self._stopping or is_last or self.monitor.best.exhausted
        due = self._is_due(step, self.recipe.run.save_steps) or self.monitor.best.wants_checkpoint
        if needed or due:
            with self.meter.paused():
                self._save(needed=needed)  # rank 0 writes

    def _save(self, *, needed: bool) -> None:
        self.held.watchdog(self.last_step, "saving")
        self.guard.settle()
        best = self.monitor.best
        metadata = {**self.metadata, **best.state()}
        best.saved(self.checkpoints.save(self.last_step, self.saved, metadata, needed=needed))

    # after the last step

    def finish(self) -> int:
        """Leave DONE, STOPPED or PREEMPTED, and return the last step done. Collective."""
        done = self.last_step
        total = self.recipe.total_steps
        best = self.monitor.best
        preempted = done < total and not best.exhausted
        self.held.watchdog(done, "ended")
        self.quarantine.collect()
        if preempted:
            self.reporter.event(done, "stop")
            number = self.stop_requested.signal or signal.SIGTERM  # another rank was asked
            marker = "STOPPED" if number in FROM_A_KEYBOARD else "PREEMPTED"
            sentences = [f"stopped at step {done} of {total}; the same command resumes it"]
        else:
            reason = {"reason": str(best)} if best.exhausted else {}
            self.reporter.event(done, "end", reason)
            number = None
            marker = "DONE"
            sentences = [f"done: {done} steps in {self.run_dir}", *reason.values(), best.choice]
        note_stop(number)
        if self.process.rank == 0:
            write_marker(self.run_dir, marker, f"step {done}")
        self.reporter.say("; ".join(filter(None, sentences)))
        return done

    def _is_due(self, step: int, interval: int) -> bool:
        return is_due(step + 1, interval, self.recipe.total_steps)
