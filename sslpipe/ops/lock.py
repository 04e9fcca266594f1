"""One job in a run directory at a time."""

import json
import os
import socket
import time
from pathlib import Path

from sslpipe.errors import UserError

STALE_AFTER_S = 600  # a lock of another host that was not touched for this long is left over


class RunLock:
    """RUN/lock names the job that holds the directory; `touch` shows that it still lives.

    Raises: UserError from the constructor where another living job holds it.
    """

    def __init__(self, run_dir: Path) -> None:
        run_dir.mkdir(parents=True, exist_ok=True)
        self.path = run_dir / "lock"
        try:
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            self._refuse_if_alive()
            self.path.unlink(missing_ok=True)
            descriptor = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        with os.fdopen(descriptor, "w") as file:
            json.dump({"host": socket.gethostname(), "pid": os.getpid(), "start": _start()}, file)

    def touch(self) -> None:
        os.utime(self.path)

    def release(self) -> None:
        self.path.unlink(missing_ok=True)

    def _refuse_if_alive(self) -> None:
        try:
            holder = json.loads(self.path.read_text())
            age_s = time.time() - self.path.stat().st_mtime
        except (OSError, ValueError):
            return  # it went away, or was cut off while being written
        if holder["host"] == socket.gethostname():
            alive = _start(holder["pid"]) == holder["start"]
        else:
            alive = age_s < STALE_AFTER_S
        if alive:
            raise UserError(
                f"{self.path.parent} is in use by process {holder['pid']} on {holder['host']} "
                f"(last sign of life {age_s:.0f} s ago); wait for it, stop it, or use another "
                f"--run-dir. If it is gone, delete {self.path}"
            )


def _start(pid: int | None = None) -> str | None:
    """When a process started, in the kernel's ticks: tells it from a later one with its number."""
    try:
        with open(f"/proc/{pid or os.getpid()}/stat") as file:
            return file.read().rpartition(")")[2].split()[19]
    except OSError:
        return None if os.path.isdir("/proc/self") else "unknown"
