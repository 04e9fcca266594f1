"""The launcher of this process: how to start one, what it may start, and what its end means.

Needs no torch: `watch_launcher` is the first thing that a launched process does.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from sslpipe.errors import RecipeError, UserError
from sslpipe.portable import command_of
from sslpipe.run.console import say_last

LOOK_EVERY_S = 1.0
SAY_WITHIN_S = 5.0
LOST_STATUS = 70  # sysexits.h: an internal error of the system, not of the user


def launch_command(processes: int) -> str:
    """Return a command that starts `processes` on one machine, with or without GPUs.

    It needs no file of a clone, takes any free port, and reads no settings of the user's.
    """
    return f"torchrun --standalone --nproc_per_node {processes} -m sslpipe train"


def check_streams(streams: int, world: int) -> None:
    """Raise RecipeError where `world` processes cannot share data.num_streams evenly."""
    if streams % world:
        from sslpipe.recipe.base import divisors  # pydantic: not before the launcher is watched

        valid = divisors(streams)[:20]
        raise RecipeError(
            f"data.num_streams = {streams} does not divide over {world} processes; start "
            f"{', '.join(map(str, valid))} processes, or set num_streams to a multiple of {world}"
        )


def launched_processes() -> int:
    """Read how many processes a launcher started; 1 where there is none."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal():
        raise UserError(f"WORLD_SIZE = {text!r} is no number of processes; unset it")
    return int(text)


class _Watch:
    """A thread that ends this process when its parent is gone."""

    def __init__(self) -> None:
        self.last_words: Callable[[str], None] | None = None
        self._parent = os.getppid()
        # the parent may have died before this line; torchrun's processes know whom they had
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        self._adopted = by_torchrun and adopts(self._parent, command_of(self._parent))
        threading.Thread(target=self._look, name="sslpipe-launcher", daemon=True).start()

    def _look(self) -> None:
        pause = threading.Event()
        while not self._adopted and os.getppid() == self._parent:
            pause.wait(LOOK_EVERY_S)
        saying = threading.Thread(target=self._say, daemon=True)
        saying.start()
        saying.join(SAY_WITHIN_S)  # its disk may be as lost as the launcher
        os._exit(LOST_STATUS)  # the main thread may wait for a rendezvous, deep in C++

    def _say(self) -> None:
        text = "LauncherLost: the process that started it is gone"
        if self.last_words is not None:
            self.last_words(text)
        else:
            say_last(f"rank {os.environ.get('RANK', '0')}: {text}")


_watches: dict[int, _Watch] = {}  # by process id: a thread does not survive a fork


def watch_launcher(last_words: Callable[[str], None] | None = None) -> None:
    """End this process within seconds of its launcher's end; else it would wait for the others.

    The launcher is the parent. One thread looks after it, from the first call on, through imports,
    rendezvous and training; a later call only changes what is said.

    Args:
        last_words: Called with the reason before the end; None: a line on stderr.
    """
    watch = _watches.get(os.getpid())
    if watch is None:
        watch = _watches[os.getpid()] = _Watch()
    watch.last_words = last_words


def adopts(pid: int, command: str | None) -> bool:
    """Say whether a parent took over an orphan of a launcher: process 1, or a user's systemd.

    In a container, process 1 may be the launcher itself.

    Args:
        pid: Of the parent.
        command: Its command line; None: unknown.
    """
    if not command or any(name in command for name in ("python", "torchrun", "accelerate")):
        return False
    return pid == 1 or Path(command.split()[0]).name == "systemd"
