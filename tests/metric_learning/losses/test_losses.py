"""Each loss against loops over single rows, value and gradient."""

import math

import pytest
import torch

from sslpipe.metric_learning import METRIC_LOSSES
from tests.helpers import metric_loops as loops
from tests.helpers.metric_rows import LABELS, SIZES, built, rows, value_and_grad

TAGS = [[0, 2], [1, 1], [1, 0], [2, 2]]
SHARES = [1.0, 0.5, 0.2]


def of(loop, **arguments):
    """The oracle of a loss without weights."""
    return lambda loss, x, y: loop(x, y, **arguments)


# case, loss, its arguments, the loop; test_rows.py takes the first case of a loss
CASES = [
    ("contrastive_with_margin", "contrastive", {}, of(loops.contrastive)),
    (
        "positive_margin",
        "contrastive",
        {"margin": 2.0, "positive_margin": 0.7},
        of(loops.contrastive, margin=2.0, positive_margin=0.7),
    ),
    ("chopra", "chopra", {"normalize": False, "bound": 5.0}, of(loops.chopra, q=5.0)),
    (
        "chopra_at_length_1",
        "chopra",
        {},
        lambda loss, x, y: loops.chopra(loops.unit(x), y, 2 * math.sqrt(6)),
    ),
    (
        "deep_id2",
        "deep_id2",
        {**SIZES, "margin": 2.0, "weight": 0.3},
        lambda loss, x, y: loops.deep_id2(x, y, loss.rule.classifier, 2.0, 0.3),
    ),
    (
        "triplet_of_any_length",
        "triplet",
        {"distance": "euclidean", "normalize": False},
        lambda loss, x, y: loops.mean(
            [
                loops.hinge(loops.dist(x[a], x[p]) - loops.dist(x[a], x[n]) + 0.2)
                for a, p, n in loops.triplets(y)
            ]
        ),
    ),
    ("triplet", "triplet", {}, of(loops.triplet)),
    (
        "triplet_plain_distance",
        "triplet",
        {"distance": "euclidean", "margin": 0.5},
        of(loops.triplet, margin=0.5, distance=loops.dist),
    ),
    ("triplet_mean_over_active", "triplet", {"reduction": "mean_active"}, of(loops.active_triplet)),
    ("triplet_soft", "triplet", {"soft": True, "margin": 0.1}, of(loops.soft_triplet, margin=0.1)),
    (
        "semi_hard_triplets",
        "triplet",
        {"triplets": "semi_hard"},
        of(loops.semi_hard_triplet),
    ),
    ("hard_triplets", "triplet", {"triplets": "hard"}, of(loops.hard_triplet)),
    ("violating_triplets", "triplet", {"triplets": "violating"}, of(loops.active_triplet)),
    (
        "batch_hard_soft",
        "batch_hard",
        {"soft": True},
        of(loops.batch_hard, soft_margin=True),
    ),
    ("batch_hard", "batch_hard", {}, of(loops.batch_hard)),
    ("triplet_ratio", "triplet_ratio", {}, of(loops.triplet_ratio)),
    *(
        (
            f"ranking_and_tags_of_the_{who}",
            "ranking_and_tags",
            {**SIZES, "tags": TAGS, "weight": 0.4, "classified": who},
            lambda loss, x, y, who=who: loops.ranking_and_tags(
                x, y, TAGS, loss.rule.classifiers, 0.4, who
            ),
        )
        for who in ("negative", "anchor")
    ),
    *(
        (
            f"lmnn_neighbours_{k}",
            "lmnn",
            {"dim": 6, "weight": 0.7, "neighbours": k},
            lambda loss, x, y, k=k: loops.lmnn(
                x, y, loss.rule.map.weight.T @ loss.rule.map.weight, 1.0, 0.7, k
            ),
        )
        for k in (None, 1)
    ),
    (
        "cosine_triplet",
        "triplet",
        {"distance": "cosine", "margin": 0.0},
        of(loops.cosine_triplet),
    ),
    ("tuple_with_max", "tuple_max", {}, of(loops.tuple_max)),
    ("n_pair", "n_pair", {}, of(loops.n_pair)),
    ("info_nce", "info_nce", {}, of(loops.info_nce)),
    ("nt_xent", "nt_xent", {}, of(loops.nt_xent)),
    ("sup_con", "sup_con", {}, of(loops.sup_con)),
    ("sup_con_inside", "sup_con", {"form": "in"}, of(loops.sup_con, form="in")),
    ("nca", "nca", {}, of(loops.nca)),
    (
        "nca_expected",
        "nca",
        {"form": "expected", "scale": 0.5},
        of(loops.nca, form="expected", scale=0.5),
    ),
    ("lifted_structure", "lifted", {}, of(loops.lifted)),
    ("multi_similarity", "multi_similarity", {}, of(loops.multi_similarity)),
    (
        "multi_similarity_as_released",
        "multi_similarity",
        {"base": 0.5, "beta": 40.0},
        of(loops.multi_similarity, base=0.5, beta=40.0),
    ),
    ("margin", "margin", {}, of(loops.margin)),
    *(
        (
            f"margin_beta_per_{learn}",
            "margin",
            {"learn": learn, "nu": 0.3, "num_classes": 4},
            lambda loss, x, y: loops.margin(x, y, beta=loss.rule.beta, nu=0.3),
        )
        for learn in ("class", "shared")
    ),
    ("angular", "angular", {}, of(loops.angular)),
    ("angular_36", "angular", {"angle_deg": 36}, of(loops.angular, angle_deg=36)),
    ("tuplet_margin", "tuplet_margin", {}, of(loops.tuplet_margin)),
    (
        "hierarchical_triplet",
        "hierarchical_triplet",
        {**SIZES, "levels": 8},
        of(loops.hierarchical_triplet, levels=8),
    ),
    ("magnet", "magnet", {"alpha": 0.5}, of(loops.magnet, alpha=0.5)),
    ("unified", "unified", {"gamma": 8.0}, of(loops.unified, gamma=8.0)),
    ("circle", "circle", {}, of(loops.circle)),
    ("hard_cluster", "hard_cluster", {}, of(loops.hard_cluster)),
    (
        "hdc",
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
    exact, exact_grad = value_and_grad(lambda x: loop(loss, list(x), LABELS), x)
    value, grad = value_and_grad(lambda x: loss(x, torch.tensor(LABELS)), x)
    torch.testing.assert_close(value, exact, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(grad, exact_grad, rtol=1e-8, atol=1e-10)
    assert float(exact_grad.norm()) > 1e-6  # the case is not an empty one


def test_every_loss_has_a_case():
    assert {case[1] for case in CASES} == set(METRIC_LOSSES) - {"pml"}


@pytest.mark.parametrize("triplets", ["all", "violating", "hard", "semi_hard"])
@pytest.mark.parametrize("distance", ["squared", "euclidean"])
def test_sorting_the_negatives_gives_what_meeting_each_gives(triplets, distance, monkeypatch):
    x, labels = rows(size=40), torch.arange(40) % 3
    loss = METRIC_LOSSES["triplet"](triplets=triplets, distance=distance)
    direct = value_and_grad(lambda x: loss(x, labels), x), loss.last_count, loss.last_active
    monkeypatch.setattr("sslpipe.metric_learning.losses.triplet.MOST_POSITIVES", 0)
    ordered = value_and_grad(lambda x: loss(x, labels), x), loss.last_count, loss.last_active
    torch.testing.assert_close(ordered[0], direct[0], rtol=1e-10, atol=1e-12)
    assert ordered[1:] == direct[1:]
