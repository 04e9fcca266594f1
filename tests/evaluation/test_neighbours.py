"""One search: a GPU's, on the CPU's tensors, and that of gloo processes find what one CPU does."""

import sys
from types import SimpleNamespace

import pytest
import torch

from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.evaluation import exact, neighbours
from sslpipe.evaluation.exact import among_all, fixed_point_units
from sslpipe.evaluation.few_shot import few_shot_knn
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.neighbours import (
    check_k,
    faiss_proposals,
    nearest,
    search_on_device,
    tile_numbers,
    torch_proposals,
)
from tests.evaluation.test_knn import random_rows, tied_rows
from tests.helpers.processes import run_processes


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
        monkeypatch.setattr(neighbours, "MOST_NUMBERS", numbers)
        monkeypatch.setattr(neighbours, "RANKED_NUMBERS", ranked)
        monkeypatch.setattr(exact, "BANK_PART", 700)
        actual = searched(bank, queries, k, torch_proposals, leave_out=leave_out)
        assert_same(actual, expected)


def test_only_a_query_of_which_a_nearer_row_may_be_left_out_meets_the_whole_bank(monkeypatch):
    met = []
    original = neighbours.among_all

    def counting(bank, queries, *rest):
        met.append(len(queries))
        return original(bank, queries, *rest)

    monkeypatch.setattr(neighbours, "among_all", counting)
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


@pytest.mark.parametrize("part_bytes", [20_000, 7_777])
@pytest.mark.parametrize("leave_out", [False, True])
def test_a_large_bank_is_searched_in_parts_with_the_same_neighbours(
    leave_out, part_bytes, monkeypatch
):
    bank, queries = tied_rows(5000, 6, 3, 1), tied_rows(40, 6, 3, 2)  # 120,000 bytes
    ids = {"bank_ids": bank.ids, "query_ids": queries.ids} if leave_out else {}
    whole = nearest(bank.features, queries.features, 30, **ids)
    monkeypatch.setattr(neighbours, "PART_BYTES", part_bytes)
    assert_same(nearest(bank.features, queries.features, 30, **ids), whole)


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


def in_rank(process: Rank):
    found = []
    for make in (random_rows, tied_rows):
        bank, queries = make(103, 4, 5, seed=1), make(31, 4, 5, seed=2)
        bank = bank._replace(ids=bank.ids // 3)  # three rows an id, in two shares
        for k in (1, 9, 100):
            options = {"search": "faiss"} if k == 9 else {}
            for ids in ({}, {"bank_ids": bank.ids, "query_ids": queries.ids}):
                near = nearest(
                    bank.features, queries.features, k, process=process, **options, **ids
                )
                found += [near.indices, near.similarities]
    # groups of a quarter of the bank, found beside the others or taken away first
    bank, queries = random_rows(103, 4, 5, seed=1), random_rows(31, 4, 5, seed=2)
    numbers, own = torch.arange(103) % 4, torch.arange(31) % 5
    for small_bank in (neighbours.SMALL_BANK, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(neighbours, "SMALL_BANK", small_bank)
            ids = {"bank_ids": numbers, "query_ids": own}
            near = nearest(bank.features, queries.features, 9, process=process, **ids)
        found += [near.indices, near.similarities]
    # more processes than some have rows
    few = random_rows(3, 4, 2, seed=1)
    near = nearest(few.features, few.features, 3, process=process)
    found += [near.indices, near.similarities]
    bank, queries = random_rows(203, 4, 5, seed=1), random_rows(31, 4, 5, seed=2, first_id=999)
    results = knn_results(bank, queries, k=(1, 20), vote="both", process=process)
    results += knn_results(bank, bank, k=(5,), exclude_same_id=True, process=process)
    results += few_shot_knn(bank, queries, labels_per_class=3, k=(3,), process=process)
    with pytest.raises(DataError, match="k = 201 does not fit a bank of 200 rows"):
        nearest(torch.ones(200, 2), torch.ones(1, 2), 201, process=process)
    return found, results


@pytest.mark.parametrize("world", [2, 4])
def test_a_bank_split_over_processes_gives_the_neighbours_of_one(world):
    found, results = in_rank(Rank())
    for theirs, their_results in run_processes(in_rank, world):
        assert all(torch.equal(a, b) for a, b in zip(theirs, found, strict=True))
        assert their_results == results
