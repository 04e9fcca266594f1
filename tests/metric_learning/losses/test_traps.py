"""Formulas in circulation that are wrong, or another loss: none of them is what we compute."""

import math

import pytest
import torch

from sslpipe.metric_learning.losses.pairwise import unit
from tests.helpers import metric_loops as loops
from tests.helpers.metric_rows import LABELS, SIZES, built, rows


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


D, D2, HINGE = loops.dist, loops.d2, loops.hinge
TRAPS = {
    "contrastive_negative_branch_not_squared": (
        lambda: value("contrastive"),
        lambda: by_pair(lambda a, b: 0.5 * D2(a, b), lambda a, b: 0.5 * HINGE(1 - D(a, b))),
    ),
    "contrastive_without_the_half": (
        lambda: value("contrastive"),
        lambda: by_pair(D2, lambda a, b: HINGE(1 - D(a, b)) ** 2),
    ),
    "contrastive_hinges_not_squared": (
        lambda: value("contrastive"),
        lambda: by_pair(D, lambda a, b: HINGE(1 - D(a, b))),
    ),
    "deep_id2_hinge_of_half_the_squared_distance": (
        lambda: (
            value("deep_id2", **SIZES, margin=2.0, weight=1.0)
            - value("deep_id2", **SIZES, margin=2.0, weight=0.0)
        ),
        lambda: by_pair(lambda a, b: 0.5 * D2(a, b), lambda a, b: HINGE(2 - 0.5 * D2(a, b))),
    ),
    "triplet_plain_distance": (
        lambda: value("triplet"),
        lambda: float(loops.triplet(list(rows()), LABELS, distance=D)),
    ),
    "batch_hard_per_class": (lambda: value("batch_hard"), batch_hard_of_classes),
    "nt_xent_without_the_positive_below": (lambda: value("nt_xent"), lambda: negatives_only(0.1)),
    "nt_xent_with_itself_below": (lambda: value("nt_xent"), lambda: with_itself(0.1)),
    "nca_negatives_only_below": (lambda: value("nca"), nca_with_negatives_below),
    "lifted_hard_maximum": (lambda: value("lifted"), lifted_with_maximum),
    "angular_all_rows_of_the_batch": (lambda: value("angular"), angular_over_the_whole_batch),
    "tuplet_margin_margin_added_to_the_cosine": (
        lambda: value("tuplet_margin", margin=0.1, variance_weight=0.0),
        lambda: float(torch.tensor(cosine_margin_tuplet())),
    ),
    "hierarchical_triplet_margin_as_a_term_of_its_own": (
        lambda: value("hierarchical_triplet", **SIZES),
        lambda: hierarchical_with_a_term(),
    ),
    "semi_hard_without_upper_bound": (
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
