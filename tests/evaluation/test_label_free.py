"""Label-free scores against loops in numpy, and their values for features of known shape."""

from itertools import combinations

import numpy as np
import pytest
import torch

from sslpipe.evaluation.label_free import (
    SCORES,
    alignment,
    alpha_req,
    label_free_numbers,
    lidar,
    rankme,
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
    assert rankme(torch.tensor(x)) == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize(("count", "images", "dim"), [(2, 30, 6), (5, 8, 12)])
def test_lidar_is_the_rank_of_the_discriminant_matrix_by_loops(count, images, dim):
    centres = gaussian(images, dim) * np.logspace(0, -1, dim)
    views = centres + 0.3 * gaussian(count, images, dim, seed=1)
    mean_of_image = [np.mean([view[i] for view in views], axis=0) for i in range(images)]
    mean = np.mean(mean_of_image, axis=0)
    between, within = np.zeros((dim, dim)), 1e-4 * np.eye(dim)
    for i in range(images):
        between += np.outer(mean_of_image[i] - mean, mean_of_image[i] - mean) / images
        for view in views:
            apart = view[i] - mean_of_image[i]
            within += np.outer(apart, apart) / (images * count)
    values, vectors = np.linalg.eigh(within)
    root = vectors @ np.diag(values**-0.5) @ vectors.T
    expected = entropy_rank(np.linalg.eigvalsh(root @ between @ root).clip(0))
    assert lidar(torch.tensor(views)) == pytest.approx(expected, rel=1e-6)


def test_alignment_and_uniformity_are_means_over_pairs():
    views = 1 + gaussian(3, 12, 5)
    pairs = [(i, j) for i in range(3) for j in range(3) if i != j]
    u = unit(views)
    expected = np.mean([np.sum((u[i, n] - u[j, n]) ** 2) for i, j in pairs for n in range(12)])
    assert alignment(torch.tensor(views)) == pytest.approx(expected, rel=1e-10)
    squared = [((u[0, n] - u[0, m]) ** 2).sum() for n in range(12) for m in range(12) if n != m]
    expected = np.log(np.mean(np.exp(-2 * np.array(squared))))
    assert uniformity(torch.tensor(views[0])) == pytest.approx(expected, rel=1e-10)


def test_alpha_req_is_the_weighted_least_squares_of_the_covariances_eigenvalues():
    x = gaussian(90, 30) * np.logspace(0, -3, 30)
    values = np.sort(np.linalg.eigvalsh(np.cov(x.T)))[::-1]
    rank = np.arange(6, 31)
    slope = np.polyfit(np.log(rank), np.log(values[5:30]), 1, w=(1 / rank) ** 0.5)[0]
    assert alpha_req(torch.tensor(x)) == pytest.approx(-slope, rel=1e-8)


def test_view_recall_counts_own_other_views_that_are_nearest():
    a = gaussian(30, 4)
    b = a + 0.4 * gaussian(30, 4, seed=1)
    table = unit(a) @ unit(b).T
    hits = [np.argmax(table[i]) == i for i in range(30)]
    hits += [np.argmax(table[:, i]) == i for i in range(30)]
    assert 0 < np.mean(hits) < 1
    views = torch.tensor(np.stack([a, b]))
    assert view_recall(views) == pytest.approx(np.mean(hits))


def test_features_of_one_direction_have_the_worst_numbers():
    x = torch.tensor(gaussian(200, 1) @ gaussian(1, 40, seed=1))
    views = torch.stack([x, x * 1.01])
    numbers = label_free_numbers(x, views)
    assert numbers["rankme"] == pytest.approx(1, rel=1e-5)
    assert numbers["lidar"] == pytest.approx(1, rel=1e-3)
    assert numbers["alpha_req"] == float("inf")
    assert SCORES["alpha_req"](numbers) == -float("inf")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1e-4, 1e-2, 1.0])
def test_uniformity_of_collapsed_rows_keeps_its_digits(spread, dtype):
    rows = torch.tensor(0.125 + spread * unit(gaussian(32, 64)), dtype=dtype)
    pairs = combinations(rows.double().numpy(), 2)
    expected = np.log1p(np.mean([np.expm1(-2 * ((a - b) ** 2).sum()) for a, b in pairs]))
    assert float(uniformity_of_units(rows)) == pytest.approx(expected, rel=1e-6)
