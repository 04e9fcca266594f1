"""Miners against their rules written as loops, also on inputs that spoil digits; their draws."""

import math

import pytest
import torch

from sslpipe.metric_learning import METRIC_LOSSES, MINERS
from sslpipe.metric_learning.losses.pairwise import compare
from tests.helpers import metric_loops as loops
from tests.helpers import metric_rows
from tests.helpers.metric_rows import LABELS
from tests.metric_learning.test_rows import INPUTS, D, rows_of


def listed(kept):
    """The triplets (a, p, n) that are left."""
    slots, triplets = kept.slots(), kept.triplets
    if triplets is None:
        triplets = slots.filled[:, :, None] & kept.negative[:, None]
    return {(a, int(slots.columns[a, p]), n) for a, p, n in triplets.nonzero().tolist()}


def agrees(kept, slack, tolerance):
    """What a rule keeps by more than the tolerance is kept, what it drops by more is not."""
    must = {item for item, value in slack.items() if value > tolerance}
    may = {item for item, value in slack.items() if value >= -tolerance}
    assert must <= kept <= may, (sorted(must - kept)[:3], sorted(kept - may)[:3])


def masks(kept):
    pairs = [*kept.positive.nonzero().tolist(), *kept.negative.nonzero().tolist()]
    return {tuple(pair) for pair in pairs}


def by_pairs(rule, normalize=False):
    """A check by slack(i, j, x, y) of each pair."""

    def check(kept, x, y):
        x = loops.unit(x) if normalize else x
        slack = {(i, j): rule(i, j, x, y) for i, j in loops.pairs(y)}
        agrees(masks(kept), slack, 1e-6 * scale_of(x))

    return check


def by_triplets(rule, normalize=False):
    def check(kept, x, y):
        x = loops.unit(x) if normalize else x
        slack = {t: rule(*(x[k] for k in t)) for t in loops.triplets(y)}
        agrees(listed(kept), slack, 1e-6 * scale_of(x) ** 2)

    return check


def scale_of(x):
    """How long the rows are, taken from their middle."""
    middle = sum(x) / max(1, len(x))
    return max((float(loops.dist(row, middle)) for row in x), default=0.0)


def pair_margin(i, j, x, y):
    d = float(loops.dist(x[i], x[j]))
    return d - 2.3 if y[i] == y[j] else 2.4 - d


def multi_similarity(i, j, x, y):
    s = {k: float(x[i] @ x[k]) for k in range(len(y)) if k != i}
    if y[i] == y[j]:
        return max((s[n] for n in loops.negatives(y, i)), default=-math.inf) + 0.1 - s[j]
    return s[j] - min((s[p] for p in loops.positives(y, i)), default=math.inf) + 0.1


def triplet_kind(kind, distance=loops.d2, margin=0.2, strict=False):
    """A check by the rule of a kind; strict: kept is what fits to the last bit, ties too."""

    def slack(a, p, n):
        near, far = float(distance(a, p)), float(distance(a, n))
        return {
            "semi_hard": min(far - near, near + margin - far),
            "hard": near - far,
            "violating": near + margin - far,
            "easy": far - near - margin,
            "semi_hard_or_easy": far - near,
        }[kind]

    def exactly(kept, x, y):
        slacks = {t: slack(*(x[k] for k in t)) for t in loops.triplets(y)}
        at_bound = kind == "easy"
        assert kept == {t for t, value in slacks.items() if value > 0 or (at_bound and value == 0)}

    return exactly if strict else by_triplets(slack)


def angular(a, p, n):
    near, middle = loops.d2(a, p), loops.d2(n, (a + p) / 2)
    return float(near - 4 * math.tan(math.radians(20)) ** 2 * middle)


def batch_hard(kept, x, y):
    for a in range(len(y)):
        own, other = loops.positives(y, a), loops.negatives(y, a)
        for mask, choices, sign in ((kept.positive, own, 1), (kept.negative, other, -1)):
            chosen = mask[a].nonzero()[:, 0].tolist()
            assert len(chosen) == bool(own and other)
            best = max((sign * float(loops.dist(x[a], x[j])) for j in choices), default=0)
            for j in chosen:
                assert j in choices
                assert sign * float(loops.dist(x[a], x[j])) >= best - 1e-6 * scale_of(x)


def hardest_share(kept, x, y):
    for mask, kind, sign in ((kept.positive, True, 1), (kept.negative, False, -1)):
        every = [(i, j) for i, j in loops.pairs(y) if (y[i] == y[j]) == kind]
        hardness = {(i, j): sign * float(loops.dist(x[i], x[j])) for i, j in every}
        ordered = sorted(hardness.values(), reverse=True)
        bound = ordered[math.ceil(0.5 * len(every)) - 1] if every else 0
        slack = {pair: value - bound for pair, value in hardness.items()}
        agrees({tuple(pair) for pair in mask.nonzero().tolist()}, slack, 1e-6 * scale_of(x))


def one_negative_each(kept, x, y):
    triplets, every = listed(kept), loops.triplets(y)
    assert triplets <= set(every)
    assert sorted(t[:2] for t in triplets) == sorted({t[:2] for t in every})


def one_per_class(kept, x, y):
    for a in range(len(y)):
        chosen = sorted(y[n] for n in kept.negative[a].nonzero()[:, 0].tolist())
        assert chosen == sorted({label for label in y if label != y[a]})


def packaged(kept, x, y):
    fits = {(a, a + 1, a + 2) for a in range(0, len(y) - 2, 3) if y[a] == y[a + 1] != y[a + 2]}
    assert listed(kept) == fits


def everything(kept, x, y):
    assert masks(kept) == set(loops.pairs(y))


def largest_loss(kept, x, y):
    """The subsets are drawn by a hash; the one kept has the largest loss of all that were asked."""
    assert masks(kept) <= set(loops.pairs(y))
    assert len({i for pair in masks(kept) for i in pair}) <= 6


KINDS = ("semi_hard", "hard", "violating", "easy", "semi_hard_or_easy")
RULES = [
    ("all", {}, everything),
    ("angular", {}, by_triplets(angular, normalize=True)),
    ("batch_hard", {}, batch_hard),
    ("curriculum", {"first": "all"}, everything),
    ("distance_weighted", {}, one_negative_each),
    ("hardest_share", {}, hardest_share),
    ("maximum_loss", {"rows": 6}, largest_loss),
    ("multi_similarity", {}, by_pairs(multi_similarity, normalize=True)),
    ("one_per_class", {}, one_per_class),
    ("packaged", {}, packaged),
    ("pair_margin", {"positive": 2.3, "negative": 2.4}, by_pairs(pair_margin)),
    ("random_negative", {}, one_negative_each),
    *(("triplets", {"triplets": kind}, triplet_kind(kind)) for kind in KINDS),
    *(
        (*("triplets", {"triplets": kind, "distance": "euclidean"}), triplet_kind(kind, loops.dist))
        for kind in KINDS
    ),
]


def test_no_miner_of_the_table_is_without_a_rule():
    assert {name for name, _, _ in RULES} == set(MINERS)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), INPUTS)
@pytest.mark.parametrize(("name", "arguments", "check"), RULES)
def test_a_miner_keeps_what_its_rule_keeps_in_float64(name, arguments, check, kind, dtype):
    x, y = rows_of(kind)
    x = x.to(dtype)
    miner, seen = MINERS[name](**arguments), []
    if name == "maximum_loss":  # used in a loss only
        miner.register_forward_hook(lambda _, given, kept: seen.append(kept))
        METRIC_LOSSES["contrastive"]()(x, torch.tensor(y, dtype=torch.int64), miner=miner)
    else:
        seen.append(miner(x, torch.tensor(y, dtype=torch.int64)))
    if not y:
        assert all(kept.positive.shape == (0, 0) for kept in seen)
    elif max(y) < 0:
        assert not masks(seen[0])
    else:
        if name == "distance_weighted":
            inside_the_sphere(miner, x, y)
        check(seen[0], list(x.double()), y)


def tied_rows(dim, offset, dtype, seed):
    """Rows on a grid of eighths: many pairs are exactly as far apart."""
    generator = torch.Generator().manual_seed(seed)
    steps = torch.randint(-8, 9, (14, dim), generator=generator)
    labels = torch.randint(0, 3, (14,), generator=generator)
    return (steps.to(torch.float64) / 8 + offset).to(dtype), labels


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("offset", [0.0, 1000.0, -4096.0])
@pytest.mark.parametrize("dim", [1, 2, 5])
@pytest.mark.parametrize("kind", KINDS)
def test_equal_distances_are_equal_to_a_miner(kind, dim, offset, dtype):
    for seed in range(5):
        x, labels = tied_rows(dim, offset, dtype, seed)
        x64, y = x.double(), labels.tolist()
        check = triplet_kind(kind, margin=0.25, strict=True)
        check(listed(MINERS["triplets"](triplets=kind, margin=0.25)(x, labels)), list(x64), y)
        hard = MINERS["batch_hard"](distance="squared")(x, labels)
        for a in loops.with_both(y):  # the first of the farthest, and of the nearest
            far, near = loops.positives(y, a), loops.negatives(y, a)
            chosen = max(far, key=lambda j, a=a: float(loops.d2(x64[a], x64[j])))
            assert hard.positive[a].nonzero().tolist() == [[chosen]]
            chosen = min(near, key=lambda j, a=a: float(loops.d2(x64[a], x64[j])))
            assert hard.negative[a].nonzero().tolist() == [[chosen]]


def test_a_negative_as_far_as_the_positive_is_not_semi_hard():
    x, labels = (
        torch.tensor([0, 1, -1, 1.25, 1.125]).double()[:, None],
        torch.tensor([0, 0, 1, 1, 1]),
    )
    kept = listed(MINERS["triplets"](triplets="semi_hard", margin=0.25)(x, labels))
    assert (4, 3, 1) not in kept  # both are 1/8 away


@pytest.mark.parametrize(("name", "arguments", "check"), RULES)
def test_a_miner_keeps_what_its_rule_keeps_and_dead_rows_have_length_0(name, arguments, check):
    for kind in ("ordinary", "dead rows", "empty"):
        test_a_miner_keeps_what_its_rule_keeps_in_float64(
            name, arguments, check, kind, torch.float32
        )


def inside_the_sphere(miner, x, y):
    """Weights are those of 1 / q(d), the largest of an anchor 1."""
    batch, pairs = compare(x.float(), torch.tensor(y), None, None)
    weights = miner.weights(batch, pairs)
    rows = loops.unit(list(x.double()))
    for a in range(len(y)):
        away = {n: float(loops.dist(rows[a], rows[n])) for n in loops.negatives(y, a)}
        near = {n: max(d, 0.5) for n, d in away.items() if d < 1.4 - 1e-6}
        logs = {
            n: -(D - 2) * math.log(d) - (D - 3) / 2 * math.log1p(-d * d / 4)
            for n, d in near.items()
        }
        for n, value in logs.items():
            expected = math.exp(value - max(logs.values()))
            assert float(weights[a, n]) == pytest.approx(expected, rel=1e-3, abs=1e-30)


def rows(seed=0, size=10):
    return torch.nn.functional.normalize(metric_rows.rows(seed, size=size))


def mined(name, x=None, labels=LABELS, **arguments):
    batch, pairs = compare(rows() if x is None else x, torch.tensor(labels), None, None)
    return MINERS[name](**arguments)(batch, pairs)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("distance", ["squared", "euclidean"])
def test_a_loss_sees_the_triplets_of_a_kind_alone(kind, distance):
    x, given = rows(), {"triplets": kind, "margin": 0.3, "distance": distance}
    every = listed(mined("triplets", **given))
    assert 0 < len(every) < len(loops.triplets(LABELS))
    loss = METRIC_LOSSES["triplet"](margin=0.3)
    value = loss(x, torch.tensor(LABELS), miner=MINERS["triplets"](**given))
    gaps = [loops.d2(x[a], x[p]) - loops.d2(x[a], x[n]) + 0.3 for a, p, n in every]
    torch.testing.assert_close(value, loops.mean([loops.hinge(gap) for gap in gaps]))
    assert loss.last_count == len(every)


def test_random_negatives_are_uniform_and_differ_from_call_to_call():
    """Chi-square over 1,600 draws of 7 negatives; 30 is passed by chance once in 25,000 runs."""
    batch, pairs = compare(rows(), torch.tensor(LABELS), None, None)
    miner = MINERS["random_negative"]()
    calls = [listed(miner(batch, pairs)) for _ in range(800)]
    assert calls[0] != calls[1]
    assert calls[0] == listed(MINERS["random_negative"]()(batch, pairs))  # the seed decides
    assert calls[0] != listed(MINERS["random_negative"](seed=1)(batch, pairs))
    drawn = torch.tensor([n for call in calls for a, _, n in call if a == 0])
    observed = drawn.bincount(minlength=10)[loops.negatives(LABELS, 0)]
    assert int(observed.sum()) == 1600
    expected = 1600 / len(observed)
    assert float(((observed - expected) ** 2 / expected).sum()) < 30


def test_the_draws_follow_the_weights_and_without_any_all_negatives():
    """600 draws for one pair: each share within 5 standard deviations."""
    x, labels = rows(2, size=8), [0, 0, 1, 2, 3, 4, 5, 6]
    batch, pairs = compare(x, torch.tensor(labels), None, None)
    miner = MINERS["distance_weighted"]()
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
