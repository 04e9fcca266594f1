"""The search of a GPU, on the CPU's tensors: bit for bit what `nearest` finds."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sslpipe.errors import DataError
from sslpipe.evaluation import device_search, exact
from sslpipe.evaluation.device_search import (
    faiss_proposals,
    search_on_device,
    tile_numbers,
    torch_proposals,
)
from sslpipe.evaluation.exact import among_all, fixed_point_units
from sslpipe.evaluation.neighbours import check_k, nearest
from tests.evaluation.test_knn import random_rows, tied_rows


def collapsed_rows(n, width, classes, seed, first_id=0):
    """All cosines within 1e-7: which rows are proposed is chance."""
    data = random_rows(n, width, classes, seed, first_id)
    return data._replace(features=1 + 1e-4 * data.features)


def searched(bank, queries, k, propose, *, leave_out=False):
    ids = (bank.ids, queries.ids) if leave_out else (None, None)
    own_rows = check_k(len(bank.ids), k, *ids)
    units = fixed_point_units(bank.features), fixed_point_units(queries.features)
    return search_on_device(*units, k, own_rows, *ids, propose(units[0]))


def assert_same(actual, expected):
    assert torch.equal(actual.indices, expected.indices)
    assert torch.equal(actual.similarities, expected.similarities)


@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("k", [1, 40, 1100])
@pytest.mark.parametrize("make", [random_rows, tied_rows, collapsed_rows])
def test_a_gpus_search_finds_the_neighbours_of_the_cpu(make, k, leave_out, monkeypatch):
    bank, queries = make(3000, 8, 5, seed=3), make(70, 8, 5, seed=4)
    bank = bank._replace(ids=bank.ids // 3)  # three rows an id
    ids = {"bank_ids": bank.ids, "query_ids": queries.ids} if leave_out else {}
    expected = nearest(bank.features, queries.features, k, **ids)
    for numbers, ranked in ((2**28, 2**24), (3000 * 7, 999)):  # one tile; many, and of many parts
        monkeypatch.setattr(device_search, "MOST_NUMBERS", numbers)
        monkeypatch.setattr(device_search, "RANKED_NUMBERS", ranked)
        monkeypatch.setattr(exact, "BANK_PART", 700)
        actual = searched(bank, queries, k, torch_proposals, leave_out=leave_out)
        assert_same(actual, expected)


def test_only_a_query_of_which_a_nearer_row_may_be_left_out_meets_the_whole_bank(monkeypatch):
    met = []
    original = device_search.among_all

    def counting(bank, queries, *rest):
        met.append(len(queries))
        return original(bank, queries, *rest)

    monkeypatch.setattr(device_search, "among_all", counting)
    searched(random_rows(3000, 8, 5, 3), random_rows(70, 8, 5, 4), 10, torch_proposals)
    assert not met
    searched(collapsed_rows(3000, 8, 5, 3), collapsed_rows(70, 8, 5, 4), 10, torch_proposals)
    assert met == [70]


def test_without_queries_there_is_nothing_and_a_tile_is_an_eighth_of_the_memory(monkeypatch):
    bank = random_rows(3000, 8, 5, 3)
    actual = searched(bank, bank.rows(torch.arange(0)), 10, torch_proposals)
    assert actual.indices.shape == (0, 10)
    memory = {"mem_get_info": 2**30, "memory_reserved": 2**29, "memory_allocated": 2**28}
    for name, value in memory.items():
        answer = (value, 0) if name == "mem_get_info" else value
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert tile_numbers(torch.device("cuda")) == (2**30 + 2**28) // 32
    memory_of_a_large_card = (2**37, 2**37)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory_of_a_large_card)
    assert tile_numbers(torch.device("cuda")) == 2**28


@pytest.mark.parametrize("part", [1, 64, 5000])
def test_a_bank_in_parts_is_merged_to_what_it_is_as_a_whole(part, monkeypatch):
    bank, queries = tied_rows(1000, 5, 3, 1), tied_rows(20, 5, 3, 2)
    units = fixed_point_units(bank.features), fixed_point_units(queries.features)
    whole = among_all(*units, 30, bank.ids, queries.ids)
    monkeypatch.setattr(exact, "BANK_PART", part)
    assert_same(among_all(*units, 30, bank.ids, queries.ids), whole)


def stand_in(seen):
    """faiss as on a GPU: products of the tensors it is given, of 2,048 rows at most."""

    def knn_gpu(resources, queries, bank, k, *, metric, device):
        assert metric == "inner product"
        assert k <= 2048
        seen.append(bank.data_ptr())
        return (queries @ bank.T).topk(k, dim=1)

    return SimpleNamespace(
        StandardGpuResources=object,
        knn_gpu=knn_gpu,
        METRIC_INNER_PRODUCT="inner product",
        contrib=SimpleNamespace(torch_utils=None),
    )


def use_faiss(monkeypatch, faiss):
    for name in ("faiss", "faiss.contrib", "faiss.contrib.torch_utils"):
        monkeypatch.setitem(sys.modules, name, faiss)


@pytest.mark.parametrize("make", [random_rows, tied_rows])
def test_faiss_searches_the_bank_where_it_lies_and_finds_the_same(make, monkeypatch):
    seen = []
    bank, queries = make(3000, 8, 5, seed=3), make(70, 8, 5, seed=4)
    expected = nearest(bank.features, queries.features, 50)
    use_faiss(monkeypatch, stand_in(seen))
    units = fixed_point_units(bank.features), fixed_point_units(queries.features)
    actual = search_on_device(*units, 50, 0, None, None, faiss_proposals(units[0]))
    assert_same(actual, expected)
    assert set(seen) == {units[0].data_ptr()}


def test_more_neighbours_than_faiss_finds_on_a_gpu_are_one_clear_error(monkeypatch):
    use_faiss(monkeypatch, stand_in([]))
    bank, queries = random_rows(3000, 8, 5, seed=3), random_rows(7, 8, 5, seed=4)
    assert searched(bank, queries, 2016, faiss_proposals).indices.shape == (7, 2016)
    with pytest.raises(DataError, match="at most 2016 neighbours on a GPU, and 2017 are needed"):
        searched(bank, queries, 2017, faiss_proposals)
    use_faiss(monkeypatch, SimpleNamespace(contrib=SimpleNamespace(torch_utils=None)))
    with pytest.raises(DataError, match="needs faiss-gpu, and this is faiss-cpu"):
        searched(bank, queries, 10, faiss_proposals)
