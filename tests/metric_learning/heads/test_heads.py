"""Heads against loops written from the papers, row by row; float64 unless it says otherwise."""

import math

import pytest
import torch

from sslpipe.metric_learning.heads import HEADS
from sslpipe.metric_learning.heads.fixed_margins import MultipliedAngle
from tests.helpers import head_loops as loops
from tests.helpers.head_loops import HEAD_LOOPS, same, with_margin

C, D = 5, 6
LABELS = torch.tensor([0, 1, 1, 4, 2, 0, 4])  # none of class 3


def rows(count=7, seed=0):
    torch.manual_seed(seed)
    return torch.randn(count, D, dtype=torch.float64) * torch.linspace(0.3, 3, count)[:, None]


def head_of(name, seed=1, **arguments):
    torch.manual_seed(seed)
    return HEADS[name](num_classes=C, dim=D, **arguments).double()


def by_loop(loop, head, x):
    return loop(list(x), LABELS.tolist(), head)


# head, its arguments, the loop: with its defaults, and with others
CASES = [
    *((name, {}, loop) for name, loop in HEAD_LOOPS.items()),
    ("normface", {"scale": 30.0, "learn_scale": False}, with_margin(same, same, 30.0)),
    ("normface", {"learn_scale": False}, with_margin(same, same, 20.0)),
    (
        "combined_margin",
        {"m1": 0.9, "m2": 0.4, "m3": 0.15},
        with_margin(lambda v: torch.cos(0.9 * torch.acos(v) + 0.4) - 0.15, same),
    ),
    *(("sphereface", {"m": m}, loops.multiplied(False, m)) for m in (1, 2, 3)),
    *(("l_softmax", {"m": m}, loops.multiplied(True, m)) for m in (2, 3)),
    # lam = max(5, 1000 / (1 + 0.12 it))
    (
        "sphereface",
        {"lam_first": 1000.0, "lam_last": 5.0},
        loops.multiplied(False, lam=1000 / 1.12),
    ),
    ("circle_softmax", {"gamma": 16.0}, loops.circle(gamma=16)),
    *(
        ("proxy_nca", {"form": form, "scale": scale}, loops.proxy_nca(form, scale))
        for form in ("paper", "all")
        for scale in (1.0, 9.0)
    ),
    ("proxy_anchor", {"alpha": 8.0}, loops.proxy_anchor(alpha=8)),
    ("soft_triple", {"tau": 0.0, "centers": 4}, loops.soft_triple(tau=0.0)),
    ("center", {"weight": 0.01, "reduction": "sum"}, loops.center(0.01, lambda x: 1)),
]


@pytest.mark.parametrize(("name", "arguments", "loop"), CASES)
def test_a_head_equals_the_loops_of_its_paper(name, arguments, loop):
    head, x = head_of(name, **arguments), rows().requires_grad_()
    trained = [x, *(p for p in head.parameters() if p.requires_grad)]
    expected = by_loop(loop, head, x)  # first: the call counts a step
    exact = torch.autograd.grad(expected, trained, materialize_grads=True)
    value = head(x, LABELS)
    torch.testing.assert_close(value, expected, rtol=1e-9, atol=0)
    grads = torch.autograd.grad(value, trained, materialize_grads=True)
    for ours, theirs in zip(grads, exact, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-9 * float(theirs.abs().max()))


def test_arcface_keeps_falling_beyond_pi_minus_its_margin_and_the_bare_cosine_does_not():
    angles = torch.linspace(0.01, math.pi - 0.01, 400, dtype=torch.float64)
    target = head_of("arcface").rule.with_margin(angles.cos())
    assert bool((target.diff() < 0).all())
    bare = head_of("arcface", beyond="cosine").rule.with_margin(angles.cos())
    assert not bool((bare.diff() < 0).all())
    inside = angles <= math.pi - 0.5
    torch.testing.assert_close(target[inside], bare[inside])
    torch.testing.assert_close(bare, torch.cos(angles + 0.5))


@pytest.mark.parametrize("m", [2, 3, 4])
def test_psi_is_the_loops_at_every_angle(m):
    cosines = torch.linspace(1, -1, 1000, dtype=torch.float64)
    expected = torch.stack([loops.psi(v, m) for v in cosines])
    torch.testing.assert_close(MultipliedAngle(m).psi(cosines), expected)


def test_sphereface_counts_training_steps_and_saves_them():
    head = head_of("sphereface", lam_first=1000.0, lam_last=5.0)
    for _ in range(3):
        value = head(rows(), LABELS)
    expected = by_loop(loops.multiplied(False, lam=1000 / (1 + 0.12 * 3)), head, rows())
    torch.testing.assert_close(value, expected)
    head.eval()(rows(), LABELS)
    assert int(head.state_dict()["rule.steps"]) == 3
    head.rule.steps.fill_(10**6)
    torch.testing.assert_close(
        head(rows(), LABELS), by_loop(loops.multiplied(False, lam=5), head, rows())
    )


def test_center_loss_moves_the_centres_by_the_papers_rule():
    head, x = head_of("center", alpha=0.5), rows()
    centers = torch.zeros(C, D, dtype=torch.float64)
    for _ in range(3):
        expected = by_loop(loops.center(), head, x)
        torch.testing.assert_close(head(x, LABELS), expected)
        for c in range(C):
            own = [row for row, y in zip(x, LABELS.tolist(), strict=True) if y == c]
            centers[c] -= 0.5 * sum(centers[c] - row for row in own) / (1 + len(own))
        torch.testing.assert_close(head.centers, centers)


@pytest.mark.parametrize(("name", "arguments"), [("softmax", {}), ("arcface", {"scale": 4.0})])
def test_focal_multiplies_the_cross_entropy_by_1_minus_p_to_gamma(name, arguments):
    plain, focal = head_of(name, **arguments), head_of(name, focal_gamma=2.0, **arguments)
    for row, label in zip(rows(), LABELS, strict=True):
        ce = float(plain(row[None], label[None]).detach())
        expected = (1 - math.exp(-ce)) ** 2 * ce
        assert float(focal(row[None], label[None]).detach()) == pytest.approx(expected, rel=1e-10)


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


def test_a_wrong_argument_is_an_error_that_names_it():
    for name, wrong, text in (
        ("arcface", {"beyond": "flat"}, "beyond = 'flat'"),
        ("arcface", {"focal_gamma": -1.0}, "focal_gamma = -1.0"),
        ("sphereface", {"m": 0}, "m = 0"),
        ("sphereface", {"lam_first": -1.0}, "lam_first = -1 must be"),
        ("proxy_nca", {"form": "old"}, "form = 'old'"),
        ("proxy_nca", {"scale": 0.0}, "scale = 0.0"),
        ("soft_triple", {"centers": 0}, "centers = 0"),
        ("center", {"reduction": "max"}, "reduction = 'max'"),
    ):
        with pytest.raises(ValueError, match=text):
            head_of(name, **wrong)
    with pytest.raises(ValueError, match="num_classes = 1"):
        HEADS["cosface"](num_classes=1, dim=3)
