"""HDC: each branch gets the pairs that are hard for the one before."""

import torch

from sslpipe.metric_learning import HDCLoss


def test_pairs_that_are_easy_for_a_branch_go_no_deeper():
    """One share of the pairs goes on: the others have no gradient in later branches."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, 12, generator=generator, dtype=torch.float64).requires_grad_()
    labels = torch.arange(8) // 2
    (grad,) = torch.autograd.grad(HDCLoss(shares=[1.0, 0.2, 0.1], margin=9.0)(x, labels), x)
    rows = [(grad[:, k : k + 4].abs().sum(1) > 0).sum() for k in (0, 4, 8)]
    assert rows[0] == 8
    assert rows[0] >= rows[1] >= rows[2] > 0
    assert rows[2] < 8
