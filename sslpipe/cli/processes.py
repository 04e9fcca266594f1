"""Where a command computes, and its place among the processes of a launcher."""

import os

import torch

from sslpipe.distributed import Rank, pick_device
from sslpipe.errors import UserError
from sslpipe.run.allocator import keep_freed_memory


def start(device: str) -> tuple[str, Rank]:
    """Join the launcher's processes; `sslpipe.distributed.end_processes` leaves them.

    Returns:
        The torch device of this process, and its place among the others.
    """
    target = pick_device(device, f"--device {device}")
    if any(name == "WORLD_SIZE" or name.startswith("ACCELERATE_") for name in os.environ):
        from sslpipe.run.launch import join_processes  # imports accelerate

        process = join_processes(cpu=target == "cpu", timeout_s=3600.0)
    else:  # no launcher
        keep_freed_memory()
        process = Rank()
    return f"cuda:{torch.cuda.current_device()}" if target == "cuda" else target, process


def refuse_several(command: str, process: Rank) -> None:
    """Raise UserError where a launcher started several processes of a command that has one."""
    if process.world_size > 1:
        raise UserError(
            f"{command} runs in one process, and the launcher started {process.world_size}"
        )


def start_alone(command: str, device: str) -> str:
    """Return the torch device of a command that runs in one process; see `start`."""
    target, process = start(device)
    refuse_several(command, process)
    return target
