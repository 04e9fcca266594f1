"""Each loss against loops over single rows, value and gradient, and against wrong formulas."""

import inspect
import math

import pytest
import torch
import torch.nn.functional as F

from sslpipe.metric_learning import METRIC_LOSSES
from sslpipe.metric_learning.compare import compare, masked_lse, unit
from tests import metric_loops as loops

LABELS = [0, 1, 2, 0, 1, 3, 2, 0, 1, 2]  # unequal classes, one row alone in its own
SIZES = {"num_classes": 4, "dim": 6}
TAGS = [[0, 2], [1, 1], [1, 0], [2, 2]]
SHARES = [1.0, 0.5, 0.2]


def rows(seed=0, spread=0.6, size=10, dim=6):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, dim, generator=generator, dtype=torch.float64) * spread


def built(name, **arguments):
    """The loss in float64; weights of its own are moved away from where they start."""
    torch.manual_seed(1)
    loss = METRIC_LOSSES[name](**arguments).double()
    for parameter in filter(lambda p: p.requires_grad, loss.parameters()):
        parameter.data += 0.1 * torch.randn(parameter.shape, dtype=torch.float64)
    return loss


def sizes_of(name):
    """num_classes and dim, where the loss asks for them."""
    asked = inspect.signature(METRIC_LOSSES[name]).parameters
    return {key: size for key, size in SIZES.items() if asked.keys() >= {key} and name != "margin"}


def value_and_grad(fn, x):
    x = x.detach().requires_grad_()
    value = fn(x)
    return value.detach(), torch.autograd.grad(value, x)[0]


def of(loop, **arguments):
    """The oracle of a loss without weights."""
    return lambda loss, x: loop(list(x), LABELS, **arguments)


# row of the list, loss, its arguments, the loop
CASES = [
    ("row_02_contrastive_with_margin", "contrastive", {}, of(loops.contrastive)),
    (
        "row_03_positive_margin",
        "contrastive",
        {"margin": 2.0, "positive_margin": 0.7},
        of(loops.contrastive, margin=2.0, positive_margin=0.7),
    ),
    ("row_04_chopra", "chopra", {"normalize": False, "bound": 5.0}, of(loops.chopra, q=5.0)),
    (
        "row_04_chopra_at_length_1",
        "chopra",
        {},
        lambda loss, x: loops.chopra(loops.unit(list(x)), LABELS, 2 * math.sqrt(6)),
    ),
    (
        "row_05_deep_id2",
        "deep_id2",
        {**SIZES, "margin": 2.0, "weight": 0.3},
        lambda loss, x: loops.deep_id2(list(x), LABELS, loss.rule.classifier, 2.0, 0.3),
    ),
    ("row_08_triplet", "triplet", {}, of(loops.triplet)),
    (
        "row_08_triplet_plain_distance",
        "triplet",
        {"distance": "euclidean", "margin": 0.5},
        of(loops.triplet, margin=0.5, distance=loops.dist),
    ),
    ("row_08_mean_over_active", "triplet", {"reduction": "mean_active"}, of(loops.active_triplet)),
    ("row_08_soft", "triplet", {"soft": True, "margin": 0.1}, of(loops.soft_triplet, margin=0.1)),
    (
        "row_45_semi_hard_triplets",
        "triplet",
        {"triplets": "semi_hard"},
        of(loops.semi_hard_triplet),
    ),
    ("row_46_hard_triplets", "triplet", {"triplets": "hard"}, of(loops.hard_triplet)),
    ("row_46_violating_triplets", "triplet", {"triplets": "violating"}, of(loops.active_triplet)),
    ("row_09_batch_hard", "batch_hard", {}, of(loops.batch_hard)),
    (
        "row_09_batch_hard_soft",
        "batch_hard",
        {"soft": True},
        of(loops.batch_hard, soft_margin=True),
    ),
    ("row_10_triplet_ratio", "triplet_ratio", {}, of(loops.triplet_ratio)),
    *(
        (
            f"row_11_ranking_and_tags_of_the_{who}",
            "ranking_and_tags",
            {**SIZES, "tags": TAGS, "weight": 0.4, "classified": who},
            lambda loss, x, who=who: loops.ranking_and_tags(
                list(x), LABELS, TAGS, loss.rule.classifiers, 0.4, who
            ),
        )
        for who in ("negative", "anchor")
    ),
    *(
        (
            f"row_12_lmnn_neighbours_{k}",
            "lmnn",
            {"dim": 6, "weight": 0.7, "neighbours": k},
            lambda loss, x, k=k: loops.lmnn(
                list(x), LABELS, loss.rule.map.weight.T @ loss.rule.map.weight, 1.0, 0.7, k
            ),
        )
        for k in (None, 1)
    ),
    (
        "row_13_cosine_triplet",
        "triplet",
        {"distance": "cosine", "margin": 0.0},
        of(loops.cosine_triplet),
    ),
    ("row_14_tuple_with_max", "tuple_max", {}, of(loops.tuple_max)),
    ("row_15_n_pair", "n_pair", {}, of(loops.n_pair)),
    ("row_16_info_nce", "info_nce", {}, of(loops.info_nce)),
    ("row_17_nt_xent", "nt_xent", {}, of(loops.nt_xent)),
    ("row_18_sup_con", "sup_con", {}, of(loops.sup_con)),
    ("row_18_sup_con_inside", "sup_con", {"form": "in"}, of(loops.sup_con, form="in")),
    ("row_19_nca", "nca", {}, of(loops.nca)),
    (
        "row_19_nca_expected",
        "nca",
        {"form": "expected", "scale": 0.5},
        of(loops.nca, form="expected", scale=0.5),
    ),
    ("row_20_lifted_structure", "lifted", {}, of(loops.lifted)),
    ("row_21_multi_similarity", "multi_similarity", {}, of(loops.multi_similarity)),
    (
        "row_21_as_released",
        "multi_similarity",
        {"base": 0.5, "beta": 40.0},
        of(loops.multi_similarity, base=0.5, beta=40.0),
    ),
    ("row_22_margin", "margin", {}, of(loops.margin)),
    *(
        (
            f"row_22_margin_beta_per_{learn}",
            "margin",
            {"learn": learn, "nu": 0.3, "num_classes": 4},
            lambda loss, x: loops.margin(list(x), LABELS, beta=loss.rule.beta, nu=0.3),
        )
        for learn in ("class", "shared")
    ),
    ("row_23_angular", "angular", {}, of(loops.angular)),
    ("row_23_angular_36", "angular", {"angle_deg": 36}, of(loops.angular, angle_deg=36)),
    ("row_24_tuplet_margin", "tuplet_margin", {}, of(loops.tuplet_margin)),
    (
        "row_25_hierarchical_triplet",
        "hierarchical_triplet",
        {**SIZES, "levels": 8},
        of(loops.hierarchical_triplet, levels=8),
    ),
    ("row_26_magnet", "magnet", {"alpha": 0.5}, of(loops.magnet, alpha=0.5)),
    ("row_37_unified", "unified", {"gamma": 8.0}, of(loops.unified, gamma=8.0)),
    ("row_38_circle", "circle", {}, of(loops.circle)),
    ("row_48_hard_cluster", "hard_cluster", {}, of(loops.hard_cluster)),
    (
        "row_53_hdc",
        "hdc",
        {"shares": SHARES, "margin": 1.0},
        of(loops.hdc, shares=SHARES, margin=1.0),
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "loop"), [case[1:] for case in CASES], ids=[case[0] for case in CASES]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_loss_equals_the_loops_of_its_paper(name, arguments, loop, seed):
    loss, x = built(name, **arguments), rows(seed)
    exact, exact_grad = value_and_grad(lambda x: loop(loss, x), x)
    value, grad = value_and_grad(lambda x: loss(x, torch.tensor(LABELS)), x)
    torch.testing.assert_close(value, exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad, exact_grad, rtol=1e-8, atol=1e-10)
    assert float(exact_grad.norm()) > 1e-6  # the case is not an empty one


def test_every_loss_has_a_case_with_its_row():
    assert {case[1] for case in CASES} == set(METRIC_LOSSES) - {"pml"}


@pytest.mark.parametrize("triplets", ["all", "violating", "hard", "semi_hard"])
@pytest.mark.parametrize("distance", ["squared", "euclidean"])
def test_sorting_the_negatives_gives_what_meeting_each_gives(triplets, distance, monkeypatch):
    x, labels = rows(size=40), torch.arange(40) % 3
    loss = METRIC_LOSSES["triplet"](triplets=triplets, distance=distance)
    direct = value_and_grad(lambda x: loss(x, labels), x), loss.last_count, loss.last_active
    monkeypatch.setattr("sslpipe.metric_learning.triplet_sums.MOST_POSITIVES", 0)
    ordered = value_and_grad(lambda x: loss(x, labels), x), loss.last_count, loss.last_active
    torch.testing.assert_close(ordered[0], direct[0], rtol=1e-10, atol=1e-12)
    assert ordered[1:] == direct[1:]


# --- formulas in circulation: what they say, and that it is not what is computed ---


def value(name, **arguments):
    return built(name, **arguments)(rows(), torch.tensor(LABELS)).item()


def by_pair(positive, negative, x=None):
    x = list(rows()) if x is None else x
    return float(
        loops.mean(
            [
                (positive if LABELS[i] == LABELS[j] else negative)(x[i], x[j])
                for i, j in loops.pairs(LABELS)
            ]
        )
    )


def negatives_only(temperature):
    """NT-Xent with the positive missing from its own sum: 2N - 2 terms."""
    x, values = loops.unit(list(rows())), []
    for a in range(len(x)):
        others = sum(torch.exp(x[a] @ x[n] / temperature) for n in loops.negatives(LABELS, a))
        values += [
            torch.log(others) - x[a] @ x[p] / temperature for p in loops.positives(LABELS, a)
        ]
    return float(loops.mean(values))


def with_itself(temperature):
    """2N terms: the anchor in its own sum."""
    s = unit(rows()) @ unit(rows()).T / temperature
    values = [
        s[a].logsumexp(0) - s[a, p] for a in range(len(s)) for p in loops.positives(LABELS, a)
    ]
    return float(loops.mean(values))


def nca_with_negatives_below():
    x, values = list(rows()), []
    for i in range(len(x)):
        below = sum(torch.exp(-loops.d2(x[i], x[k])) for k in loops.negatives(LABELS, i))
        values += [torch.log(below) + loops.d2(x[i], x[j]) for j in loops.positives(LABELS, i)]
    return float(loops.mean(values))


def lifted_with_maximum():
    x, values = list(rows()), []
    for i, j in loops.pairs(LABELS):
        if LABELS[i] == LABELS[j]:
            hardest = max(
                1 - loops.dist(x[k], x[n]) for k in (i, j) for n in loops.negatives(LABELS, k)
            )
            values.append(loops.hinge(loops.dist(x[i], x[j]) + hardest) ** 2 / 2)
    return float(loops.mean(values))


def angular_over_the_whole_batch():
    x, values = loops.unit(list(rows())), []
    for a, p in loops.pairs(LABELS):
        if LABELS[a] == LABELS[p]:
            f = [
                4 * (x[a] + x[p]) @ x[n] - 4 * x[a] @ x[p] for n in range(len(x)) if n not in (a, p)
            ]
            values.append(torch.log(1 + sum(map(torch.exp, f))))
    return float(loops.mean(values))


def batch_hard_of_classes():
    x, values = list(rows()), []
    for c in set(LABELS):
        own = [i for i, label in enumerate(LABELS) if label == c]
        far = max(loops.dist(x[i], x[j]) for i in own for j in own)
        near = min(loops.dist(x[i], x[n]) for i in own for n in loops.negatives(LABELS, i))
        values.append(loops.hinge(0.2 + far - near))
    return float(loops.mean(values))


def zero(*_):
    return torch.zeros(())


D, D2, HINGE = loops.dist, loops.d2, loops.hinge
TRAPS = {
    "row_02_negative_branch_not_squared": (
        lambda: value("contrastive"),
        lambda: by_pair(lambda a, b: 0.5 * D2(a, b), lambda a, b: 0.5 * HINGE(1 - D(a, b))),
    ),
    "row_02_without_the_half": (
        lambda: value("contrastive"),
        lambda: by_pair(D2, lambda a, b: HINGE(1 - D(a, b)) ** 2),
    ),
    "row_02_hinges_not_squared": (
        lambda: value("contrastive"),
        lambda: by_pair(D, lambda a, b: HINGE(1 - D(a, b))),
    ),
    "row_02_is_not_chopra": (
        lambda: value("contrastive"),
        lambda: value("chopra", normalize=False),
    ),
    "row_05_hinge_of_half_the_squared_distance": (
        lambda: (
            value("deep_id2", **SIZES, margin=2.0, weight=1.0)
            - value("deep_id2", **SIZES, margin=2.0, weight=0.0)
        ),
        lambda: by_pair(lambda a, b: 0.5 * D2(a, b), lambda a, b: HINGE(2 - 0.5 * D2(a, b))),
    ),
    "row_08_plain_distance": (
        lambda: value("triplet"),
        lambda: float(loops.triplet(list(rows()), LABELS, distance=D)),
    ),
    "row_09_per_class": (lambda: value("batch_hard"), batch_hard_of_classes),
    "row_09_squared": (
        lambda: value("batch_hard"),
        lambda: value("batch_hard", distance="squared"),
    ),
    "row_10_without_the_2": (lambda: value("triplet_ratio"), lambda: value("triplet_ratio") / 2),
    "row_13_is_not_the_angular_loss": (
        lambda: value("triplet", distance="cosine", margin=0.0),
        lambda: value("angular"),
    ),
    "row_15_normalised": (lambda: value("n_pair"), lambda: value("n_pair", normalize=True)),
    "row_15_without_the_penalty": (lambda: value("n_pair"), lambda: value("n_pair", l2_weight=0.0)),
    "row_16_without_temperature": (
        lambda: value("info_nce"),
        lambda: value("info_nce", temperature=1.0),
    ),
    "row_17_without_the_positive_below": (lambda: value("nt_xent"), lambda: negatives_only(0.1)),
    "row_17_with_itself_below": (lambda: value("nt_xent"), lambda: with_itself(0.1)),
    "row_17_other_positives_left_out": (
        lambda: value("nt_xent"),
        lambda: value("info_nce", temperature=0.1),
    ),
    "row_18_inside": (lambda: value("sup_con"), lambda: value("sup_con", form="in")),
    "row_19_negatives_only_below": (lambda: value("nca"), nca_with_negatives_below),
    "row_20_hard_maximum": (lambda: value("lifted"), lifted_with_maximum),
    "row_20_normalised": (lambda: value("lifted"), lambda: value("lifted", normalize=True)),
    "row_22_not_normalised": (lambda: value("margin"), lambda: value("margin", normalize=False)),
    "row_23_all_rows_of_the_batch": (lambda: value("angular"), angular_over_the_whole_batch),
    "row_23_not_normalised": (lambda: value("angular"), lambda: value("angular", normalize=False)),
    "row_24_margin_added_to_the_cosine": (
        lambda: value("tuplet_margin", margin=0.1, variance_weight=0.0),
        lambda: float(torch.tensor(cosine_margin_tuplet())),
    ),
    "row_25_margin_as_a_term_of_its_own": (
        lambda: value("hierarchical_triplet", **SIZES),
        lambda: hierarchical_with_a_term(),
    ),
    "row_37_is_not_circle": (lambda: value("unified"), lambda: value("circle")),
    "row_45_without_upper_bound": (
        lambda: value("triplet", triplets="semi_hard"),
        lambda: float(semi_hard_and_easy()),
    ),
}


def cosine_margin_tuplet():
    x, values = loops.unit(list(rows())), []
    for a, p in loops.pairs(LABELS):
        if LABELS[a] == LABELS[p]:
            gaps = [x[a] @ x[n] - x[a] @ x[p] + 0.1 for n in loops.negatives(LABELS, a)]
            values.append(float(torch.log(1 + sum(torch.exp(64 * g) for g in gaps))))
    return loops.mean(values)


def hierarchical_with_a_term():
    margins, x = loops.tree_margins(list(rows()), LABELS, 0.1, 16), loops.unit(list(rows()))
    return float(
        loops.mean(
            [
                HINGE(D2(x[a], x[p]) - D2(x[a], x[n])) + margins[LABELS[a], LABELS[n]]
                for a, p, n in loops.triplets(LABELS)
            ]
        )
        / 2
    )


def semi_hard_and_easy():
    x = loops.unit(list(rows()))
    gaps = [D2(x[a], x[p]) - D2(x[a], x[n]) for a, p, n in loops.triplets(LABELS)]
    return loops.mean([HINGE(gap + 0.2) for gap in gaps if gap < 0])


@pytest.mark.parametrize("name", TRAPS)
def test_a_wrong_formula_in_circulation_is_not_what_we_compute(name):
    ours, wrong = (side() for side in TRAPS[name])
    assert math.isfinite(wrong)
    assert abs(ours - wrong) > 1e-3 * abs(wrong)


# --- rows that are a statement rather than a formula ---


def test_row_01_no_loss_falls_without_bound():
    """The unbounded contrastive loss would be -D2 here."""
    far = torch.tensor([[1e3, 0, 0, 0, 0, 0], [-1e3, 0, 0, 0, 0, 0]], dtype=torch.float64)
    x, labels = far.repeat_interleave(2, 0), torch.tensor([0, 0, 1, 1])
    for name in METRIC_LOSSES:
        if name not in ("pml", "n_pair"):  # n_pair: its penalty is above 0 here
            loss = METRIC_LOSSES[name](**sizes_of(name)).double()
            assert loss(x, labels).item() >= 0


def test_row_06_one_network_for_all_inputs_has_the_sum_of_their_gradients():
    torch.manual_seed(0)
    shared = torch.nn.Linear(6, 4).double()
    branches = [torch.nn.Linear(6, 4).double() for _ in LABELS]
    for branch in branches:
        branch.load_state_dict(shared.state_dict())
    loss = METRIC_LOSSES["triplet"]()
    loss(shared(rows()), torch.tensor(LABELS)).backward()
    apart = torch.stack([branch(row) for branch, row in zip(branches, rows(), strict=True)])
    loss(apart, torch.tensor(LABELS)).backward()
    total = sum(branch.weight.grad for branch in branches)
    torch.testing.assert_close(shared.weight.grad, total, rtol=1e-10, atol=1e-12)


def test_row_07_a_constant_embedding_satisfies_no_triplet_but_only_the_limit():
    x, labels = torch.ones(6, 3, dtype=torch.float64), torch.arange(6) // 2
    loss = METRIC_LOSSES["triplet"](margin=0.0, triplets="hard")
    assert float(loss(x, labels)) == 0
    assert loss.last_count == 0  # no negative is nearer; none is farther either:
    strict = METRIC_LOSSES["triplet"](margin=1e-9)
    assert float(strict(x, labels)) == pytest.approx(1e-9)
    assert strict.last_active == strict.last_count == 24


def test_row_08_at_collapse_the_loss_is_the_margin_and_its_gradient_is_zero():
    x = torch.ones(8, 3, dtype=torch.float64)
    loss = METRIC_LOSSES["triplet"](margin=0.2)
    value, grad = value_and_grad(lambda x: loss(x, torch.arange(8) // 2), x)
    assert float(value) == pytest.approx(0.2)
    assert not grad.any()


def test_row_17_a_low_temperature_looks_at_the_hardest_negatives():
    """The share of the gradient that the hardest negative gets falls as temperature rises."""
    s = torch.tensor([0.9, 0.5, 0.1, -0.4])
    shares = [float(F.softmax(s / t, 0)[0]) for t in (0.01, 0.1, 1.0, 100.0)]
    assert shares == sorted(shares, reverse=True)
    assert shares[0] > 0.999
    assert shares[-1] == pytest.approx(0.25, abs=0.01)
    x = unit(torch.tensor([[1.0, 0, 0], [0.8, 0.6, 0], [0.9, 0, 0.436], [0.1, 0, 0.995]]).double())
    labels = torch.tensor([0, 0, 1, 2])
    pulls = []
    for temperature in (0.05, 5.0):
        loss = METRIC_LOSSES["nt_xent"](temperature=temperature, reduction="none")
        s = (x @ x.T).requires_grad_()
        batch, pairs = compare(x, labels, None, None)
        batch = batch._replace(anchors=s, columns=torch.eye(4, dtype=torch.float64))
        term = loss.rule(batch, pairs, temperature=temperature)[0]
        grad = torch.autograd.grad(term.total[0], s)[0][0]
        pulls.append(float(grad[2] / (grad[2] + grad[3])))
    assert pulls[0] > 0.99 > 0.6 > pulls[1]


def test_row_18_the_mean_inside_the_logarithm_is_never_larger():
    for seed in range(20):
        x, labels = rows(seed), torch.tensor(LABELS)
        inside = METRIC_LOSSES["sup_con"](form="in")(x, labels)
        assert float(inside) <= float(METRIC_LOSSES["sup_con"]()(x, labels)) + 1e-12


def test_row_21_the_weights_of_multi_similarity_are_its_gradient():
    """w- = 1 / (e^{b (l - S_ij)} + sum_k e^{b (S_ik - S_ij)}), and w+ alike."""
    x, labels = unit(rows()), torch.tensor(LABELS)
    batch, pairs = compare(x, labels, None, None)
    s = (x @ x.T).requires_grad_()
    batch = batch._replace(anchors=s, columns=torch.eye(len(x), dtype=torch.float64))
    loss = METRIC_LOSSES["multi_similarity"](alpha=2.0, beta=50.0, base=0.5)
    (grad,) = torch.autograd.grad(loss.rule(batch, pairs, **loss.conventions)[0].total.sum(), s)
    for i, j in loops.pairs(LABELS):
        sign = -1 if LABELS[i] == LABELS[j] else 1
        steep = -2.0 if sign < 0 else 50.0
        kind = loops.positives if sign < 0 else loops.negatives
        below = torch.exp(steep * (0.5 - s[i, j])) + sum(
            torch.exp(steep * (s[i, k] - s[i, j])) for k in kind(LABELS, i)
        )
        torch.testing.assert_close(grad[i, j], (sign / below).detach(), rtol=1e-9, atol=1e-12)


def test_row_28_log_sum_exp_bounds_the_maximum_and_mirrored_the_minimum():
    v, every = rows(3, spread=3.0), torch.ones(10, 6, dtype=torch.bool)
    top, lse = v.amax(1), masked_lse(v, every)
    assert bool(((top <= lse) & (lse <= top + math.log(6))).all())
    for g in (10.0, 1000.0):
        low = -masked_lse(-g * v, every) / g  # -(1/g) LSE(-g v)
        assert bool(((low <= v.amin(1)) & (v.amin(1) <= low + math.log(6) / g)).all())
        wrong = masked_lse(-g * v, every)  # the sign and the 1/g missing
        assert not bool(((wrong - v.amin(1)).abs() < 0.5).any())


def test_row_38_the_gradient_of_circle_has_the_factor_gamma_and_no_slope_of_its_weights():
    s0 = torch.tensor([[1.0, 0.7, 0.2, -0.1]], dtype=torch.float64)
    gamma, m = 8.0, 0.25
    s = s0.clone().requires_grad_()
    batch, pairs = compare(torch.zeros(1, 4).double(), torch.tensor([0]), None, None)
    pairs = pairs._replace(
        positive=torch.tensor([[False, True, False, False]]),
        negative=torch.tensor([[False, False, True, True]]),
    )
    batch = batch._replace(anchors=s, columns=torch.eye(4, dtype=torch.float64))
    rule = METRIC_LOSSES["circle"](gamma=gamma, margin=m).rule
    loss = rule(batch, pairs, gamma=gamma, margin=m)[0].total.sum()
    (grad,) = torch.autograd.grad(loss, s)
    weight = 1 + m - 0.7
    z = 1 - torch.exp(-loss.detach())
    assert float(grad[0, 1]) == pytest.approx(float(-z * gamma * weight), rel=1e-9)


def test_row_38_circle_is_the_unified_loss_on_the_circle_of_radius_sqrt_2_m():
    """Where s_n^2 + (s_p - 1)^2 = 2 m^2 positives and negatives are as far apart as wished."""
    m, gamma = 0.25, 80.0
    for turn in (0.1, 0.6, 1.2):
        s_n = math.sqrt(2) * m * math.cos(turn)
        s_p = 1 - math.sqrt(2) * m * math.sin(turn)
        exponent = (s_n + m) * (s_n - m) - (1 + m - s_p) * (s_p - 1 + m)
        assert gamma * exponent == pytest.approx(0, abs=1e-9)


def test_row_78_distances_on_the_sphere_and_the_gradient_of_normalising():
    x = rows().requires_grad_()
    batch, _ = compare(unit(x), torch.tensor(LABELS), None, None)
    torch.testing.assert_close(batch.distances("squared"), 2 - 2 * batch.similarities())
    (grad,) = torch.autograd.grad(METRIC_LOSSES["sup_con"]()(x, torch.tensor(LABELS)), x)
    assert float((grad * x.detach()).sum(1).abs().max()) < 1e-12  # across x
    row = x[0].detach()
    jacobian = torch.autograd.functional.jacobian(lambda r: unit(r[None])[0], row)
    length, u = row.norm(), row / row.norm()
    torch.testing.assert_close(jacobian, (torch.eye(6, dtype=torch.float64) - u.outer(u)) / length)


def test_row_79_l2_pooling_is_torch_s_with_no_gradient_at_zero():
    """FaceNet's pooling needs no code of ours: the root of a window's sum of squares."""
    x = rows(size=36).reshape(1, 6, 6, 6)
    pooled = torch.nn.LPPool2d(2, 3, stride=2)(x)
    for row in range(pooled.shape[2]):
        for column in range(pooled.shape[3]):
            window = x[0, :, 2 * row : 2 * row + 3, 2 * column : 2 * column + 3].reshape(6, 9)
            expected = sum(v**2 for v in window.unbind(1)) ** 0.5
            torch.testing.assert_close(pooled[0, :, row, column], expected)
    zero = torch.zeros(1, 1, 4, 4, requires_grad=True)
    torch.nn.LPPool2d(2, 2)(zero).sum().backward()
    assert not zero.grad.any()


@pytest.mark.parametrize("kind", ["euclidean", "squared", "cosine"])
def test_row_82_only_the_plain_distance_keeps_the_triangle_inequality(kind):
    points = unit(rows(size=30, dim=3))
    batch, _ = compare(points, torch.arange(30), None, None)
    d = batch.distances(kind)
    assert float(d.min()) >= -1e-12
    torch.testing.assert_close(d, d.T)
    assert float(d.diagonal().abs().max()) < 1e-7
    assert float((d + torch.eye(30)).min()) > 1e-6  # zero for equal points alone
    detour = (d[:, :, None] + d[None]).amin(1)
    assert bool((d <= detour + 1e-9).all()) == (kind == "euclidean")
