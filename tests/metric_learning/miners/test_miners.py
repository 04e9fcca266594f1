"""Miners of triplets and of chance, and what they are made of; every rule: test_rows.py."""

import pytest
import torch

from sslpipe.metric_learning import METRIC_LOSSES, MINERS
from sslpipe.metric_learning.losses.clusters import k_means, merge_levels
from sslpipe.metric_learning.losses.pairwise import compare
from sslpipe.metric_learning.miners.triplets import DistanceWeightedMiner
from tests.helpers import metric_loops as loops
from tests.helpers.metric_rows import LABELS
from tests.metric_learning.test_rows import listed


def rows(seed=0, size=10, dim=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dim, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True)


def mined(name, x=None, labels=LABELS, **arguments):
    batch, pairs = compare(rows() if x is None else x, torch.tensor(labels), None, None)
    return MINERS[name](**arguments)(batch, pairs)


KINDS = {
    "semi_hard": lambda ap, an, m: ap < an < ap + m,
    "hard": lambda ap, an, m: an < ap,
    "violating": lambda ap, an, m: an < ap + m,
    "easy": lambda ap, an, m: an >= ap + m,
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distance", ["squared", "euclidean"])
def test_triplets_of_a_kind(kind, distance):
    metric = loops.d2 if distance == "squared" else loops.dist
    x, margin = rows(), 0.3
    expected = {
        (a, p, n)
        for a, p, n in loops.triplets(LABELS)
        if KINDS[kind](metric(x[a], x[p]), metric(x[a], x[n]), margin)
    }
    actual = listed(mined("triplets", kind=kind, margin=margin, distance=distance))
    assert actual == expected
    assert 0 < len(actual) < len(loops.triplets(LABELS))
    hardest = listed(mined("triplets", kind=kind, margin=margin, distance=distance, pick="hardest"))
    assert hardest == {
        min((t for t in expected if t[:2] == ap), key=lambda t: metric(x[t[0]], x[t[2]]))
        for ap in {t[:2] for t in expected}
    }
    random = listed(mined("triplets", kind=kind, margin=margin, distance=distance, pick="random"))
    assert random <= expected
    assert sorted(t[:2] for t in random) == sorted({t[:2] for t in expected})


def test_a_miner_of_triplets_feeds_the_loss_exactly_those():
    x = rows()
    for kind in KINDS:
        loss = METRIC_LOSSES["triplet"](margin=0.3)
        miner = MINERS["triplets"](kind=kind, margin=0.3)
        value = loss(x, torch.tensor(LABELS), miner=miner)
        kept = listed(mined("triplets", kind=kind, margin=0.3))
        expected = loops.mean(
            [loops.hinge(loops.d2(x[a], x[p]) - loops.d2(x[a], x[n]) + 0.3) for a, p, n in kept]
        )
        torch.testing.assert_close(value, expected)
        assert loss.last_count == len(kept)


def test_random_negatives_are_uniform_and_differ_from_call_to_call():
    """Chi-square over 1,600 draws of 7 negatives; 30 is passed by chance once in 25,000 runs."""
    batch, pairs = compare(rows(), torch.tensor(LABELS), None, None)
    miner = MINERS["random_negative"]()
    counts, calls = torch.zeros(10), []
    for _ in range(800):
        actual = listed(miner(batch, pairs))
        calls.append(actual)
        for a, _, n in actual:
            counts[n] += a == 0
    assert all(sorted(t[:2] for t in actual) == sorted(t[:2] for t in calls[0]) for actual in calls)
    assert len(calls[0]) == len({t[:2] for t in loops.triplets(LABELS)})
    assert calls[0] != calls[1]
    assert calls[0] == listed(MINERS["random_negative"]()(batch, pairs))  # the seed decides
    assert calls[0] != listed(MINERS["random_negative"](seed=1)(batch, pairs))
    observed = counts[loops.negatives(LABELS, 0)]
    assert float(observed.sum()) == 1600
    expected = 1600 / len(observed)
    assert float(((observed - expected) ** 2 / expected).sum()) < 30


@pytest.mark.parametrize("seed", range(5))
def test_the_tree_merges_what_is_near_through_others_too(seed):
    x = rows(seed, size=9, dim=3)
    between = torch.cdist(x, x).square()
    actual = merge_levels(between, levels=8, start=0.2)
    for level in range(1, 9):  # connected components, by squaring the adjacency until it is full
        threshold = level * (4 - 0.2) / 8 + 0.2
        together = (between < threshold).double()
        for _ in range(4):
            together = ((together @ together) > 0).double()
        torch.testing.assert_close((actual <= threshold + 1e-9).double(), together)


def test_the_draws_follow_the_weights_and_without_any_all_negatives():
    """600 draws for one pair: each share within 5 standard deviations."""
    x, labels = rows(2, size=8), [0, 0, 1, 2, 3, 4, 5, 6]
    batch, pairs = compare(x, torch.tensor(labels), None, None)
    miner = DistanceWeightedMiner()
    shares = miner.weights(batch, pairs)[0]
    shares = shares / shares.sum()
    counts = torch.zeros(8)
    for _ in range(600):
        ((_, _, n),) = [t for t in listed(miner(batch, pairs)) if t[0] == 0]
        counts[n] += 1
    bound = 5 * (shares * (1 - shares) / 600).sqrt() + 1e-12
    assert bool(((counts / 600 - shares).abs() <= bound).all())
    opposite = torch.tensor([[1.0, 0], [1, 0], [-1, 0], [-1, 0]], dtype=torch.float64)
    batch, pairs = compare(opposite, torch.tensor([0, 0, 1, 2]), None, None)
    assert miner.weights(batch, pairs)[0].tolist() == [0, 0, 1, 1]


def test_maximum_loss_keeps_the_subset_with_the_largest_loss():
    batch, pairs = compare(rows(), torch.tensor(LABELS), None, None)
    loss, seen = METRIC_LOSSES["contrastive"](), []

    def value(some):
        seen.append((float(loss._reduce(batch, some)), some))
        return torch.tensor(seen[-1][0])

    kept = MINERS["maximum_loss"](rows=6, trials=8)(batch, pairs, loss=value)
    best = max(seen, key=lambda pair: pair[0])[1]
    assert len({v for v, _ in seen}) > 1
    assert torch.equal(kept.positive, best.positive)
    assert torch.equal(kept.negative, best.negative)
    for _, some in seen:
        rows_left = (some.positive | some.negative).any(1).nonzero()[:, 0].tolist()
        assert len(rows_left) <= 6
        inside = torch.zeros(10, dtype=torch.bool)
        inside[rows_left] = True
        assert torch.equal(some.positive, pairs.positive & inside & inside[:, None])


def test_a_curriculum_changes_its_miner_at_its_step_also_after_a_resume():
    batch, pairs = compare(rows(), torch.tensor(LABELS), None, None)
    miner = MINERS["curriculum"](first="all", then="batch_hard", steps=3)
    sizes = [len(listed(miner(batch, pairs))) for _ in range(2)]
    resumed = MINERS["curriculum"](first="all", then="batch_hard", steps=3)
    resumed.load_state_dict(miner.state_dict())
    sizes += [len(listed(resumed(batch, pairs))) for _ in range(3)]
    every = len(loops.triplets(LABELS))
    hard = len(listed(mined("batch_hard")))
    assert sizes == [every, every, every, hard, hard]


def test_k_means_parts_each_class_by_itself():
    centers = torch.tensor([[0.0, 0], [0.6, 0], [0, 0.6], [0.6, 0.6]], dtype=torch.float64)
    x = centers.repeat_interleave(3, 0) + rows(4, size=12, dim=2) * 0.1
    labels = torch.tensor([5] * 6 + [7] * 6)
    clusters = k_means(x, labels, 2)
    for start in (0, 3, 6, 9):
        assert len(set(clusters[start : start + 3].tolist())) == 1
    assert clusters[0] != clusters[3]
    assert clusters[6] != clusters[9]
    loss = METRIC_LOSSES["magnet"](clusters_per_class=2)
    expected = loops.magnet(list(x), labels.tolist(), clusters.tolist())
    torch.testing.assert_close(loss(x, labels), expected)
