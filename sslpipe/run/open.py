"""What surrounds a training: its processes, its run directory, its watchdog, what it says last."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from sslpipe.errors import UserError
from sslpipe.recipe.base import RunRecipe
from sslpipe.registry.plugins import describe_error, made_with
from sslpipe.run.checkpoint_files import describe_newest
from sslpipe.run.console import run_console, say_last
from sslpipe.run.launch import deterministic_algorithms, start_processes, training_device
from sslpipe.run.lock import take_lock
from sslpipe.run.records import plugins_of
from sslpipe.run.session import Run
from sslpipe.run.stop import restore_markers, write_failure, write_refusal
from sslpipe.run.watchdog import Watchdog

_LESS_MEMORY = (
    "The same command with more processes needs less memory each. Or begin in a new run directory "
    "with data.micro_batch, a part of data.batch_size (pretraining: the same negatives), a smaller "
    "sampler.classes_per_batch (fine-tuning), or optim.precision = 'bf16'"
)


@contextmanager
def open_run(recipe: RunRecipe, run_dir: Path) -> Iterator[Run]:
    """Join the launcher's processes and hold the run directory; on leaving, close what was opened.

    Inside, no other job can use `run_dir`, and a rank that hangs is ended. A failure leaves FAILED
    there with its text; what is refused, or stopped, before it continues a run of the directory
    leaves that run's markers. Collective.

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
        except torch.OutOfMemoryError as error:
            text = f"{error}; {describe_newest(run_dir)}. {_LESS_MEMORY}"
            write_failure(run_dir, f"rank {process.rank}: UserError: {text}")
            raise UserError(text) from error
        except BaseException as error:
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
