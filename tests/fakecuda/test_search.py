"""Searches and evaluations on "cuda": a CPU's neighbours and numbers, in few waits."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._pytree import tree_leaves

from sslpipe.augment.eval_view import EvalView
from sslpipe.data.index import load_index
from sslpipe.evaluation.neighbours import nearest
from tests.evaluation.test_embed import VIEW, make_backbone
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _rows(size: int, seed: int) -> torch.Tensor:
    return torch.randn(size, 16, generator=torch.Generator().manual_seed(seed))


def _searched(tile_numbers: int):
    """Waits and operations of a search, and what it found."""
    from sslpipe.evaluation import neighbours
    from tests.fakecuda.runtime import events, operations, reset, waits

    neighbours.MOST_NUMBERS = tile_numbers
    bank, queries = _rows(3000, 1).cuda(), _rows(200, 2).cuda()
    reset()
    found = neighbours.nearest(bank, queries, 20)
    log = events()
    return len(waits(log)), operations(log), [tensor.cpu() for tensor in found]


def test_a_search_on_cuda_finds_the_neighbours_of_the_cpu_and_waits_once_a_search():
    expected = nearest(_rows(3000, 1), _rows(200, 2), 20)
    counts = []
    for numbers in (2**28, 3000 * 20):  # one tile, and ten
        ((waited, operations, found),) = run_on_cuda(_searched, numbers)
        assert torch.equal(found[0], expected.indices)
        assert torch.equal(found[1], expected.similarities)
        assert waited <= 3  # one `nonzero`, whatever the tiles
        counts.append(operations)
    assert counts[1] - counts[0] < 9 * 30  # of each further tile


def _searched_together() -> list[torch.Tensor]:
    from sslpipe.run.accelerator import join_processes

    process = join_processes(cpu=False, timeout_s=60)
    return [found.cpu() for found in _searches("cuda", process=process)]


def _searches(device: str, **options: Any) -> list[torch.Tensor]:
    """Neighbours of all rows, and of those with another id."""
    bank, queries = _rows(6000, 1), _rows(50, 2).to(device)
    ids = torch.arange(6000) // 3, torch.arange(50).to(device)
    found = (nearest(bank, queries, 20, hidden=hidden, **options) for hidden in (None, ids))
    return [tensor for near in found for tensor in near]


def test_two_gpus_with_half_of_the_bank_each_find_the_neighbours_of_the_cpu():
    expected = _searches("cpu")
    for found in run_on_cuda(_searched_together, ranks=2):
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def _numbers(data: Path) -> list[list[float]]:
    """Of the suite, on the CPU and on "cuda"."""
    from sslpipe.evaluation.embed import EmbedOptions, embed
    from sslpipe.evaluation.table import run_suite

    index, found = load_index(data), []
    splits = index.split("train"), index.split("test")
    for device in ("cpu", "cuda"):
        backbone, view = make_backbone().to(device), EvalView(**VIEW)
        options = EmbedOptions(batch_size=20, device=device, rows_on=device)
        train, test = (embed(backbone, view, split, options) for split in splits)
        report = run_suite({"ssl": (train, test)}, {"seed": 0})
        found.append([each for each in tree_leaves(report["rows"]) if isinstance(each, float)])
    return found


def test_the_suite_gives_a_cpus_numbers(tmp_path: Path) -> None:
    data = write_dataset(tmp_path / "data", (40, 40))
    write_dataset(tmp_path / "data", (24,), split="test")
    ((expected, found),) = run_on_cuda(_numbers, data)
    assert len(expected) > 10
    assert found == pytest.approx(expected, rel=1e-3, abs=1e-3)
