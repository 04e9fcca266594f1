"""Where a command computes, and its place among the processes of a launcher."""

import os

import torch

from sslpipe.distributed import Rank, pick_device
from sslpipe.errors import UserError
from sslpipe.portable import keep_freed_memory


def start(device: str, alone: str = "", *, small: bool = False) -> tuple[str, Rank]:
    """Join the launcher's processes; `sslpipe.distributed.end_processes` leaves them.

    Args:
        device: As in --device.
        alone: A command that runs in one process; "": one that takes several.
        small: Keep no freed memory: slower, but the process shrinks between large stages.

    Returns:
        The torch device of this process, and its place among the others.

    Raises:
        UserError: There is no such device, or there are several processes and one is wanted.
    """
    target, process = pick_device(device, f"--device {device}"), Rank()
    if any(name == "WORLD_SIZE" or name.startswith("ACCELERATE_") for name in os.environ):
        from sslpipe.run.launch import join_processes  # imports accelerate

        process = join_processes(cpu=target == "cpu", timeout_s=3600.0)
    elif not small:  # no launcher
        keep_freed_memory()
    if alone and process.world_size > 1:
        started = f"the launcher started {process.world_size}"
        raise UserError(f"{alone} runs in one process, and {started}")
    return f"cuda:{torch.cuda.current_device()}" if target == "cuda" else target, process
