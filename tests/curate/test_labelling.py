"""What is chosen to be labelled, against brute force and planted clusters."""

import numpy as np
import pytest
import torch

from sslpipe.curate.clusters import cluster
from sslpipe.curate.labelling import by_coverage, one_of_each
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings

SIZES = (60, 40, 25, 12)


@pytest.fixture(scope="module")
def rows():
    """Four blobs far from each other."""
    rng = np.random.default_rng(0)
    parts = [10 * np.eye(8)[k] + rng.normal(size=(n, 8)) for k, n in enumerate(SIZES)]
    ids = torch.arange(sum(SIZES)) * 3
    features = torch.from_numpy(np.concatenate(parts)).float()
    return Embeddings(features, torch.full_like(ids, -1), ids)


def blob(row):
    return int(np.searchsorted(np.cumsum(SIZES), row, side="right"))


def test_coverage_takes_the_most_typical_of_each_cluster_the_largest_first(rows):
    chosen = by_coverage(rows, 4)
    assert [blob(one.row) for one in chosen] == [0, 1, 2, 3]
    assert [one.value for one in chosen] == list(SIZES)
    assert {type(one.value) for one in chosen} == {float}  # as written to chosen.csv
    units = torch.nn.functional.normalize(rows.features.double()).numpy()
    for one, first, size in zip(chosen, np.cumsum((0, *SIZES)), SIZES, strict=False):
        own = units[first : first + size]
        cosines = own @ own.T
        np.fill_diagonal(cosines, -np.inf)
        near = np.sort(cosines, axis=1)[:, -min(20, size - 1) :].mean(axis=1)
        assert one.row == first + near.argmax()
    # what a label covers is left
    labelled = np.zeros(len(rows.ids), bool)
    labelled[[5, 110]] = True  # of the largest blob and of the third
    assert [blob(one.row) for one in by_coverage(rows, 2, labelled=labelled)] == [1, 3]


def test_of_copies_one_is_chosen_and_none_of_what_has_a_label():
    groups = np.array([-1, 3, 3, 5, -1, 5, 3, 7, 7])
    labelled = np.isin(np.arange(9), [0, 5])
    kept = one_of_each(groups, labelled)
    assert np.flatnonzero(kept).tolist() == [0, 1, 4, 5, 7]


def test_what_cannot_be_chosen_is_refused(rows):
    labelled = np.ones(len(rows.ids), bool)
    labelled[:3] = False
    with pytest.raises(DataError, match="4 samples to label were asked for, and 3 of 137 have no"):
        by_coverage(rows, 4, labelled=labelled)


def test_the_same_seed_chooses_the_same_in_any_order_of_the_rows(rows):
    shuffled = torch.randperm(len(rows.ids), generator=torch.Generator().manual_seed(0))
    plain = [one.row for one in by_coverage(rows, 10, seed=2)]
    other = [int(shuffled[one.row]) for one in by_coverage(rows.rows(shuffled), 10, seed=2)]
    assert plain == other
    assert len({*plain}) == 10
    assert cluster(rows, 10, seed=2).sizes.sum() == len(rows.ids)
