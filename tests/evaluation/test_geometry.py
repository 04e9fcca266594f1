"""Alignment, uniformity, rank and spread against loops and closed forms."""

from itertools import combinations

import numpy as np
import pytest
import torch

from sslpipe.evaluation.geometry import geometry, uniformity
from sslpipe.random import permutation
from tests.evaluation.test_knn import random_rows, rows


def by_metric(*arguments, **options):
    return {result.metric: result for result in geometry(*arguments, **options)}


def test_every_number_equals_its_definition_by_loops():
    data = random_rows(60, 6, 4, seed=1)
    actual = by_metric(data, data, pairs=10_000)  # all pairs
    unit = torch.nn.functional.normalize(data.features.double()).numpy()
    labels = data.labels.tolist()
    squared = {(i, j): ((unit[i] - unit[j]) ** 2).sum() for i, j in combinations(range(60), 2)}
    same = [d for (i, j), d in squared.items() if labels[i] == labels[j]]
    assert actual["alignment"].value == pytest.approx(np.mean(same), rel=1e-6)
    expected = np.log(np.mean([np.exp(-2 * d) for d in squared.values()]))
    assert actual["uniformity"].value == pytest.approx(expected, rel=1e-6)
    values = np.linalg.svd(data.features.double().numpy(), compute_uv=False)
    share = values / values.sum()
    assert actual["effective_rank"].value == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    assert actual["effective_rank"].details["singular_values"] == pytest.approx(values, rel=1e-6)
    spreads = sorted(unit.std(axis=0), reverse=True)
    assert actual["std"].details["std_spectrum"] == pytest.approx(spreads, rel=1e-6)
    assert actual["std"].value == pytest.approx(np.mean(spreads) * 6**0.5, rel=1e-6)
    for result in actual.values():
        assert result.interval95[0] < result.value < result.interval95[1]
        assert result.unit == "number"


def rank_by_svd(x):
    share = np.linalg.svd(x, compute_uv=False)
    share = share / share.sum()
    return np.exp(-(share * np.log(share)).sum())


def uniformity_by_loops(x):
    unit = x / np.linalg.norm(x, axis=1, keepdims=True)
    return np.log(np.mean([np.exp(-2 * ((u - v) ** 2).sum()) for u, v in combinations(unit, 2)]))


@pytest.mark.parametrize("width", [6, 40])  # fewer columns than rows, and more
def test_intervals_are_those_of_leaving_out_each_tenth_of_the_rows(width):
    data = random_rows(35, width, 4, seed=1)
    data = data._replace(features=data.features * torch.logspace(0, -5, width))  # as spectra fall
    actual = by_metric(data, data)
    x = data.features.double().numpy()[permutation(35, 0)]
    for metric, value in (("effective_rank", rank_by_svd), ("uniformity", uniformity_by_loops)):
        without = [value(x[np.arange(35) % 10 != group]) for group in range(10)]
        half = 1.96 * np.sqrt(9 * np.var(without))  # 9 / 10 times the sum of 10 squares
        low, high = actual[metric].interval95
        assert actual[metric].value == pytest.approx(value(x), rel=1e-8)
        assert (high - low) / 2 == pytest.approx(half, rel=1e-4)
        assert (high + low) / 2 == pytest.approx(value(x), rel=1e-8)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("spread", [1e-4, 1e-2, 1.0])
def test_uniformity_of_collapsed_rows_keeps_its_digits(spread, dtype):
    generator = torch.Generator().manual_seed(0)
    noise = torch.nn.functional.normalize(torch.randn(32, 64, generator=generator))
    u = (torch.full((64,), 0.125) + spread * noise).to(dtype)
    wide = u.double().numpy()
    expected = np.log1p(
        np.mean([np.expm1(-2 * ((a - b) ** 2).sum()) for a, b in combinations(wide, 2)])
    )
    assert float(uniformity(u)) == pytest.approx(expected, rel=1e-6)


def test_collapsed_and_uniform_features_have_the_values_of_theory():
    rng = np.random.default_rng(0)
    labels = np.arange(1500) % 10
    sphere = by_metric(*[rows(rng.normal(size=(1500, 128)), labels)] * 2)
    # on a sphere of many dimensions distances are near sqrt(2), uniformity near -4
    assert sphere["alignment"].value == pytest.approx(2, abs=0.02)
    assert sphere["uniformity"].value == pytest.approx(-4, abs=0.1)
    assert sphere["effective_rank"].value > 120
    assert sphere["std"].value == pytest.approx(1, abs=0.01)
    point = by_metric(*[rows(1 + 1e-6 * rng.normal(size=(300, 8)), labels[:300])] * 2)
    assert point["alignment"].value < 1e-9
    assert -1e-9 < point["uniformity"].value < 0
    assert point["effective_rank"].value < 1.01
    assert point["std"].value < 1e-4
