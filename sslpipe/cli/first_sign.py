"""A first line where a command would be silent for long: libraries take seconds to load."""

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from sslpipe.run.console import LastingStream, say_last

SILENT_S = 1.5


@contextmanager
def first_sign(command: str, streams: Sequence[LastingStream]) -> Iterator[None]:
    """Inside, say on stderr that the command is at work, if nothing else is said soon.

    By the first process alone; not with SSLPIPE_NEXT=0, for scripts.

    Args:
        command: Its name.
        streams: What it prints on.
    """
    ended = threading.Event()

    def watch() -> None:
        if not ended.wait(SILENT_S) and not any(stream.used for stream in streams):
            say_last(f"sslpipe {command}: loading libraries and data ...")

    wanted = os.environ.get("SSLPIPE_NEXT") != "0" and os.environ.get("RANK", "0") == "0"
    if command and wanted:
        threading.Thread(target=watch, name="sslpipe-first-sign", daemon=True).start()
    try:
        yield
    finally:
        ended.set()
