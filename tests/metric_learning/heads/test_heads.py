"""Heads against loops written from the papers, row by row; float64 unless it says otherwise."""

import math

import pytest
import torch
import torch.nn.functional as F

from sslpipe.metric_learning.heads import HEADS
from sslpipe.metric_learning.heads.fixed_margins import MultipliedAngle
from sslpipe.metric_learning.losses.pairwise import unit
from tests.helpers.processes import run_processes

C, D = 5, 6
LABELS = torch.tensor([0, 1, 1, 4, 2, 0, 4])


def rows(count=7, seed=0):
    torch.manual_seed(seed)
    return torch.randn(count, D, dtype=torch.float64) * torch.linspace(0.3, 3, count)[:, None]


def head_of(name, seed=1, **arguments):
    torch.manual_seed(seed)
    return HEADS[name](num_classes=C, dim=D, **arguments).double()


def cosine(a, b):
    a, b = plain(a), plain(b)
    dot = sum(p * q for p, q in zip(a, b, strict=True))
    return dot / (length(a) * length(b))


def length(a):
    return math.sqrt(sum(p**2 for p in plain(a)))


def plain(a):
    return a.tolist() if isinstance(a, torch.Tensor) else a


def cross_entropy(logits, label):
    top = max(logits)
    return top + math.log(sum(math.exp(z - top) for z in logits)) - logits[label]


def loop(name, logits_of_row, **arguments):
    """Our value and the mean of the rows' cross entropies, logits from a loop over classes."""
    head, x = head_of(name, **arguments), rows()
    values = [
        cross_entropy(logits_of_row(row, head.weight, label), label)
        for row, label in zip(x, LABELS.tolist(), strict=True)
    ]
    return float(head(x, LABELS).detach()), sum(values) / len(values)


def margin_logits(target, other=None):
    """logits of a row from functions of (cos, |x|, |w|)."""
    other = other or (lambda cos, nx, nw: cos)

    def logits(row, weight, label):
        return [
            (target if c == label else other)(cosine(row, w), length(row), length(w))
            for c, w in enumerate(weight)
        ]

    return logits


def psi(cos, m):
    """L-Softmax, eq. 6: the piece of theta is looked for, not computed."""
    theta = math.acos(cos)
    k = next(k for k in range(m) if k * math.pi / m <= theta <= (k + 1) * math.pi / m)
    return (-1) ** k * math.cos(m * theta) - 2 * k


def test_softmax_is_the_cross_entropy_of_a_linear_classifier():
    head, x = head_of("softmax"), rows()
    values = [
        cross_entropy(
            [
                sum(p * q for p, q in zip(row, w, strict=True)) + b
                for w, b in zip(head.linear.weight.tolist(), head.linear.bias.tolist(), strict=True)
            ],
            label,
        )
        for row, label in zip(x.tolist(), LABELS.tolist(), strict=True)
    ]
    assert float(head(x, LABELS).detach()) == pytest.approx(sum(values) / len(values), rel=1e-12)


def test_softmax_gradient_of_a_logit_is_p_minus_1_for_the_target_and_p_elsewhere():
    head, x = head_of("softmax"), rows(1)
    head(x, torch.tensor([2])).backward()
    p = F.linear(x, head.linear.weight, head.linear.bias).softmax(1)[0].detach()
    expected = p.clone()
    expected[2] -= 1  # and not label - 1
    torch.testing.assert_close(head.linear.bias.grad, expected)


def test_softmax_logsumexp_lies_between_the_maximum_and_the_maximum_plus_log_c():
    z = 40 * rows()
    lse, top = z.logsumexp(1), z.amax(1)
    assert bool(((lse >= top) & (lse <= top + math.log(D))).all())
    soft_min = -(-8.0 * z).logsumexp(1) / 8  # with the sign and the factor that make it a minimum
    assert bool(((soft_min <= z.amin(1)) & (soft_min >= z.amin(1) - math.log(D) / 8)).all())


def test_modified_softmax_drops_the_weights_length_and_keeps_the_embeddings():
    ours, expected = loop("modified_softmax", margin_logits(*[lambda cos, nx, nw: nx * cos] * 2))
    assert ours == pytest.approx(expected, rel=1e-12)


def test_normface_scales_cosines_and_learns_the_scale():
    ours, expected = loop(
        "normface", margin_logits(*[lambda cos, nx, nw: 30 * cos] * 2), scale=30.0
    )
    assert ours == pytest.approx(expected, rel=1e-12)
    head = head_of("normface")
    head(rows(), LABELS).backward()
    assert float(head.rule.scale.grad) != 0
    fixed = head_of("normface", learn_scale=False)
    assert [p for p in fixed.parameters() if p.requires_grad] == [fixed.weight]


@pytest.mark.parametrize("scale", [1.0, 4.0, 20.0])
def test_normface_cannot_fall_below_the_papers_bound(scale):
    """Reached, by orthogonal-as-can-be weights (a simplex) and embeddings on them."""
    n = D + 1
    simplex = torch.eye(n, dtype=torch.float64) - 1 / n
    basis = torch.linalg.svd(simplex).Vh[:D].T
    head = HEADS["normface"](num_classes=n, dim=D, scale=scale).double()
    head.weight.data = simplex @ basis
    bound = math.log(1 + (n - 1) * math.exp(-scale * n / (n - 1)))
    at_best = float(head(head.weight.data, torch.arange(n)).detach())
    assert at_best == pytest.approx(bound, rel=1e-9)
    assert float(head(rows(n), torch.arange(n)).detach()) > bound


def test_cosface_subtracts_its_margin_from_the_cosine():
    target, other = lambda c, nx, nw: 64 * (c - 0.35), lambda c, nx, nw: 64 * c
    ours, expected = loop("cosface", margin_logits(target, other))
    assert ours == pytest.approx(expected, rel=1e-12)


def arc(cos, m=0.5):
    theta = math.acos(cos)
    return math.cos(theta + m) if theta + m <= math.pi else cos - m * math.sin(m)


def test_arcface_adds_its_margin_to_the_angle():
    target, other = lambda c, nx, nw: 64 * arc(c), lambda c, nx, nw: 64 * c
    ours, expected = loop("arcface", margin_logits(target, other))
    assert ours == pytest.approx(expected, rel=1e-10)
    # the ones in circulation: no scale on the others; no scale; a margin on the cosine; degrees
    for trap in (
        margin_logits(target, lambda c, nx, nw: c),
        margin_logits(lambda c, nx, nw: arc(c), lambda c, nx, nw: c),
        margin_logits(lambda c, nx, nw: 64 * (c - 0.5), other),
        margin_logits(lambda c, nx, nw: 64 * arc(c, 0.49916), other),
    ):
        assert abs(loop("arcface", trap)[1] - ours) > 1e-3


def test_arcface_keeps_falling_beyond_pi_minus_its_margin_and_the_bare_cosine_does_not():
    angles = torch.linspace(0.01, math.pi - 0.01, 400, dtype=torch.float64)
    target = head_of("arcface").rule.with_margin(angles.cos())
    assert bool((target.diff() < 0).all())
    bare = head_of("arcface", beyond="cosine").rule.with_margin(angles.cos())
    assert not bool((bare.diff() < 0).all())
    inside = angles <= math.pi - 0.5
    torch.testing.assert_close(target[inside], bare[inside])
    torch.testing.assert_close(bare, torch.cos(angles + 0.5))


def test_combined_margin_is_all_three():
    def target(c, nx, nw):
        return 64 * (math.cos(0.9 * math.acos(c) + 0.4) - 0.15)

    arguments = {"m1": 0.9, "m2": 0.4, "m3": 0.15}
    logits = margin_logits(target, lambda c, nx, nw: 64 * c)
    ours, expected = loop("combined_margin", logits, **arguments)
    assert ours == pytest.approx(expected, rel=1e-10)


@pytest.mark.parametrize("m", [1, 2, 3, 4])
def test_sphereface_multiplies_the_angle_by_psi_not_by_the_raw_cosine(m):
    target, other = lambda c, nx, nw: nx * psi(c, m), lambda c, nx, nw: nx * c
    ours, expected = loop("sphereface", margin_logits(target, other), m=m)
    assert ours == pytest.approx(expected, rel=1e-10)

    def raw(c, nx, nw):
        return nx * math.cos(m * math.acos(c))

    if m > 1:
        assert abs(loop("sphereface", margin_logits(raw, other), m=m)[1] - ours) > 1e-3


@pytest.mark.parametrize("m", [2, 3, 4])
def test_l_softmax_multiplies_both_lengths(m):
    target, other = lambda c, nx, nw: nw * nx * psi(c, m), lambda c, nx, nw: nw * nx * c
    ours, expected = loop("l_softmax", margin_logits(target, other), m=m)
    assert ours == pytest.approx(expected, rel=1e-10)


def test_sphereface_psi_falls_from_1_to_1_minus_2m_where_the_raw_cosine_rises_again():
    angles = torch.linspace(0, math.pi, 1000, dtype=torch.float64)
    for m in (2, 3, 4):
        values = MultipliedAngle(m).psi(angles.cos())
        assert bool((values.diff() < 1e-12).all())
        assert float(values[0]) == pytest.approx(1)
        assert float(values[-1]) == pytest.approx(1 - 2 * m)
    raw = torch.cos(4 * angles)
    assert bool((raw[angles > math.pi / 4].diff() > 0).any())


def test_sphereface_anneals_as_it_was_trained():
    """lam = max(5, 1000 / (1 + 0.12 it)); counted in training only, and saved."""
    head = head_of("sphereface", lam_first=1000.0, lam_last=5.0)
    x = rows()
    for _ in range(3):
        value = float(head(x, LABELS).detach())
    lam = 1000 / (1 + 0.12 * 3)
    logits = margin_logits(
        lambda c, nx, nw: nx * (lam * c + psi(c, 4)) / (1 + lam), lambda c, nx, nw: nx * c
    )
    expected = [
        cross_entropy(logits(row, head.weight, label), label)
        for row, label in zip(x, LABELS.tolist(), strict=True)
    ]
    assert value == pytest.approx(sum(expected) / len(expected), rel=1e-10)
    assert int(head.state_dict()["rule.steps"]) == 3
    head.eval()
    head(x, LABELS)
    assert int(head.rule.steps) == 3
    head.rule.steps.fill_(10**6)
    assert max(head.rule.lam_last, 1000 / (1 + 0.12 * 10**6)) == 5


def test_sub_center_arcface_counts_the_nearest_of_a_classes_weights():
    head, x = head_of("sub_center_arcface", sub_centers=3), rows()
    values = []
    for row, label in zip(x, LABELS.tolist(), strict=True):
        nearest = [max(cosine(row, head.weight[3 * c + k]) for k in range(3)) for c in range(C)]
        logits = [64 * (arc(v) if c == label else v) for c, v in enumerate(nearest)]
        values.append(cross_entropy(logits, label))
    assert float(head(x, LABELS).detach()) == pytest.approx(sum(values) / len(values), rel=1e-10)


def test_curricularface_weighs_hard_negatives_by_the_running_mean_of_targets():
    head, x = head_of("curricularface"), rows()
    t, any_hard = 0.0, False
    for _ in range(3):
        ours = float(head(x, LABELS).detach())
        cosines = [[cosine(row, w) for w in head.weight] for row in x]
        targets = [row[label] for row, label in zip(cosines, LABELS.tolist(), strict=True)]
        t = 0.01 * sum(targets) / len(targets) + 0.99 * t
        values = []
        for row, label in zip(cosines, LABELS.tolist(), strict=True):
            threshold = math.cos(math.acos(row[label]) + 0.5)
            any_hard |= any(c > threshold for j, c in enumerate(row) if j != label)
            logits = [64 * (c if c <= threshold else c * (t + c)) for c in row]
            logits[label] = 64 * arc(row[label])
            values.append(cross_entropy(logits, label))
        assert ours == pytest.approx(sum(values) / len(values), rel=1e-9)
    assert any_hard
    assert float(head.state_dict()["rule.t"]) == pytest.approx(t)


def test_adaface_takes_its_margin_from_the_length_of_the_embedding():
    head, x = head_of("adaface"), rows() * 20
    mean, std = 20.0, 100.0
    for _ in range(2):
        ours = float(head(x, LABELS).detach())
        norms = [min(max(length(row), 0.001), 100) for row in x]
        centre = sum(norms) / len(norms)
        spread = math.sqrt(sum((n - centre) ** 2 for n in norms) / (len(norms) - 1))
        mean, std = 0.01 * centre + 0.99 * mean, 0.01 * spread + 0.99 * std
        values = []
        for row, norm, label in zip(x, norms, LABELS.tolist(), strict=True):
            q = min(max(0.333 * (norm - mean) / (std + 0.001), -1), 1)
            logits = [64 * cosine(row, w) for w in head.weight]
            theta = min(max(math.acos(logits[label] / 64) - 0.4 * q, 0), math.pi)
            logits[label] = 64 * (math.cos(theta) - 0.4 * q - 0.4)
            values.append(cross_entropy(logits, label))
        assert ours == pytest.approx(
            sum(values) / len(values), rel=1e-6
        )  # mean, std: float32 start
    assert float(head.rule.mean) == pytest.approx(mean)
    assert float(head.rule.std) == pytest.approx(std)


def test_circle_softmax_is_circle_loss_with_one_positive():
    head, x, m, gamma = head_of("circle_softmax", margin=0.25, gamma=16.0), rows(), 0.25, 16.0
    values = []
    for row, label in zip(x, LABELS.tolist(), strict=True):
        s = [cosine(row, w) for w in head.weight]
        negatives = sum(
            math.exp(gamma * max(0, c + m) * (c - m)) for j, c in enumerate(s) if j != label
        )
        positive = math.exp(-gamma * max(0, 1 + m - s[label]) * (s[label] - (1 - m)))
        values.append(math.log(1 + negatives * positive))
    assert float(head(x, LABELS).detach()) == pytest.approx(sum(values) / len(values), rel=1e-12)


@pytest.mark.parametrize(("name", "arguments"), [("softmax", {}), ("arcface", {"scale": 4.0})])
def test_focal_multiplies_the_cross_entropy_by_1_minus_p_to_gamma(name, arguments):
    plain, focal = head_of(name, **arguments), head_of(name, focal_gamma=2.0, **arguments)
    for row, label in zip(rows(), LABELS, strict=True):
        ce = float(plain(row[None], label[None]).detach())
        expected = (1 - math.exp(-ce)) ** 2 * ce
        assert float(focal(row[None], label[None]).detach()) == pytest.approx(expected, rel=1e-10)


def squared_distance(a, b):
    a, b = [v / length(a) for v in a.tolist()], [v / length(b) for v in b.tolist()]
    return sum((p - q) ** 2 for p, q in zip(a, b, strict=True))


@pytest.mark.parametrize("scale", [1.0, 9.0])
@pytest.mark.parametrize("form", ["paper", "all"])
def test_proxy_nca_leaves_the_positive_out_of_the_denominator_in_the_papers_form(form, scale):
    head, x = head_of("proxy_nca", form=form, scale=scale), rows()
    values = []
    for row, label in zip(x, LABELS.tolist(), strict=True):
        d2 = [squared_distance(row, p) for p in head.proxies.detach()]
        below = [c for c in range(C) if form == "all" or c != label]
        ratio = math.exp(-scale * d2[label]) / sum(math.exp(-scale * d2[c]) for c in below)
        values.append(-math.log(ratio))
    ours = float(head(x, LABELS).detach())
    assert ours == pytest.approx(sum(values) / len(values), rel=1e-11)
    other = head_of("proxy_nca", form="all" if form == "paper" else "paper", scale=scale)
    assert abs(float(other(x, LABELS).detach()) - ours) > 1e-2
    # ProxyNCA++'s length 3 is our scale 9
    if scale == 9 and form == "all":
        p, z = 3 * F.normalize(head.proxies.detach()), 3 * F.normalize(x)
        expected = F.cross_entropy(-torch.cdist(z, p).square(), LABELS)
        assert ours == pytest.approx(float(expected), rel=1e-9)


def test_proxy_anchor_is_each_proxy_against_the_batch():
    head, x = head_of("proxy_anchor", alpha=8.0), rows()
    pull, push, present = 0.0, 0.0, set(LABELS.tolist())
    for c, p in enumerate(head.proxies.detach()):
        s = [cosine(row, p) for row in x]
        own = [v for v, y in zip(s, LABELS.tolist(), strict=True) if y == c]
        others = [v for v, y in zip(s, LABELS.tolist(), strict=True) if y != c]
        if c in present:
            pull += math.log(1 + sum(math.exp(-8 * (v - 0.1)) for v in own))
        push += math.log(1 + sum(math.exp(8 * (v + 0.1)) for v in others))
    expected = pull / len(present) + push / C
    assert float(head(x, LABELS).detach()) == pytest.approx(expected, rel=1e-11)
    assert len(present) < C  # class 3 pulls nothing, and is still pushed


@pytest.mark.parametrize("tau", [0.0, 0.2])
def test_soft_triple_is_a_soft_maximum_over_centres_with_the_regulariser(tau):
    head, x, k = head_of("soft_triple", centers=4, tau=tau), rows(), 4
    values = []
    for row, label in zip(x, LABELS.tolist(), strict=True):
        logits = []
        for c in range(C):
            s = [cosine(row, w) for w in head.weight[c].detach()]
            weights = [math.exp(v / 0.1) for v in s]
            soft = sum(w * v for w, v in zip(weights, s, strict=True)) / sum(weights)
            logits.append(20 * (soft - 0.01 * (c == label)))
        values.append(cross_entropy(logits, label))
    spread = sum(
        math.sqrt(2 - 2 * cosine(head.weight[c, s].detach(), head.weight[c, t].detach()))
        for c in range(C)
        for s in range(k)
        for t in range(s + 1, k)
    )
    expected = sum(values) / len(values) + tau * spread / (C * k * (k - 1))
    assert float(head(x, LABELS).detach()) == pytest.approx(expected, rel=1e-10)


def test_center_loss_sums_over_samples_and_moves_the_centres_by_the_papers_rule():
    head, x = head_of("center", weight=0.01, alpha=0.5, reduction="sum"), rows()
    centers = [[0.0] * D for _ in range(C)]
    for _ in range(3):
        ours = float(head(x, LABELS))
        expected = 0.0
        for row, label in zip(x.tolist(), LABELS.tolist(), strict=True):
            d2 = sum((a - b) ** 2 for a, b in zip(row, centers[label], strict=True))
            expected += 0.01 / 2 * d2
        assert ours == pytest.approx(expected, rel=1e-12)  # over the samples, not over the classes
        for c in range(C):
            own = [r for r, y in zip(x.tolist(), LABELS.tolist(), strict=True) if y == c]
            centers[c] = [
                centers[c][d] - 0.5 * sum(centers[c][d] - r[d] for r in own) / (1 + len(own))
                for d in range(D)
            ]
        torch.testing.assert_close(head.centers, torch.tensor(centers, dtype=torch.float64))
    mean = head_of("center", weight=0.01, reduction="mean")
    assert float(mean(x, LABELS)) == pytest.approx(
        float(head_of("center", weight=0.01, reduction="sum")(x, LABELS)) / len(x)
    )


@pytest.mark.parametrize("name", [n for n in HEADS if n != "circle_softmax"])
def test_gradients_are_the_finite_differences(name):
    head = head_of(name)
    head.eval()  # running statistics stand still; they carry no gradient
    if name == "adaface":
        head.rule.std.fill_(1e-6)  # every quality is clipped: that way it carries none either
    x = (0.3 * rows()).requires_grad_()
    trained = [p for p in head.parameters() if p.requires_grad]
    assert torch.autograd.gradcheck(
        lambda x, *_: head(x, LABELS), (x, *trained), eps=1e-6, atol=1e-5, rtol=1e-4
    )


def test_circle_softmax_gradient_is_that_of_its_weights_taken_as_constants():
    head, x = head_of("circle_softmax", gamma=4.0), rows().requires_grad_()
    (actual,) = torch.autograd.grad(head(x, LABELS), x)
    m, u = 0.25, unit(x)
    s = u @ unit(head.weight.detach()).T
    own = F.one_hot(LABELS, C).bool()
    a = torch.where(own, 1 + m - s, s + m).clamp_min(0).detach()  # constants
    logits = 4 * a * torch.where(own, s - (1 - m), s - m)
    (expected,) = torch.autograd.grad(F.cross_entropy(logits, LABELS), x)
    torch.testing.assert_close(actual, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", HEADS)
def test_value_and_gradient_are_finite_on_the_weights_against_them_and_at_zero(name, dtype):
    head = head_of(name).float()
    points = next((p.detach() for p in head.parameters() if p.ndim > 1), torch.randn(C, D)).reshape(
        -1, D
    )[:C]
    x = torch.cat([points, -points, torch.zeros(1, D), points[:1]]).to(dtype).requires_grad_()
    labels = torch.tensor([*range(C), *range(C), 0, 1])
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.bfloat16):
        loss = head(x, labels)
    assert loss.dtype == torch.float32  # never a half-precision logit
    loss.backward()
    gradients = [x.grad, *(p.grad for p in head.parameters() if p.requires_grad)]
    assert bool(loss.isfinite())
    assert all(bool(g.isfinite().all()) for g in gradients)
    if name not in ("center", "softmax"):
        assert not bool(x.grad[2 * C].any())  # a zero row points nowhere
        assert float(x.grad.abs().max()) < 1e5


@pytest.mark.parametrize("name", [n for n in HEADS if n not in ("softmax", "center")])
def test_the_rows_lengths_matter_only_where_the_paper_says_so(name):
    head, x = head_of(name).eval(), rows()
    scaled = float(head(3 * x, LABELS).detach())
    same = scaled == pytest.approx(float(head(x, LABELS).detach()), rel=1e-9)
    assert same == (name not in ("modified_softmax", "sphereface", "l_softmax", "adaface"))


def heads_in_rank(process, counts):
    """Value, gradients as DDP makes them, and state after two steps, of every head."""
    x, labels = rows(sum(counts)), torch.arange(sum(counts)) % (C - 1)
    begin = sum(counts[: process.rank])
    mine = slice(begin, begin + counts[process.rank])
    results = {}
    for name in HEADS:
        head = head_of(name)
        for _ in range(2):
            local = x[mine].clone().requires_grad_()
            head.zero_grad()
            loss = head(local, labels[mine])
            loss.backward()
        trained = [p for p in head.parameters() if p.requires_grad]
        value = loss.detach().clone()
        sums = [loss.detach(), *(p.grad for p in trained)]
        for tensor in sums:
            torch.distributed.all_reduce(tensor)
        # DDP's mean for what all ranks share; a row's own gradient reaches the backbone as it is,
        # and is averaged there
        results[name] = (
            [tensor / process.world_size for tensor in sums],
            local.grad / process.world_size,
            [b.clone() for b in head.buffers()],
            value,
        )
    return results


def test_1_2_and_3_processes_with_unequal_rows_give_the_same_value_gradient_and_state():
    [one] = run_processes(heads_in_rank, 1, (12,))
    for counts in ((8, 4), (2, 7, 3)):
        ranks = run_processes(heads_in_rank, len(counts), counts)
        for name in HEADS:
            shared, per_row, state, _ = one[name]
            assert len({float(rank[name][3]) for rank in ranks}) == 1, name  # equal on all ranks
            for rank in ranks:
                for actual, expected in zip(rank[name][0], shared, strict=True):
                    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=name)
                for actual, expected in zip(rank[name][2], state, strict=True):
                    torch.testing.assert_close(actual, expected, rtol=1e-9, atol=1e-12, msg=name)
            together = torch.cat([rank[name][1] for rank in ranks])
            torch.testing.assert_close(together, per_row, rtol=1e-9, atol=1e-12, msg=name)


def test_a_wrong_argument_is_an_error_that_names_it():
    for name, wrong, text in (
        ("arcface", {"beyond": "flat"}, "beyond = 'flat'"),
        ("arcface", {"focal_gamma": -1.0}, "focal_gamma = -1.0"),
        ("sphereface", {"m": 0}, "m = 0"),
        ("proxy_nca", {"form": "old"}, "form = 'old'"),
        ("proxy_nca", {"scale": 0.0}, "scale = 0.0"),
        ("soft_triple", {"centers": 0}, "centers = 0"),
        ("center", {"reduction": "max"}, "reduction = 'max'"),
    ):
        with pytest.raises(ValueError, match=text):
            head_of(name, **wrong)
    with pytest.raises(ValueError, match="num_classes = 1"):
        HEADS["cosface"](num_classes=1, dim=3)


@pytest.mark.parametrize("name", ["l_softmax", "sphereface"])
@pytest.mark.parametrize("key", ["lam_first", "lam_last", "lam_decay"])
def test_an_annealing_that_could_divide_by_zero_is_refused(name, key):
    with pytest.raises(ValueError, match=f"{key} = -1 must be a finite number of at least 0"):
        HEADS[name](dim=4, num_classes=3, **{key: -1.0})
