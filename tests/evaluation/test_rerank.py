"""Re-ranking and augmentation against loops in float64 that follow the papers' equations."""

import math

import numpy as np
import pytest
import torch

from sslpipe.errors import DataError
from sslpipe.evaluation import neighbours
from sslpipe.evaluation.embed import Embeddings
from sslpipe.evaluation.neighbours import augmented, k_reciprocal_order
from sslpipe.evaluation.retrieval import query_metrics, retrieval, retrieval_per_query
from sslpipe.evaluation.search import ImageSearch
from tests.evaluation.test_search import by_loops, write_part


def looped_order(query, rows, k1, k2, weight):
    """Zhong et al. with sets and dictionaries, one pair at a time."""
    everything = [query.double(), *rows.double()]
    units = [row / row.norm() for row in everything]
    n = len(units)
    d = [[round(float(1 - units[i] @ units[j]), 6) for j in range(n)] for i in range(n)]
    others = [[j for j in range(n) if j != i] for i in range(n)]
    lists = [[i, *sorted(others[i], key=lambda j: d[i][j])] for i in range(n)]

    def reciprocal(i, k):  # equation 3
        return {j for j in lists[i][: k + 1] if i in lists[j][: k + 1]}

    encoded = []
    for i in range(n):
        expanded = reciprocal(i, k1)
        for j in sorted(reciprocal(i, k1)):  # equation 5
            half = reciprocal(j, round(k1 / 2))
            if 3 * len(reciprocal(i, k1) & half) >= 2 * len(half):
                expanded |= half
        values = {j: math.exp(-d[i][j]) for j in expanded}  # equation 7
        total = sum(values.values())
        encoded.append([values.get(j, 0) / total for j in range(n)])
    means = [[sum(encoded[m][j] for m in lists[i][:k2]) / k2 for j in range(n)] for i in range(n)]
    final = []
    for g in range(1, n):
        smaller = sum(map(min, means[0], means[g]))  # equation 10
        larger = sum(map(max, means[0], means[g]))
        final.append(round((1 - weight) * (1 - smaller / larger) + weight * d[0][g], 6))
    return sorted(range(n - 1), key=lambda g: final[g])


def drawn(n, width=4, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(n, width, generator=generator)


@pytest.mark.parametrize(
    ("k1", "k2", "weight"), [(4, 2, 0.3), (3, 1, 0.0), (6, 3, 0.7), (20, 6, 0.3)]
)
def test_re_ranking_is_that_of_loops(k1, k2, weight, monkeypatch):
    for name, value in (("K1", k1), ("K2", k2), ("WEIGHT", weight)):
        monkeypatch.setattr(neighbours, name, value)
    changed = 0
    for seed in range(10):
        rows = drawn(18, seed=seed)
        rows[5] = 2 * rows[3]  # a copy
        query = rows[0] + 0.7 * drawn(1, seed=100 + seed)[0]
        rows = rows[(-torch.cosine_similarity(rows, query[None])).argsort(stable=True)]
        actual = k_reciprocal_order(query, rows).tolist()
        assert sorted(actual) == list(range(18))
        assert actual == looped_order(query, rows, k1, k2, weight), seed
        changed += actual != list(range(18))
    assert changed > 5
    monkeypatch.setattr(neighbours, "WEIGHT", 1)  # the cosine alone
    assert k_reciprocal_order(query, rows).tolist() == list(range(18))


def test_augmentation_is_that_of_loops_in_any_parts(monkeypatch):
    monkeypatch.setattr(neighbours, "PART_ROWS", 4)
    rows = drawn(15)
    actual = augmented(rows, 4)
    units = rows.double() / rows.double().norm(dim=1, keepdim=True)
    for i in range(15):
        near = sorted(range(15), key=lambda j: -float(units[i] @ units[j]))[:4]
        total = sum(max(float(units[i] @ units[j]), 0) ** 3 * units[j] for j in near)
        torch.testing.assert_close(actual[i].double(), total / total.norm(), rtol=0, atol=1e-6)
    torch.testing.assert_close(augmented(rows, 1), units.float(), rtol=0, atol=1e-6)
    assert augmented(torch.zeros(2, 3), 2).tolist() == [[0.0] * 3] * 2
    for count in (0, 16):
        with pytest.raises(DataError, match=r"augment = .* 1\.\.15"):
            augmented(rows, count)


def two_sets():
    gallery = Embeddings(drawn(40), torch.arange(40) % 4, torch.arange(40))
    queries = Embeddings(drawn(9, seed=1), torch.arange(9) % 4, torch.arange(9))
    return gallery, queries


@pytest.mark.parametrize("hide", [False, True])
def test_every_metric_of_a_re_ranked_query_equals_the_loops(hide):
    """The first 12 of what a query sees are ordered anew; what it does not see takes no part."""
    gallery, queries = two_sets()
    scores = retrieval_per_query(gallery, queries, k=(1, 5), exclude_same_id=hide, rerank=12)
    for q in range(9):
        seen = [j for j in range(40) if not (hide and j == q)]
        cosine = torch.cosine_similarity(gallery.features.double(), queries.features[q].double())
        seen.sort(key=lambda j: -float(cosine[j]))
        order = looped_order(queries.features[q], gallery.features[seen[:12]], 20, 6, 0.3)
        ranked = [seen[place] for place in order] + seen[12:]
        good = [int(gallery.labels[j]) == int(queries.labels[q]) for j in ranked]
        ranks = np.flatnonzero(good)[None] + 1.0
        expected = query_metrics(ranks, np.array([sum(good)]), (1, 5))
        np.testing.assert_allclose(scores.values[q], np.ravel([*expected.values()]), rtol=1e-12)


def test_rows_of_retrieval_are_beside_the_plain_ones_and_marked():
    gallery, queries = two_sets()
    plain = retrieval(gallery, queries, k=(1,))
    both = retrieval(gallery, queries, k=(1,), augment=3, rerank=10)
    assert both[: len(plain)] == plain
    marked = both[len(plain) :]
    assert [row.metric for row in marked] == [row.metric for row in plain]
    assert all("transductive augment=3 rerank=10" in row.protocol for row in marked)
    mixed = gallery._replace(features=augmented(gallery.features, 3))
    expected = retrieval_per_query(mixed, queries, k=(1,), rerank=10).values.mean(axis=0)
    np.testing.assert_allclose([row.value for row in marked], expected, rtol=1e-12)
    last = retrieval(gallery, queries, k=(1,), augment=2)[-1].protocol
    assert "transductive augment=2 interval" in last
    for count in (-1, 1, 1001):
        with pytest.raises(DataError, match=f"rerank = {count} is not 0"):
            retrieval(gallery, queries, k=(1,), rerank=count)


def test_a_search_is_re_ranked_and_its_images_mixed_over_all_files(tmp_path):
    parts = [write_part(tmp_path / str(seed), seed) for seed in (0, 1)]
    query = torch.tensor([[-0.5, 2.0, 0.1, 1.0, -1.0, 0.3]])
    places = [(part, row) for part in (0, 1) for row in range(7)]
    features = {(p, int(parts[p][2].ids[r])): parts[p][2].features[r] for p, r in places}
    near = by_loops(parts, query[0].double(), 14)
    search = ImageSearch(*(part[:2] for part in parts))
    (hits,) = search.find(query, 4, rerank=8)
    rows = torch.stack([features[hit[1:3]] for hit in near[:8]])
    order = looped_order(query[0], rows, 20, 6, 0.3)
    assert [hit[1:] for hit in hits] == [near[place][1:] for place in order[:4]]
    (hits,) = search.find(query, 12, rerank=8)  # what lies behind stays
    assert [hit[1:] for hit in hits[8:]] == [hit[1:] for hit in near[8:12]]

    mixed = augmented(torch.stack([parts[p][2].features[r] for p, r in places]), 3)
    (hits,) = ImageSearch(*(part[:2] for part in parts), augment=3).find(query, 14)
    cosine = torch.cosine_similarity(mixed.double(), query.double())
    best = sorted(range(14), key=lambda place: -float(cosine[place]))
    expected = [(places[at][0], int(parts[places[at][0]][2].ids[places[at][1]])) for at in best]
    assert [hit[1:3] for hit in hits] == expected
