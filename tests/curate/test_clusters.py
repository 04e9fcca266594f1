"""Clusters and what is chosen from them to be labelled, against planted ones and brute force."""

import numpy as np
import pytest
import torch
from torch.nn.functional import normalize

from sslpipe.curate.clusters import by_coverage, cluster, one_of_each
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings

SIZES = (40, 60, 12, 25)  # of blobs, in the order of the rows
RANKED = (60, 40, 25, 12)
FIRST = np.cumsum((0, *SIZES))


@pytest.fixture(scope="module")
def rows():
    """Blobs far from each other, of rows of any length."""
    rng = np.random.default_rng(0)
    parts = [10 * np.eye(8)[k] + 0.5 * rng.normal(size=(n, 8)) for k, n in enumerate(SIZES)]
    features = np.concatenate(parts) * rng.uniform(0.5, 2, (sum(SIZES), 1))
    ids = torch.arange(sum(SIZES)) * 3
    return Embeddings(torch.from_numpy(features).float(), torch.full_like(ids, -1), ids)


def test_planted_clusters_are_found_the_largest_first_with_their_centres(rows):
    found = cluster(rows, 4)
    assert found.sizes.tolist() == list(RANKED)
    assert np.array_equal(found.of_row, np.repeat([1, 0, 3, 2], SIZES))
    units = normalize(rows.features).numpy()
    for k in range(4):
        own = found.members(k)
        far = np.linalg.norm(units[own] - units[own].mean(axis=0), axis=1)
        np.testing.assert_allclose(found.distances[own], far, atol=1e-6)
        assert found.central[k] == own[far.argmin()]


def test_the_rows_own_order_changes_nothing(rows):
    shuffled = torch.randperm(len(rows.ids), generator=torch.Generator().manual_seed(0))
    other_rows = rows.rows(shuffled)
    for count in (4, 12):
        plain, other = cluster(rows, count, seed=4), cluster(other_rows, count, seed=4)
        assert np.array_equal(plain.of_row[shuffled.numpy()], other.of_row)
        assert np.array_equal(plain.central, shuffled.numpy()[other.central])
    plain = [one.id for one in by_coverage(rows, 10)]
    assert plain == [one.id for one in by_coverage(other_rows, 10)]
    assert len({*plain}) == 10


def test_coverage_takes_the_most_typical_of_each_cluster_the_largest_first(rows):
    chosen = by_coverage(rows, 4)
    assert [one.value for one in chosen] == list(RANKED)
    assert {type(one.value) for one in chosen} == {float}  # as written to chosen.csv
    units = normalize(rows.features.double()).numpy()
    ids = rows.ids.numpy()
    for one, blob in zip(chosen, (1, 0, 3, 2), strict=True):
        own = units[FIRST[blob] : FIRST[blob + 1]]
        cosines = own @ own.T
        np.fill_diagonal(cosines, -np.inf)
        near = np.sort(cosines, axis=1)[:, -min(20, len(own) - 1) :].mean(axis=1)
        assert one.id == ids[FIRST[blob] + near.argmax()]
    # what a label covers is left
    labelled = np.isin(np.arange(len(rows.ids)), [FIRST[1], FIRST[3]])
    rest = [one.id for one in by_coverage(rows, 2, labelled=labelled)]
    places = np.searchsorted(ids, rest)
    assert np.searchsorted(FIRST, places, side="right").tolist() == [1, 3]


def test_of_copies_one_is_chosen_and_none_of_what_has_a_label():
    groups = np.array([-1, 3, 3, 5, -1, 5, 3, 7, 7])
    kept = one_of_each(groups, np.isin(np.arange(9), [0, 5]))
    assert np.flatnonzero(kept).tolist() == [0, 1, 4, 5, 7]


def test_too_few_rows_are_refused(rows):
    with pytest.raises(DataError, match="138 clusters of 137 rows; use 1 to 137"):
        cluster(rows, 138)
    twice = rows.rows(torch.tensor([0, 1]).repeat(5))
    with pytest.raises(DataError, match="3 clusters were asked for, and the features hold 2"):
        cluster(twice, 3)
    labelled = np.arange(len(rows.ids)) >= 3
    with pytest.raises(DataError, match="4 samples to label were asked for, and 3 of 137 have no"):
        by_coverage(rows, 4, labelled=labelled)
