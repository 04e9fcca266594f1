"""A progress bar on a terminal, a plain line now and then everywhere else (batch logs, pipes)."""

import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

PLAIN_EVERY_S = 10.0


@contextmanager
def progress(task: str, total: int) -> Iterator[Callable[[int], None]]:
    """Yield a function that advances the bar by a number; any thread may call it. On stderr."""
    console = Console(stderr=True)
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


def _plain(task: str, total: int) -> Callable[[int], None]:
    lock, done, last = threading.Lock(), 0, time.monotonic()

    def advance(count: int) -> None:
        nonlocal done, last
        with lock:
            done += count
            if done == total or time.monotonic() - last > PLAIN_EVERY_S:
                last = time.monotonic()
                print(f"{task}: {done}/{total}", file=sys.stderr, flush=True)

    return advance
