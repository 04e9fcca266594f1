"""Each miner against its rule, pair by pair or triplet by triplet, and against wrong versions."""

import math

import pytest
import torch

from sslpipe.metric_learning import METRIC_LOSSES, MINERS
from sslpipe.metric_learning.losses.clusters import k_means, merge_levels, neighbouring_classes
from sslpipe.metric_learning.losses.pairwise import compare, positive_slots
from sslpipe.metric_learning.miners.triplets import DistanceWeightedMiner
from tests.helpers import metric_loops as loops

LABELS = [0, 1, 2, 0, 1, 3, 2, 0, 1, 2]


def rows(seed=0, size=10, dim=6):
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, dim, generator=generator, dtype=torch.float64)
    return x / x.norm(dim=1, keepdim=True)


def mined(name, x=None, labels=LABELS, **arguments):
    batch, pairs = compare(rows() if x is None else x, torch.tensor(labels), None, None)
    return MINERS[name](**arguments)(batch, pairs)


def listed(pairs):
    """{(a, p, n)} of what is left."""
    slots = positive_slots(pairs.positive)
    triplets = pairs.triplets
    if triplets is None:
        triplets = slots.filled[:, :, None] & pairs.negative[:, None]
    return {(a, int(slots.columns[a, p]), n) for a, p, n in triplets.nonzero().tolist()}


def pairs_of(mask):
    return {tuple(ij) for ij in mask.nonzero().tolist()}


def test_all_triplets_are_p_k_k_minus_1_p_minus_1_k():
    classes, k = 3, 4
    labels = [i % classes for i in range(classes * k)]
    pairs = mined("all", rows(size=12), labels)
    assert listed(pairs) == set(loops.triplets(labels))
    assert len(listed(pairs)) == classes * k * (k - 1) * (classes - 1) * k


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


def test_the_upper_bound_is_there_and_bounds_are_strict():
    """Without it, as in circulation, semi-hard would hold the easy ones too."""
    semi, easy = (listed(mined("triplets", kind=kind)) for kind in ("semi_hard", "easy"))
    assert easy
    assert not semi & easy
    # distances that float64 holds exactly: 1, 1 (equal), 1.25 (the margin's end), 1.125
    x = torch.tensor([[0.0], [1.0], [-1.0], [1.25], [1.125]], dtype=torch.float64)
    pairs = mined("triplets", x, [0, 0, 1, 1, 1], margin=0.25, distance="euclidean")
    assert {t for t in listed(pairs) if t[0] == 0} == {(0, 1, 4)}


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


def test_batch_hard_keeps_the_farthest_positive_and_nearest_negative():
    x, pairs = rows(), mined("batch_hard")
    for a in range(10):
        own, other = loops.positives(LABELS, a), loops.negatives(LABELS, a)
        far = [max(own, key=lambda j: loops.dist(x[a], x[j]))] if own else []
        near = [min(other, key=lambda j: loops.dist(x[a], x[j]))] if own else []
        assert pairs.positive[a].nonzero()[:, 0].tolist() == far
        assert pairs.negative[a].nonzero()[:, 0].tolist() == near


def test_neighbouring_classes_are_the_nearest_ones():
    means = rows(3, size=8)
    between = torch.cdist(means, means)
    chosen = neighbouring_classes(between[[5, 2]], torch.tensor([5, 2]), 4)
    for row, anchor in zip(chosen.tolist(), (5, 2), strict=True):
        others = sorted((float(between[anchor, k]), k) for k in range(8) if k != anchor)
        assert row == [anchor] + [k for _, k in others[:3]]


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


def test_packaged_rows_are_anchor_positive_negative():
    labels = [0, 0, 1, 2, 2, 0, 1, 1, 1]  # the last has no negative and is masked
    assert listed(mined("packaged", rows(size=9), labels)) == {(0, 1, 2), (3, 4, 5)}


@pytest.mark.parametrize("length", [1.0, 7.0])
def test_angular_normalises_its_rows(length):
    x = rows()
    expected = set()
    for a, p, n in loops.triplets(LABELS):
        middle = (x[a] + x[p]) / 2
        angle = math.atan(loops.dist(x[a], x[p]) / (2 * loops.dist(x[n], middle)))
        if angle > math.radians(30):
            expected.add((a, p, n))
    assert listed(mined("angular", x * length, angle_deg=30.0)) == expected
    assert 0 < len(expected) < len(loops.triplets(LABELS))


def test_distance_weighted_takes_the_inverse_of_the_density():
    batch, pairs = compare(rows(), torch.tensor(LABELS), None, None)
    weights = DistanceWeightedMiner(cutoff=0.5, limit=1.4).weights(batch, pairs)
    x, dim = rows(), 6
    for a in range(10):
        expected = {}
        for n in loops.negatives(LABELS, a):
            d = float(loops.dist(x[a], x[n]))
            if d < 1.4:
                d = max(d, 0.5)
                expected[n] = 1 / (d ** (dim - 2) * (1 - d * d / 4) ** ((dim - 3) / 2))
        total = float(weights[a].sum())
        for n in range(10):
            share = expected.get(n, 0.0) / sum(expected.values())
            assert float(weights[a, n]) / total == pytest.approx(share, abs=1e-9)
        closest = min(expected, key=lambda n: loops.dist(x[a], x[n]))
        assert float(weights[a, closest]) == 1  # the largest; q itself would reverse this
        if len(expected) > 1:
            assert float(weights[a].sort().values[-2]) < 1


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


def test_hardest_share_keeps_far_positives_and_near_negatives():
    x, pairs = rows(), mined("hardest_share", share=0.4)
    for mask, kind, sign in ((pairs.positive, True, -1), (pairs.negative, False, 1)):
        every = [ij for ij in loops.pairs(LABELS) if (LABELS[ij[0]] == LABELS[ij[1]]) == kind]
        hardness = {ij: sign * float(loops.dist(x[ij[0]], x[ij[1]])) for ij in every}
        bound = sorted(hardness.values())[math.ceil(0.4 * len(every)) - 1] + 1e-12
        assert pairs_of(mask) == {ij for ij in every if hardness[ij] <= bound}


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


def test_multi_similarity_keeps_the_hard_pairs_not_the_easy_ones():
    x, pairs, epsilon = rows(), mined("multi_similarity", rows() * 3, epsilon=0.05), 0.05
    easy = 0
    for i in range(10):
        own = {j: float(x[i] @ x[j]) for j in loops.positives(LABELS, i)}
        other = {j: float(x[i] @ x[j]) for j in loops.negatives(LABELS, i)}
        low, high = min(own.values(), default=math.inf), max(other.values())
        kept = {j for j, s in other.items() if s > low - epsilon}
        assert set(pairs.negative[i].nonzero()[:, 0].tolist()) == kept
        assert set(pairs.positive[i].nonzero()[:, 0].tolist()) == {
            j for j, s in own.items() if s < high + epsilon
        }
        # the version in circulation: the same signs with distances in place of similarities
        if own:
            near = min(math.sqrt(2 - 2 * s) for s in own.values())
            easy += {j for j, s in other.items() if math.sqrt(2 - 2 * s) > near - epsilon} != kept
    assert easy > 0


def test_pair_margin_keeps_far_positives_and_near_negatives():
    x, pairs = rows(), mined("pair_margin", positive=1.2, negative=1.3)
    d = {ij: float(loops.dist(x[ij[0]], x[ij[1]])) for ij in loops.pairs(LABELS)}
    same = {ij: LABELS[ij[0]] == LABELS[ij[1]] for ij in d}
    assert pairs_of(pairs.positive) == {ij for ij in d if same[ij] and d[ij] > 1.2}
    assert pairs_of(pairs.negative) == {ij for ij in d if not same[ij] and d[ij] < 1.3}


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


def test_one_per_class_leaves_each_anchor_one_negative_of_each_other_class():
    pairs = mined("one_per_class")
    for a in range(10):
        classes = sorted(LABELS[n] for n in pairs.negative[a].nonzero()[:, 0].tolist())
        assert classes == [c for c in range(4) if c != LABELS[a]]


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


def test_active_triplets_are_counted():
    x = rows()
    loss = METRIC_LOSSES["triplet"](margin=0.2)
    loss(x, torch.tensor(LABELS))
    gaps = [loops.d2(x[a], x[p]) - loops.d2(x[a], x[n]) + 0.2 for a, p, n in loops.triplets(LABELS)]
    assert loss.last_count == len(gaps)
    assert loss.last_active == sum(bool(gap > 0) for gap in gaps)


def test_branches_side_by_side_are_searched_by_the_sum_of_their_squared_distances():
    x = rows(dim=6)
    batch, _ = compare(x, torch.tensor(LABELS), None, None)
    parts = [x[:, k : k + 2] for k in (0, 2, 4)]
    total = sum(torch.cdist(part, part).square() for part in parts)
    torch.testing.assert_close(batch.distances("squared"), total)
