"""kNN on "cuda": the neighbours of a CPU, and how often the host waits."""

import torch

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _rows(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(seed))


def _searched(tile_numbers: int, count: bool):
    from contextlib import nullcontext

    from sslpipe.evaluation import device_search
    from sslpipe.evaluation.neighbours import nearest
    from tests.fakecuda.runtime import Values, events, reset, waits

    device_search.MOST_NUMBERS = tile_numbers
    bank, queries = _rows(5000, 1), _rows(300, 2)
    with nullcontext() if count else Values():
        on_device = bank.cuda(), queries.cuda()
        reset()
        found = nearest(*on_device, 20)
        waited = len(waits(events()))
        return waited, None if count else [tensor.cpu() for tensor in found]


def test_a_search_on_cuda_finds_the_neighbours_of_the_cpu():
    from sslpipe.evaluation.neighbours import nearest

    expected = nearest(_rows(5000, 1), _rows(300, 2), 20)
    for numbers in (2**28, 5000 * 16):
        ((_, found),) = run_on_cuda(_searched, numbers, False)
        assert torch.equal(found[0], expected.indices)
        assert torch.equal(found[1], expected.similarities)


def test_the_host_waits_a_few_times_a_search_however_many_the_tiles():
    waited = {
        numbers: run_on_cuda(_searched, numbers, True)[0][0] for numbers in (2**28, 5000 * 16)
    }
    assert set(waited.values()) <= {1, 2, 3}
