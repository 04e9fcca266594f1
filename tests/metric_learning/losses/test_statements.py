"""Bounds and special points of what losses are made of; their formulas: test_losses.py."""

import pytest
import torch

from sslpipe.metric_learning import METRIC_LOSSES
from sslpipe.metric_learning.losses.pairwise import NEVER, compare, masked_lse
from tests.helpers.metric_rows import rows, sizes_of, value_and_grad


def test_no_loss_falls_without_bound():
    """The unbounded contrastive loss would be -D2 here."""
    far = torch.tensor([[1e3, 0, 0, 0, 0, 0], [-1e3, 0, 0, 0, 0, 0]], dtype=torch.float64)
    x, labels = far.repeat_interleave(2, 0), torch.tensor([0, 0, 1, 1])
    for name in METRIC_LOSSES:
        if name not in ("pml", "n_pair"):  # n_pair: its penalty is above 0 here
            loss = METRIC_LOSSES[name](**sizes_of(name)).double()
            assert loss(x, labels).item() >= 0


@pytest.mark.parametrize("kind", ["euclidean", "squared"])
def test_rows_that_are_one_have_distance_0_also_where_rounding_would_leave_some(kind):
    x = torch.cat([rows(size=40, dim=96), 50 + rows(3, size=40, dim=96)]).float()
    twice = torch.cat([x, x]).requires_grad_()
    batch, _ = compare(twice, torch.arange(160), None, None)
    d = batch.distances(kind)
    apart = twice.detach().double()[:, None] - twice.detach().double()
    exact = apart.square().sum(2) if kind == "squared" else apart.norm(dim=2)
    copies = torch.eye(80, dtype=torch.bool).repeat(2, 2)
    assert not d.detach()[copies].any()
    torch.testing.assert_close(d.detach().double(), exact, rtol=5e-3, atol=1e-12)
    assert bool((d.detach()[~copies] > 0).all())
    (grad,) = torch.autograd.grad(d[copies].sum(), twice)
    assert not grad.any()


@pytest.mark.parametrize("scale", [1.0, -300.0])
def test_a_masked_log_sum_exp_is_the_loop_s_and_an_empty_row_has_no_gradient(scale):
    x, mask = rows(1, size=8, dim=30), rows(2, size=8, dim=30) > 0.3
    mask[3] = False
    filled = torch.arange(8) != 3

    def loop(x):
        kept = [scale * x[i][mask[i]] for i in range(8) if i != 3]
        return sum(row.logsumexp(0) ** 2 for row in kept)

    expected, expected_grad = value_and_grad(loop, x)
    value, grad = value_and_grad(lambda x: masked_lse(x, mask, scale)[filled].square().sum(), x)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(grad, expected_grad, rtol=1e-10, atol=1e-12)
    empty, grad = value_and_grad(lambda x: masked_lse(x, mask, scale)[3], x)
    assert float(empty) < NEVER / 3
    assert not grad.any()
