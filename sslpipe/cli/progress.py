"""A progress bar on a terminal, a plain line now and then everywhere else (batch logs, pipes)."""

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from sslpipe.cli.terminal import console

PLAIN_EVERY_S = 10.0


@contextmanager
def progress(task: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the bar by a number; any thread may call it. On stderr.

    What `terminal.console` prints meanwhile stands above the bar.
    """
    if not console.is_terminal:
        yield _plain(task, total)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(elapsed_when_finished=True),
    )
    with Progress(*columns, console=console) as bar:
        number = bar.add_task(task, total=total)
        yield lambda count: bar.advance(number, count)


@contextmanager
def working(task: str) -> Iterator[Callable[[str], None]]:
    """Show how long a task takes whose end nobody knows; yields a function that says what it does.

    On a terminal alone, by the first process alone, and gone at the end.
    """
    if not console.is_terminal or os.environ.get("RANK", "0") != "0":
        yield lambda text: None
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as bar:
        number = bar.add_task(task, total=None)
        yield lambda text: bar.update(number, description=f"{task}: {text}")


def _plain(task: str, total: int) -> Callable[[int], None]:
    """A line each ten seconds, and a last one where there was one before."""
    lock, done, last, said = threading.Lock(), 0, time.monotonic(), False

    def advance(count: int) -> None:
        nonlocal done, last, said
        with lock:
            done += count
            if (said and done == total) or time.monotonic() - last > PLAIN_EVERY_S:
                last, said = time.monotonic(), True
                console.print(f"{task}: {done}/{total}", highlight=False, markup=False)

    return advance
