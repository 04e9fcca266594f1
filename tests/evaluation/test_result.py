"""Intervals: against scipy and against simulation."""

import numpy as np
import pytest
from scipy.stats import binomtest

from sslpipe.evaluation.difference import bootstrap95, wilson95
from sslpipe.evaluation.result import accuracy


@pytest.mark.parametrize(("right", "total"), [(0, 10), (3, 10), (81, 100), (9999, 10000), (7, 7)])
def test_wilson95_equals_scipy(right, total):
    theirs = binomtest(right, total).proportion_ci(method="wilson")
    assert wilson95(right, total) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_accuracy_counts_each_query_once():
    predicted, labels = np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2])
    result = accuracy("p", predicted, labels, bank=9, C=1.0)
    assert (result.value, result.queries, result.bank) == (0.75, 4, 9)
    assert result.interval95[0] < 0.75 < result.interval95[1]
    assert result.to_json()["details"] == {"C": 1.0}


def test_bootstrap95_of_one_draw_is_the_binomial_interval():
    # 2,000 resamples of 1,000 queries: the quantiles' own error is below 0.003
    right = np.arange(1000)[None] % 10 < 8
    low, high = bootstrap95(right)
    half = 1.96 * np.sqrt(0.8 * 0.2 / 1000)
    assert (low, high) == pytest.approx((0.8 - half, 0.8 + half), abs=0.004)


def test_bootstrap95_equals_the_loop_over_whole_numbers():
    right = np.random.default_rng(1).random((5, 700)) < 0.7
    generator = np.random.default_rng(3)
    shares = generator.multinomial(5, np.full(5, 1 / 5), size=200) / 5
    means = []
    for share in shares:
        params = generator.integers(700, size=700)
        means.append(share @ np.array([sum(row[params].tolist()) for row in right]) / 700)
    expected = np.quantile(means, [0.025, 0.975])
    assert bootstrap95(right, resamples=200, seed=3) == tuple(expected)


def test_bootstrap95_is_wider_where_the_draws_differ():
    same = np.ones((5, 400), bool)
    same[:, ::4] = False
    differing = same.copy()
    differing[:2] = False
    assert np.ptp(bootstrap95(differing)) > 3 * np.ptp(bootstrap95(same))
