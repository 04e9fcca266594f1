"""Held-out slices, whole groups, the first of each group."""

import numpy as np
import pytest

from sslpipe.data.subsets import (
    choose_groups,
    class_groups,
    held_out,
    repeated,
    suggest_holdout,
    with_a_partner,
)
from sslpipe.errors import DataError


def test_the_holdout_is_stratified_fixed_and_never_unlabelled():
    labels = np.array([0] * 600 + [1] * 300 + [2] * 100 + [-1] * 50)
    taken = held_out(labels, 100)
    assert np.bincount(labels[taken]).tolist() == [60, 30, 10]
    assert np.array_equal(taken, held_out(labels, 100))
    assert np.array_equal(taken, np.sort(taken))
    assert len(held_out(np.full(50, -1), 10)) == 0
    with pytest.raises(DataError, match=r"= 4 leaves nothing to train on"):
        held_out(np.zeros(4, np.int64), 4)


@pytest.mark.parametrize(
    ("sizes", "few", "settings", "scores_knn"),
    [
        ([600, 300, 100], 0, {"holdout": 100}, True),
        ([60_000], 0, {"holdout": 2000}, False),
        ([3] * 490, 0, {"holdout": 147, "holdout_by": "class"}, True),
        ([4] * 490, 0, {"holdout": 196, "holdout_by": "class"}, True),
        ([1] * 500, 0, {"holdout": 50, "holdout_by": "class"}, False),
        ([1000] + [2] * 500, 0, {"holdout": 200, "holdout_by": "class"}, True),
        ([6, 6], 0, {"holdout": 3}, True),
        ([4, 4], 0, {"holdout": 3}, True),  # half of them, and no more
        # 8 of 20 had a partner
        ([80] + [10] * 12, 0, {"holdout": 20, "holdout_by": "class"}, True),
        ([1, 1, 1], 0, {"holdout": 0}, False),
        ([], 0, {"holdout": 25, "holdout_from": "all"}, False),
        ([300] * 4, 100, {"holdout": 120}, True),  # a tenth is more
        ([200] * 4, 100, {"holdout": 100}, True),
        ([100] * 4, 100, {"holdout": 80}, True),  # a fifth
        ([4] * 50, 100, {"holdout": 40, "holdout_by": "class"}, True),
        ([], 100, {"holdout": 50, "holdout_from": "all"}, False),
    ],
)
def test_the_suggested_holdout_is_about_a_tenth_and_has_neighbours(
    sizes, few, settings, scores_knn
):
    labels = np.repeat(np.arange(len(sizes)), sizes) if sizes else np.full(250, -1)
    assert suggest_holdout(labels, few) == (settings, scores_knn)
    count = settings["holdout"]
    if not count:
        return
    groups = class_groups(labels) if "holdout_by" in settings else None
    taken = held_out(labels if sizes else labels + 1, count, groups)
    assert count / 2 <= len(taken) <= 2 * count
    assert scores_knn == (with_a_partner(labels[taken]) > 0 and len(np.unique(labels[taken])) > 1)
    if "holdout_by" in settings:
        assert set(labels[taken]).isdisjoint(np.delete(labels, taken))


def random_groups(rng):
    """(labels, groups, sizes) of samples in groups of random size, some labels missing."""
    sizes = np.minimum(rng.geometric(rng.uniform(0.05, 1), rng.integers(3, 60)), 40)
    groups = rng.permutation(np.repeat(rng.permutation(len(sizes) * 3)[: len(sizes)], sizes))
    labels = rng.integers(-1, rng.integers(1, 6), len(groups))
    return labels, groups


@pytest.mark.parametrize("seed", range(100))
def test_chosen_groups_are_whole_and_hold_the_share(seed):
    rng = np.random.default_rng(seed)
    labels, groups = random_groups(rng)
    fraction = rng.uniform(0.05, 0.95)
    taken = choose_groups(groups, labels, fraction, seed)
    for group in np.unique(groups):
        assert len(set(taken[groups == group].tolist())) == 1
    counted = labels >= 0 if (labels >= 0).any() else np.ones(len(labels), bool)
    largest = np.bincount(groups[counted]).max()
    assert abs(taken[counted].sum() - fraction * counted.sum()) <= largest / 2
    assert set(groups[taken]) <= set(groups[counted])  # nobody else is taken alone
    assert np.array_equal(taken, choose_groups(groups, labels, fraction, seed))


def test_chosen_groups_are_of_every_class_alike_and_of_any_place():
    groups = np.repeat(np.arange(3000), 2)
    labels = (groups % 3 == 0) + 2 * (groups < 300)
    taken = choose_groups(groups, labels, 0.2, 5)
    for label in range(4):
        assert abs(taken[labels == label].mean() - 0.2) < 0.01
    places = np.flatnonzero(choose_groups(groups, np.zeros(6000, np.int64), 0.2, 6))
    assert abs(places.mean() - 3000) < 4 * 6000 / np.sqrt(12 * 600)


def test_a_holdout_by_groups_takes_unlabelled_members_along():
    labels = np.array([0, -1, 0, 1, -1, 1, 0, 0, 1, 1] * 20)
    groups = np.repeat(np.arange(40), 5)
    taken = held_out(labels, 40, groups)
    assert set(groups[taken]).isdisjoint(set(np.delete(groups, taken)))
    assert (labels[taken] < 0).any()
    assert abs((labels[taken] >= 0).sum() - 40) <= 2
    with pytest.raises(DataError, match=r"groups are too large to hold some out"):
        held_out(labels, 20, np.zeros(200, np.int64))


@pytest.mark.parametrize("seed", range(5))
def test_repeated_are_all_but_the_first_of_each_group_that_are_there(seed):
    rng = np.random.default_rng(seed)
    groups, without = rng.integers(0, 30, 60), np.sort(rng.choice(60, 12, replace=False))
    seen, expected = set(), []
    for sample in range(60):
        if sample in without:
            continue
        if int(groups[sample]) in seen:
            expected.append(sample)
        seen.add(int(groups[sample]))
    assert repeated(groups, without).tolist() == expected
