"""NMI and AMI of clusters against counts by loops."""

import math

import pytest
import torch
from sklearn.metrics import adjusted_mutual_info_score, normalized_mutual_info_score

from sslpipe.errors import DataError
from sslpipe.evaluation.clustering import STARTS, clusters
from tests.evaluation.test_knn import random_rows, rows


def mutual_information(a, b):
    """Of two groupings, over the mean of their entropies, by counting pairs of names."""
    n = len(a)

    def share(*names):
        return sum(each == names for each in zip(a, b, strict=True)) / n

    def entropy(names):
        shares = [names.count(name) / n for name in set(names)]
        return -sum(p * math.log(p) for p in shares)

    both = sum(
        share(x, y) * math.log(share(x, y) / (a.count(x) / n * b.count(y) / n))
        for x in set(a)
        for y in set(b)
        if share(x, y)
    )
    return both / ((entropy(a) + entropy(b)) / 2)


def test_classes_that_lie_apart_are_found_and_the_order_of_rows_changes_nothing():
    generator = torch.Generator().manual_seed(0)
    labels = [label for label in (3, 5, 900) for _ in range(20)]
    middles = torch.eye(3, 8)[torch.arange(60) // 20]
    data = rows((middles + 0.01 * torch.randn(60, 8, generator=generator)).numpy(), labels)
    for result in clusters(data, data):
        assert result.value == pytest.approx(1.0)
        assert (result.queries, result.bank) == (60, 0)
    mixed = random_rows(90, 4, 3, seed=1)
    backwards = mixed.rows(torch.arange(89, -1, -1))
    assert clusters(mixed, mixed) == clusters(backwards, backwards)


def test_the_values_are_scikit_learns_and_the_intervals_are_over_starts(monkeypatch):
    data = random_rows(60, 4, 3, seed=2)
    grouped = []

    def watched(function):
        def score(truth, groups):
            grouped.append((truth.tolist(), groups.tolist(), function(truth, groups)))
            return grouped[-1][2]

        return score

    for function in (normalized_mutual_info_score, adjusted_mutual_info_score):
        monkeypatch.setattr(f"sklearn.metrics.{function.__name__}", watched(function))
    nmi, ami = clusters(data, data, seed=4)
    assert [nmi.metric, ami.metric] == ["nmi", "ami"]
    assert len(grouped) == 2 * STARTS
    assert nmi.details["starts"] == pytest.approx(
        [mutual_information(truth, groups) for truth, groups, _ in grouped[:STARTS]]
    )
    assert ami.value < nmi.value  # chance is taken off
    for result in (nmi, ami):
        assert result.value == pytest.approx(sum(result.details["starts"]) / STARTS)
        assert result.interval95[0] <= result.value <= result.interval95[1]


def test_what_cannot_be_clustered_is_one_error():
    one = rows([[1.0, 0.0], [0.0, 1.0]], [2, 2])
    with pytest.raises(DataError, match="two classes or more"):
        clusters(one, one)
    same = rows([[1.0, 0.0]] * 4, [0, 1, 2, 3])
    with pytest.raises(DataError, match="as many distinct rows, and there are 1"):
        clusters(same, same)
