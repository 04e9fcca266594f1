"""Real commands in real processes, killed at random; every process is known by a mark."""

import contextlib
import os
import random
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from tests.helpers.runs import ROOT

WORLD = 2
GONE_WITHIN_S = 15.0
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGHUP)
TARGETS = ("rank 0", "rank 1", "launcher", "all")
PATIENCE_S = 240.0  # for a command that nothing kills
ACCELERATE = "accelerate.commands.accelerate_cli"
LAUNCHERS = (
    ("-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={WORLD}"),
    ("-m", ACCELERATE, "launch", f"--config_file={ROOT}/launch/cpu2.yaml"),
)
SHARED_MEMORY = Path("/dev/shm")


class Kill(NamedTuple):
    """What is done to a command."""

    target: str = ""  # one of TARGETS; "" for a named place, where the process ends itself
    number: int = signal.SIGKILL
    after_s: float = 0.0  # since the command's start or, where `working`, since it began to work
    working: bool = False
    fault: str = ""  # what SSLPIPE_FAULT says, instead of all that

    def __str__(self) -> str:
        if self.fault:
            return self.fault
        when = "of work" if self.working else "of start-up"
        return f"{signal.Signals(self.number).name} to {self.target}, {self.after_s:.2f} s {when}"


class Command:
    """A command of several processes (by one of LAUNCHERS) or one, marked in their environment."""

    def __init__(
        self, words: list[str], launcher: tuple[str, ...], scratch: Path, fault: str = ""
    ) -> None:
        self._mark = f"SSLPIPE_STORM={uuid.uuid4().hex}".encode()
        self.begin_s, self.struck = time.monotonic(), dict[int, str]()
        self._out = open(scratch.with_suffix(".log"), "w+b")  # noqa: SIM115 (closed by `wait`)
        name, _, value = self._mark.decode().partition("=")
        self.process = subprocess.Popen(
            [sys.executable, *launcher, "-m", "sslpipe", *words],
            env={
                **os.environ,
                "PYTHONPATH": str(ROOT),
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "lo",
                "TMPDIR": str(scratch),
                "SSLPIPE_FAULT": fault,
                "PYTHONFAULTHANDLER": "1",
                name: value,
            },
            stdin=subprocess.DEVNULL,
            stdout=self._out,
            stderr=self._out,
            start_new_session=True,
            # `nohup` in front of the tests may ignore it
            preexec_fn=lambda: signal.signal(signal.SIGHUP, signal.SIG_DFL),
        )

    def living(self) -> dict[int, str]:
        """Process id -> "rank N", "launcher" (the first one) or "child", of all with the mark."""
        words: dict[int, list[bytes]] = {}
        for folder in Path("/proc").iterdir():
            if folder.name.isdecimal():
                with contextlib.suppress(OSError):  # it ended, or is another user's
                    words[int(folder.name)] = (folder / "environ").read_bytes().split(b"\0")
        marked = {pid: its for pid, its in words.items() if self._mark in its}
        ranks = {
            pid: word[5:].decode()
            for pid, its in marked.items()
            for word in its
            if word.startswith(b"RANK=")
        }
        found = dict.fromkeys(marked, "child")
        found |= {pid: f"rank {rank}" for pid, rank in ranks.items() if parent(pid) not in ranks}
        return found | ({self.process.pid: "launcher"} if self.process.pid in marked else {})

    def strike(self, kill: Kill, works: Callable[[], bool]) -> bool:
        """Wait for the moment and send the signal; whether anybody was there to get it."""
        deadline = time.monotonic() + PATIENCE_S
        while kill.working and not works() and self.process.poll() is None:
            assert time.monotonic() < deadline, f"no work: {self.said()}"
            time.sleep(0.02)
        begin_s = time.monotonic() if kill.working else self.begin_s
        time.sleep(max(0.0, begin_s + kill.after_s - time.monotonic()))
        for pid, name in self.living().items():
            if kill.target in (name, "all"):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, kill.number)
                    self.struck[pid] = name
        return bool(self.struck)

    def wait(self, within_s: float = PATIENCE_S) -> int:
        """Wait until no process is left; the exit status of the first.

        Once a rank has ended, the others and the launcher have GONE_WITHIN_S to do so.
        """
        deadline, ranks = time.monotonic() + within_s, set[int]()
        try:
            while (left := self.living()) or self.process.poll() is None:
                present = {pid for pid, name in left.items() if name.startswith("rank")}
                if ranks - present and within_s > GONE_WITHIN_S:
                    within_s, deadline = GONE_WITHIN_S, time.monotonic() + GONE_WITHIN_S
                ranks |= present
                assert time.monotonic() < deadline, (
                    f"left: {left}; struck {self.struck}; {self._stacks(left)}"
                )
                time.sleep(0.1)
        finally:
            for pid in self.living():
                os.kill(pid, signal.SIGKILL)
            self.process.wait()
            self._said = self.said()
            self._out.close()
        return self.process.returncode

    def _stacks(self, left: dict[int, str]) -> str:
        """End processes by SIGABRT, at which each prints its threads' stacks; what was printed."""
        for pid in left:
            os.kill(pid, signal.SIGABRT)
            time.sleep(0.5)
        return self.said()

    def said(self) -> str:
        """What the processes printed."""
        if not self._out.closed:
            self._out.seek(0)
            self._said = self._out.read().decode(errors="replace")
        return self._said


def choose(
    rng: random.Random, points: dict[str, tuple[int, bool]], start_s: float, work_s: float
) -> Kill:
    """Draw a kill: at a named place, in start-up and rendezvous (start_s long), or at work.

    points: named place -> most visits, and whether any rank comes there (else rank 0 alone).
    """
    if points and rng.random() < 0.35:
        point = rng.choice(sorted(points))
        most, any_rank = points[point]
        rank = rng.randrange(WORLD) if any_rank else 0
        return Kill(fault=f"{point}:{rng.randrange(most) + 1}@{rank}")
    target, number = rng.choice(TARGETS), rng.choice(SIGNALS)
    working = rng.random() < 0.5
    return Kill(target, number, rng.uniform(0.2, work_s if working else start_s), working)


def parent(pid: int) -> int | None:
    """Return the parent of a process; None where it has ended."""
    try:
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    except (OSError, IndexError, ValueError):
        return None


# what a kill may leave, and the next start removes: names of files and folders
LEFTOVERS = (r"\.tmp-.*", r"\..*\.parts", r"\..*\.exporting", r"\..*\.tmp")


def unexpected_files(folder: Path) -> list[str]:
    """List hidden entries that no next start would know."""
    hidden = (path for path in folder.rglob(".*"))
    return [str(p) for p in hidden if not any(re.fullmatch(each, p.name) for each in LEFTOVERS)]


def shared_memory() -> set[str]:
    """List the shared memory and the semaphores that have a name."""
    return set(os.listdir(SHARED_MEMORY)) if SHARED_MEMORY.is_dir() else set()
