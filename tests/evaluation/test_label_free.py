"""Label-free scores against loops in numpy, and their values for features of known shape."""

from itertools import combinations

import numpy as np
import pytest
import torch

from sslpipe.evaluation.label_free import (
    alignment,
    effective_rank,
    label_free_numbers,
    uniformity,
    uniformity_of_units,
    view_recall,
)


def gaussian(*shape, seed=0):
    return np.random.default_rng(seed).normal(size=shape)


def entropy_rank(values):
    p = np.asarray(values) / np.sum(values)
    return np.exp(-sum(x * np.log(x) for x in p if x > 0))


def unit(x):
    return x / np.linalg.norm(x, axis=-1, keepdims=True)


@pytest.mark.parametrize(("images", "dim"), [(40, 7), (9, 16)])
def test_rankme_is_the_entropy_of_the_singular_values(images, dim):
    x = 3 + gaussian(images, dim) * np.logspace(0, -2, dim)
    expected = entropy_rank(np.linalg.svd(x, compute_uv=False))
    assert float(effective_rank(torch.tensor(x))) == pytest.approx(expected, rel=1e-10)


def test_alignment_and_uniformity_are_means_over_pairs():
    views = 1 + gaussian(3, 12, 5)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    u = unit(views)
    expected = np.mean([np.sum((u[i, n] - u[j, n]) ** 2) for i, j in pairs for n in range(12)])
    assert alignment(torch.tensor(views)) == pytest.approx(expected, rel=1e-10)
    squared = [((u[0, n] - u[0, m]) ** 2).sum() for n in range(12) for m in range(12) if n != m]
    expected = np.log(np.mean(np.exp(-2 * np.array(squared))))
    assert uniformity(torch.tensor(views[0])) == pytest.approx(expected, rel=1e-10)


def test_view_recall_counts_own_other_views_that_are_nearest():
    a = gaussian(30, 4)
    b = a + 0.4 * gaussian(30, 4, seed=1)
    table = unit(a) @ unit(b).T
    hits = [np.argmax(table[i]) == i for i in range(30)]
    hits += [np.argmax(table[:, i]) == i for i in range(30)]
    assert 0 < np.mean(hits) < 1
    views = torch.tensor(np.stack([a, b]))
    assert view_recall(views) == pytest.approx(np.mean(hits))


def test_features_of_one_direction_have_the_worst_rank():
    x = torch.tensor(gaussian(200, 1) @ gaussian(1, 40, seed=1))
    assert label_free_numbers(x, torch.stack([x, x * 1.01]))["rankme"] == pytest.approx(1, rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1e-4, 1e-2, 1.0])
def test_uniformity_of_collapsed_rows_keeps_its_digits(spread, dtype):
    rows = torch.tensor(0.125 + spread * unit(gaussian(32, 64)), dtype=dtype)
    pairs = combinations(rows.double().numpy(), 2)
    expected = np.log1p(np.mean([np.expm1(-2 * ((a - b) ** 2).sum()) for a, b in pairs]))
    assert float(uniformity_of_units(rows)) == pytest.approx(expected, rel=1e-6)
