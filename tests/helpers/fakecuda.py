"""Run a function with torch's CUDA on a machine without a GPU: tests/fakecuda says what that shows.

@needs_fakecuda
def test_upload_does_not_wait() -> None:
    (found,) = run_on_cuda(_upload, 128)

def _upload(rows: int) -> int:      # at the top of a module: another process imports it by name
    from tests.fakecuda.runtime import events, reset, waits
    ...
    return len(waits(events()))
"""

import multiprocessing.connection
import os
import pickle
import tempfile
import time
from collections.abc import Callable
from multiprocessing import forkserver, resource_tracker
from multiprocessing.forkserver import ForkServer
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from tests.fakecuda.build import CannotBuildError, preload, stub_folder
from tests.helpers.processes import free_port, redirect


def missing() -> str:
    """Why this machine cannot build the fake runtime; "" where it can."""
    try:
        preload(stub_folder())
    except CannotBuildError as error:
        return str(error)
    return ""


@pytest.fixture(scope="session")
def fakecuda() -> None:
    """Skip, with the reason, where the fake runtime cannot be built."""
    reason = missing()
    if reason:
        pytest.skip(f"the fake CUDA runtime {reason}")


needs_fakecuda = pytest.mark.usefixtures("fakecuda")


def run_on_cuda(
    fn: Callable[..., Any],
    *args: Any,
    ranks: int = 1,
    memory_gib: int = 80,
    name: str = "NVIDIA H100 80GB HBM3",
    env: dict[str, str] | None = None,
    timeout_s: float = 200.0,
) -> list[Any]:
    """Call fn(*args) in processes of their own with fake GPUs; one result per rank.

    `fn` is at the top of a module; its result must pickle, and tensors be on the CPU. With several
    `ranks` each has a launcher's variables and a GPU, and fn joins the group itself. Raises:
    AssertionError with the output of every rank that failed; TimeoutError.
    """
    settings = {
        "OMP_NUM_THREADS": "1",
        "FAKE_DEVICES": str(ranks),
        "FAKE_GIB": str(memory_gib),
        "FAKE_NAME": name,
        **(env or {}),
    }
    if ranks > 1:
        group = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        settings |= {**group, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_bytes(pickle.dumps((fn, args)))
        children = [_start(Path(folder), rank, settings) for rank in range(ranks)]
        try:
            _wait(children, Path(folder), time.monotonic() + timeout_s)
        finally:
            for child in children:
                child.kill()
                child.join()
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(ranks)]


_server = ForkServer()  # beside that of tests.helpers.processes: it has loaded the fake libraries
_server.set_forkserver_preload(["tests.fakecuda.imports"])


def _start(folder: Path, rank: int, settings: dict[str, str]) -> BaseProcess:
    """A process of the server with fake GPUs; its output goes to a file of the folder."""
    context = multiprocessing.get_context("forkserver")
    child = context.Process(target=_child, args=(folder, rank, settings))
    resource_tracker.ensure_running()  # without the fake libraries
    with (
        patch.dict(os.environ, preload(stub_folder())),  # until the server has started
        patch.object(forkserver, "connect_to_new_process", _server.connect_to_new_process),
    ):
        child.start()
    return child


def _wait(children: list[BaseProcess], folder: Path, deadline: float) -> None:
    while running := [child for child in children if child.exitcode is None]:
        failed = any(child.exitcode for child in children)
        if failed or time.monotonic() > deadline:
            break
        multiprocessing.connection.wait([child.sentinel for child in running], 0.2)
    texts = "\n".join(
        f"--- rank {rank}: exit status {child.exitcode} ---\n{_output(folder, rank)}"
        for rank, child in enumerate(children)
    )
    if any(child.exitcode for child in children):
        raise AssertionError(texts)
    if running:
        raise TimeoutError(texts)


def _output(folder: Path, rank: int) -> str:
    path = folder / f"output{rank}"
    return path.read_text(errors="replace") if path.exists() else ""


def _child(folder: Path, rank: int, settings: dict[str, str]) -> None:
    redirect(folder / f"output{rank}", 1, 2)
    hidden = ("FAKE_", "LD_PRELOAD", "CUDA_VISIBLE_DEVICES")
    for name in [name for name in os.environ if name.startswith(hidden)]:
        del os.environ[name]  # what this process starts is not to be fooled
    os.environ.update(settings)
    if "WORLD_SIZE" in settings:
        os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank))
    import tests.fakecuda.imports  # noqa: F401  # as the server has done
    from tests.fakecuda.runtime import values

    fn, args = pickle.loads((folder / "job").read_bytes())
    with values:
        result = fn(*args)
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))
