"""Real gloo processes for tests: `run_processes(fn, world, *args)` gives one result per rank.

`fn(process, *args)` must be a function at the top of a module (children import it by name; `tests`
is a package for that) and its result must pickle; tensors are fine. The process group is up before
fn is called and torch uses one thread. Children come from a fork server that has imported torch
once, so a call costs well under a second; pack many checks into one call all the same.
"""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import socket
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from sslpipe.distributed import Rank


def run_processes(
    fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call fn(Rank(rank, world), *args) in `world` gloo processes; results in rank order.

    world = 1 gives a process group of one. Raises: AssertionError with the traceback of every rank
    that failed; the others are ended. TimeoutError after timeout_s.
    """
    context = multiprocessing.get_context("forkserver")
    # DDP imports torch._dynamo when it is first built: seconds in every child otherwise
    context.set_forkserver_preload(["tests.helpers.processes", "torch._dynamo"])
    # plain pickle: multiprocessing's own would share tensors' memory, which ends with its process
    job = pickle.dumps((fn, args))
    port = _free_port()
    pipes, children = [], []
    for rank in range(world):
        ours, theirs = context.Pipe(duplex=False)
        child = context.Process(
            target=_child, args=(theirs, job, Rank(rank, world), port), daemon=True
        )
        child.start()
        theirs.close()
        pipes.append(ours)
        children.append(child)
    try:
        return _collect(pipes, time.monotonic() + timeout_s)
    finally:
        for child in children:
            child.terminate()
        for child in children:
            child.join()
            child.close()
        for pipe in pipes:
            pipe.close()


def _collect(pipes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    waiting = {pipe: rank for rank, pipe in enumerate(pipes)}
    failures: dict[int, str] = {}
    while waiting:
        # once one has failed, the rest only have the time to say what they saw
        left = deadline - time.monotonic() if not failures else 2.0
        ready = multiprocessing.connection.wait(list(waiting), timeout=max(0.0, left))
        if not ready:
            break
        for pipe in ready:
            rank = waiting.pop(pipe)
            try:
                good, value = pickle.loads(pipe.recv_bytes())
            except EOFError:
                good, value = False, "the process ended without a word"
            (results if good else failures)[rank] = value
    if failures:
        raise AssertionError(
            "\n".join(f"--- rank {rank} ---\n{text}" for rank, text in sorted(failures.items()))
        )
    if waiting:
        raise TimeoutError(f"no answer from ranks {sorted(waiting.values())}")
    return [results[rank] for rank in range(len(pipes))]


def _child(pipe: Any, job: bytes, process: Rank, port: int) -> None:
    os.environ.update(
        RANK=str(process.rank),
        LOCAL_RANK=str(process.rank),
        WORLD_SIZE=str(process.world_size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        GLOO_SOCKET_IFNAME="lo",
        OMP_NUM_THREADS="1",
    )
    torch.set_num_threads(1)
    try:
        fn, args = pickle.loads(job)
        dist.init_process_group(
            "gloo", rank=process.rank, world_size=process.world_size, timeout=timedelta(seconds=60)
        )
        answer = pickle.dumps((True, fn(process, *args)))
        dist.barrier()
        dist.destroy_process_group()
    except BaseException:
        answer = pickle.dumps((False, traceback.format_exc()))
    pipe.send_bytes(answer)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
