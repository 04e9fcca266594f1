"""NT-Xent against the textbook, closed forms and numbers made by hand; the loops: see loops.py."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from sslpipe.errors import UserError
from sslpipe.losses import NTXentLoss
from sslpipe.losses.engine import tiles
from tests.losses.loops import pair, relative, value_and_grad


def textbook(z_a: Tensor, z_b: Tensor, temperature: float) -> Tensor:
    z = F.normalize(torch.cat([z_a, z_b]), dim=1)
    logits = (z @ z.T / temperature).fill_diagonal_(-math.inf)
    return F.cross_entropy(logits, torch.arange(len(z)).roll(len(z_a)))


@pytest.mark.promise(3)
def test_tiles_that_are_kept_for_the_gradient_equal_those_made_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    z_a, z_b = pair(40, 8)
    kept = value_and_grad(NTXentLoss(temperature=0.1, tile_rows=16)(z_a, z_b), z_a, z_b)
    monkeypatch.setattr(tiles, "KEPT_TILES_BYTES", 0)
    again = value_and_grad(NTXentLoss(temperature=0.1, tile_rows=16)(z_a, z_b), z_a, z_b)
    assert all(map(torch.equal, kept, again))


@pytest.mark.promise(3)
@pytest.mark.parametrize("temperature", [0.01, 0.02, 0.07, 0.1, 0.5])
@pytest.mark.parametrize("closeness", [0.0, 1.0, 20.0])
def test_float32_gradient_is_within_1e_5_of_float64(closeness: float, temperature: float) -> None:
    """Also where the loss is nearly 0 and p of the positive nearly 1: nothing may cancel."""
    z_a, z_b = pair(300, 64, closeness=closeness)
    exact, exact_grad = value_and_grad(textbook(z_a, z_b, temperature), z_a, z_b)
    a, b = (z.detach().float().requires_grad_() for z in (z_a, z_b))
    exact32 = textbook(a.double(), b.double(), temperature)  # of the rounded inputs
    _, exact_grad = value_and_grad(exact32, a, b)
    loss, grad = value_and_grad(NTXentLoss(temperature=temperature, tile_rows=128)(a, b), a, b)
    assert loss.dtype is torch.float32
    assert loss.item() == pytest.approx(exact32.item(), rel=2e-5, abs=1e-9)
    if exact.item() > 1e-6:  # below, textbook's own 1 - p has no digits left in float64
        assert relative(grad, exact_grad.double()) < 1e-5


@pytest.mark.parametrize(
    ("dtype", "length"),
    [
        *((torch.float32, length) for length in (1e-36, 1e-25, 1e25, 1e36)),
        *((torch.float64, length) for length in (1e-300, 1e-170, 1e160, 1e300)),
    ],
)
def test_lengths_near_the_limits_of_a_dtype_do_not_matter(
    dtype: torch.dtype, length: float
) -> None:
    z_a, z_b = (z.detach().to(dtype) for z in pair(12, 8))
    a, b = ((z * (length / 20)).requires_grad_() for z in (z_a, z_b))
    loss = NTXentLoss(temperature=0.1)(a, b)
    torch.testing.assert_close(loss, NTXentLoss(temperature=0.1)(z_a, z_b), rtol=1e-4, atol=1e-6)
    _, grad = value_and_grad(loss * min(length, 1.0), a, b)
    assert torch.isfinite(grad).all()


@pytest.mark.parametrize("temperature", [0.01, 0.1])
def test_a_zero_row_is_finite_and_leaves_the_others_exact(temperature: float) -> None:
    z_a, z_b = pair(6, 4)
    with torch.no_grad():
        z_a[2], z_b[1, 0] = 0, 0  # and one number of another row
    loss, grad = value_and_grad(
        NTXentLoss(temperature=temperature, tile_rows=5)(z_a, z_b), z_a, z_b
    )
    exact, exact_grad = value_and_grad(textbook(z_a, z_b, temperature), z_a, z_b)
    torch.testing.assert_close(loss, exact, rtol=1e-12, atol=0)
    assert (grad[2] == 0).all()
    others = torch.arange(12) != 2
    torch.testing.assert_close(grad[others], exact_grad[others], rtol=1e-9, atol=1e-12)


def test_views_that_need_no_gradient_change_nothing_of_the_others() -> None:
    z_a, z_b = pair(9, 4)
    loss, grads = NTXentLoss()(z_a, z_b), torch.autograd.grad(NTXentLoss()(z_a, z_b), (z_a, z_b))
    with torch.no_grad():
        alone = NTXentLoss()(z_a, z_b)
    assert not alone.requires_grad
    assert torch.equal(alone, loss.detach())
    (one,) = torch.autograd.grad(NTXentLoss()(z_a, z_b.detach()), (z_a,))
    torch.testing.assert_close(one, grads[0])


def test_a_second_derivative_is_refused_and_not_left_out() -> None:
    """Torch's `once_differentiable` gives 0 for a gradient penalty, and says nothing."""
    z_a, z_b = pair(9, 4)
    loss = NTXentLoss()(z_a, z_b)
    with pytest.raises(UserError, match="create_graph = True"):
        torch.autograd.grad(loss, z_a, create_graph=True)
