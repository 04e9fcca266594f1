"""What every test shares: one thread, CUDA tests only where there is CUDA."""

import pytest
import torch

from tests.helpers.fakecuda import fakecuda  # noqa: F401  (a fixture)

torch.set_num_threads(1)  # tests run beside others; a thread pool per process only gets in the way


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):  # a folder of that name is a keyword, too
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
