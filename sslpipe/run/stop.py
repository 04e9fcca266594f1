"""Graceful shutdown on a signal or a file, and the marker that says how the run ended."""

import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from sslpipe.errors import UserError
from sslpipe.portable import read_regular, stop_signals, write_atomically
from sslpipe.registry.plugins import describe_error

FROM_A_KEYBOARD = (signal.SIGINT, signal.SIGQUIT)  # Ctrl-C and Ctrl-\
MOST_MARKER_BYTES = 2**20
MARKERS = ("DONE", "STOPPED", "PREEMPTED", "FAILED")  # exit codes do not survive a launcher

_last_stop: int | None = None


class StopRequest:
    """True once a signal of `stop_signals` arrived, or the stop file exists. Call it every step.

    The handlers only set a flag; the loop saves and ends. A second SIGINT or SIGQUIT, from a
    keyboard, ends at once.

    Args:
        stop_file: Looked for at most once a second; None: not at all.

    Attributes:
        signal: The first that asked; SIGTERM for the stop file; None: none did.
        handles_signals: Whether it was made in the main thread: Python has handlers set there only,
            and another thread's program (a service, a notebook's) keeps its own.
    """

    def __init__(self, stop_file: str | None) -> None:
        self.signal: int | None = None
        self._looked_s = 0.0
        self._stop_file = stop_file
        self.handles_signals = threading.current_thread() is threading.main_thread()
        numbers = stop_signals() if self.handles_signals else ()
        self._old = {number: signal.signal(number, self._handle) for number in numbers}

    def __call__(self) -> bool:
        """Return whether a stop was requested."""
        now_s = time.monotonic()
        if self._stop_file and self.signal is None and now_s - self._looked_s >= 1.0:
            self._looked_s = now_s
            if os.path.exists(self._stop_file):
                self.signal = signal.SIGTERM
        return self.signal is not None

    def restore_handlers(self) -> None:
        """Give the signals back to who had them before."""
        for number, handler in self._old.items():
            signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.signal is not None and number in FROM_A_KEYBOARD:
            raise KeyboardInterrupt
        if self.signal is None:
            self.signal = number


def note_stop(number: int | None) -> None:
    """Remember which signal ended this process's last run; None: it is done."""
    global _last_stop
    _last_stop = number


def stopped_status() -> int:
    """Return the exit status of this process's last run: 0 where it is done, 128 + the signal."""
    return 0 if _last_stop is None else 128 + _last_stop


def write_marker(run_dir: Path, marker: str, text: str = "") -> None:
    """Leave exactly one of MARKERS in the run directory."""
    clear_markers(run_dir)
    write_atomically(run_dir / marker, text + "\n")


def write_failure(run_dir: Path, text: str) -> None:
    """Leave FAILED with the first failing rank's text; the others' errors are consequences."""
    try:
        with open(run_dir / "FAILED", "x") as file:
            file.write(text + "\n")
    except OSError:  # another rank was first; or the directory is gone, which is no second error
        return


@contextmanager
def reported_refusal(run_dir: Path) -> Iterator[None]:
    """Have a refusal inside, while a plan is made, be seen by those who watch the run directory.

    FAILED says it, as that of a refusal during the run; of a run that is there the markers stay.
    """
    try:
        yield
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        text = f"rank {rank}: {describe_error(error)}"
        if (run_dir / "recipe.json").exists():
            write_refusal(text)
        elif rank == "0":  # all ranks make the same plan
            run_dir.mkdir(parents=True, exist_ok=True)
            write_marker(run_dir, "FAILED", text)
        raise


def clear_markers(run_dir: Path) -> dict[str, bytes]:
    """Remove all of MARKERS. Returns: those that were there, name -> what they said."""
    contents = {}
    for path in (run_dir / name for name in MARKERS):
        if os.path.lexists(path):
            with suppress(OSError):  # a link that leads nowhere, a FIFO: no marker of ours
                contents[path.name] = read_regular(path, MOST_MARKER_BYTES)
            path.unlink(missing_ok=True)
    return contents


def restore_markers(run_dir: Path, markers: Mapping[str, bytes]) -> None:
    """Leave the markers that `clear_markers` has removed, and no others."""
    with suppress(OSError):  # the directory is gone, or full: no second error
        clear_markers(run_dir)
        for name, contents in markers.items():
            write_atomically(run_dir / name, contents)


def write_refusal(text: str) -> None:
    """Tell a batch job (the environment's SSLPIPE_REFUSED_FILE) why its run was not continued."""
    if path := os.environ.get("SSLPIPE_REFUSED_FILE"):
        with suppress(OSError), open(path, "x") as file:
            file.write(text + "\n")
