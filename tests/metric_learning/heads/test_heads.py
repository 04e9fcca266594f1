"""What heads are made of and what they keep, in float64; their papers: losses/test_losses.py."""

import math

import pytest
import torch

from sslpipe.metric_learning.heads.margin_softmax import shifted_angle
from tests.helpers import head_loops as loops
from tests.helpers.metric_rows import LABELS as ROW_LABELS
from tests.helpers.metric_rows import built, rows

C, D, LABELS = 5, 6, torch.tensor(ROW_LABELS)  # none of class 4


def head_of(name, **arguments):
    return built(name, num_classes=C, dim=D, **arguments)


def by_loop(loop, head, x):
    return loop(list(x), ROW_LABELS, head)


def test_arcface_keeps_falling_beyond_pi_minus_its_margin_and_the_bare_cosine_does_not():
    angles = torch.linspace(0.01, math.pi - 0.01, 400, dtype=torch.float64)
    target = shifted_angle(angles.cos(), 0.5, "linear")
    assert bool((target.diff() < 0).all())
    bare = shifted_angle(angles.cos(), 0.5, "cosine")
    assert not bool((bare.diff() < 0).all())
    inside = angles <= math.pi - 0.5
    torch.testing.assert_close(target[inside], bare[inside])
    torch.testing.assert_close(bare, torch.cos(angles + 0.5))


@pytest.mark.parametrize("m", [2, 3, 4])
def test_psi_is_the_loops_at_every_angle(m):
    cosines = torch.linspace(1, -1, 1000, dtype=torch.float64)
    expected = torch.stack([loops.psi(v, m) for v in cosines])
    torch.testing.assert_close(head_of("sphereface", m=m).psi(cosines), expected)


def test_sphereface_counts_training_steps_and_saves_them():
    head = head_of("sphereface", lam_first=1000.0, lam_last=5.0)
    for _ in range(3):
        value = head(rows(), LABELS)
    expected = by_loop(loops.multiplied(False, lam=1000 / (1 + 0.12 * 3)), head, rows())
    torch.testing.assert_close(value, expected)
    head.eval()(rows(), LABELS)
    assert int(head.state_dict()["steps"]) == 3
    head.steps.fill_(10**6)
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


def test_the_scale_of_normface_is_trained_unless_told_otherwise():
    assert head_of("normface").learned_scale.requires_grad
    assert not head_of("normface", learn_scale=False).learned_scale.requires_grad
