"""Verification against loops over pairs and thresholds, and scikit-learn."""

from itertools import combinations

import numpy as np
import pytest
import torch
from scipy.optimize import brentq
from sklearn.metrics import roc_auc_score, roc_curve

from sslpipe.distributed import Rank
from sslpipe.errors import DataError
from sslpipe.evaluation.result import caveats
from sslpipe.evaluation.retrieval import query_metrics, retrieval, retrieval_per_query
from sslpipe.evaluation.verification import (
    auc,
    best_threshold,
    draw_pairs,
    eer,
    fpr_at_tpr,
    kfold_accuracy,
    pair_cosines,
    roc,
    tar_at_far,
    verification,
)
from tests.evaluation.test_knn import brute_similarities, random_rows, rows, tied_rows
from tests.helpers.processes import run_processes


def scored(seed, ties):
    """(scores, same): overlapping kinds; with ties, few distinct scores."""
    rng = np.random.default_rng(seed)
    same = np.arange(300) < 120
    scores = (rng.normal(size=300) + same).astype(np.float32)
    return (np.round(scores) if ties else scores), same


def accepted(scores, same, threshold):
    """(share of the different, share of the same) with at least the threshold, by loops."""
    kinds = [
        [s >= threshold for s, good in zip(scores, same, strict=True) if good == k] for k in (0, 1)
    ]
    return [sum(kind) / len(kind) for kind in kinds]


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("seed", [1, 2])
def test_fpr_tar_and_auc_equal_loops_over_all_thresholds(seed, ties):
    scores, same = scored(seed, ties)
    points = [accepted(scores, same, t) for t in sorted(set(scores.tolist()), reverse=True)]
    curve = roc(scores, same)
    np.testing.assert_allclose(np.stack([curve.false, curve.true], 1), points, atol=1e-12)
    assert fpr_at_tpr(curve, 0.95) == pytest.approx(next(f for f, t in points if t >= 0.95))
    for far in (0.01, 0.1, 0.5):
        expected = max((t for f, t in points if f <= far), default=0.0)
        assert tar_at_far(curve, far) == pytest.approx(expected)
    assert auc(curve) == pytest.approx(roc_auc_score(same, scores))
    false, true, _ = roc_curve(same, scores, drop_intermediate=False)
    crossing = brentq(lambda f: 1 - np.interp(f, false, true) - f, 0, 1)
    assert eer(curve) == pytest.approx(crossing, abs=1e-9)


def test_equal_errors_of_scores_that_part_the_kinds_that_mix_them_and_that_are_all_one():
    same = np.array([True, True, False, False])
    for scores, expected in (
        ([4, 3, 2, 1], 0.0),
        ([1, 2, 3, 4], 1.0),
        ([4, 2, 3, 1], 0.5),
        ([1, 1, 1, 1], 0.5),
    ):
        assert eer(roc(np.array(scores, np.float32), same)) == expected


@pytest.mark.promise(6)
@pytest.mark.parametrize("ties", [False, True])
def test_each_fold_is_scored_at_the_threshold_that_is_best_on_the_others(ties):
    scores, same = scored(3, ties)
    mean, per_fold = kfold_accuracy(scores, same, 4)
    fold = np.concatenate([np.arange(120) % 4, np.arange(180) % 4])
    expected = []
    for number in range(4):
        others = [(s, g) for s, g, f in zip(scores, same, fold, strict=True) if f != number]
        right = {
            t: sum((s >= t) == g for s, g in others) for t in [np.inf, *(t for t, _ in others)]
        }
        threshold = max(t for t in right if right[t] == max(right.values()))
        held = [
            (s >= threshold) == g for s, g, f in zip(scores, same, fold, strict=True) if f == number
        ]
        expected.append(np.mean(held))
    assert per_fold == pytest.approx(expected)
    assert mean == pytest.approx(np.mean(expected))
    assert best_threshold(np.array([3, 2, 1], np.float32), np.array([True, True, False])) == 2


@pytest.mark.parametrize(("same", "different"), [(20, 760), (760, 20)])
def test_where_scores_say_nothing_the_best_threshold_gives_the_more_frequent_answer(
    same, different
):
    scores = np.ones(same + different, np.float32)  # collapsed features
    kinds = np.arange(len(scores)) < same
    threshold = best_threshold(scores, kinds)
    assert np.isfinite(threshold)
    assert ((scores >= threshold) == (same > different)).all()
    assert kfold_accuracy(scores, kinds, 10)[0] == pytest.approx(760 / 780)
    # nor where different pairs score higher
    scores = np.array([0.1, 0.2, 0.8, 0.9, 0.95], np.float32)
    assert not (scores >= best_threshold(scores, np.arange(5) < 2)).any()


def test_pairs_are_distinct_of_the_right_kind_and_the_same_for_every_order_of_rows():
    data = random_rows(200, 4, 5, seed=1)
    data = data._replace(labels=data.labels + 2**62)
    pairs = draw_pairs(data, 500, seed=3)
    assert pairs.same.tolist() == [True] * 500 + [False] * 500
    same = data.labels[pairs.first] == data.labels[pairs.second]
    assert same.tolist() == pairs.same.tolist()
    named = id_pairs(data, pairs)
    assert len({frozenset(pair) for pair in named}) == 1000
    assert all(len(pair) == 2 for pair in named)
    backwards = data.rows(torch.arange(199, -1, -1))
    assert id_pairs(backwards, draw_pairs(backwards, 500, seed=3)) == named
    assert not np.array_equal(draw_pairs(data, 500, seed=4).first, pairs.first)


def id_pairs(rows, pairs):
    sides = (rows.ids[pairs.first].tolist(), rows.ids[pairs.second].tolist())
    return [{*pair} for pair in zip(*sides, strict=True)]


def test_where_there_are_few_pairs_all_are_taken():
    data = rows(np.eye(5), [0, 0, 1, 1, 1])
    pairs = draw_pairs(data, 1000, seed=0)
    assert {tuple(sorted(p)) for p in id_pairs(data, pairs)} == {*combinations(range(5), 2)}
    with pytest.raises(DataError, match="pairs = 0 must be at least 1"):
        draw_pairs(random_rows(40, 3, 4, seed=0), 0, 0)
    with pytest.raises(DataError, match="no pair of one label among 2 rows"):
        draw_pairs(rows(np.eye(2), [0, 1]), 10, 0)


def test_pairs_are_sampled_uniformly():
    # 40 rows, classes of 4, 12 and 24: 6, 66 and 276 pairs of one label; 40 of 348 in each of 300
    # draws: the count of pairs in the smallest class is 300 * 40 * 6 / 348 = 207, spread < 15
    data = rows(np.eye(40), np.repeat([0, 1, 2], [4, 12, 24]))
    counts = np.zeros(3)
    for seed in range(300):
        pairs = draw_pairs(data, 20, seed)
        counts += np.bincount(data.labels[pairs.first[pairs.same]], minlength=3)
    expected = 300 * 20 * np.array([6, 66, 276]) / 348
    assert (abs(counts - expected) < 5 * np.sqrt(expected)).all()


@pytest.mark.parametrize("make", [random_rows, tied_rows])
def test_scores_are_the_exact_cosines(make):
    data = make(60, 5, 4, seed=2)
    pairs = draw_pairs(data, 200, seed=0)
    table = brute_similarities(data, data)
    np.testing.assert_array_equal(pair_cosines(data, pairs), table[pairs.first, pairs.second])


def test_every_result_is_that_of_its_own_function_and_its_interval_holds_it():
    bank, queries = random_rows(10, 6, 4, seed=1), random_rows(200, 6, 4, seed=2)
    results = {r.metric: r for r in verification(bank, queries, pairs=800, far=(0.1,))}
    pairs = draw_pairs(queries, 800, 0)
    curve = roc(pair_cosines(queries, pairs), pairs.same)
    expected = {"fpr@95tpr": fpr_at_tpr(curve, 0.95), "tar@far=0.1": tar_at_far(curve, 0.1)}
    for metric, value in {**expected, "auc": auc(curve), "eer": eer(curve)}.items():
        result = results[metric]
        assert result.value == value
        assert result.interval95[0] < value < result.interval95[1]
        assert result.details["different_pairs"] == 800
        assert result.queries == 200
    accuracy = results["accuracy 10-fold best threshold"]
    assert len(accuracy.details["folds"]) == 10
    half = 1.96 * np.std(accuracy.details["folds"], ddof=1) / 10**0.5
    assert accuracy.interval95 == pytest.approx((accuracy.value - half, accuracy.value + half))
    with pytest.raises(
        DataError, match=r"far = 0.001 of 800 different pairs .* draw at least 1000"
    ):
        verification(bank, queries, pairs=800, far=(1e-3,))
    # where none are given: those of one different pair or more
    by_default = {result.metric for result in verification(bank, queries, pairs=800)}
    assert by_default == {*results, "tar@far=0.01"}


def test_an_accuracy_of_unequal_kinds_of_pairs_stands_beside_that_of_one_answer():
    bank = random_rows(10, 6, 4, seed=1)
    unequal = random_rows(60, 6, 12, seed=2)
    results = {r.metric: r for r in verification(bank, unequal, pairs=1_000)}
    pairs = draw_pairs(unequal, 1_000, 0)
    guessed = 100 * max(pairs.same.mean(), 1 - pairs.same.mean())
    assert guessed > 60
    (caveat,) = caveats(results["accuracy 10-fold best threshold"].details)
    assert f"{guessed:.1f} %" in caveat
    assert not caveats(results["auc"].details)
    equal = random_rows(200, 6, 4, seed=2)
    assert not any(caveats(each.details) for each in verification(bank, equal, pairs=800))


def in_rank(process):
    # of 41 queries two have a class that none of the others' parts has: it is the largest
    gallery, queries = random_rows(900, 4, 9, seed=1), random_rows(41, 4, 12, seed=2, first_id=1000)
    gallery.labels[300:] = 5
    queries.labels[queries.labels == 5] = 6
    queries.labels[:2] = 5
    ranked = []  # queries that are ranked here

    def counting(ranks, *rest):
        ranked.append(len(ranks))
        return query_metrics(ranks, *rest)

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(retrieval_per_query.__globals__, "query_metrics", counting)
        assert len(retrieval_per_query(gallery, queries, process=process).ids) == 41
    scores = pair_cosines(gallery, draw_pairs(gallery, 101, seed=0), process)
    options = {"process": process}
    results = retrieval(gallery, queries, **options)
    results += verification(gallery, gallery, pairs=101, far=(0.1,), **options)
    return sum(ranked), len(scores), results


def test_several_processes_share_queries_and_pairs_and_have_the_results_of_one():
    world = 4
    queries, pairs, results = in_rank(Rank())
    actual = run_processes(in_rank, world)
    assert sum(count for count, *_ in actual) == queries
    assert sum(count for _, count, _ in actual) == pairs
    assert max(count for count, *_ in actual) <= queries // world + 1
    for *_, theirs in actual:
        assert theirs == results
