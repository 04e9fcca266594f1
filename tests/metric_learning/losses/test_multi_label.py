"""Multi-label circle loss against loops."""

import math

import pytest
import torch
import torch.nn.functional as F

from sslpipe.metric_learning.losses import MultiLabelCircleLoss
from tests.helpers.processes import run_processes


def batch(rows=6, classes=5, dtype=torch.float64):
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(rows, classes, generator=generator, dtype=torch.float64)
    targets = torch.rand(rows, classes, generator=generator) < 0.4
    targets[0], targets[1] = False, True  # no class, and all of them
    return scores.to(dtype), targets


def looped(scores, targets, gamma, threshold):
    values = []
    for row, own in zip(scores.tolist(), targets.tolist(), strict=True):
        push = sum(math.exp(gamma * s) for s, mine in zip(row, own, strict=True) if not mine)
        pull = sum(math.exp(-gamma * s) for s, mine in zip(row, own, strict=True) if mine)
        apart = math.log(1 + push) + math.log(1 + pull)
        values.append(apart if threshold else math.log(1 + push * pull))
    return sum(values) / len(values)


@pytest.mark.parametrize("threshold", [True, False])
@pytest.mark.parametrize("gamma", [1.0, 3.0])
def test_the_value_is_the_loops_and_the_gradient_that_of_differences(gamma, threshold):
    scores, targets = batch()
    loss = MultiLabelCircleLoss(gamma=gamma, threshold=threshold)
    expected = looped(scores, targets, gamma, threshold)
    assert float(loss(scores, targets)) == pytest.approx(expected)
    assert float(loss(scores.float(), targets.long())) == pytest.approx(expected, rel=1e-6)
    assert torch.autograd.gradcheck(lambda x: loss(x, targets), scores.requires_grad_())


def test_with_one_class_an_image_it_is_softmax_cross_entropy():
    scores, _ = batch()
    labels = torch.arange(6) % 5
    loss = MultiLabelCircleLoss(threshold=False)
    expected = F.cross_entropy(scores, labels)
    torch.testing.assert_close(loss(scores, F.one_hot(labels, 5)), expected)


def test_rows_of_no_class_teach_with_a_threshold_alone():
    scores, targets = batch()
    nothing = torch.zeros_like(targets)
    for threshold in (True, False):
        x = scores.clone().requires_grad_()
        value = MultiLabelCircleLoss(threshold=threshold)(x, nothing)
        (grad,) = torch.autograd.grad(value, x)
        assert bool((grad > 0).all()) == bool(value > 0) == threshold


def test_large_scores_stay_finite_in_half_precision():
    scores, targets = batch(dtype=torch.float16)
    x = (1000 * scores).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        value = MultiLabelCircleLoss(gamma=64.0)(x, targets)
    assert value.dtype == torch.float32
    assert bool(value.isfinite())
    assert bool(torch.autograd.grad(value, x)[0].isfinite().all())


@pytest.mark.parametrize(
    ("scores", "targets", "said"),
    [
        (torch.zeros(2, 3), torch.zeros(2, 4), "both"),
        (torch.zeros(3), torch.zeros(3), "both"),
        (torch.zeros(2, 3), torch.full((2, 3), 2), "0 or 1"),
    ],
)
def test_targets_that_do_not_fit_are_named(scores, targets, said):
    with pytest.raises(ValueError, match=said):
        MultiLabelCircleLoss()(scores, targets)


def of_rank(process):
    scores, targets = batch()
    mine = slice(0, 2) if process.rank == 0 else slice(2, 6)
    x = scores[mine].requires_grad_()
    value = MultiLabelCircleLoss()(x, targets[mine])
    (grad,) = torch.autograd.grad(value, x)
    return float(value.detach()), (grad / process.world_size).tolist()


def test_two_processes_with_unequal_rows_equal_one():
    scores, targets = batch()
    x = scores.requires_grad_()
    value = MultiLabelCircleLoss()(x, targets)
    (grad,) = torch.autograd.grad(value, x)
    ranks = run_processes(of_rank, 2)
    assert [each[0] for each in ranks] == [pytest.approx(float(value.detach()), rel=1e-12)] * 2
    torch.testing.assert_close(
        torch.tensor(ranks[0][1] + ranks[1][1]).double(), grad.float().double()
    )
