"""One training run, whatever is trained: what repeats at each step.

`open_run` makes a `Run`, which carries a training from its parts to DONE. `sslpipe.pretrain` and
`sslpipe.metric_learning.finetune` show the order of the calls.
"""

import os
import signal
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Protocol, TypeVar, cast

import numpy as np
import torch
from accelerate import Accelerator
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.optim import Optimizer

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import DatasetIndex, Split
from sslpipe.data.loader import open_reader
from sslpipe.data.pipeline import Batch
from sslpipe.data.plan import RunPlan
from sslpipe.data.reader import Quarantined
from sslpipe.distributed import Rank, agree, broadcast_object, gather_objects
from sslpipe.errors import DataError, UserError
from sslpipe.faults import fault
from sslpipe.optim import clip_gradient, describe_groups, lr_at, ramp_at, set_lr
from sslpipe.portable import ignores_hang_up, lacks_memory
from sslpipe.recipe.base import RunRecipe
from sslpipe.registry.plugins import describe_error, made_with
from sslpipe.run.best import EMA, Best
from sslpipe.run.checkpoint import Checkpointer
from sslpipe.run.checkpoint_files import describe_newest
from sslpipe.run.console import run_console, say_last
from sslpipe.run.guard import Decision, StepGuard
from sslpipe.run.health import Alarms, StartAlarm
from sslpipe.run.launch import (
    describe_run,
    deterministic_algorithms,
    place,
    start_accelerator,
    start_processes,
    training_device,
    wrap,
)
from sslpipe.run.lock import take_lock
from sslpipe.run.log import RunLog, quarantined_ids, read_metrics
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

ModuleT = TypeVar("ModuleT", bound=nn.Module)

_LESS_MEMORY = (
    "The same command with more processes needs less memory each. Or begin in a new run directory "
    "with data.micro_batch, a part of data.batch_size (pretraining: the same negatives), a smaller "
    "sampler.classes_per_batch (fine-tuning), or optim.precision = 'bf16'"
)


class TrainingPlan(Protocol):
    """What a run has to know of its plan: `sslpipe.plan.Pretraining`, or that of a fine-tuning."""

    @property
    def recipe(self) -> RunRecipe:
        """Resolved."""

    @property
    def index(self) -> DatasetIndex:
        """The data set."""

    @property
    def order(self) -> RunPlan:
        """The plan of the batches."""

    def identity(self) -> dict[str, Any]:
        """Return what decides the weights, with its digest."""


@contextmanager
def open_run(recipe: RunRecipe, run_dir: Path) -> Iterator["Run"]:
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
        run = Run(recipe, run_dir, process, watchdog)
        try:
            with watchdog:
                try:
                    yield run
                except SystemExit as error:  # of a part of the user's own: nothing is done
                    raise UserError(describe_error(error)) from error
                finally:
                    run.close()
        except BaseException as error:
            if lacks_memory(error) and not isinstance(error, UserError):
                said = " ".join(str(error).split()) or "not enough memory"
                text = f"{said}; {describe_newest(run_dir)}. {_LESS_MEMORY}"
                write_failure(run_dir, f"rank {process.rank}: UserError: {text}")
                raise UserError(text) from error
            text = f"rank {process.rank}: {describe_error(error)}"
            stopped = isinstance(error, KeyboardInterrupt)
            refused = holds_run and isinstance(error, UserError)
            if run.began or not (stopped or refused):
                write_failure(run_dir, text)
                raise
            if refused:
                write_refusal(text)
            if process.rank == 0:
                restore_markers(run_dir, markers)
                if stopped:
                    say_last("stopped before the first step; the same command starts it")
            raise


class Run:
    """This process's part of a run: parts, log, checkpoints, and what repeats at each step.

    Call in this order: `configure`, `place`, `prepare`, `restore`, `announce`, `monitor`,
    `evaluate_start`, then `steps` and, inside the loop, `guard.remember`, `backward`,
    `optimizer_step`, `step_done`, `log`, `evaluate_if_due`, `save_if_due`; then `finish`.

    Attributes:
        process: This process among all.
        recipe: The recipe, resolved by `configure`.
        device: Where the model is.
        dtype: Of the model's weights.
        view_dtype: Of the model's input: bf16 on CUDA under bf16, which rounds them anyway.
        reporter: metrics.jsonl, the console and trackers; rank 0 writes.
        quarantine: Collects bad samples.
        guard: Decides which steps are taken.
        last_step: Steps done so far, those before a resume included.
        began: Whether its checkpoint and its log were accepted.
    """

    accelerator: Accelerator
    device: torch.device
    dtype: torch.dtype
    view_dtype: torch.dtype
    reporter: RunLog
    quarantine: "Quarantine"
    guard: StepGuard

    def __init__(self, recipe: RunRecipe, run_dir: Path, process: Rank, watchdog: Watchdog) -> None:
        self.recipe, self.run_dir, self.process = recipe, run_dir, process
        self.last_step, self.first_step, self.began = 0, 0, False
        self._watchdog, self._opened = watchdog, ExitStack()
        self._stopping, self._lr, self._numbers = False, 0.0, torch.zeros(2)
        self._backbones: dict[str, nn.Module] = {}
        self._start_alarm: StartAlarm | None = None

    # before the first step

    def configure(self, recipe: RunRecipe, precision: str) -> None:
        """Start the Accelerator in fp64, fp32, bf16 or fp16: from here on the device is known."""
        self.recipe, self.precision = recipe, precision
        self.accelerator = start_accelerator(recipe, precision)
        self.device = self.accelerator.device
        self.dtype = torch.float64 if precision == "fp64" else torch.float32
        rounded = self.device.type == "cuda" and precision == "bf16"
        self.view_dtype = torch.bfloat16 if rounded else self.dtype

    def place(self, module: ModuleT) -> ModuleT:
        """Return the model on the device, its BatchNorms over all processes."""
        return cast(ModuleT, place(module, self.device, self.dtype, self.recipe))

    def prepare(self, model: nn.Module, optimizer: Optimizer) -> tuple[nn.Module, Any]:
        """Wrap a model for DDP (and torch.compile), to run it, and the optimizer for the scaler."""
        self._model, self._parameters = model, list(model.parameters())
        mode, compiled = self.recipe.run.compile, model
        if mode != "off":
            compiled = cast(nn.Module, torch.compile(model, mode=mode))
        wrapped, self._optimizer = wrap(self.accelerator, compiled, optimizer)
        return wrapped, self._optimizer

    def restore(
        self,
        plan: TrainingPlan,
        parts: Mapping[str, Any],
        *,
        guarded: Sequence[nn.Module],
        alarms: Alarms | None = None,
        metadata: Mapping[str, Any] | None = None,
    ) -> int:
        """Load the newest checkpoint into the parts, keep them for later saves, and open the log.

        Args:
            plan: Of the run.
            parts: What a checkpoint holds: `model`, and others with a `state_dict`, or None.
            guarded: Modules whose buffers a non-finite step must not change.
            alarms: Read the numbers of each log line.
            metadata: Plain values stored beside each checkpoint.

        Returns:
            The step to begin with: 0 where there is no checkpoint.

        Raises:
            CheckpointError: The run was another one, or all its checkpoints are damaged.
        """
        recipe = self.recipe
        run_config = recipe.run
        is_main = self.process.rank == 0
        self._order = plan.order
        self._alarms = alarms
        launch = {"world": self.process.world_size, "precision": self.precision}
        self._metadata = {**launch, **(metadata or {})}

        # weights, optimizer, loss; the gradient scaler where fp16 needs one
        everything = {**parts, "scaler": self.accelerator.scaler}
        self._parts = {name: part for name, part in everything.items() if part is not None}
        self._checkpoints = Checkpointer(
            self.run_dir,
            keep=run_config.keep_checkpoints,
            identity=plan.identity(),
            process=self.process,
            warn=lambda text: print(f"warning: {text}", flush=True),
        )
        self.first_step = self.last_step = self._checkpoints.restore(self._parts)
        self._best = Best(run_config, self._checkpoints.best)

        # the log, at that step; rank 0 writes it
        if is_main:
            sha256 = self._checkpoints.identity["index_sha256"]
            describe_run(self.run_dir, recipe, plan.index, sha256, self._metadata)
        self.reporter = RunLog(
            self.run_dir,
            name=recipe.name,
            config=recipe.model_dump(mode="json"),
            steps=recipe.total_steps,
            first_step=self.first_step,
            trackers=run_config.trackers,
            enabled=is_main,
            cheaper_steps=recipe.tune.projector_first_steps,
        )
        self._opened.callback(self.reporter.close)
        if alarms is not None and is_main and self.first_step:  # what the run began with
            for line in read_metrics(self.run_dir)[:1]:
                alarms.read(line["step"], line)
        self.began = True
        self.reporter.event(self.first_step, "start", **launch)

        # what watches the steps
        self.quarantine = Quarantine(
            self.reporter, self.run_dir, plan.order.samples, run_config.max_bad_fraction
        )
        self.guard = StepGuard(
            guarded,
            self.accelerator,
            self._optimizer,
            max_bad_steps=run_config.max_bad_steps,
            folder=self.run_dir,
            first_step=self.first_step,
            rank=self.process.rank,
            warn=self.reporter.warn,
            optim=recipe.optim,
            precision=self.precision,
            compiled=run_config.compile != "off",
        )
        self._stop_requested = StopRequest(os.environ.get("SSLPIPE_STOP_FILE") if is_main else None)
        self._opened.callback(self._stop_requested.restore_handlers)
        if not self._stop_requested.handles_signals:
            self.reporter.say(
                "this is not the main thread: signals do not stop the run; a file that the "
                "environment's SSLPIPE_STOP_FILE names does"
            )
        return self.first_step

    def announce(self, what: str, remarks: Sequence[str | None] = ()) -> None:
        """Say on the console what begins: machine, data, parameter groups, then warnings."""
        world, total = self.process.world_size, self.recipe.total_steps
        start = f"resumed at step {self.first_step}" if self.first_step else "from the start"
        self.reporter.say(
            f"{self.recipe.name}: {world} process{'es' * (world > 1)} on {self.device.type}, "
            f"{self.precision}; {what}; {start}, {total} steps in all"
        )
        self.reporter.say(describe_groups(self._optimizer.param_groups, self._model))
        if ignores_hang_up():
            text = "SIGHUP is ignored (nohup): closing the terminal does not stop the run"
            self.reporter.say(text)
        for remark in filter(None, remarks):
            self.reporter.warn(remark)

    def monitor(
        self,
        score: Callable[..., dict[str, float]],
        backbone: nn.Module,
        view: EvalView,
        split: Split,
        ids: NDArray[np.int64],
        ema: nn.Module | None = None,
    ) -> None:
        """Have held-out samples scored by `evaluate_if_due`; without any, none are.

        Args:
            score: One of `evaluation.monitor`, told the canvas_px.
            backbone: Images (B, 3, S, S) -> (B, F).
            view: Of the samples.
            split: Where they are.
            ids: (n,) of samples that the run never trains on.
            ema: An average of the backbone, scored likewise: its numbers begin with "ema_".
        """
        if not len(ids):
            return
        self._score, self._samples = score, (view, split, ids, self.process)
        self._score_options = {
            "device": self.device,
            "num_workers": self.recipe.run.num_workers,
            "reader": open_reader(split, self.recipe.run),
        }
        self._backbones = {"": backbone} if ema is None else {"": backbone, EMA: ema}

    def _evaluate(self) -> dict[str, float]:
        """Embed on all ranks, score on rank 0; the others get no numbers."""
        numbers: dict[str, float] = {}
        for prefix, backbone in self._backbones.items():
            scores = self._score(backbone, *self._samples, **self._score_options)
            numbers |= {f"{prefix}{name}": value for name, value in scores.items()}
        return numbers

    def evaluate_start(self) -> None:
        """Score held-out samples before the first step of a run that starts from weights.

        With run.keep = "best" the start is a candidate, saved as step-00000000. An alarm compares
        with its scores, also after a resume.
        """
        if not (self._backbones and self.recipe.init and self.recipe.run.monitor_steps):
            return
        if self.first_step == 0 and self._best.entry.start is None:
            self._watchdog(0, "evaluating")
            values = self._evaluate()
            self.reporter.evals(0, values)
            self._best.read_start(values)
            if self._best.wants_checkpoint:
                self._save(needed=True)
        lines = read_metrics(self.run_dir, "eval") if self.process.rank == 0 else []
        if lines and lines[0]["step"] == 0:
            self._start_alarm = StartAlarm(lines[0])

    # each step

    def steps(
        self, batches: Generator[Batch], *, step_flops: float = 0.0
    ) -> Iterator[tuple[int, Batch]]:
        """Set the learning rate and yield (step, batch), until all are done or ranks agree to stop.

        Args:
            batches: Endless, from the restored step on; closed with the run.
            step_flops: Of a global step, forward and backward; 0: utilisation is not logged.
        """
        self._opened.callback(batches.close)
        self._opened.callback(self.quarantine.write_own)
        peak = peak_flops(self.device, self.precision) if step_flops else None
        self._meter = Meter(self._order.batch_size, step_flops, peak, self.process.world_size)
        total = self.recipe.total_steps
        end = self.first_step if self._best.exhausted else total  # it was ended early before
        self._watchdog(self.first_step, "waiting for data")
        waiting = self._meter.waiting(batches)
        for step, batch in zip(range(self.first_step, end), waiting, strict=False):
            self._watchdog(step, "training")
            lr, ramp = lr_at(step, self.recipe.optim, total), ramp_at(step, self.recipe.tune)
            self._lr = set_lr(self._optimizer, lr, ramp)
            yield step, batch
            if self._stopping or self._best.exhausted:
                break
            self._watchdog(step + 1, "waiting for data")

    def backward(self, loss: Tensor) -> None:
        """Accumulate the gradient of a loss (), scaled where fp16 needs it."""
        self.accelerator.backward(loss)

    @contextmanager
    def optimizer_step(self, loss: Tensor) -> Iterator[Decision]:
        """Clip the gradient and step the optimizer by a loss (), equal on all ranks.

        A non-finite step changes nothing; what the block does to the guarded buffers is part of it.
        """
        self.accelerator.unscale_gradients()
        most = self.recipe.optim.clip_norm
        norm = clip_gradient(self._optimizer.optimizer, self._parameters, most)
        with self.guard.step(loss, norm) as decision:
            yield decision

    def step_done(self, step: int, batch: Batch, decision: Decision) -> None:
        """Count a step as taken or skipped; the ids of a skipped one are written.

        Raises:
            UserError: After run.max_bad_steps skipped steps in a row, on CUDA one step later.
        """
        self._numbers = decision.numbers
        self.guard.count(step, batch.ids, batch.source_ids, decision, epoch=batch.epoch)
        self.last_step = step + 1
        fault("train.step")
        self.reporter.step_done(self.last_step)

    def is_log_step(self, step: int) -> bool:
        """Say whether this step's numbers are logged; the same on all ranks."""
        return self._is_due(step, self.recipe.run.log_steps)

    def log(self, step: int, numbers: Mapping[str, float]) -> None:
        """Write a log line of this step, with further numbers, and read the alarms. Collective."""
        self.guard.settle()
        loss_value, grad_norm = self._numbers.tolist()
        values = {
            "loss": loss_value,
            "lr": self._lr,
            "grad_norm": grad_norm,
            "epoch": self.last_step / self._order.steps_per_epoch,
            **self._meter.read(self.last_step - self.first_step),
            **numbers,
            "skipped_steps": self.guard.skipped,
            "overflows": self.guard.overflows,
            "quarantined": self.quarantine.collect(),
        }
        self.reporter.train(self.last_step, values)
        if self._alarms is not None:
            self.reporter.alarms(self.last_step, self._alarms.read(self.last_step, values))

    def evaluate_if_due(self, step: int) -> None:
        """Score held-out samples every run.monitor_steps and at the end. All ranks call it."""
        if not self._backbones or not self._is_due(step, self.recipe.run.monitor_steps or 0):
            return
        self._watchdog(self.last_step, "evaluating")
        fault("train.monitor")
        with self._meter.paused():
            values = self._evaluate()
            self.reporter.evals(self.last_step, values)
        self._best.read(self.last_step, values)
        if self._start_alarm is not None:
            self.reporter.alarms(self.last_step, self._start_alarm.read(values))

    def save_if_due(self, step: int) -> None:
        """Save every run.save_steps, at the end, where any rank was asked to stop, and the best.

        All ranks vote on the stop at every step; rank 0 writes the checkpoint.
        """
        self._stopping = agree(self._stop_requested())
        is_last = step + 1 == self.recipe.total_steps
        needed = self._stopping or is_last or self._best.exhausted
        due = self._is_due(step, self.recipe.run.save_steps) or self._best.wants_checkpoint
        if needed or due:
            with self._meter.paused():
                self._save(needed=needed)

    def _save(self, *, needed: bool) -> None:
        self._watchdog(self.last_step, "saving")
        self.guard.settle()
        metadata = {**self._metadata, **self._best.state()}
        save = self._checkpoints.save
        self._best.saved(save(self.last_step, self._parts, metadata, needed=needed))

    # after the last step

    def finish(self) -> int:
        """Leave DONE, STOPPED or PREEMPTED, and return the last step done. Collective."""
        done, total, early = self.last_step, self.recipe.total_steps, self._best.exhausted
        preempted = done < total and not early
        self._watchdog(done, "ended")
        self.quarantine.collect()
        reason = {"reason": str(self._best)} if early else {}
        self.reporter.event(done, "stop" if self._stopping and not early else "end", **reason)
        number = self._stop_requested.signal or signal.SIGTERM  # another rank was asked
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

    def close(self) -> None:
        """Close what was opened, the last first; what this rank still has to say is written."""
        self._opened.close()

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
        self._log, self._samples, self._limit = log, samples, max_fraction
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
        new, self._new = self._new, []
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
