"""Each loss and head against loops over single rows, value and gradients."""

import math

import pytest
import torch

from sslpipe.metric_learning import METRIC_LOSSES
from tests.helpers import head_loops as heads
from tests.helpers import metric_loops as loops
from tests.helpers.head_loops import HEAD_LOOPS, same, with_margin
from tests.helpers.metric_rows import LABELS, SIZES, built, rows

TAGS = [[0, 2], [1, 1], [1, 0], [2, 2]]


def of(loop, **arguments):
    """The oracle of a loss without weights."""
    return lambda loss, x, y: loop(x, y, **arguments)


def alike(name, **arguments):
    """The case of a loss whose loop has its name and takes the same arguments."""
    return name, arguments, of(getattr(loops, name), **arguments)


def plain_triplets(loss, x, y):
    gaps = [loops.dist(x[a], x[p]) - loops.dist(x[a], x[n]) for a, p, n in loops.triplets(y)]
    return loops.mean([loops.hinge(gap + 0.2) for gap in gaps])


def violating(near, far):
    return far < near + 0.2


def metric(loss):
    return loss.map.weight.T @ loss.map.weight


# loss, its arguments, the loop; test_rows.py takes the first case of a loss, and misses none
CASES = [
    alike("contrastive"),
    alike("contrastive", margin=2.0, positive_margin=0.7),
    ("chopra", {"normalize": False, "bound": 5.0}, of(loops.chopra, q=5.0)),
    ("chopra", {}, lambda loss, x, y: loops.chopra(loops.unit(x), y, 2 * math.sqrt(6))),
    (
        *("deep_id2", {**SIZES, "margin": 2.0, "weight": 0.3}),
        lambda loss, x, y: loops.deep_id2(x, y, loss.classifier, 2.0, 0.3),
    ),
    ("triplet", {"distance": "euclidean", "normalize": False}, plain_triplets),
    alike("triplet"),
    (
        *("triplet", {"distance": "euclidean", "margin": 0.5}),
        of(loops.triplet, margin=0.5, distance=loops.dist),
    ),
    ("triplet", {"reduction": "mean_active"}, of(loops.chosen_triplet, kept=violating)),
    (
        *("triplet", {"soft": True, "margin": 0.1}),
        of(loops.triplet, margin=0.1, penalty=loops.soft),
    ),
    *(
        ("triplet", {"triplets": kind}, of(loops.chosen_triplet, kept=kept))
        for kind, kept in {
            "semi_hard": lambda near, far: near < far < near + 0.2,
            "hard": lambda near, far: far < near,
            "violating": violating,
        }.items()
    ),
    (
        *("triplet", {"distance": "cosine", "margin": 0.0}),
        of(loops.triplet, margin=0.0, distance=lambda a, b: -a @ b),
    ),
    ("batch_hard", {"soft": True}, of(loops.batch_hard, soft_margin=True)),
    *map(alike, ("batch_hard", "triplet_ratio")),
    *(
        (
            *("ranking_and_tags", {**SIZES, "tags": TAGS, "weight": 0.4, "classified": who}),
            lambda loss, x, y, who=who: loops.ranking_and_tags(
                x, y, TAGS, loss.classifiers, 0.4, who
            ),
        )
        for who in ("negative", "anchor")
    ),
    *(
        (
            *("lmnn", {"dim": 6, "weight": 0.7, "neighbours": k}),
            lambda loss, x, y, k=k: loops.lmnn(x, y, metric(loss), 1.0, 0.7, k),
        )
        for k in (None, 1)
    ),
    *map(alike, ("tuple_max", "n_pair", "info_nce", "nt_xent", "sup_con", "nca", "lifted")),
    alike("sup_con", form="in"),
    alike("nca", form="expected", scale=0.5),
    alike("multi_similarity"),
    alike("multi_similarity", base=0.5, beta=40.0),  # as released
    alike("margin"),
    *(
        (
            *("margin", {"learn": learn, "nu": 0.3, "num_classes": 4}),
            lambda loss, x, y: loops.margin(x, y, beta=loss.learned_beta, nu=0.3),
        )
        for learn in ("class", "shared")
    ),
    *map(alike, ("angular", "tuplet_margin", "circle", "hard_cluster")),
    alike("angular", angle_deg=36),
    ("hierarchical_triplet", {**SIZES, "levels": 8}, of(loops.hierarchical_triplet, levels=8)),
    alike("magnet", alpha=0.5),
    alike("unified", gamma=8.0),
    alike("hdc", shares=[1.0, 0.5, 0.2], margin=1.0),
]


HEAD_CASES = [  # the loop takes rows, labels and the head
    *((name, {}, loop) for name, loop in HEAD_LOOPS.items()),
    ("normface", {"scale": 30.0, "learn_scale": False}, with_margin(same, same, 30.0)),
    ("normface", {"learn_scale": False}, with_margin(same, same, 20.0)),
    (
        "combined_margin",
        {"m1": 0.9, "m2": 0.4, "m3": 0.15},
        with_margin(lambda v: torch.cos(0.9 * torch.acos(v) + 0.4) - 0.15, same),
    ),
    *(("sphereface", {"m": m}, heads.multiplied(False, m)) for m in (1, 2, 3)),
    *(("l_softmax", {"m": m}, heads.multiplied(True, m)) for m in (2, 3)),
    # lam = max(5, 1000 / (1 + 0.12 it))
    ("sphereface", {"lam_first": 1e3, "lam_last": 5.0}, heads.multiplied(False, lam=1e3 / 1.12)),
    ("circle_softmax", {"gamma": 16.0}, heads.circle(gamma=16)),
    *(
        ("proxy_nca", {"form": form, "scale": scale}, heads.proxy_nca(form, scale))
        for form in ("paper", "all")
        for scale in (1.0, 9.0)
    ),
    ("proxy_anchor", {"alpha": 8.0}, heads.proxy_anchor(alpha=8)),
    ("soft_triple", {"tau": 0.0, "centers": 4}, heads.soft_triple(tau=0.0)),
    ("center", {"weight": 0.01, "reduction": "sum"}, heads.center(0.01, lambda x: 1)),
]
ALL = [
    *CASES,
    *(
        (name, {**given, **SIZES, "num_classes": 5}, lambda head, x, y, loop=loop: loop(x, y, head))
        for name, given, loop in HEAD_CASES
    ),
]


@pytest.mark.parametrize(
    ("name", "arguments", "loop"), ALL, ids=[f"{name} {given}" for name, given, _ in ALL]
)
@pytest.mark.parametrize("seed", [0, 1])
def test_a_loss_equals_the_loops_of_its_paper(name, arguments, loop, seed):
    loss, x = built(name, **arguments), rows(seed).requires_grad_()
    trained = [x, *(p for p in loss.parameters() if p.requires_grad)]
    exact = loop(loss, list(x), LABELS)  # first: a call counts a step
    expected = torch.autograd.grad(exact, trained, materialize_grads=True)
    value = loss(x, torch.tensor(LABELS))
    torch.testing.assert_close(value, exact, rtol=1e-9, atol=1e-12)
    grads = torch.autograd.grad(value, trained, materialize_grads=True)
    for ours, theirs in zip(grads, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10)
    assert float(expected[0].norm()) > 1e-6  # the case is not an empty one


@pytest.mark.parametrize("kind", ["semi_hard", "hard", "violating"])
def test_equal_distances_are_equal_to_a_kind_of_triplets(kind):
    margin = 0.2  # near + margin is rounded
    for seed in range(5):
        generator = torch.Generator().manual_seed(seed)
        x = torch.randint(-8, 9, (14, 2), generator=generator).double() / 8 + 100
        labels = torch.randint(0, 3, (14,), generator=generator)
        loss = METRIC_LOSSES["triplet"](triplets=kind, margin=margin, normalize=False)
        loss(x, labels)
        apart = [
            (float(loops.d2(x[a], x[p])), float(loops.d2(x[a], x[n])))
            for a, p, n in loops.triplets(labels.tolist())
        ]
        counts = {
            "semi_hard": sum(near < far < near + margin for near, far in apart),
            "hard": sum(far < near for near, far in apart),
            "violating": sum(far < near + margin for near, far in apart),
        }
        assert loss.last_count == counts[kind]
