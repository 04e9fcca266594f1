"""Every loss, head and miner on inputs that spoil digits, against loops in float64.

Most is slow. Tolerances: values to VALUE, gradients to GRADIENT of their size, from half precision,
too (everything is computed in float32 at least), but for the rounding of its gradients.
"""

import math

import pytest
import torch
import torch.nn.functional as F

from sslpipe.metric_learning import HEADS, METRIC_LOSSES, MINERS
from sslpipe.metric_learning.losses.pairwise import compare, positive_slots
from tests.helpers import metric_loops as loops
from tests.helpers.head_loops import HEAD_LOOPS
from tests.metric_learning.losses.test_losses import CASES

D, SIZES = 66, {"num_classes": 4, "dim": 66}
LABELS = [0, 1, 2, 0, 1, 3, 2, 0, 1, 2]
VALUE, GRADIENT = 1e-6, 3e-6
# rows of length 1 are rounded to 6e-8: to 6e-4 of differences of 1e-4 (collapsed), to less of those
# that are left of an offset. More digits would take rows in float64.
UNIT_GRADIENT = {"collapsed": 2e-3, "offset": 2e-4}
LOSS_LOOPS = {}  # name -> (arguments, value of the loss, rows and labels in float64)
for loss_name, given, loss_loop in CASES:
    LOSS_LOOPS.setdefault(loss_name, (given | {"dim": D} if "dim" in given else given, loss_loop))


def noise(seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(LABELS), D, generator=generator)


def rows_of(kind):
    """Rows and labels of a case."""
    x, y = 0.2 * noise(), list(LABELS)
    if kind == "collapsed":
        x = F.normalize(noise(1)[:1]) + 1e-4 * F.normalize(noise())
    elif kind == "offset":
        x = noise() + 1000
    elif kind == "tiny":
        x = 1e-6 * x
    elif kind == "dead rows":  # one of a class, and all of another
        x[[at for at, label in enumerate(y) if label == y[0]][:1]] = 0
        x[[at for at, label in enumerate(y) if label == max(y)]] = 0
    elif kind == "single class":
        y = [1] * len(y)
    elif kind == "empty":
        x, y = x[:0], []
    elif kind == "without labels":
        y = [-1] * len(y)
    return x, y


DIGITS = ("ordinary", "collapsed", "offset", "tiny", "dead rows")
INPUTS = [
    *((kind, torch.float32) for kind in (*DIGITS, "single class", "empty", "without labels")),
    *((kind, torch.bfloat16) for kind in DIGITS),
    *((kind, torch.float16) for kind in ("ordinary", "tiny")),  # its range is its own
]
# rounded to half precision, rows become equal: which of them is the hardest is then open
TIES = (("hdc", "collapsed"), ("tuple_max", "offset"))


def made(name):
    torch.manual_seed(0)
    if name in HEADS:
        return HEADS[name](**SIZES)
    return METRIC_LOSSES[name](**LOSS_LOOPS[name][0])


def expected(name, x, y):
    """Value and gradient by the loops; nothing to add up is 0."""
    x = x.double().requires_grad_()
    if not y or max(y) < 0:
        return torch.zeros(()), torch.zeros_like(x)
    try:
        if name in HEADS:
            value = HEAD_LOOPS[name](list(x), y, made(name).double())
        else:
            value = LOSS_LOOPS[name][1](made(name).double(), list(x), y)
    except (TypeError, ValueError):  # a maximum or a logarithm of no items
        return torch.zeros(()), torch.zeros_like(x)
    if not value.requires_grad:  # a mean of no items
        return value, torch.zeros_like(x)
    return value.detach(), torch.autograd.grad(value, x)[0]


def test_no_entry_of_a_table_is_without_an_oracle():
    assert set(LOSS_LOOPS) == set(METRIC_LOSSES) - {"pml"}  # that one calls another library
    assert set(HEAD_LOOPS) == set(HEADS)
    assert set(MINER_RULES) == set(MINERS)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), INPUTS)
@pytest.mark.parametrize("name", [*LOSS_LOOPS, *HEAD_LOOPS])
def test_a_loss_has_the_digits_of_float64(name, kind, dtype):
    x, y = rows_of(kind)
    x = x.to(dtype)
    exact, exact_grad = expected(name, x, y)
    x.requires_grad_()
    if kind in ("empty", "without labels") and name == "soft_triple":
        exact = HEAD_LOOPS[name]([], [], made(name).double())  # its second term is of its weights
    value = made(name)(x, torch.tensor(y, dtype=torch.int64))
    (grad,) = torch.autograd.grad(value, x)
    half = dtype != torch.float32
    if half and (name, kind) in TIES:
        assert bool(value.isfinite())
        assert bool(grad.isfinite().all())
        return
    torch.testing.assert_close(
        value.double(), exact.double().detach(), rtol=VALUE, atol=VALUE * 0.1
    )
    # gradients beyond the dtype are infinite, those below its smallest number 0
    info = torch.finfo(dtype)
    within = exact_grad.abs() < 0.99 * info.max
    assert bool((grad[~within].abs() > 0.98 * info.max).all())
    size = float(exact_grad[within].norm())
    error = float((grad.double() - exact_grad)[within].norm())
    tolerance = (UNIT_GRADIENT.get(kind, GRADIENT) + 2 * info.eps * half) * size
    tolerance += half * info.smallest_normal * info.eps * within.numel() ** 0.5
    assert error <= tolerance + 1e-14, (error, size)


OF_DISTANCES = (
    *("batch_hard", "contrastive", "margin", "triplet", "lifted"),
    *("triplet_ratio", "hard_cluster"),
)
QUICK = [
    *((name, "dead rows") for name in (*LOSS_LOOPS, *HEAD_LOOPS)),
    *((name, kind) for name in OF_DISTANCES for kind in ("collapsed", "offset")),
    ("magnet", "tiny"),
]


@pytest.mark.parametrize(("name", "kind"), QUICK)
def test_dead_rows_have_length_0_and_near_rows_their_distances(name, kind):
    test_a_loss_has_the_digits_of_float64(name, kind, torch.float32)


def listed(kept):
    """The triplets (a, p, n) that are left."""
    slots, triplets = positive_slots(kept.positive), kept.triplets
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


def semi_hard(a, p, n):
    near, far = loops.d2(a, p), loops.d2(a, n)
    return float(min(far - near, near + 0.2 - far))


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


MINER_RULES = {
    "all": ({}, everything),
    "angular": ({}, by_triplets(angular, normalize=True)),
    "batch_hard": ({}, batch_hard),
    "curriculum": ({"first": "all"}, everything),
    "distance_weighted": ({}, one_negative_each),
    "hardest_share": ({}, hardest_share),
    "maximum_loss": ({"rows": 6}, largest_loss),
    "multi_similarity": ({}, by_pairs(multi_similarity, normalize=True)),
    "one_per_class": ({}, one_per_class),
    "packaged": ({}, packaged),
    "pair_margin": ({"positive": 2.3, "negative": 2.4}, by_pairs(pair_margin)),
    "random_negative": ({}, one_negative_each),
    "triplets": ({}, by_triplets(semi_hard)),
}


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "dtype"), INPUTS)
@pytest.mark.parametrize("name", MINER_RULES)
def test_a_miner_keeps_what_its_rule_keeps_in_float64(name, kind, dtype):
    x, y = rows_of(kind)
    x = x.to(dtype)
    arguments, check = MINER_RULES[name]
    miner, seen = MINERS[name](**arguments), []
    if name == "maximum_loss":  # used in a loss only
        loss = METRIC_LOSSES["contrastive"]()
        miner.register_forward_hook(lambda _, given, kept: seen.append(kept))
        loss(x, torch.tensor(y, dtype=torch.int64), miner=miner)
        kept = seen[0] if seen else None
    else:
        kept = miner(x, torch.tensor(y, dtype=torch.int64))
    if kept is None or not y:
        assert kept is None or kept.positive.shape == (0, 0)
        return
    if max(y) < 0:
        assert not masks(kept)
        return
    if name == "distance_weighted":
        inside_the_sphere(miner, x, y)
    check(kept, list(x.double()), y)


@pytest.mark.parametrize("name", MINER_RULES)
def test_a_miner_keeps_what_its_rule_keeps_and_dead_rows_have_length_0(name):
    for kind in ("ordinary", "dead rows", "empty"):
        test_a_miner_keeps_what_its_rule_keeps_in_float64(name, kind, torch.float32)


def inside_the_sphere(miner, x, y):
    """Weights are those of 1 / q(d), the largest of an anchor 1."""
    batch, pairs = compare(x.float(), torch.tensor(y), None, None)
    weights = miner.weights(batch, pairs)
    rows = loops.unit(list(x.double()))
    for a in range(len(y)):
        logs = {}
        for n in loops.negatives(y, a):
            d = float(loops.dist(rows[a], rows[n]))
            if d < 1.4 - 1e-6:
                d = max(d, 0.5)
                logs[n] = -(D - 2) * math.log(d) - (D - 3) / 2 * math.log1p(-d * d / 4)
        for n, value in logs.items():
            assert float(weights[a, n]) == pytest.approx(
                math.exp(value - max(logs.values())), rel=1e-3, abs=1e-30
            )
