"""One training run, whatever is trained: a plan's parts on the device, and what a step repeats.

`open_run` makes a `Run` of a plan, complete, and holds the run directory for it; the loops of
`sslpipe.pretrain` and `sslpipe.metric_learning.finetune` show what a step calls.
"""

import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, Self, TypeVar, cast

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn

from sslpipe.augment.eval_view import EvalView
from sslpipe.augment.two_views import Views
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.loader import open_reader
from sslpipe.data.pipeline import Batch
from sslpipe.data.plan import RunPlan
from sslpipe.data.reader import Quarantined
from sslpipe.distributed import Rank, agree, broadcast_object, gather_objects
from sslpipe.errors import DataError, UserError
from sslpipe.faults import fault
from sslpipe.models.tuning import ProjectorFirst
from sslpipe.optim import clip_gradient, describe_groups, lr_at, optimizer_over, ramp_at, set_lr
from sslpipe.portable import ignores_hang_up, lacks_memory
from sslpipe.recipe.base import RunRecipe
from sslpipe.registry.plugins import describe_error, made_with
from sslpipe.run.best import EMA, Best
from sslpipe.run.checkpoint import Checkpointer
from sslpipe.run.checkpoint_files import describe_newest
from sslpipe.run.console import run_console, say_last
from sslpipe.run.gradient_cache import GradientCache, PooledStatistics
from sslpipe.run.guard import Decision, StepGuard
from sslpipe.run.health import Alarms, StartAlarm
from sslpipe.run.launch import (
    describe_run,
    deterministic_algorithms,
    place,
    resolve_precision,
    seed_torch,
    start_accelerator,
    start_processes,
    training_device,
    wrap,
)
from sslpipe.run.lock import take_lock
from sslpipe.run.log import RunLog, quarantined_ids, read_metrics
from sslpipe.run.memory import warn_of_memory
from sslpipe.run.records import plugins_of
from sslpipe.run.stop import (
    FROM_A_KEYBOARD,
    StopRequest,
    note_stop,
    restore_markers,
    write_failure,
    write_marker,
    write_refusal,
)
from sslpipe.run.throughput import Meter, peak_flops
from sslpipe.run.watchdog import Watchdog

Place = Callable[[nn.Module], nn.Module]

_LESS_MEMORY = (
    "The same command with more processes needs less memory each. Or begin in a new run directory "
    "with data.micro_batch, a part of data.batch_size (pretraining: the same negatives), a smaller "
    "sampler.classes_per_batch (fine-tuning), or optim.precision = 'bf16'"
)


class TrainingParts(Protocol):
    """What is trained, of either kind: `sslpipe.plan.Parts`, or those of a fine-tuning."""

    @property
    def augment(self) -> Views:
        """Makes the views of a batch."""

    @property
    def model(self) -> nn.Module:
        """What is optimised: images (B, 3, S, S), and what else its forward takes, in one call."""

    @property
    def backbone(self) -> nn.Module:
        """What evaluations embed by."""

    @property
    def ema(self) -> nn.Module | None:
        """Its average, evaluated likewise, if there is one."""

    @property
    def encoder(self) -> nn.Module | None:
        """What takes views alone, where the model takes more."""

    @property
    def others(self) -> Sequence[nn.Module]:
        """What needs memory beside the model."""

    def to(self, device: torch.device, dtype: torch.dtype, place: Place) -> Self:
        """Return the parts on a device; `place` moves what has weights to be trained."""

    def first_frozen(self) -> Sequence[nn.Module]:
        """Return the networks that tune.projector_first_steps keeps out of training."""

    def saved(self) -> Mapping[str, Any]:
        """Return what a checkpoint holds beside the optimizer, by name; "model" is exported."""

    def guarded(self) -> Sequence[nn.Module]:
        """Return the modules whose buffers a non-finite step must not change."""


PartsT = TypeVar("PartsT", bound=TrainingParts)


class TrainingPlan(Protocol[PartsT]):
    """What a run has to know of its plan: `sslpipe.plan.Pretraining`, or that of a fine-tuning."""

    @property
    def recipe(self) -> RunRecipe:
        """Resolved."""

    @property
    def index(self) -> DatasetIndex:
        """The data set."""

    @property
    def split(self) -> Split:
        """What is trained on, and held out from."""

    @property
    def order(self) -> RunPlan:
        """The plan of the batches."""

    @property
    def watched(self) -> NDArray[np.int64]:
        """Ids of the held-out samples that are scored during the run."""

    def identity(self) -> dict[str, Any]:
        """Return what decides the weights, with its digest."""

    def check_processes(self, world_size: int) -> None:
        """Refuse a number of processes that cannot share the batches."""

    def keep_start(self, run_dir: Path) -> None:
        """Keep named weights in the run directory; rank 0."""

    def build(self) -> PartsT:
        """Build the parts on the CPU, the same on every rank."""

    def remarks(self, parts: PartsT) -> list[str]:
        """List what a user should know before the first step, or refuse."""

    def groups(self, parts: PartsT) -> list[dict[str, Any]]:
        """Take what [tune] freezes out of training; return the optimizer's parameter groups."""

    def step_flops(self, parts: PartsT) -> float:
        """Count FLOPs of a step, forward and backward; 0: utilisation is not logged."""

    def micro_batches(self, world_size: int) -> list[Tensor]:
        """Return the rows of this rank's micro-batches; one: the batch is not cut."""

    def torch_seed(self, step: int, rank: int, micro_batch: int) -> tuple[int, ...]:
        """Return the integers that decide dropout and the like."""

    def evaluation_view(self, crop_px: int) -> EvalView:
        """Return the view of held-out samples."""

    def score(self) -> Callable[..., dict[str, float]]:
        """Return one of `evaluation.monitor`."""

    def alarms(self, parts: PartsT) -> Alarms:
        """Return what reads the numbers of each log line."""

    def metadata(self, view: EvalView) -> dict[str, Any]:
        """Return plain values that are stored beside each checkpoint."""

    def describe(self) -> str:
        """Describe data and start for the console."""


class Held:
    """A run directory that this process holds.

    Attributes:
        run_dir: The directory.
        process: This process among all.
        watchdog: Ends a rank that hangs.
        opened: Closed with the run, the last first.
        began: Whether the run's checkpoint and its log were accepted.
    """

    def __init__(self, run_dir: Path, process: Rank, watchdog: Watchdog) -> None:
        self.run_dir = run_dir
        self.process = process
        self.watchdog = watchdog
        self.opened = ExitStack()
        self.began = False


@contextmanager
def hold_directory(recipe: RunRecipe, run_dir: Path) -> Iterator[Held]:
    """Join the launcher's processes and hold the run directory inside. Collective.

    No other job can use `run_dir`, and a rank that hangs is ended. A failure leaves FAILED there;
    what is refused, or stopped, before it continues a run leaves that run's markers.

    Raises:
        UserError: The directory is in use, the launcher's processes are not accelerate's, or the
            device has no memory left.
    """
    process = start_processes(recipe)
    deterministic = deterministic_algorithms(recipe, training_device(recipe).type)
    plugins = plugins_of(run_dir)
    with run_console(), take_lock(run_dir, process) as markers, deterministic, made_with(plugins):
        holds_run = (run_dir / "recipe.json").exists()
        watchdog = Watchdog(run_dir, process, recipe.run.timeout_s)
        held = Held(run_dir, process, watchdog)
        try:
            with watchdog:
                try:
                    yield held
                except SystemExit as error:  # of a part of the user's own: nothing is done
                    raise UserError(describe_error(error)) from error
                finally:
                    held.opened.close()  # what this rank still has to say is written
        except BaseException as error:
            if lacks_memory(error) and not isinstance(error, UserError):
                said = " ".join(str(error).split()) or "not enough memory"
                text = f"{said}; {describe_newest(run_dir)}. {_LESS_MEMORY}"
                write_failure(run_dir, f"rank {process.rank}: UserError: {text}")
                raise UserError(text) from error
            text = f"rank {process.rank}: {describe_error(error)}"
            stopped = isinstance(error, KeyboardInterrupt)
            refused = holds_run and isinstance(error, UserError)
            if held.began or not (stopped or refused):
                write_failure(run_dir, text)
                raise
            if refused:
                write_refusal(text)
            if process.rank == 0:
                restore_markers(run_dir, markers)
                if stopped:
                    say_last("stopped before the first step; the same command starts it")
            raise


@contextmanager
def open_run(
    plan: TrainingPlan[PartsT], run_dir: Path, parts: PartsT | None = None
) -> Iterator["Run[PartsT]"]:
    """Start or resume a run; inside, its directory is held. Collective.

    Args:
        plan: For this run directory.
        run_dir: As in `hold_directory`.
        parts: What is trained; None: what the plan builds.

    Raises:
        UserError: As `hold_directory`; what the plan or this machine refuses; the run was another
            one, or all its checkpoints are damaged.
    """
    with hold_directory(plan.recipe, run_dir) as held:
        plan.check_processes(held.process.world_size)
        if held.process.rank == 0:
            plan.keep_start(run_dir)

        # views, model, losses: the same numbers on every rank, from recipe.seed
        parts = parts or plan.build()
        remarks = plan.remarks(parts)  # or refused
        warn_of_memory(
            plan.recipe,
            parts.augment.crop_px,
            parts.model,
            held.process,
            encoder=parts.encoder,
            others=parts.others,
            image_type=plan.index.image_type,
        )
        run = _start(plan, parts, held)
        run.announce(plan.describe(), remarks)
        run.score_start()  # a run from weights should not fall below
        yield run


def _start(plan: TrainingPlan[PartsT], parts: PartsT, held: Held) -> "Run[PartsT]":
    """Move the parts to the device, restore the newest checkpoint, and open the log."""
    recipe = plan.recipe
    config = recipe.run
    process = held.process
    is_main = process.rank == 0

    # from here on the device is known: fp64, fp32, bf16 or fp16
    precision = resolve_precision(recipe.optim.precision, training_device(recipe))
    accelerator = start_accelerator(recipe, precision)
    device = accelerator.device
    dtype = torch.float64 if precision == "fp64" else torch.float32
    flops = plan.step_flops(parts)
    parts = parts.to(device, dtype, partial(place, device=device, dtype=dtype, recipe=recipe))

    # the optimizer of what is not frozen; the model as DDP and torch.compile run it
    optimizer_of_all = optimizer_over(plan.groups(parts), recipe.optim)
    compiled = parts.model
    if config.compile != "off":
        compiled = cast(nn.Module, torch.compile(parts.model, mode=config.compile))
    wrapped, optimizer = wrap(accelerator, compiled, optimizer_of_all)
    projector_first = ProjectorFirst(parts.first_frozen(), recipe.tune.projector_first_steps)
    cache = None
    rows = plan.micro_batches(process.world_size)
    if len(rows) > 1:
        px = parts.augment.crop_px
        views = torch.zeros(
            (2, len(plan.index.image_type.channels), px, px), dtype=dtype, device=device
        )
        cache = GradientCache(wrapped, PooledStatistics(parts.model, views), rows)

    # resume: weights, optimizer, losses; a gradient scaler where fp16 needs one
    view = plan.evaluation_view(parts.augment.crop_px)
    launch = {"world": process.world_size, "precision": precision}
    metadata = {**launch, **plan.metadata(view)}
    everything = {**parts.saved(), "optimizer": optimizer, "scaler": accelerator.scaler}
    saved = {name: part for name, part in everything.items() if part is not None}
    checkpoints = Checkpointer(
        held.run_dir,
        keep=config.keep_checkpoints,
        identity=plan.identity(),
        process=process,
        warn=lambda text: print(f"warning: {text}", flush=True),
    )
    first_step = checkpoints.restore(saved)

    # the log, at that step; rank 0 writes it
    if is_main:
        sha256 = checkpoints.identity["index_sha256"]
        describe_run(held.run_dir, recipe, plan.index, sha256, metadata)
    reporter = RunLog(
        held.run_dir,
        name=recipe.name,
        config=recipe.model_dump(mode="json"),
        steps=recipe.total_steps,
        first_step=first_step,
        trackers=config.trackers,
        enabled=is_main,
        cheaper_steps=recipe.tune.projector_first_steps,
    )
    held.opened.callback(reporter.close)
    alarms = plan.alarms(parts)
    if is_main and first_step:  # what the run began with
        for line in read_metrics(held.run_dir)[:1]:
            alarms.read(line["step"], line)
    held.began = True
    reporter.event(first_step, "start", **launch)

    # what watches the steps
    quarantine = Quarantine(reporter, held.run_dir, plan.order.samples, config.max_bad_fraction)
    guard = StepGuard(
        parts.guarded(),
        accelerator,
        optimizer,
        max_bad_steps=config.max_bad_steps,
        folder=held.run_dir,
        first_step=first_step,
        rank=process.rank,
        warn=reporter.warn,
        optim=recipe.optim,
        precision=precision,
        compiled=config.compile != "off",
    )
    stop_requested = StopRequest(os.environ.get("SSLPIPE_STOP_FILE") if is_main else None)
    held.opened.callback(stop_requested.restore_handlers)
    if not stop_requested.handles_signals:
        reporter.say(
            "this is not the main thread: signals do not stop the run; a file that the "
            "environment's SSLPIPE_STOP_FILE names does"
        )
    peak = peak_flops(device, precision) if flops else None
    return Run(
        plan=plan,
        held=held,
        parts=parts,
        accelerator=accelerator,
        precision=precision,
        dtype=dtype,
        wrapped=wrapped,
        optimizer=optimizer,
        projector_first=projector_first,
        cache=cache,
        view=view,
        metadata=metadata,
        saved=saved,
        checkpoints=checkpoints,
        reporter=reporter,
        alarms=alarms,
        quarantine=quarantine,
        guard=guard,
        stop_requested=stop_requested,
        meter=Meter(plan.order.batch_size, flops, peak, process.world_size),
        first_step=first_step,
    )


class StepViews(NamedTuple):
    """The views of a batch, made when they are asked for: the same ones each time."""

    augment: Views
    batch: Batch  # on the device
    dtype: torch.dtype

    def whole(self) -> Tensor:
        """Make all, (2B, 3, S, S), first views first."""
        views: Tensor = self.augment(self.batch, dtype=self.dtype)
        return views

    def of_rows(self, rows: Tensor) -> Tensor:
        """Make those of some rows (b,) of the batch, (2b, 3, S, S)."""
        views: Tensor = self.augment(self.batch.rows(rows), dtype=self.dtype)
        return views


@dataclass(eq=False)
class Run(Generic[PartsT]):
    """This process's part of a run, from the restored step to DONE: `open_run` makes it.

    `steps` yields what a step trains on; inside the loop come `augment`, `model`, `step`, `after`,
    and `finish` behind it.

    Attributes:
        plan: What is executed.
        held: The run directory.
        parts: What is trained, on the device.
        accelerator: Of this run.
        precision: fp64, fp32, bf16 or fp16.
        dtype: Of the model's weights.
        wrapped: The model as it is run, compiled and in DDP.
        optimizer: As accelerate prepared it.
        projector_first: Freezes the backbone in tune.projector_first_steps.
        cache: Takes micro-batches one by one; None without data.micro_batch.
        view: Of held-out samples.
        metadata: Stored beside each checkpoint.
        saved: What a checkpoint holds.
        checkpoints: Saves and restores.
        reporter: metrics.jsonl, the console and trackers; rank 0 writes.
        alarms: Read the numbers of each log line.
        quarantine: Collects bad samples.
        guard: Decides which steps are taken.
        stop_requested: Whether somebody asked this rank to stop.
        meter: Measures the speed.
        first_step: Where this start begins: 0 where there was no checkpoint.
    """

    plan: TrainingPlan[PartsT]
    held: Held
    parts: PartsT
    accelerator: Accelerator
    precision: str
    dtype: torch.dtype
    wrapped: nn.Module
    optimizer: Any
    projector_first: ProjectorFirst
    cache: GradientCache | None
    view: EvalView
    metadata: Mapping[str, Any]
    saved: dict[str, Any]
    checkpoints: Checkpointer
    reporter: RunLog
    alarms: Alarms
    quarantine: "Quarantine"
    guard: StepGuard
    stop_requested: StopRequest
    meter: Meter
    first_step: int

    def __post_init__(self) -> None:
        self.recipe = self.plan.recipe
        self.run_dir = self.held.run_dir
        self.process = self.held.process
        self.device: torch.device = self.accelerator.device
        # bf16 on CUDA under bf16, which rounds the model's input anyway
        rounded = self.device.type == "cuda" and self.precision == "bf16"
        self.view_dtype = torch.bfloat16 if rounded else self.dtype
        self.last_step = self.first_step  # steps done so far, those before a resume included
        self._best = Best(self.recipe.run, self.checkpoints.best)
        self._parameters = list(self.parts.model.parameters())
        self._stopping = False
        self._lr = 0.0
        self._numbers = torch.zeros(2)  # loss and gradient norm of the last step
        self._start_alarm: StartAlarm | None = None
        # who is scored: the backbone, and its average under names that begin with "ema_"
        self._backbones: dict[str, nn.Module] = {}
        self._reader: Any = None
        if len(self.plan.watched):
            self._backbones[""] = self.parts.backbone
            self._reader = open_reader(self.plan.split, self.recipe.run)
            if self.parts.ema is not None:
                self._backbones[EMA] = self.parts.ema

    # before the first step

    def announce(self, what: str, remarks: Sequence[str | None] = ()) -> None:
        """Say on the console what begins: machine, data, parameter groups, then warnings."""
        world = self.process.world_size
        total = self.recipe.total_steps
        start = f"resumed at step {self.first_step}" if self.first_step else "from the start"
        self.reporter.say(
            f"{self.recipe.name}: {world} process{'es' * (world > 1)} on {self.device.type}, "
            f"{self.precision}; {what}; {start}, {total} steps in all"
        )
        self.reporter.say(describe_groups(self.optimizer.param_groups, self.parts.model))
        if ignores_hang_up():
            text = "SIGHUP is ignored (nohup): closing the terminal does not stop the run"
            self.reporter.say(text)
        for remark in filter(None, remarks):
            self.reporter.warn(remark)

    def _evaluate(self) -> dict[str, float]:
        """Embed on all ranks, score on rank 0; the others get no numbers."""
        numbers: dict[str, float] = {}
        for prefix, backbone in self._backbones.items():
            scores = self.plan.score()(
                backbone,
                self.view,
                self.plan.split,
                self.plan.watched,
                self.process,
                device=self.device,
                num_workers=self.recipe.run.num_workers,
                reader=self._reader,
            )
            numbers |= {f"{prefix}{name}": value for name, value in scores.items()}
        return numbers

    def score_start(self) -> None:
        """Score held-out samples before the first step of a run that starts from weights.

        With run.keep = "best" the start is a candidate, saved as step-00000000. An alarm compares
        with its scores, also after a resume.
        """
        if not (self._backbones and self.recipe.init and self.recipe.run.monitor_steps):
            return
        if self.first_step == 0 and self._best.entry.start is None:
            self.held.watchdog(0, "evaluating")
            values = self._evaluate()
            self.reporter.evals(0, values)
            self._best.read_start(values)
            if self._best.wants_checkpoint:
                self._save(needed=True)
        lines = read_metrics(self.run_dir, "eval") if self.process.rank == 0 else []
        if lines and lines[0]["step"] == 0:
            self._start_alarm = StartAlarm(lines[0])

    # each step

    def steps(self, batches: Generator[Batch]) -> Iterator[tuple[int, Batch]]:
        """Set the learning rate and yield (step, batch), until all are done or ranks agree to stop.

        Args:
            batches: Endless, from `first_step` on; closed with the run.
        """
        self.held.opened.callback(batches.close)
        self.held.opened.callback(self.quarantine.write_own)
        total = self.recipe.total_steps
        end = self.first_step if self._best.exhausted else total  # it was ended early before
        self.held.watchdog(self.first_step, "waiting for data")
        self.meter.begin()
        waiting = self.meter.waiting(batches)
        for step, batch in zip(range(self.first_step, end), waiting, strict=False):
            self.held.watchdog(step, "training")
            lr = lr_at(step, self.recipe.optim, total)
            ramp = ramp_at(step, self.recipe.tune)
            self._lr = set_lr(self.optimizer, lr, ramp)
            self.projector_first.begin(step)
            yield step, batch
            if self._stopping or self._best.exhausted:
                break
            self.held.watchdog(step + 1, "waiting for data")

    def augment(self, batch: Batch) -> StepViews:
        """Take a batch to the device; its views are made when the model takes them."""
        return StepViews(self.parts.augment, batch.to(self.device), self.view_dtype)

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
        return self.wrapped(views.whole(), *more)

    def _seed(self, micro_batch: int) -> None:
        """Seed torch's generators, for dropout and the like."""
        words = self.plan.torch_seed(self.last_step, self.process.rank, micro_batch)
        seed_torch(self.device, *words)

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss (), scaled where fp16 needs it."""
        self.accelerator.backward(loss)
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
        self.accelerator.unscale_gradients()
        most = self.recipe.optim.clip_norm
        norm = clip_gradient(self.optimizer.optimizer, self._parameters, most)
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
        self._evaluate_if_due(step)  # all ranks embed, rank 0 scores
        self._save_if_due(step)  # all ranks agree whether to stop, rank 0 writes

    def _evaluate_if_due(self, step: int) -> None:
        """Score held-out samples every run.monitor_steps and at the end."""
        if not self._backbones or not self._is_due(step, self.recipe.run.monitor_steps or 0):
            return
        self.held.watchdog(self.last_step, "evaluating")
        fault("train.monitor")
        with self.meter.paused():
            values = self._evaluate()
            self.reporter.evals(self.last_step, values)
        self._best.read(self.last_step, values)
        if self._start_alarm is not None:
            self.reporter.alarms(self.last_step, self._start_alarm.read(values))

    def _save_if_due(self, step: int) -> None:
        """Save every run.save_steps, at the end, where any rank was asked to stop, and the best.

        All ranks vote on the stop at every step; rank 0 writes the checkpoint.
        """
        self._stopping = agree(self.stop_requested())
        is_last = step + 1 == self.recipe.total_steps
        needed = self._stopping or is_last or self._best.exhausted
        due = self._is_due(step, self.recipe.run.save_steps) or self._best.wants_checkpoint
        if needed or due:
            with self.meter.paused():
                self._save(needed=needed)

    def _save(self, *, needed: bool) -> None:
        self.held.watchdog(self.last_step, "saving")
        self.guard.settle()
        metadata = {**self.metadata, **self._best.state()}
        save = self.checkpoints.save
        self._best.saved(save(self.last_step, self.saved, metadata, needed=needed))

    # after the last step

    def finish(self) -> int:
        """Leave DONE, STOPPED or PREEMPTED, and return the last step done. Collective."""
        done = self.last_step
        total = self.recipe.total_steps
        early = self._best.exhausted
        preempted = done < total and not early
        self.held.watchdog(done, "ended")
        self.quarantine.collect()
        reason = {"reason": str(self._best)} if early else {}
        self.reporter.event(done, "stop" if self._stopping and not early else "end", **reason)
        number = self.stop_requested.signal or signal.SIGTERM  # another rank was asked
        note_stop(number if preempted else None)
        if self.process.rank == 0:
            stopped = "STOPPED" if number in FROM_A_KEYBOARD else "PREEMPTED"
            write_marker(self.run_dir, stopped if preempted else "DONE", f"step {done}")
        if preempted:
            said = [f"stopped at step {done} of {total}; the same command resumes it"]
        else:
            said = [f"done: {done} steps in {self.run_dir}", *reason.values(), self._best.choice]
        self.reporter.say("; ".join(filter(None, said)))
        return done

    def _is_due(self, step: int, interval: int) -> bool:
        """Whether what is done every `interval` steps and at the end is done; 0: never."""
        is_last = step + 1 == self.recipe.total_steps
        return interval > 0 and (is_last or (step + 1) % interval == 0)


class Quarantine:
    """Collects the bad samples that the loader reports; rank 0's log lists them once. Collective.

    Args:
        log: Writes the list.
        run_dir: Of the run, whose earlier starts may have listed some.
        samples: Served in an epoch.
        max_fraction: The share of them that may be bad.
    """

    def __init__(self, log: RunLog, run_dir: Path, samples: int, max_fraction: float) -> None:
        self._log = log
        self._samples = samples
        self._limit = max_fraction
        self._new: list[Quarantined] = []
        self._ids = broadcast_object(quarantined_ids(run_dir) if log.enabled else set())

    def add(self, record: Quarantined) -> None:
        """Note a bad sample; safe to call from the loader's threads."""
        self._new.append(record)

    def collect(self) -> int:
        """List what every rank reported since the last call; return how many are bad. Collective.

        Raises:
            DataError: They are more than the run allows.
        """
        new = self._new
        self._new = []
        self._list([record for records in gather_objects(new) for record in records])
        if len(self._ids) > self._limit * self._samples:
            raise DataError(
                f"{len(self._ids)} of {self._samples} samples are bad, more than "
                f"run.max_bad_fraction = {self._limit}; see quarantine.jsonl, or raise it"
            )
        return len(self._ids)

    def write_own(self) -> None:
        """List what this rank reported, if it writes: for an end without the others."""
        self._list(self._new)

    def _list(self, records: list[Quarantined]) -> None:
        new: dict[int, Quarantined] = {}
        for record in records:
            if record.id not in self._ids:
                new.setdefault(record.id, record)  # as it was seen first
        self._ids |= new.keys()
        self._log.quarantined([*new.values()])
