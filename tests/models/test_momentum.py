"""The momentum encoder against its recurrence written out."""

import copy
import math

import pytest
import torch
from torch import nn

from sslpipe.models.backbones import small_resnet
from sslpipe.models.momentum import MomentumPair, momentum_at
from sslpipe.models.simclr import SimCLR
from sslpipe.models.sync_batchnorm import SyncBatchNorm, sync_batchnorm
from sslpipe.recipe.pretrain import Momentum, Projector

PROJECTOR = Projector(hidden_dim=6, out_dim=4)


def pair() -> MomentumPair:
    torch.manual_seed(0)
    return MomentumPair(small_resnet((4, 8)), PROJECTOR).double()


def views(count: int = 12) -> torch.Tensor:
    return torch.randn(count, 3, 8, 8, generator=torch.Generator().manual_seed(1)).double()


def test_queries_are_of_the_first_views_keys_of_the_second_and_only_queries_have_a_gradient():
    model = pair()
    torch.manual_seed(0)
    alone = SimCLR(small_resnet((4, 8)), PROJECTOR).double()
    keys_of = copy.deepcopy(alone)  # before the first step both are equal
    view_a, view_b = views().chunk(2)
    z = model(views())
    torch.testing.assert_close(z, torch.cat([alone(view_a), keys_of(view_b)]))
    z[6:].sum().backward()
    assert all(not p.grad.any() for p in model.parameters())
    z = model(views())
    z[:6].square().sum().backward()
    assert all(bool(p.grad.any()) for p in model.parameters())
    # each side keeps the running statistics of its own views
    for ours, theirs in ((model.backbone, alone.backbone), (model.momentum, keys_of)):
        mean = next(b for n, b in ours.named_buffers() if n.endswith("running_mean"))
        other = next(b for n, b in theirs.named_buffers() if n.endswith("running_mean"))
        assert not torch.equal(mean, other)  # two forwards here, one there
    assert not torch.equal(
        model.backbone.network[1].running_mean, model.momentum.backbone.network[1].running_mean
    )


def test_the_copy_is_all_buffers_under_the_names_of_what_it_follows():
    model = pair()
    torch.manual_seed(0)
    alone = SimCLR(small_resnet((4, 8)), PROJECTOR)
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in alone.named_parameters()]
    assert list(model.momentum.parameters()) == []
    expected = {*alone.state_dict(), *(f"momentum.{name}" for name in alone.state_dict())}
    assert set(model.state_dict()) == expected
    other = pair()
    other.follow(0.5)
    other.load_state_dict(model.state_dict(), strict=True)
    assert model.backbone(views()).shape == (12, 8)


def test_the_copy_follows_by_the_papers_formula():
    model = pair()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    slow = {name: p.detach().clone() for name, p in model.named_parameters()}
    for step, momentum in enumerate((0.9, 0.5, 1.0, 0.99)):
        optimizer.zero_grad()
        model(views() * (step + 1)).square().mean().backward()
        optimizer.step()
        model.follow(momentum)
        for name, p in model.named_parameters():  # eq. 2: k = m k + (1 - m) q
            slow[name] = momentum * slow[name] + (1 - momentum) * p.detach()
    for name, value in slow.items():
        torch.testing.assert_close(model.momentum.state_dict()[name], value, rtol=1e-12, atol=1e-14)
    model.follow(0.0)
    for name, p in model.named_parameters():
        assert torch.equal(model.momentum.state_dict()[name], p)


def test_momentum_is_constant_or_rises_to_one():
    constant, cosine = Momentum(start=0.99), Momentum(start=0.99, schedule="cosine")
    assert [momentum_at(step, constant, 10) for step in (0, 5, 9)] == [0.99] * 3
    actual = [momentum_at(step, cosine, 12) for step in (0, 4, 6, 12)]
    expected = [0.99, 1 - 0.01 * (1 + math.cos(math.pi / 3)) / 2, 0.995, 1.0]
    assert actual == pytest.approx(expected, rel=1e-12)


def test_conversion_to_global_batchnorm_keeps_the_copy_in_buffers():
    model, other = pair(), pair()
    other = sync_batchnorm(other, 2)
    norms = [m for m in other.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
    assert {type(norm) for norm in norms} == {SyncBatchNorm}
    assert [n for n, _ in other.named_parameters()] == [n for n, _ in model.named_parameters()]
    assert [n for n, _ in other.named_buffers()] == [n for n, _ in model.named_buffers()]
    torch.testing.assert_close(other(views()), model(views()))  # one process: the same numbers
    other.follow(0.5)
