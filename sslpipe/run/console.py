"""Standard output and error of a process: the console may fail, the work may not.

A reader that goes away (`| head`), a terminal that is closed, a full disk behind `> file`: what is
printed is lost, and nothing else.
"""

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any, TextIO

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment

from sslpipe.errors import printable

GONE = (errno.EPIPE, errno.EIO)  # it will not be read again; a full disk may have room later


class SafeConsole(Console):
    """A console on which names of files, classes and samples give the terminal no commands."""

    def render(
        self, renderable: RenderableType, options: ConsoleOptions | None = None
    ) -> Iterator[Segment]:
        """Yield the segments of what is printed; only rich's own may move the cursor."""
        for segment in super().render(renderable, options):
            if segment.control:
                yield segment
            else:
                yield Segment(printable(segment.text), segment.style)


class LastingStream:
    """A text stream whose `write` and `flush` do not raise; all else is the inner stream's.

    Attributes:
        error: The first error that lost text; None: none was lost.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Write, or lose the text."""
        # a terminal may know fewer letters; what a program put in place of one may name none
        encoding = getattr(self.stream, "encoding", None) or "utf-8"
        with self._kept():
            self.stream.write(text.encode(encoding, "backslashreplace").decode(encoding))
        return len(text)

    def flush(self) -> None:
        """Flush, or lose what is pending."""
        with self._kept():
            self.stream.flush()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)

    @contextmanager
    def _kept(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.error = self.error or error
            if error.errno in GONE:  # what C++ and the end of the process write goes nowhere, too
                with suppress(OSError, ValueError):
                    null = os.open(os.devnull, os.O_WRONLY)
                    os.dup2(null, self.stream.fileno())
                    os.close(null)


@contextmanager
def lasting_streams() -> Iterator[list[LastingStream]]:
    """Let sys.stdout and sys.stderr last inside; gives the two, none where there is no console."""
    before = sys.stdout, sys.stderr
    if None in before:  # a program without a console
        yield []
        return
    lasting = [s if isinstance(s, LastingStream) else LastingStream(s) for s in before]
    sys.stdout, sys.stderr = lasting
    try:
        yield lasting
    finally:
        for stream in lasting:
            stream.flush()
        sys.stdout, sys.stderr = before


@contextmanager
def run_console() -> Iterator[None]:
    """Print inside as in `lasting_streams`; what is lost is no error of the program."""
    with lasting_streams() as streams:
        yield
        for stream in streams:
            stream.error = None


def say_last(text: str) -> None:
    """Print a line on the process's own stderr, if that can be, from any thread."""
    with suppress(OSError, ValueError):
        print(text, file=sys.__stderr__, flush=True)
