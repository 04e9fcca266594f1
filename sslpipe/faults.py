"""Named places where a test may end, hang or break the process, as the world would."""

import os
import re
import signal
import time
from collections import Counter

_seen: Counter[str] = Counter()


def fault(point: str) -> None:
    """Act where the environment's SSLPIPE_FAULT names this point and this is its n-th visit.

    SSLPIPE_FAULT is `point:n` (`point:*`: every visit), then `@rank` for one rank alone, then
    `=action`: exit (the default: at once with status 9, as a power cut would), hang (for an hour),
    slow (a fifth of a second), full (OSError of a full disk), term (SIGTERM), another signal by its
    name, as sigint, or memory (torch's error of a device without memory).
    """
    # does the variable name this place, this rank and this visit?
    wanted = os.environ.get("SSLPIPE_FAULT", "")
    if not wanted:
        return
    match = re.fullmatch(
        r"([\w.]+):(\d+|\*)(?:@(\d+))?(?:=(exit|hang|slow|full|term|memory|sig\w+))?", wanted
    )
    assert match, f"SSLPIPE_FAULT = {wanted!r} is not point:n@rank=action"
    name, visit, rank, action = match.groups()
    if name != point or (rank and rank != os.environ.get("RANK", "0")):
        return
    _seen[point] += 1
    if visit != "*" and _seen[point] != int(visit):
        return
    if action == "hang":
        time.sleep(3600)
    elif action == "slow":
        time.sleep(0.2)
    elif action == "full":
        raise OSError(28, f"No space left on device (the fault {point})")
    elif action is not None and action.startswith(("term", "sig")):
        os.kill(os.getpid(), signal.Signals["SIGTERM" if action == "term" else action.upper()])
    elif action == "memory":
        import torch  # only here: this module is imported by those that need no torch

        raise torch.OutOfMemoryError(f"CUDA out of memory (the fault {point})")
    else:
        os._exit(9)
