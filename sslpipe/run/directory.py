"""Holding a run directory: one job at a time, a watchdog, and a marker that says how it ended."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from sslpipe.distributed import Rank
from sslpipe.errors import UserError
from sslpipe.portable import lacks_memory
from sslpipe.recipe.sections import RunRecipe
from sslpipe.registry.plugins import describe_error, made_with
from sslpipe.run.accelerator import deterministic_algorithms, join_processes
from sslpipe.run.checkpoint_files import describe_newest
from sslpipe.run.console import run_console, say_last
from sslpipe.run.description import plugins_of
from sslpipe.run.device import training_device
from sslpipe.run.lock import take_lock
from sslpipe.run.stop import restore_markers, write_failure, write_refusal
from sslpipe.run.watchdog import Watchdog

_LESS_MEMORY = (
    "The same command with more processes needs less memory each. Or begin in a new run directory "
    "with data.micro_batch, a part of data.batch_size (pretraining: the same negatives), a smaller "
    "sampler.classes_per_batch (fine-tuning), run.activation_checkpointing = true (networks "
    "without BatchNorm), or optim.precision = 'bf16'"
)


@dataclass(eq=False)
class HeldDirectory:
    """A run directory that this process holds."""

    run_dir: Path
    process: Rank  # this one, among all
    watchdog: Watchdog  # ends a rank that hangs
    # closed with the run, the last first
    opened: ExitStack = field(init=False, default_factory=ExitStack)
    # whether the run's checkpoint and its log were accepted
    began: bool = field(init=False, default=False)


@contextmanager
def hold_directory(recipe: RunRecipe, run_dir: Path) -> Iterator[HeldDirectory]:
    """Join the launcher's processes and hold the run directory inside. Collective.

    No other job can use `run_dir`, and a rank that hangs is ended. A failure leaves FAILED there;
    what is refused, or stopped, before it continues a run leaves that run's markers.

    Raises:
        UserError: The directory is in use, the launcher's processes are not accelerate's, or the
            device has no memory left.
    """
    device = training_device(recipe).type
    process = join_processes(cpu=device == "cpu", timeout_s=recipe.run.timeout_s)
    deterministic = deterministic_algorithms(recipe, device)
    plugins = plugins_of(run_dir)
    with run_console(), take_lock(run_dir, process) as markers, deterministic, made_with(plugins):
        holds_run = (run_dir / "recipe.json").exists()
        watchdog = Watchdog(run_dir, process, recipe.run.timeout_s)
        held = HeldDirectory(run_dir, process, watchdog)
        try:
            with watchdog:
                try:
                    yield held
                except SystemExit as error:  # of a part of the user's own: nothing is done
                    raise UserError(describe_error(error)) from error
                finally:
                    held.opened.close()  # what this rank still has to say is written
        except BaseException as error:
            if (text := _explain(error, recipe, run_dir)) is not None:
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


def _explain(error: BaseException, recipe: RunRecipe, run_dir: Path) -> str | None:
    """Return in one line what torch or the machine refused, and what to do; None: another error."""
    if isinstance(error, UserError):
        return None
    if lacks_memory(error):
        message = " ".join(str(error).split()) or "not enough memory"
        return f"{message}; {describe_newest(run_dir)}. {_LESS_MEMORY}"
    if type(error).__module__.startswith(("torch._dynamo", "torch._inductor")):
        message = str(error).strip().partition("\n")[0]
        return (
            f"run.compile = {recipe.run.compile!r}: torch cannot compile the network ({message}); "
            "where it finds no compiler install one, such as g++, or use run.compile = 'off'"
        )
    return None
