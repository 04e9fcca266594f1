"""Retrieval against loops in integers: ties, singletons, duplicates, lone queries, large labels."""

import numpy as np
import pytest
import torch

from sslpipe.errors import DataError
from sslpipe.evaluation.intervals import bootstrap_means95, means95
from sslpipe.evaluation.retrieval import PerQuery, retrieval, retrieval_per_query, summary
from tests.evaluation.test_knn import brute_similarities, random_rows, rows, tied_rows


def ranked(gallery, queries, removed=()):
    """For each query, nearest first: is the row it may see one of its own label?"""
    actual = []
    for q, similarities in enumerate(brute_similarities(gallery, queries, removed)):
        seen = np.flatnonzero(similarities > -np.inf).tolist()
        seen.sort(key=lambda j: (-similarities[j], j))
        actual.append([int(gallery.labels[j]) == int(queries.labels[q]) for j in seen])
    return actual


def brute(names, gallery, queries, ks, removed):
    """{query id: (matches, {metric: value})} by the definitions, one rank at a time."""
    actual = {}
    for q, relevant in enumerate(ranked(gallery, queries, removed)):
        total = sum(relevant)
        values = dict.fromkeys(names, 0.0)
        if total:
            sums = hits = first = 0
            for rank, good in enumerate(relevant, 1):
                if good:
                    hits += 1
                    sums += hits / rank
                    first = first or rank
                if rank in ks:
                    values[f"Recall@{rank}"] = float(hits > 0)
                    values[f"recall (IR)@{rank}"] = hits / total
                    values[f"precision@{rank}"] = hits / rank
                    values[f"mAP@{rank}"] = sums / min(rank, total)
                if rank == total:
                    values["R-precision"], values["MAP@R"] = hits / total, sums / total
            values["mAP"], values["MRR"] = sums / total, 1 / first
        actual[int(queries.ids[q])] = total, values
    return actual


def assert_equals_loops(actual, gallery, queries, ks, removed=()):
    expected = brute(actual.names, gallery, queries, ks, removed)
    assert actual.ids.tolist() == list(expected)
    assert actual.matches.tolist() == [total for total, _ in expected.values()]
    table = [[*values.values()] for _, values in expected.values()]  # of these metrics, no more
    np.testing.assert_allclose(actual.values, table, rtol=0, atol=1e-12)


def mixed(make):
    """A gallery with duplicates, ties and singletons; queries of which some are lone."""
    gallery, queries = make(90, 4, 9, seed=1), make(40, 4, 12, seed=2, first_id=1000)
    twice = gallery.rows(torch.arange(30, 50))
    gallery = type(gallery)(*(torch.cat(p) for p in zip(gallery, twice, strict=True)))
    gallery = gallery._replace(ids=torch.arange(len(gallery.ids)) + 7)
    gallery.labels[5] = 10  # a singleton
    queries.labels[3] = 10
    queries.labels[4] = 77  # lone
    # labels that floats do not tell apart
    return [rows._replace(labels=rows.labels + 2**62) for rows in (gallery, queries)]


@pytest.mark.parametrize("counted", [0, 10**9], ids=["sorted", "counted"])
@pytest.mark.promise(6)
@pytest.mark.parametrize("make", [random_rows, tied_rows])
def test_every_metric_of_every_query_equals_the_loops(make, counted, monkeypatch):
    for name, number in (("COUNTED", counted), ("TILE_NUMBERS", 110 * 7)):  # the last one smaller
        monkeypatch.setitem(retrieval_per_query.__globals__, name, number)
    gallery, queries = mixed(make)
    actual = retrieval_per_query(gallery, queries, k=(1, 3, 50))
    assert_equals_loops(actual, gallery, queries, (1, 3, 50))
    assert 1 <= (actual.matches == 0).sum() < 40
    for scale in (1e-30, 1e30):
        scaled = [x._replace(features=x.features * scale) for x in (gallery, queries)]
        if make is random_rows:  # of tied ones the lengths' roundings differ
            again = retrieval_per_query(*scaled, k=(1, 3, 50))
            np.testing.assert_allclose(again.values, actual.values, atol=1e-12)


def test_a_split_searched_in_itself_excludes_the_query_by_its_global_id():
    data = mixed(random_rows)[0]
    shuffled = data.rows(torch.randperm(len(data.ids), generator=torch.Generator().manual_seed(0)))
    actual = retrieval_per_query(data, shuffled, k=(1, 5), exclude_same_id=True)
    pairs = [(i, i) for i in data.ids.tolist()]
    assert_equals_loops(actual, data, shuffled, (1, 5), removed=pairs)


def test_queries_without_a_match_are_counted_and_skipped():
    gallery = rows(np.eye(3), [0, 1, 2])
    queries = rows([*np.eye(3), [1, 0.1, 0], [0.1, 1, 0], [0, 1, 0]], [0, 1, 2, 0, 2, 9], 10)
    first, *others = retrieval(gallery, queries, k=(1,))
    assert {r.details["lone"] for r in (first, *others)} == {1}
    assert (first.metric, first.value, first.queries) == ("Recall@1", 4 / 5, 5)
    assert "lone=skip" in first.protocol


def test_of_ten_classes_the_interval_is_over_classes_of_fewer_over_queries():
    for classes, unit in ((9, "queries"), (10, "classes")):
        labelled = random_rows(60, 6, 1, seed=1)._replace(labels=torch.arange(60) % classes)
        scores = retrieval_per_query(labelled, labelled, k=(1,), exclude_same_id=True)
        results = retrieval(labelled, labelled, k=(1,), exclude_same_id=True)
        assert {r.protocol.split()[-1] for r in results} == {f"interval={unit}"}
        intervals, over = means95(scores.values, scores.labels)
        assert ([r.interval95 for r in results], over) == (intervals, unit)
        if unit == "queries":
            assert intervals == bootstrap_means95(scores.values)


@pytest.mark.parametrize(
    ("classes", "images", "least"),
    [(40, 5, 0.88), pytest.param(10, 20, 0.84, marks=pytest.mark.slow)],
)
def test_intervals_over_classes_hold_the_mean_of_other_classes_and_those_over_queries_do_not(
    classes, images, least
):
    """Each draw has classes of its own, some spread out and some not; queries of one are alike.

    The truth is the mean over all draws. With 1,000 draws, of 100 intervals over classes 92
    (Recall@1) and 93 (MAP@R) hold it, and 69 and 64 of those over queries; of 10 classes 89 and 93,
    and 54 and 34.
    """
    rng, draws = np.random.default_rng(1), 200
    means, of_classes, of_queries = [], [], []
    for _ in range(draws):
        labels = np.repeat(np.arange(classes), images)
        noise = rng.uniform(0.5, 1.5, classes)[labels, None] * rng.standard_normal((200, 12))
        labelled = rows(rng.standard_normal((classes, 12))[labels] + noise, labels)
        scores = retrieval_per_query(labelled, labelled, k=(1,), exclude_same_id=True)
        columns = [scores.names.index(name) for name in ("Recall@1", "MAP@R")]
        values = scores.values[:, columns]
        found = summary(PerQuery(("Recall@1", "MAP@R"), *scores[1:4], values), "p")
        means.append([result.value for result in found])
        of_classes.append([result.interval95 for result in found])
        of_queries.append(bootstrap_means95(values, resamples=200))
    truth = np.mean(means, axis=0)

    def covered(intervals):
        low, high = np.moveaxis(np.array(intervals), 2, 0)  # (draws, 2) each
        return ((low <= truth) & (truth <= high)).mean(axis=0)

    assert (covered(of_classes) >= least).all()  # a share of 0.93 has a standard error of 0.018
    assert (covered(of_queries) <= 0.78).all()


@pytest.mark.parametrize(
    ("width", "k", "message"),
    [(4, (0, 1), "lie in 1..100"), (4, (101,), "lie in 1..100"), (3, (1,), "different backbones")],
)
def test_wrong_options_are_one_clear_error(width, k, message):
    gallery, queries = random_rows(100, 4, 4, seed=1), random_rows(5, 4, 4, 2, 1000)
    with pytest.raises(DataError, match=message):
        retrieval(gallery, queries._replace(features=queries.features[:, :width]), k=k)
    with pytest.raises(DataError, match="none of 5 queries has a match"):
        summary(retrieval_per_query(gallery, queries._replace(labels=queries.labels + 50)), "p")
