"""One job in a run directory at a time."""

import json
import os
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sslpipe.errors import UserError
from sslpipe.portable import process_start, read_regular
from sslpipe.run.records import check_types, parse_object
from sslpipe.run.stop import clear_markers

if TYPE_CHECKING:  # `sslpipe status` needs no torch
    from sslpipe.distributed import Rank

MOST_LOCK_BYTES = 2**16
TOUCH_EVERY_S = 60
HOLDER: dict[str, type] = {"host": str, "pid": int}  # what a lock must say
STALE_AFTER_S = 600  # a lock of another host that was not touched for this long is left over


class RunLock:
    """RUN/lock names the job that holds the directory; a thread touches it while the job lives.

    A batch job that was killed and started again (the environment's SSLPIPE_JOB_ID is the same)
    takes its own lock over, also from another host. Raises: UserError where a living job holds it.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "lock"
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            if self.path.is_dir():
                text = f"{self.path} is a folder where a file should be; move it away"
                raise UserError(text) from None
            self._refuse_if_alive()
            self.path.unlink(missing_ok=True)
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        with os.fdopen(descriptor, "w") as file:
            holder = {"host": socket.gethostname(), "pid": os.getpid(), "start": process_start()}
            file.write(json.dumps({**holder, "job": os.environ.get("SSLPIPE_JOB_ID")}))
        self._released = threading.Event()
        threading.Thread(target=self._keep_alive, name="sslpipe-lock", daemon=True).start()

    def release(self) -> None:
        """Give the directory back."""
        self._released.set()
        self.path.unlink(missing_ok=True)

    def _keep_alive(self) -> None:
        while not self._released.wait(TOUCH_EVERY_S):
            with suppress(OSError):  # released meanwhile, or a network disk is away for a moment
                os.utime(self.path)

    def _refuse_if_alive(self) -> None:
        if (damage := lock_damage(self.path)) is not None:
            print(f"warning: {self.path} is damaged ({damage}); replaced", file=sys.stderr)
        holder = holder_of(self.path.parent)
        if holder is None:
            return
        elsewhere = holder["host"] != socket.gethostname()
        if elsewhere and holder.get("job") and holder["job"] == os.environ.get("SSLPIPE_JOB_ID"):
            return  # a scheduler ends a job everywhere before it starts it again
        raise UserError(
            f"{self.path.parent} is in use by process {holder['pid']} on {holder['host']} "
            f"(last sign of life {holder['age_s']:.0f} s ago); wait for it, stop it, or use "
            f"another --run-dir. If it is gone, delete {self.path}"
        )


def _read_lock(path: Path) -> dict[str, Any]:
    holder = parse_object(read_regular(path, MOST_LOCK_BYTES))
    check_types(holder, HOLDER)
    return holder


def lock_damage(path: Path) -> str | None:
    """Say what is wrong with a lock; None: nothing, or it is not there."""
    try:
        _read_lock(path)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        return getattr(error, "strerror", None) or str(error)
    return None


def holder_of(run_dir: Path) -> dict[str, Any] | None:
    """Find the living process that holds a run directory.

    On this host it is alive if it is there; on another if it touched the lock in the last
    STALE_AFTER_S. A damaged lock names nobody, and stops no resume.

    Returns:
        host, pid, job, age_s (seconds since it touched the lock); None where no process holds it.
    """
    path = run_dir / "lock"
    try:
        holder = _read_lock(path)
        holder["age_s"] = time.time() - path.stat().st_mtime
    except (OSError, ValueError):
        return None
    if holder["host"] == socket.gethostname():
        alive = process_start(holder["pid"]) == holder.get("start")
    else:
        alive = holder["age_s"] < STALE_AFTER_S
    return holder if alive else None


@contextmanager
def take_lock(run_dir: Path, process: "Rank") -> Iterator[dict[str, bytes]]:
    """Hold the run directory inside, on rank 0; gives the markers that it removes. Collective.

    Raises:
        UserError: On every rank, where rank 0 cannot have it.
    """
    from sslpipe.distributed import broadcast_object

    lock, problem, markers = None, None, {}
    if process.rank == 0:
        try:
            lock = RunLock(run_dir)
            markers = clear_markers(run_dir)
        except (UserError, OSError) as error:
            problem = str(error)
    problem = broadcast_object(problem)
    if problem:
        raise UserError(f"cannot use the run directory: {problem}")
    try:
        yield markers
    finally:
        if lock:
            lock.release()
