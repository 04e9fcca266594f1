"""One search: whatever its tiles, parts and processes, it finds what loops and comparing all do."""

import sys

import pytest
import torch

from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.evaluation import neighbours
from sslpipe.evaluation.few_shot import few_shot_knn
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.neighbours import among_all, fixed_point_units, nearest, tile_numbers
from tests.evaluation.test_knn import collapsed_rows, random_rows, tied_rows
from tests.helpers.processes import run_processes


@pytest.mark.parametrize("search", ["torch", "faiss"])
@pytest.mark.parametrize("leave_out", [False, True])
@pytest.mark.parametrize("k", [1, 40, 1100])
@pytest.mark.parametrize("make", [random_rows, tied_rows, collapsed_rows])
def test_a_search_finds_what_comparing_all_finds(make, k, leave_out, search, monkeypatch):
    bank, queries = make(3000, 8, 5, seed=3), make(70, 8, 5, seed=4)
    bank = bank._replace(ids=bank.ids // 3)  # three rows an id
    hidden = (bank.ids, queries.ids) if leave_out else None
    units = fixed_point_units(bank.features), fixed_point_units(queries.features)
    expected = among_all(*units, k, hidden)
    sizes = ("CPU_NUMBERS", "PAIRED_NUMBERS", "PROPOSED_NUMBERS", "WIDE_NUMBERS", "PART_BYTES")
    # one tile; many, of queries that are proposed to in turns; and the bank part by part
    for numbers in (
        (2**28, 2**24, 2**24, 2**24, 2**27),
        (3000 * 7, 999, 20 * (k + 32), 700 * 8, 2**27),
        (3000 * 7, 2**24, 2**24, 2**24, 7_777),
    ):
        for name, number in zip(sizes, numbers, strict=True):
            monkeypatch.setattr(neighbours, name, number)
        actual = nearest(bank.features, queries.features, k, search=search, hidden=hidden)
        assert torch.equal(actual.indices, expected.indices)
        assert torch.equal(actual.similarities, expected.similarities)


def test_faiss_is_needed_only_where_it_is_asked_for(monkeypatch):
    monkeypatch.setitem(sys.modules, "faiss", None)  # import faiss now raises ImportError
    bank = random_rows(50, 4, 3, 1).features
    nearest(bank, bank[:3], 5)
    with pytest.raises(DataError, match="pip install faiss"):
        nearest(bank, bank[:3], 5, search="faiss")


def test_only_a_query_of_which_a_nearer_row_may_be_left_out_meets_the_whole_bank(monkeypatch):
    met = []
    original = neighbours.among_all

    def counting(bank, queries, *rest):
        met.append(len(queries))
        return original(bank, queries, *rest)

    monkeypatch.setattr(neighbours, "among_all", counting)
    for make, expected in ((random_rows, []), (collapsed_rows, [70])):
        nearest(make(3000, 8, 5, 3).features, make(70, 8, 5, 4).features, 10)
        assert met == expected


def test_only_rows_that_may_be_among_the_nearest_are_compared_exactly(monkeypatch):
    compared, original = [], neighbours.exact_cosines

    def counting(bank, rows, *rest):
        compared.append(len(rows))
        return original(bank, rows, *rest)

    monkeypatch.setattr(neighbours, "exact_cosines", counting)
    bank, queries = random_rows(3000, 8, 5, 3).features, random_rows(70, 8, 5, 4).features
    nearest(bank, queries, 10)
    assert 700 <= sum(compared) <= 710  # 42 are proposed
    monkeypatch.setattr(neighbours, "PART_BYTES", 1000 * 8 * 4)
    compared.clear()
    nearest(bank, queries, 10)
    assert len(compared) == 3
    assert sum(compared[1:]) < 1.5 * compared[0]  # of later parts, what is nearer than those found


def test_without_queries_there_is_nothing_and_a_tile_is_an_eighth_of_the_memory(monkeypatch):
    bank = random_rows(3000, 8, 5, 3).features
    assert nearest(bank, bank[:0], 10).indices.shape == (0, 10)
    memory = {"mem_get_info": 2**30, "memory_reserved": 2**29, "memory_allocated": 2**28}
    for name, value in memory.items():
        answer = (value, 0) if name == "mem_get_info" else value
        monkeypatch.setattr(torch.cuda, name, lambda device, answer=answer: answer)
    assert tile_numbers(torch.device("cuda")) == (2**30 + 2**28) // 32
    memory_of_a_large_card = (2**37, 2**37)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: memory_of_a_large_card)
    assert tile_numbers(torch.device("cuda")) == 2**28


def in_rank(process: Rank):
    found = []
    for make in (random_rows, tied_rows):
        bank, queries = make(103, 4, 5, seed=1), make(31, 4, 5, seed=2)
        bank = bank._replace(ids=bank.ids // 3)  # three rows an id, in two shares
        for k in (1, 9, 100):
            for ids in (None, (bank.ids, queries.ids)):
                near = nearest(bank.features, queries.features, k, hidden=ids, process=process)
                found += [near.indices, near.similarities]
    # groups of a quarter of the bank
    ids = torch.arange(103) % 4, torch.arange(31) % 5
    near = nearest(bank.features, queries.features, 9, hidden=ids, process=process)
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


def test_a_bank_split_over_processes_gives_the_neighbours_of_one():
    found, results = in_rank(Rank())
    for theirs, their_results in run_processes(in_rank, 4):
        assert all(torch.equal(a, b) for a, b in zip(theirs, found, strict=True))
        assert their_results == results
