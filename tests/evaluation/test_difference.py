"""Intervals of differences: their formulas by hand, and how often they hold the truth."""

import numpy as np
import pytest
from scipy.stats import binomtest, multivariate_normal, norm

from sslpipe.evaluation.difference import holm, paired_means, paired_top1
from sslpipe.evaluation.intervals import bootstrap95, wilson95
from sslpipe.evaluation.result import accuracy

DRAWS = 2000  # a share of 95 % has a standard error of 0.5 points


def two_by_two(p, q, correlation):
    """Probabilities that both, only the one, only the other and none are right on a sample.

    Both are right on samples that are easy: a Gaussian copula.
    """
    covariance = [[1, correlation], [correlation, 1]]
    both = multivariate_normal([0, 0], covariance).cdf([norm.ppf(p), norm.ppf(q)])
    return [both, p - both, q - both, 1 - p - q + both]


def hits_of(both, only_ours, only_theirs, neither):
    """Samples that are right, (n,) each, of the counts in the table."""
    kinds = np.repeat(np.arange(4), [both, only_ours, only_theirs, neither])
    return kinds <= 1, (kinds == 0) | (kinds == 2)


@pytest.mark.promise(12)
@pytest.mark.parametrize("samples", [300, 1000, 4000])
@pytest.mark.parametrize(
    ("p", "q", "correlation"),
    [(0.62, 0.62, 0.6), (0.66, 0.62, 0.8), (0.92, 0.9, 0.7), (0.3, 0.28, 0.5)],
)
def test_top1_intervals_cover_the_truth_94_to_96_times_of_100(samples, p, q, correlation):
    rng = np.random.default_rng(samples)
    cells = two_by_two(p, q, correlation)
    covered, significant = 0, 0
    for counts in rng.multinomial(samples, cells, size=DRAWS):
        value, (low, high), p_value, *_ = paired_top1(*hits_of(*counts))
        assert low <= value <= high
        covered += low <= p - q <= high
        significant += p_value <= 0.05
        assert (p_value < 0.05) == (not low <= 0 <= high)
    assert 0.94 * DRAWS <= covered <= 0.96 * DRAWS
    if p == q:
        assert significant == DRAWS - covered


@pytest.mark.parametrize("classes", [30, 100])
def test_intervals_of_classes_that_stand_and_fall_together_cover(classes):
    """Each class has its own difference; queries of it lie around that. Sizes differ a little."""
    rng = np.random.default_rng(classes + 7)
    truth, covered, of_queries = 0.02, 0, 0
    for _ in range(DRAWS):
        labels = np.repeat(np.arange(classes), rng.integers(8, 13, classes))
        centre = truth + 0.05 * rng.standard_normal(classes)[labels]
        difference = centre + 0.1 * rng.standard_normal(len(labels))
        theirs = np.full(len(labels), 0.4)
        found = paired_means(theirs + difference, theirs, labels)
        covered += found.interval95[0] <= truth <= found.interval95[1]
        half = 1.96 * difference.std(ddof=1) / np.sqrt(len(labels))
        of_queries += abs(difference.mean() - truth) <= half
    assert 0.94 * DRAWS <= covered <= 0.96 * DRAWS
    assert of_queries <= 0.85 * DRAWS, "as if queries of a class were independent"


def test_means_are_compared_by_leaving_out_a_class_at_a_time():
    rng = np.random.default_rng(0)
    labels = rng.integers(0, 7, 60)
    ours, theirs = rng.random(60), rng.random(60)
    value, (low, high), p, unit, count = paired_means(ours, theirs, labels)
    assert value == pytest.approx((ours - theirs).mean())
    without = [(ours - theirs)[labels != label].mean() for label in range(7)]
    error = np.sqrt(6 / 7 * sum((each - value) ** 2 for each in without))
    assert (low, high) == pytest.approx((value - 2.4469118 * error, value + 2.4469118 * error))
    assert (unit, count) == ("classes", 7)
    assert (p < 0.05) == (not low <= 0 <= high)
    mirrored = paired_means(theirs, ours, labels)
    assert mirrored.interval95 == pytest.approx((-high, -low))
    assert mirrored.p == pytest.approx(p)


def test_the_same_scores_differ_by_nothing_and_a_shift_of_all_by_just_that():
    labels, scores = np.arange(12) // 3, np.arange(12) / 16
    assert paired_means(scores, scores, labels)[:3] == (0, (0, 0), 1)
    value, interval, p, *_ = paired_means(scores + 0.25, scores, labels)
    assert (value, interval, p) == (0.25, (0.25, 0.25), 0)
    equal = paired_top1(np.ones(50, bool), np.ones(50, bool))
    assert equal.value == 0
    assert equal.interval95[0] < 0 < equal.interval95[1]
    assert equal.p == 1


def test_holm_multiplies_the_least_by_all_and_the_next_by_one_fewer():
    assert holm([0.01, 0.04, 0.03]) == pytest.approx([0.03, 0.06, 0.06])
    assert holm([0.5, 0.9]) == [1, 1]
    assert holm([0.02]) == [0.02]
    assert holm([]) == []


def test_the_paired_interval_is_agresti_and_mins():
    """Their table 1: n12 = 16, n21 = 132, n = 1600 gives 0.0725 and the Wald's neighbour."""
    ours, theirs = hits_of(1000, 132, 16, 452)
    difference, (low, high), *_ = paired_top1(ours, theirs)
    assert difference == pytest.approx(116 / 1600)
    b, c, n = 132.5, 16.5, 1602
    half = 1.959963984540054 * np.sqrt(b + c - (b - c) ** 2 / n) / n
    assert (low, high) == pytest.approx(((b - c) / n - half, (b - c) / n + half))
    assert paired_top1(theirs, ours).interval95 == pytest.approx((-high, -low))
    low, high = paired_top1(np.ones(3, bool), np.zeros(3, bool)).interval95
    assert 0 < low <= high <= 1


@pytest.mark.parametrize(("right", "total"), [(0, 10), (3, 10), (81, 100), (9999, 10000), (7, 7)])
def test_wilson95_equals_scipy(right, total):
    theirs = binomtest(right, total).proportion_ci(method="wilson")
    assert wilson95(right, total) == pytest.approx((theirs.low, theirs.high), abs=1e-12)


def test_accuracy_counts_each_query_once():
    predicted, labels = np.array([0, 1, 2, 2]), np.array([0, 1, 1, 2])
    result = accuracy("p", predicted, labels, bank=9, details={"C": 1.0})
    assert (result.value, result.queries, result.bank) == (0.75, 4, 9)
    assert result.interval95[0] < 0.75 < result.interval95[1]
    assert result.to_json()["details"] == {"C": 1.0}


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
