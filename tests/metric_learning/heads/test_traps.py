"""Formulas of heads that are wrong, or another head's: none of them is what we compute."""

import math

import pytest
import torch
import torch.nn.functional as F
from torchvision.ops import sigmoid_focal_loss

from sslpipe.metric_learning.losses.pairwise import unit
from tests.metric_learning.heads.test_heads import (
    LABELS,
    C,
    arc,
    cosine,
    head_of,
    length,
    loop,
    margin_logits,
    psi,
    rows,
)


def value(name, **arguments):
    return float(head_of(name, **arguments)(rows(), LABELS).detach())


def with_logits(name, target, other=lambda cos, nx, nw: 64 * cos, **arguments):
    """What the head would be with these logits of (cos, |x|, |w|)."""
    return loop(name, margin_logits(target, other), **arguments)[1]


def with_cosines(name, logits_of, **arguments):
    """What the head would be with logits_of(cosines to all weights, label, |x|)."""
    return loop(
        name,
        lambda row, weight, label: logits_of([cosine(row, w) for w in weight], label, length(row)),
        **arguments,
    )[1]


def center_over_classes(weight=0.003):
    norms = rows().square().sum(1)  # the centres are at 0
    return weight / 2 * sum(float(norms[c == LABELS].mean()) for c in set(LABELS.tolist()))


def center_over_the_batch(weight=0.003):
    return weight / 2 * float(rows().square().sum(1).mean())


def second_center_value(**arguments):
    head = head_of("center", **arguments)
    head(rows(), LABELS)
    return float(head(rows(), LABELS))


def center_moved_at_once():
    """Without alpha, c_j -= sum (c_j - x_i) / (1 + n_j)."""
    total = 0.0
    for row, label in zip(rows(), LABELS, strict=True):
        own = rows()[label == LABELS]
        total += float((row - own.sum(0) / (1 + len(own))).square().sum())
    return 0.003 / 2 * total


def sub_centers(of_class):
    def logits(cosines, label, nx):
        s = [of_class(cosines[3 * c : 3 * c + 3]) for c in range(C)]
        return [64 * (arc(v) if c == label else v) for c, v in enumerate(s)]

    return with_cosines("sub_center_arcface", logits)


def curricular(hard, of_all=False):
    """hard(cos, t) is what a hard negative's cosine becomes; t the batch's mean, by momentum 1."""
    head, x = head_of("curricularface"), rows()
    t = sum(cosine(row, head.weight[y]) for row, y in zip(x, LABELS, strict=True)) / len(x)

    def logits(cosines, label, nx):
        threshold = math.cos(math.acos(cosines[label]) + 0.5)
        actual = [64 * (hard(c, t) if of_all or c > threshold else c) for c in cosines]
        actual[label] = 64 * arc(cosines[label])
        return actual

    return with_cosines("curricularface", logits)


def adaface(sign=-1, momentum=0.01, fixed=None):
    norms = rows().norm(dim=1)
    mean = momentum * float(norms.mean()) + (1 - momentum) * 20
    std = momentum * float(norms.std()) + (1 - momentum) * 100

    def logits(cosines, label, nx):
        q = min(max(0.333 * (nx - mean) / (std + 0.001), -1), 1) if fixed is None else fixed
        actual = [64 * c for c in cosines]
        theta = min(max(math.acos(cosines[label]) + sign * 0.4 * q, 0), math.pi)
        actual[label] = 64 * (math.cos(theta) - 0.4 * q - 0.4)
        return actual

    return with_cosines("adaface", logits)


def circle_softmax(own_optimum=1.25, other_optimum=-0.25, weighted=True, margin=0.25):
    def logits(cosines, label, nx):
        actual = [
            256 * (max(0, c - other_optimum) if weighted else 1) * (c - margin) for c in cosines
        ]
        weight = max(0, own_optimum - cosines[label]) if weighted else 1
        actual[label] = 256 * weight * (cosines[label] - (1 - margin))
        return actual

    return with_cosines("circle_softmax", logits)


def proxy_anchor(over="present", pushed="all", sign=1):
    proxies = head_of("proxy_anchor").proxies.detach()
    s = torch.tensor([[cosine(row, p) for p in proxies] for row in rows()])
    own = LABELS[:, None] == torch.arange(C)
    pulls = [math.log(1 + (-32 * (s[own[:, c], c] - 0.1)).exp().sum()) for c in range(C)]
    pushes = [math.log(1 + (32 * (s[~own[:, c], c] + sign * 0.1)).exp().sum()) for c in range(C)]
    present = set(LABELS.tolist())
    kept = range(C) if pushed == "all" else present
    return sum(pulls) / (len(present) if over == "present" else C) + sum(
        pushes[c] for c in kept
    ) / len(kept)


def hard_triple():
    """The nearest centre in place of the soft maximum."""
    head = head_of("soft_triple", tau=0.0)
    logits = (unit(rows()) @ unit(head.weight.detach().flatten(0, 1)).T).view(-1, C, 10).amax(2)
    return float(F.cross_entropy(20 * (logits - 0.01 * F.one_hot(LABELS, C)), LABELS))


def sigmoid_focal():
    """torchvision's: a binary focal loss of each class."""
    head = head_of("softmax")
    logits = F.linear(rows(), head.linear.weight, head.linear.bias).detach()
    one_hot = F.one_hot(LABELS, C).double()
    return float(sigmoid_focal_loss(logits, one_hot, alpha=-1, gamma=2).sum(1).mean())


# name -> (ours, the formula that it is not); those in circulation, and those a slip would give
TRAPS = {
    "softmax_normalised": (
        lambda: value("softmax", bias=False),
        lambda: float(
            F.cross_entropy(
                unit(rows()) @ unit(head_of("softmax", bias=False).linear.weight.detach()).T, LABELS
            )
        ),
    ),
    "center_over_the_classes": (lambda: value("center", reduction="sum"), center_over_classes),
    "center_without_lambda": (lambda: value("center"), lambda: value("center", weight=1.0)),
    "center_mean_over_the_batch": (lambda: value("center", reduction="sum"), center_over_the_batch),
    "center_without_alpha": (second_center_value, center_moved_at_once),
    "l_softmax_raw_cosine": (
        lambda: value("l_softmax"),
        lambda: with_logits(
            "l_softmax",
            lambda c, nx, nw: nw * nx * math.cos(4 * math.acos(c)),
            lambda c, nx, nw: nw * nx * c,
        ),
    ),
    "l_softmax_is_not_sphereface": (
        lambda: value("l_softmax"),
        lambda: with_logits(
            "l_softmax", lambda c, nx, nw: nx * psi(c, 4), lambda c, nx, nw: nx * c
        ),
    ),
    "modified_softmax_is_not_the_plain_softmax": (
        lambda: value("modified_softmax"),
        lambda: with_logits("modified_softmax", *[lambda c, nx, nw: nx * nw * c] * 2),
    ),
    "normface_without_scale": (
        lambda: value("normface"),
        lambda: with_logits("normface", *[lambda c, nx, nw: c] * 2),
    ),
    "cosface_without_scale_on_the_others": (
        lambda: value("cosface"),
        lambda: with_logits("cosface", lambda c, nx, nw: 64 * (c - 0.35), lambda c, nx, nw: c),
    ),
    "cosface_margin_outside_the_scale": (
        lambda: value("cosface"),
        lambda: with_logits("cosface", lambda c, nx, nw: 64 * c - 0.35),
    ),
    "cosface_margin_of_the_angle": (
        lambda: value("cosface"),
        lambda: with_logits("cosface", lambda c, nx, nw: 64 * arc(c, 0.35)),
    ),
    "combined_margin_m3_inside_the_cosine": (
        lambda: value("combined_margin"),
        lambda: with_logits(
            "combined_margin", lambda c, nx, nw: 64 * math.cos(math.acos(c) + 0.3 - 0.2)
        ),
    ),
    "combined_margin_m3_outside_the_scale": (
        lambda: value("combined_margin"),
        lambda: with_logits(
            "combined_margin", lambda c, nx, nw: 64 * math.cos(math.acos(c) + 0.3) - 0.2
        ),
    ),
    "circle_without_its_weights": (
        lambda: value("circle_softmax"),
        lambda: circle_softmax(weighted=False),
    ),
    "circle_optimum_1": (
        lambda: value("circle_softmax"),
        lambda: circle_softmax(own_optimum=1.0, other_optimum=0.0),
    ),
    "proxy_anchor_pulls_over_all_proxies": (
        lambda: value("proxy_anchor"),
        lambda: proxy_anchor(over="all"),
    ),
    "proxy_anchor_pushes_of_present_classes_only": (
        lambda: value("proxy_anchor"),
        lambda: proxy_anchor(pushed="present"),
    ),
    "proxy_anchor_negatives_margin_sign_flipped": (
        lambda: value("proxy_anchor"),
        lambda: proxy_anchor(sign=-1),
    ),
    "soft_triple_without_the_regulariser": (
        lambda: value("soft_triple"),
        lambda: value("soft_triple", tau=0.0),
    ),
    "soft_triple_hard_maximum": (lambda: value("soft_triple", tau=0.0), hard_triple),
    "focal_sigmoid": (lambda: value("softmax", focal_gamma=2.0), sigmoid_focal),
    "sub_center_mean": (
        lambda: value("sub_center_arcface"),
        lambda: sub_centers(lambda s: sum(s) / 3),
    ),
    "sub_center_farthest": (lambda: value("sub_center_arcface"), lambda: sub_centers(min)),
    "curricularface_without_t": (
        lambda: value("curricularface", momentum=1.0),
        lambda: curricular(lambda c, t: c * c),
    ),
    "curricularface_t_alone": (
        lambda: value("curricularface", momentum=1.0),
        lambda: curricular(lambda c, t: t * c),
    ),
    "curricularface_easy_negatives_too": (
        lambda: value("curricularface", momentum=1.0),
        lambda: curricular(lambda c, t: c * (t + c), of_all=True),
    ),
    "curricularface_is_not_arcface": (
        lambda: value("curricularface", momentum=1.0),
        lambda: value("arcface"),
    ),
    "adaface_angle_turned_round": (lambda: value("adaface"), lambda: adaface(sign=1)),
    "adaface_momentum_of_the_text": (lambda: value("adaface"), lambda: adaface(momentum=0.99)),
    "adaface_fixed_margin": (lambda: value("adaface"), lambda: adaface(fixed=0.0)),
}


@pytest.mark.parametrize("name", TRAPS)
def test_a_wrong_formula_is_not_what_a_head_computes(name):
    ours, wrong = (side() for side in TRAPS[name])
    assert math.isfinite(wrong)
    assert abs(ours - wrong) > 1e-3 * abs(wrong)


def test_the_loops_that_the_traps_vary_are_ours_where_nothing_is_wrong():
    for name, right in (
        ("adaface", adaface()),
        ("circle_softmax", circle_softmax()),
        ("proxy_anchor", proxy_anchor()),
        ("sub_center_arcface", sub_centers(max)),
    ):
        assert value(name) == pytest.approx(right, rel=1e-6), name
    right = curricular(lambda c, t: c * (t + c))
    assert value("curricularface", momentum=1.0) == pytest.approx(right, rel=1e-9)
