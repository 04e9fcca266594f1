"""One job in a run directory at a time."""

import os
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from filelock import FileLock, Timeout

from sslpipe.errors import UserError
from sslpipe.files import Int64, Stored, read_json, write_json
from sslpipe.portable import explain_file_error
from sslpipe.run.console import say_last
from sslpipe.run.stop import clear_markers

if TYPE_CHECKING:  # `sslpipe status` needs no torch
    from sslpipe.distributed import Rank

WAIT_S = 1.0  # `sslpipe status` looks whether the lock is held by taking it for a moment


_TRAINING = threading.RLock()  # one run of a process at a time


@contextmanager
def alone_in_process() -> Iterator[None]:
    """Let one thread at a time train: torch's generators and accelerate's state are the process's.

    As of a search over settings with several threads; the others wait.
    """
    if not _TRAINING.acquire(blocking=False):
        say_last("another thread of this process trains: waiting for it")
        _TRAINING.acquire()
    try:
        yield
    finally:
        _TRAINING.release()


class Holder(Stored):
    """RUN/lock.json: the process that holds the run directory."""

    host: str
    pid: Int64

    def __str__(self) -> str:
        return f"process {self.pid} on {self.host}"


class RunLock:
    """Holds RUN/lock, a lock of the file system: it ends with the process, however that ends.

    RUN/lock.json names the process that holds it, for messages.

    Args:
        run_dir: The run directory; made where it is not there.

    Raises:
        UserError: Another process holds it.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "lock"
        self._holder_path = run_dir / "lock.json"
        self._lock = FileLock(self.path)
        try:
            self._lock.acquire(timeout=WAIT_S)
        except Timeout:
            raise UserError(
                f"{run_dir} is in use by {_holder(run_dir)}; wait for it, stop it, or use another "
                "--run-dir; tasks of srun train together where torchrun starts them, as the script "
                "of `sslpipe slurm` does"
            ) from None
        except OSError as error:  # which does not say of what
            raise OSError(error.errno, error.strerror, str(self.path)) from error
        write_json(self._holder_path, Holder(host=socket.gethostname(), pid=os.getpid()))

    def release(self) -> None:
        """Let other processes take the directory."""
        self._holder_path.unlink(missing_ok=True)
        self.path.unlink(missing_ok=True)
        self._lock.release()


def holder_of(run_dir: Path) -> str | None:
    """Return which process holds a run directory, for messages; None where none does."""
    path = run_dir / "lock"
    if not path.is_file():
        return None
    lock = FileLock(path)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        return _holder(run_dir)
    except OSError:  # of another account, or on a read-only disk
        return None
    lock.release()
    return None


def _holder(run_dir: Path) -> str:
    try:
        return str(read_json(run_dir / "lock.json", Holder))
    except UserError:  # it is written after the lock is taken
        return "another process"


@contextmanager
def take_lock(run_dir: Path, process: "Rank") -> Iterator[dict[str, bytes]]:
    """Hold the run directory inside, on rank 0; gives the markers that it removes. Collective.

    Raises:
        UserError: On every rank, where rank 0 cannot have it.
    """
    from sslpipe.distributed import broadcast_object

    lock = None
    problem = None
    markers: dict[str, bytes] = {}
    if process.rank == 0:
        try:
            lock = RunLock(run_dir)
            markers = clear_markers(run_dir)
        except UserError as error:
            problem = str(error)
        except OSError as error:
            problem = explain_file_error(error)
    problem = broadcast_object(problem)
    if problem:
        raise UserError(f"cannot use the run directory: {problem}")
    try:
        yield markers
    finally:
        if lock:
            lock.release()
