"""How fast training is, and how much of the time it waits for data."""

import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import TypeVar

T = TypeVar("T")

TIMED_LINES = 20  # log lines that the remaining time is estimated from


def clock(seconds: float) -> str:
    """Write a duration as 2:34 (minutes, seconds) or 1:02:34, with days where there are any."""
    text = str(timedelta(seconds=round(seconds)))
    return text.removeprefix("0:").removeprefix("0") if text.startswith("0:") else text


class Meter:
    """Speed between two readings, without the time spent in evaluation and in saving.

    Args:
        batch_size: Images of a global step.
        flops: Of a global step.
        peak: FLOP/s of one process's device, None where unknown.
        world_size: Processes.
    """

    def __init__(self, batch_size: int, flops: float, peak: float | None, world_size: int) -> None:
        self._batch_size, self._flops = batch_size, flops
        self._peak = peak * world_size if peak else None
        self._begin_s = time.perf_counter()
        self._wait_s, self._steps = 0.0, 0

    def waiting(self, stream: Iterator[T]) -> Iterator[T]:
        """Yield the stream's items; the time each takes to come counts as waiting."""
        while True:
            begin_s = time.perf_counter()
            item = next(stream)  # the stream is endless
            self._wait_s += time.perf_counter() - begin_s
            yield item

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Stop the clock inside."""
        begin_s = time.perf_counter()
        yield
        self._begin_s += time.perf_counter() - begin_s

    def read(self, steps_done: int) -> dict[str, float]:
        """Measure the speed since the last reading.

        Args:
            steps_done: Optimizer steps of this process so far.

        Returns:
            images_per_s, data_wait_percent and, where the peak is known, mfu_percent.
        """
        now_s = time.perf_counter()
        elapsed_s, steps = now_s - self._begin_s, steps_done - self._steps
        numbers = {
            "images_per_s": self._batch_size * steps / elapsed_s,
            "data_wait_percent": 100 * self._wait_s / elapsed_s,
        }
        if self._peak:
            numbers["mfu_percent"] = 100 * self._flops * steps / elapsed_s / self._peak
        self._begin_s, self._wait_s, self._steps = now_s, 0.0, steps_done
        return numbers


class StepTimer:
    """How long a step takes, all that happens between steps included, over the last log lines.

    The first step of a start warms up and does not count.
    """

    def __init__(self) -> None:
        self._marks: deque[tuple[int, float]] = deque(maxlen=TIMED_LINES)  # step, seconds

    def step_done(self, done: int) -> None:
        """Note the end of a step; only this start's first one is kept."""
        if not self._marks:
            self._marks.append((done, time.monotonic()))

    def read(self, step: int) -> tuple[float, int]:
        """Time the steps before a log line.

        Args:
            step: Steps done.

        Returns:
            Seconds of one, and how many were timed: 0 where none can be yet.
        """
        if not self._marks:
            return 0.0, 0
        now_s = time.monotonic()
        first, since_s = self._marks[0]
        timed = step - first
        self._marks.append((step, now_s))
        return ((now_s - since_s) / timed, timed) if timed > 0 else (0.0, 0)
