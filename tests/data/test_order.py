from itertools import pairwise

import numpy as np
import pytest

from sslpipe.data.order import (
    Order,
    choose_groups,
    class_groups,
    held_out,
    repeated,
    suggest_holdout,
    with_a_partner,
)
from sslpipe.errors import DataError

GOLDEN = [[22, 23, 14, 12], [2, 3, 11, 10], [4, 0, 13, 12]]


def an_order(sizes, **changes):
    starts = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
    settings = {"seed": 3, "batch_size": 8, "num_streams": 4, "window": 5, **changes}
    return Order(starts, **settings)


def epoch_ids(order, epoch):
    steps = range(epoch * order.steps_per_epoch, (epoch + 1) * order.steps_per_epoch)
    return np.concatenate([order.ids(step, range(order.num_streams))[1] for step in steps])


@pytest.mark.parametrize("sizes", [(100,), (1,) * 40, (7, 50, 1, 23), (3, 3, 64, 2, 2, 30)])
@pytest.mark.parametrize("excluded", [0, 9])
def test_an_epoch_serves_every_sample_at_most_once_and_drops_less_than_a_batch(sizes, excluded):
    total = sum(sizes)
    without = np.sort(np.random.default_rng(0).choice(total, excluded, replace=False))
    order = an_order(sizes, without=without.astype(np.int64))
    for epoch in range(4):
        ids = epoch_ids(order, epoch)
        assert len(set(ids.tolist())) == len(ids)
        assert not set(ids.tolist()) & set(without.tolist())
        assert set(ids.tolist()) <= set(range(total))
        assert total - excluded - len(ids) < order.batch_size


def test_every_sample_is_served_over_some_epochs_also_from_one_shard():
    order = an_order((101,), batch_size=8, num_streams=2)
    seen = {int(i) for epoch in range(30) for i in epoch_ids(order, epoch)}
    assert seen == set(range(101))


def test_epochs_and_seeds_have_different_orders_that_ranks_share():
    order = an_order((40, 60), batch_size=16)
    again, other = an_order((40, 60), batch_size=16), an_order((40, 60), batch_size=16, seed=4)
    assert np.array_equal(epoch_ids(order, 1), epoch_ids(again, 1))
    for ids in (epoch_ids(order, 1), epoch_ids(other, 0)):
        assert not np.array_equal(epoch_ids(order, 0), ids)
    for step in range(2 * order.steps_per_epoch):
        epoch, whole = order.ids(step, range(4))
        for share in (1, 2):
            parts = [again.ids(step, range(at, at + share)) for at in range(0, 4, share)]
            assert {part[0] for part in parts} == {epoch}
            assert np.array_equal(np.concatenate([part[1] for part in parts]), whole)


def test_a_window_is_one_run_of_one_shard():
    order = an_order((17, 31, 9), window=6, num_streams=2, batch_size=4)
    for stream in range(2):
        plan = order.epoch(0).stream(stream)
        for number in range(len(plan.windows)):
            ids = np.sort(plan.window_ids(number))
            assert len(ids) <= 6
            assert np.array_equal(ids, np.arange(ids[0], ids[0] + len(ids)))
            assert len({int(np.searchsorted(order.starts, i, side="right")) for i in ids}) == 1


def test_a_stream_slice_equals_the_whole_stream_cut():
    order = an_order((50, 33), window=7, num_streams=1, batch_size=10)
    plan = order.epoch(2).stream(0)
    whole = plan.ids(0, plan.length)
    for begin, end in ((0, 1), (6, 9), (13, 40), (plan.length - 1, plan.length)):
        assert np.array_equal(plan.ids(begin, end), whole[begin:end])


def test_the_order_of_version_1_is_the_one_that_runs_were_made_with():
    """Golden: whoever changes the order must raise ORDER_VERSION and this."""
    order = an_order((10, 14), batch_size=4, num_streams=2)
    assert [order.ids(step, range(2))[1].tolist() for step in (0, 1, 6)] == GOLDEN


def test_neighbouring_windows_meet_in_different_epochs():
    """Samples served in the first tenth of an epoch are not the same ones every epoch."""
    order = an_order((500,), batch_size=10, num_streams=2, window=20)
    first = [set(epoch_ids(order, epoch)[:50].tolist()) for epoch in range(10)]
    shared = [len(a & b) for a, b in pairwise(first)]
    assert sum(shared) / len(shared) < 15  # 5 of 50 expected by chance


def test_too_large_a_batch_is_refused():
    with pytest.raises(DataError, match=r"data.batch_size = 64 is more than the 40 samples"):
        an_order((40,), batch_size=64, num_streams=8)
    with pytest.raises(DataError, match="no sample is left to train on"):
        an_order((4,), batch_size=4, without=np.arange(4))


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
    ("sizes", "settings", "scores_knn"),
    [
        ([600, 300, 100], {"holdout": 100}, True),
        ([60_000], {"holdout": 2000}, False),
        ([3] * 490, {"holdout": 147, "holdout_by": "class"}, True),
        ([4] * 490, {"holdout": 196, "holdout_by": "class"}, True),
        ([1] * 500, {"holdout": 50, "holdout_by": "class"}, False),
        ([1000] + [2] * 500, {"holdout": 200, "holdout_by": "class"}, True),
        ([6, 6], {"holdout": 3}, True),
        ([4, 4], {"holdout": 3}, True),  # half of them, and no more
        ([80] + [10] * 12, {"holdout": 20, "holdout_by": "class"}, True),  # 8 of 20 had a partner
        ([1, 1, 1], {"holdout": 0}, False),
        ([], {"holdout": 25, "holdout_from": "all"}, False),
    ],
)
def test_the_suggested_holdout_is_about_a_tenth_and_has_neighbours(sizes, settings, scores_knn):
    labels = np.repeat(np.arange(len(sizes)), sizes) if sizes else np.full(250, -1)
    assert suggest_holdout(labels) == (settings, scores_knn)
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
