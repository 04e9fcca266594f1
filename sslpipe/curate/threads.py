"""How many threads an operation of torch or numpy has where parts are shared out to threads."""

from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module

import torch


@contextmanager
def one_thread_an_operation() -> Iterator[None]:
    """Let operations of torch and numpy keep to the threads that call them: parts are shared out.

    Else each of some threads that work side by side has its products made by as many again, which
    wait for each other.
    """
    threads = import_module("threadpoolctl")  # scikit-learn brings it; it has no types
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with threads.threadpool_limits(limits=1):
            yield
    finally:
        torch.set_num_threads(before)
