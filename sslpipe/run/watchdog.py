"""Heartbeats: every rank says where it is, and one that hangs is ended."""

import faulthandler
import os
import socket
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from sslpipe.errors import UserError
from sslpipe.files import MOST_BYTES, Finite, Int64, Stored, read_json, write_json
from sslpipe.portable import read_regular, write_atomically
from sslpipe.run.console import say_last
from sslpipe.run.launcher import watch_launcher
from sslpipe.run.stop import write_failure

if TYPE_CHECKING:  # `sslpipe status` needs no torch
    from sslpipe.distributed import Rank

WRITE_EVERY_S = 10


class Heartbeat(Stored):
    """RUN/heartbeat/rank-N.json: where a rank is."""

    rank: Int64
    host: str
    pid: Int64
    step: Int64
    phase: str
    since_s: Finite  # seconds in that phase
    wall: Finite  # seconds since the epoch when it was written


class Watchdog:
    """RUN/heartbeat/rank-N.json says where this rank is; one without progress is ended.

    Call it at each change of place: `beat(step, "waiting for data")`. Without a call for half of
    timeout_s every thread's stack goes to rank-N.stacks.txt beside it; after timeout_s to stderr,
    too, FAILED says where each rank stood, and the process ends with status 70, as does one whose
    launcher died. The time before the first call is not limited, nor is it after a fork; that of a
    suspended process does not count.
    """

    def __init__(self, run_dir: Path, process: "Rank", timeout_s: float) -> None:
        self._run_dir = run_dir
        self._rank = process.rank
        self._timeout_s = timeout_s
        self._folder = run_dir / "heartbeat"
        self._path = self._folder / f"rank-{process.rank}.json"
        self._stacks = self._folder / f"rank-{process.rank}.stacks.txt"
        self._launched = process.world_size > 1
        self._before = b""
        self._place: tuple[int, str, float] = (0, "setting up", time.monotonic())
        self._armed = False
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="sslpipe-watchdog", daemon=True)

    def __enter__(self) -> "Watchdog":
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UserError(f"cannot use {error.filename}: {error.strerror}; remove it") from error
        with suppress(OSError):
            self._before = read_regular(self._path, MOST_BYTES)
        self._stacks.unlink(missing_ok=True)
        self._write()
        self._thread.start()
        if self._launched:
            watch_launcher(lambda text: self._end(f"rank {self._rank}: {text}"))
        return self

    def __exit__(self, *error: object) -> None:
        if self._launched:
            watch_launcher()
        self._ended.set()
        self._thread.join()
        if self._before and not self._armed:  # refused: the last word stays the run's own
            with suppress(OSError):
                write_atomically(self._path, self._before)
        elif self._folder.is_dir():  # a short run ends before its second heartbeat
            self._write()

    def __call__(self, step: int, phase: str) -> None:
        """Note that this rank entered a phase of a step."""
        self._place = (step, phase, time.monotonic())
        self._armed = True

    def _watch(self) -> None:
        look_every_s = min(1.0, self._timeout_s / 10)
        written_s = time.monotonic()
        looked_s = written_s
        idle_s = 0.0
        seen = self._place
        warned_at = None
        while not self._ended.wait(look_every_s):
            now_s = time.monotonic()
            place = self._place
            if place == seen and self._armed:
                # one that was suspended (SIGSTOP, Ctrl-Z, a container's pause) did not look
                idle_s += min(now_s - looked_s, 2 * look_every_s)
            else:
                idle_s = 0.0
            seen = place
            looked_s = now_s
            if idle_s > self._timeout_s / 2 and warned_at != place:
                warned_at = place
                with open(self._stacks, "w") as file:
                    faulthandler.dump_traceback(file)
            if idle_s > self._timeout_s:
                faulthandler.dump_traceback(sys.__stderr__ or 2)
                self._end(
                    f"rank {self._rank}: Hang: no progress for {idle_s:.0f} s (run.timeout_s = "
                    f"{self._timeout_s:g}) at step {place[0]}, {place[1]}; {self._others()}; its "
                    f"stacks are in {self._stacks.relative_to(self._run_dir)}"
                )
            if now_s - written_s > min(WRITE_EVERY_S, self._timeout_s / 4):
                written_s = now_s
                self._write()

    def _others(self) -> str:
        places = [
            f"rank {rank} at step {beat.step}, {beat.phase}"
            for rank, beat in read_heartbeats(self._run_dir).items()
            if rank != self._rank
        ]
        return "; ".join(places) or "no other ranks"

    def _end(self, text: str) -> None:
        self._write()
        write_failure(self._run_dir, text)
        say_last(text)
        os._exit(70)  # the main thread cannot be asked

    def _write(self) -> None:
        step, phase, at_s = self._place
        beat = Heartbeat(
            rank=self._rank,
            host=socket.gethostname(),
            pid=os.getpid(),
            step=step,
            phase=phase,
            since_s=round(time.monotonic() - at_s, 1),
            wall=round(time.time(), 1),
        )
        try:
            write_json(self._path, beat)
        except OSError as error:  # a full disk must not end the run from here
            say_last(f"warning: no heartbeat written: {error}")


def read_heartbeats(run_dir: Path) -> dict[int, Heartbeat]:
    """Read each rank's last heartbeat, of files that are whole: rank -> what it says."""
    beats = {}
    for path in (run_dir / "heartbeat").glob("rank-*.json"):
        with suppress(UserError):
            beat = read_json(path, Heartbeat)
            beats[beat.rank] = beat
    return dict(sorted(beats.items()))
