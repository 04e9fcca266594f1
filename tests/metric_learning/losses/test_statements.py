"""Properties that papers state of a loss: bounds, limits, gradients at special points."""

import pytest
import torch

from sslpipe.metric_learning import METRIC_LOSSES
from sslpipe.metric_learning.losses.pairwise import NEVER, compare, masked_lse, unit
from tests.helpers.metric_rows import LABELS, rows, sizes_of, value_and_grad


def test_no_loss_falls_without_bound():
    """The unbounded contrastive loss would be -D2 here."""
    far = torch.tensor([[1e3, 0, 0, 0, 0, 0], [-1e3, 0, 0, 0, 0, 0]], dtype=torch.float64)
    x, labels = far.repeat_interleave(2, 0), torch.tensor([0, 0, 1, 1])
    for name in METRIC_LOSSES:
        if name not in ("pml", "n_pair"):  # n_pair: its penalty is above 0 here
            loss = METRIC_LOSSES[name](**sizes_of(name)).double()
            assert loss(x, labels).item() >= 0


def test_a_low_temperature_looks_at_the_hardest_negatives():
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


def test_distances_on_the_sphere_and_the_gradient_of_normalising():
    x = rows().requires_grad_()
    batch, _ = compare(unit(x), torch.tensor(LABELS), None, None)
    torch.testing.assert_close(batch.distances("squared"), 2 - 2 * batch.similarities())
    (grad,) = torch.autograd.grad(METRIC_LOSSES["sup_con"]()(x, torch.tensor(LABELS)), x)
    assert float((grad * x.detach()).sum(1).abs().max()) < 1e-12  # across x
    row = x[0].detach()
    jacobian = torch.autograd.functional.jacobian(lambda r: unit(r[None])[0], row)
    length, u = row.norm(), row / row.norm()
    torch.testing.assert_close(jacobian, (torch.eye(6, dtype=torch.float64) - u.outer(u)) / length)


@pytest.mark.parametrize("kind", ["euclidean", "squared", "cosine"])
def test_only_the_plain_distance_keeps_the_triangle_inequality(kind):
    points = unit(rows(size=30, dim=3))
    batch, _ = compare(points, torch.arange(30), None, None)
    d = batch.distances(kind)
    assert float(d.min()) >= -1e-12
    torch.testing.assert_close(d, d.T)
    assert float(d.diagonal().abs().max()) < 1e-7
    assert float((d + torch.eye(30)).min()) > 1e-6  # zero for equal points alone
    detour = (d[:, :, None] + d[None]).amin(1)
    assert bool((d <= detour + 1e-9).all()) == (kind == "euclidean")


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
