"""How fast training is: images a second, and waiting for data."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


class Meter:
    """Speed between two readings, without the time spent in evaluation and in saving.

    Args:
        batch_size: Images of a global step.
    """

    def __init__(self, batch_size: int) -> None:
        self._batch_size = batch_size
        self._begin_s = time.perf_counter()
        self._wait_s = 0.0
        self._steps = 0

    def begin(self) -> None:
        """Start the clock anew: what came before the first step does not count."""
        self._begin_s = time.perf_counter()

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
        """Measure images_per_s and data_wait_percent."""
        now_s = time.perf_counter()
        elapsed_s = now_s - self._begin_s
        steps = steps_done - self._steps
        numbers = {
            "images_per_s": self._batch_size * steps / elapsed_s,
            "data_wait_percent": 100 * self._wait_s / elapsed_s,
        }
        self._begin_s = now_s
        self._wait_s = 0.0
        self._steps = steps_done
        return numbers
