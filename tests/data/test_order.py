from itertools import pairwise

import numpy as np
import pytest

from sslpipe.data.order import Order
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
