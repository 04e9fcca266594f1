"""Real processes for tests, from a fork server that has imported torch and sslpipe once.

`run_processes(fn, world, *args)` gives one result per rank of a gloo group. `fn(process, *args)`
must be a function at the top of a module (children import it by name; `tests` is a package for
that) and its result must pickle. The process group is up before fn is called. `run_python(words)`
is `python WORDS` but for the start of the interpreter and its imports, which are most of its
seconds. A call of either costs a fraction of a second; pack many checks into one all the same.
"""

import multiprocessing
import multiprocessing.connection
import os
import pickle
import runpy
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from sslpipe.distributed import Rank

PRELOADED = (
    "tests.helpers.processes",
    "torch._dynamo",  # DDP imports it when it is first built
    "timm",  # of its networks alone; a second and a half in each process
    *("sslpipe.report.suite", "sslpipe.cli.evaluations", "sslpipe.export.write"),
    *("sslpipe.pretrain", "sslpipe.metric_learning.finetune"),
    *("tests.helpers.runs", "tests.helpers.finetunes"),
    "tests.helpers.warm",
)


def _server() -> Any:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    return context


def run_processes(
    fn: Callable[..., Any], world: int, *args: Any, timeout_s: float = 120.0
) -> list[Any]:
    """Call fn(Rank(rank, world), *args) in `world` gloo processes; results in rank order.

    Raises: AssertionError with the traceback of every rank that failed; the others are ended.
    """
    context = _server()
    # plain pickle: multiprocessing's own would share tensors' memory, which ends with its process
    job = pickle.dumps((fn, args))
    port = free_port()
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


def run_python(
    words: Sequence[str], cwd: Path, environment: Mapping[str, str], timeout_s: float = 240.0
) -> subprocess.CompletedProcess[str]:
    """Run `python WORDS` (-m MODULE, -c CODE or SCRIPT) with its own streams and environment.

    Raises: TimeoutExpired after timeout_s; the process is killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        streams = [str(Path(folder, name)) for name in ("stdout", "stderr")]
        child = start_python(words, cwd, environment, streams)
        child.join(timeout_s)
        status = child.exitcode
        child.kill()
        child.join()
        said = [Path(path).read_text() if Path(path).exists() else "" for path in streams]
    if status is None:
        raise subprocess.TimeoutExpired(list(words), timeout_s, *said)
    return subprocess.CompletedProcess(["python", *words], status, *said)


def start_python(
    words: Sequence[str],
    cwd: Path,
    environment: Mapping[str, str],
    streams: Sequence[str] = (os.devnull, os.devnull),
    *,
    new_session: bool = False,
) -> BaseProcess:
    """Start what `run_python` runs; its streams go to files."""
    arguments = (list(words), cwd, dict(environment), list(streams), new_session)
    child = _server().Process(target=_python, args=arguments)
    child.start()
    return child


def _python(
    words: list[str], cwd: Path, environment: dict[str, str], streams: list[str], new_session: bool
):
    if new_session:
        os.setsid()
    redirect(streams[0], 1)
    redirect(streams[1], 2)
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(environment)
    # what Python does with them when it starts
    sys.path[:0] = [str(cwd), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    torch.set_num_threads(1)
    kind, *rest = words
    if kind == "-c":
        sys.argv = ["-c", *rest[1:]]
        exec(rest[0], {"__name__": "__main__"})
    elif kind == "-m":
        sys.argv = rest
        for name in (rest[0], f"{rest[0]}.__main__"):  # what is imported is run again
            if not hasattr(sys.modules.get(name), "__path__"):
                sys.modules.pop(name, None)
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = words
        runpy.run_path(kind, run_name="__main__")


def redirect(path: str | Path, *numbers: int) -> None:
    """Let standard output (1), standard error (2) or both of this process go to a file."""
    file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    for number in numbers:
        os.dup2(file, number)
        stream = open(number, "w", buffering=1)  # noqa: SIM115
        setattr(sys, "stdout" if number == 1 else "stderr", stream)
    os.close(file)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
