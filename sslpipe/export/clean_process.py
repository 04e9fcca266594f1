"""The clean process of a proof: a new Python that reads each format in a child of its own.

Its children are forks of a process that has imported torch and what `verify` imports, and nothing
else: a format starts from there, whatever the others needed.
"""

import os
import signal
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

from safetensors.torch import load_file, save_file
from torch import Tensor

from sslpipe.errors import ExportError

PROOF_TIMEOUT_S = 600  # from the last format on


class CleanProcess:
    """Compute `verify.outputs` by each library that reads a format, in processes that are new.

    Args:
        folder: The export's; a scratch folder is made beside it.
        images: (B, 3, S, S) normalised floats.
    """

    def __init__(self, folder: Path, images: Tensor) -> None:
        self._names: list[str] = []
        with ExitStack() as stack:
            scratch = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=folder.parent)))
            self._out = scratch / "out"
            self._out.mkdir()
            save_file({"images": images}, scratch / "images")
            program = [sys.executable, "-m", "sslpipe.export.verify"]
            self._process = subprocess.Popen(
                [*program, folder, scratch / "images", self._out],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.PIPE,
                text=True,
                process_group=0 if os.name == "posix" else None,  # with its children, to end all
            )
            self._scratch = stack.pop_all()

    def __enter__(self) -> "CleanProcess":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        with self._scratch:
            if self._process.poll() is None:  # an error here: what it does is of no use now
                if os.name == "posix":
                    os.killpg(self._process.pid, signal.SIGKILL)
                else:
                    self._process.kill()
            self._process.communicate()

    def start(self, name: str) -> None:
        """Begin to read a format that has been written; returns at once."""
        assert self._process.stdin is not None
        self._names.append(name)
        try:
            self._process.stdin.write(f"{name}\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            pass  # it has ended: `outputs` says why

    def outputs(self) -> dict[str, list[dict[str, Tensor]]]:
        """Wait for all that was begun: format -> the outputs of each of its readers.

        Raises:
            ExportError: A format could not be read.
        """
        try:
            _, stderr = self._process.communicate(timeout=PROOF_TIMEOUT_S)
        except subprocess.TimeoutExpired as late:
            raise ExportError(
                f"a clean process had not read {', '.join(self._names)} after {PROOF_TIMEOUT_S} s"
            ) from late
        for name in self._names:
            message = self._out / f"{name}.error"
            if message.is_file() or self._process.returncode:
                said = message.read_text(encoding="utf-8") if message.is_file() else stderr
                last = (said.strip().splitlines() or ["no message"])[-1]
                raise ExportError(f"format {name}: a clean process could not load it: {last}")
        return {
            name: [load_file(file) for file in sorted(self._out.glob(f"{name}-*"))]
            for name in self._names
        }
