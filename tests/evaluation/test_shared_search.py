"""Banks split over real gloo processes give the neighbours and results of one, bit for bit."""

import pytest
import torch

from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.evaluation import shared_search
from sslpipe.evaluation.few_shot import few_shot_knn
from sslpipe.evaluation.geometry import stability
from sslpipe.evaluation.knn import knn_results
from sslpipe.evaluation.shared_search import nearest_shared
from tests.evaluation.test_knn import random_rows, tied_rows
from tests.helpers.processes import run_processes


def in_rank(process: Rank):
    found = []
    for make in (random_rows, tied_rows):
        bank, queries = make(103, 4, 5, seed=1), make(31, 4, 5, seed=2)
        bank = bank._replace(ids=bank.ids // 3)  # three rows an id, in two shares
        for k in (1, 9, 100):
            options = {"search": "faiss"} if k == 9 else {}
            for ids in ({}, {"bank_ids": bank.ids, "query_ids": queries.ids}):
                near = nearest_shared(
                    bank.features, queries.features, k, process=process, **options, **ids
                )
                found += [near.indices, near.similarities]
    # groups of a quarter of the bank, found beside the others or taken away first
    bank, queries = random_rows(103, 4, 5, seed=1), random_rows(31, 4, 5, seed=2)
    numbers, own = torch.arange(103) % 4, torch.arange(31) % 5
    for small_bank in (shared_search.SMALL_BANK, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(shared_search, "SMALL_BANK", small_bank)
            ids = {"bank_ids": numbers, "query_ids": own}
            near = nearest_shared(bank.features, queries.features, 9, process=process, **ids)
        found += [near.indices, near.similarities]
    # more processes than some have rows
    few = random_rows(3, 4, 2, seed=1)
    near = nearest_shared(few.features, few.features, 3, process=process)
    found += [near.indices, near.similarities]
    bank, queries = random_rows(203, 4, 5, seed=1), random_rows(31, 4, 5, seed=2, first_id=999)
    results = knn_results(bank, queries, k=(1, 20), vote="both", process=process)
    results += knn_results(bank, bank, k=(5,), exclude_same_id=True, process=process)
    results += few_shot_knn(bank, queries, labels_per_class=3, k=(3,), process=process)
    other = bank._replace(features=bank.features.flip(1) ** 2)
    results += stability(bank, other, k=5, process=process)
    with pytest.raises(DataError, match="k = 201 does not fit a bank of 200 rows"):
        nearest_shared(torch.ones(200, 2), torch.ones(1, 2), 201, process=process)
    return found, results


@pytest.mark.parametrize("world", [2, 4])
def test_a_bank_split_over_processes_gives_the_neighbours_of_one(world):
    found, results = in_rank(Rank())
    for theirs, their_results in run_processes(in_rank, world):
        assert all(torch.equal(a, b) for a, b in zip(theirs, found, strict=True))
        assert their_results == results
