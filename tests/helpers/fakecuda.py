"""Run a function with torch's CUDA on a machine without a GPU: tests/fakecuda says what that shows.

@needs_fakecuda
def test_upload_does_not_wait() -> None:
    (found,) = run_on_cuda(_upload, 128)

def _upload(rows: int) -> int:      # at the top of a module: a fresh process imports it by name
    from tests.fakecuda.runtime import events, reset, waits
    ...
    return len(waits(events()))
"""

import os
import pickle
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fakecuda.build import CannotBuildError, preload, stub_folder

ROOT = Path(__file__).parents[2]


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
    gpus: int | None = None,
    memory_gib: int = 80,
    name: str = "NVIDIA H100 80GB HBM3",
    env: dict[str, str] | None = None,
    timeout_s: float = 200.0,
) -> list[Any]:
    """Call fn(*args) in fresh processes with fake GPUs; one result per rank.

    Args:
        fn: at the top of a module; its result must pickle, and tensors be on the CPU.
        args: of fn, pickled too.
        ranks: processes, as a launcher starts them (RANK, WORLD_SIZE, ...), rank r for GPU r; fn
            joins the group itself. With 1 no launcher's variable is set.
        gpus: of each process; as many as ranks unless given.
        memory_gib: of a GPU.
        name: of a GPU.
        env: further variables.

    Raises: AssertionError with the output of every rank that failed. TimeoutError.
    """
    shared = {
        **{key: value for key, value in os.environ.items() if not key.startswith("FAKE_")},
        **preload(stub_folder()),
        "PYTHONPATH": f"{ROOT}{os.pathsep}{os.environ.get('PYTHONPATH', '')}",
        "OMP_NUM_THREADS": "1",
        "FAKE_DEVICES": str(gpus or ranks),
        "FAKE_GIB": str(memory_gib),
        "FAKE_NAME": name,
        **(env or {}),
    }
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job").write_bytes(pickle.dumps((fn, args)))
        outputs = [Path(folder, f"output{rank}") for rank in range(ranks)]
        children = []
        port = _free_port()
        for rank, output in enumerate(outputs):
            launcher = {
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(ranks),
                "LOCAL_WORLD_SIZE": str(ranks),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
            }
            words = [sys.executable, "-m", "tests.helpers.fakecuda", folder, str(rank)]
            with output.open("wb") as file:
                children.append(
                    subprocess.Popen(
                        words,
                        env=shared | (launcher if ranks > 1 else {}),
                        cwd=ROOT,
                        stdout=file,
                        stderr=subprocess.STDOUT,
                    )
                )
        try:
            _wait(children, outputs, time.monotonic() + timeout_s)
        finally:
            for child in children:
                child.kill()
                child.wait()
        return [pickle.loads(Path(folder, f"result{rank}").read_bytes()) for rank in range(ranks)]


def _wait(children: list[Any], outputs: list[Path], deadline: float) -> None:
    while any(child.poll() is None for child in children):
        late = time.monotonic() > deadline
        failed = any(child.poll() not in (None, 0) for child in children)
        if late or failed:
            break
        time.sleep(0.02)
    texts = "\n".join(
        f"--- rank {rank}: exit status {child.poll()} ---\n{output.read_text(errors='replace')}"
        for rank, (child, output) in enumerate(zip(children, outputs, strict=True))
    )
    if any(child.poll() not in (None, 0) for child in children):
        raise AssertionError(texts)
    if any(child.poll() is None for child in children):
        raise TimeoutError(texts)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _child(folder: Path, rank: int) -> None:
    os.environ.pop("LD_PRELOAD")  # what this process starts is not to be fooled
    sys.modules["triton"] = None  # type: ignore[assignment]  # it compiles for real cards only
    from tests.fakecuda.runtime import values

    fn, args = pickle.loads((folder / "job").read_bytes())
    with values:
        result = fn(*args)
    Path(folder, f"result{rank}").write_bytes(pickle.dumps(result))


if __name__ == "__main__":
    _child(Path(sys.argv[1]), int(sys.argv[2]))
