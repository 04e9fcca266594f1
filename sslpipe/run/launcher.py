"""The launcher of this process: how to start one, what it may start, and what its end means.

Needs no torch: `watch_launcher` is the first thing that a launched process does.
"""

import os
import threading
from collections.abc import Callable
from pathlib import Path

from sslpipe.errors import UserError
from sslpipe.portable import command_of
from sslpipe.run.console import say_last

LOOK_EVERY_S = 1.0
SAY_WITHIN_S = 5.0
LOST_STATUS = 70  # sysexits.h: an internal error of the system, not of the user


def launch_command(processes: int) -> str:
    """Return a command that starts `processes` on one machine, on any free port, without a file."""
    return f"torchrun --standalone --nproc_per_node {processes} -m sslpipe train"


def launched_processes() -> int:
    """Read how many processes a launcher started; 1 where there is none."""
    text = os.environ.get("WORLD_SIZE", "1")
    if not text.isdecimal():
        raise UserError(f"WORLD_SIZE = {text!r} is not a number of processes; unset it")
    return int(text)


# by process id, as a thread does not survive a fork: what is called before the end; None: a line
_last_words: dict[int, Callable[[str], None] | None] = {}


def watch_launcher(last_words: Callable[[str], None] | None = None) -> None:
    """End this process within seconds of its launcher's end; else it would wait for the others.

    The launcher is the parent. One thread looks after it, from the first call on; a later call only
    changes what is called with the reason before the end (None: a line on stderr).
    """
    watched = os.getpid() in _last_words
    _last_words[os.getpid()] = last_words
    if not watched:
        parent = os.getppid()
        # it may have died before this line; torchrun's processes know whom they had
        by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ
        lost = by_torchrun and adopts(parent, command_of(parent))
        arguments = parent, lost
        threading.Thread(
            target=_watch, args=arguments, name="sslpipe-launcher", daemon=True
        ).start()


def _watch(parent: int, lost: bool) -> None:
    pause = threading.Event()
    while not lost and os.getppid() == parent:
        pause.wait(LOOK_EVERY_S)
    saying = threading.Thread(target=_say_lost, daemon=True)
    saying.start()
    saying.join(SAY_WITHIN_S)  # its disk may be as lost as the launcher
    os._exit(LOST_STATUS)  # the main thread may wait for a rendezvous, deep in C++


def _say_lost() -> None:
    text = "LauncherLost: the process that started it is gone"
    say = _last_words[os.getpid()]
    if say is not None:
        say(text)
    else:
        say_last(f"rank {os.environ.get('RANK', '0')}: {text}")


def adopts(pid: int, command: str | None) -> bool:
    """Return whether a parent took over an orphan of a launcher: process 1, or a user's systemd.

    In a container, process 1 may be the launcher itself; command: None where it is unknown.
    """
    if not command or any(name in command for name in ("python", "torchrun", "accelerate")):
        return False
    return pid == 1 or Path(command.split()[0]).name == "systemd"
