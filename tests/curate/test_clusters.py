"""Clusters: those that were planted, the largest first, whatever the order of the rows."""

import numpy as np
import pytest
import torch

from sslpipe.curate.clusters import cluster
from sslpipe.errors import DataError
from sslpipe.evaluation.embed import Embeddings

SIZES = (20, 50, 35)


@pytest.fixture(scope="module")
def rows():
    """Three blobs far from each other, at different lengths."""
    rng = np.random.default_rng(0)
    parts = [10 * np.eye(8)[k] + 0.3 * rng.normal(size=(n, 8)) for k, n in enumerate(SIZES)]
    features = np.concatenate(parts) * rng.uniform(0.5, 2, (sum(SIZES), 1))
    ids = torch.arange(sum(SIZES))
    return Embeddings(torch.from_numpy(features).float(), torch.full_like(ids, -1), ids)


def test_planted_clusters_are_found_the_largest_first(rows):
    found = cluster(rows, 3)
    assert found.sizes.tolist() == [50, 35, 20]
    expected = np.repeat([2, 0, 1], SIZES)
    assert np.array_equal(found.of_row, expected)
    assert found.members(2).tolist() == list(range(20))


def test_centre_and_distances_are_those_of_brute_force(rows):
    found = cluster(rows, 3)
    units = torch.nn.functional.normalize(rows.features).numpy()
    for k in range(3):
        own = found.members(k)
        far = np.linalg.norm(units[own] - units[own].mean(axis=0), axis=1)
        np.testing.assert_allclose(found.distances[own], far, atol=1e-6)
        assert found.central[k] == own[far.argmin()]


def test_the_rows_own_order_changes_nothing(rows):
    shuffled = torch.randperm(len(rows.ids), generator=torch.Generator().manual_seed(0))
    for count in (3, 12):
        plain, other = cluster(rows, count, seed=4), cluster(rows.rows(shuffled), count, seed=4)
        assert np.array_equal(plain.of_row[shuffled.numpy()], other.of_row)
        assert np.array_equal(plain.central, shuffled.numpy()[other.central])


def test_too_few_rows_or_distinct_ones_are_refused(rows):
    with pytest.raises(DataError, match="106 clusters of 105 rows; use 1 to 105"):
        cluster(rows, 106)
    twice = rows.rows(torch.tensor([0, 1]).repeat(5))
    with pytest.raises(DataError, match="3 clusters were asked for, and the features hold 2"):
        cluster(twice, 3)
