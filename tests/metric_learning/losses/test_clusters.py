"""Clusters and the tree of classes, also where float32 or a wrong divisor would spoil them."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from sslpipe.metric_learning import METRIC_LOSSES
from sslpipe.metric_learning.losses.clusters import (
    k_means,
    merge_levels,
    squared_distances_of_rows,
)
from tests.helpers import metric_loops as loops
from tests.helpers.metric_rows import made


def unit_rows(seed=0, size=16, dim=66):
    generator = torch.Generator().manual_seed(seed)
    return F.normalize(torch.randn(size, dim, generator=generator, dtype=torch.float64))


@pytest.mark.parametrize("seed", range(5))
def test_the_tree_merges_what_is_near_through_others_too(seed):
    x = unit_rows(seed, size=9, dim=3)
    between = torch.cdist(x, x).square()
    between[0, 1] = between[1, 0] = -1e-9  # as rounding leaves it of two that are one
    actual = merge_levels(between, levels=8, start=0.2)
    for level in range(1, 9):  # connected components, by squaring the adjacency until it is full
        threshold = level * (4 - 0.2) / 8 + 0.2
        together = (between < threshold).double()
        for _ in range(4):
            together = ((together @ together) > 0).double()
        torch.testing.assert_close((actual <= threshold + 1e-9).double(), together)


def test_distances_between_classes_near_collapse_are_those_of_loops():
    rows = F.normalize(torch.ones(66) + 1e-2 * unit_rows(size=12))
    means = rows.float().unflatten(0, (4, 3)).double().mean(1).float()
    expected = [[2 - 2 * sum(map(float, a * b)) for a in means.double()] for b in means.double()]
    np.testing.assert_allclose(squared_distances_of_rows(means), expected, rtol=1e-6)


def test_a_row_and_itself_are_left_out_of_the_mean_within_a_class():
    x, labels = unit_rows(dim=6), torch.arange(16) // 4
    loss = made("hierarchical_triplet").double()
    loss(x, labels)
    within = [
        sum(float(loops.d2(a, b)) for a in own for b in own) / 12 for own in x.split(4)
    ]  # 4 * 3 ordered pairs
    level = loss.margins() + torch.tensor(within)[:, None] - loss.beta
    torch.testing.assert_close(level, level.T)  # what is left is the tree's, equal both ways
    # the running means of many batches know the distance as well: no batch size enters
    for seed in range(200):
        loss(unit_rows(seed, dim=6), labels)
    spread = loss.beta - loss.margins().diagonal()
    assert float(spread.mean()) == pytest.approx(2.0, abs=0.1)  # of random directions


def test_clusters_within_a_tight_class_are_those_of_float64():
    """One row far away sets the scale; the clusters are of differences 1e-4 of it."""
    middle = unit_rows(7, size=3).float()
    x = middle[torch.arange(60) % 3] * 1e-4 + 1e-5 * unit_rows(size=60).float() + 1
    x[0] = 3
    one = torch.zeros(60, dtype=torch.int64)
    found = k_means(x, one, 4)
    assert torch.equal(found, k_means(x.double(), one, 4))
    assert sorted(found.bincount().tolist()) == [1, 19, 20, 20]


def test_k_means_parts_each_class_by_itself():
    centers = torch.tensor([[0.0, 0], [0.6, 0], [0, 0.6], [0.6, 0.6]], dtype=torch.float64)
    x = centers.repeat_interleave(3, 0) + unit_rows(4, size=12, dim=2) * 0.1
    labels = torch.tensor([5] * 6 + [7] * 6)
    clusters = k_means(x, labels, 2)
    for start in (0, 3, 6, 9):
        assert len(set(clusters[start : start + 3].tolist())) == 1
    assert clusters[0] != clusters[3]
    assert clusters[6] != clusters[9]
    loss = METRIC_LOSSES["magnet"](clusters_per_class=2)
    expected = loops.magnet(list(x), labels.tolist(), clusters.tolist())
    torch.testing.assert_close(loss(x, labels), expected)
