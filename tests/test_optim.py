"""Learning rate, parameter groups and LARS against written-out numbers and plain numpy."""

import math
from typing import Any, Literal

import numpy as np
import pytest
import torch
from torch import nn

from sslpipe.optim.lars import LARS
from sslpipe.optim.optimizers import OPTIMIZERS
from sslpipe.optim.parameter_groups import describe_groups, rate_warning
from sslpipe.optim.step import lr_at, set_lr
from sslpipe.recipe.sections import Optim
from tests.helpers.optimizers import build_optimizer


def optim(kind: str = "lars", **settings: object) -> Optim:
    return OPTIMIZERS[kind].model_validate({"peak_lr": 0.8, **settings})


def test_the_rate_rises_linearly_and_falls_as_half_a_cosine() -> None:
    settings = optim(warmup_steps=10)
    trace = {step: lr_at(step, settings, steps=110) for step in (0, 5, 10, 35, 60, 85, 109, 110)}
    assert trace == pytest.approx(
        {
            0: 0.0,
            5: 0.4,
            10: 0.8,
            35: 0.8 * (1 + math.sqrt(0.5)) / 2,
            60: 0.4,
            85: 0.8 * (1 - math.sqrt(0.5)) / 2,
            109: 0.8 * math.sin(math.pi / 200) ** 2,
            110: 0.0,
        },
        rel=1e-12,
        abs=1e-16,
    )


def test_rates_without_a_warmup_constant_and_of_a_run_inside_its_warmup() -> None:
    assert lr_at(0, optim(), steps=7) == 0.8
    rates = [lr_at(step, optim(schedule="constant", warmup_steps=2), 6) for step in range(6)]
    assert rates == [0.0, 0.4, 0.8, 0.8, 0.8, 0.8]
    rates = [lr_at(step, optim(warmup_steps=8), steps=4) for step in range(9)]
    assert rates == [0.1 * step for step in range(9)]
    assert lr_at(9, optim(warmup_steps=8), steps=8) == 0.0  # past the end, divided by no zero


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Flatten(), nn.Linear(12, 4))


@pytest.mark.parametrize("kind", ["sgd", "adamw", "lars"])
def test_decay_moves_matrices_only_unless_one_dim_is_asked_for(kind: str) -> None:
    for decay_one_dim in (False, True):
        model = net()
        before = [p.clone() for p in model.parameters()]
        settings = optim(kind=kind, weight_decay=0.1, decay_one_dim=decay_one_dim)
        optimizer = build_optimizer(model, settings)
        for p in model.parameters():
            p.grad = torch.zeros_like(p)
        optimizer.step()
        for old, new in zip(before, model.parameters(), strict=True):
            moved = not torch.equal(old, new)
            assert moved == (bool(old.any()) and (old.ndim > 1 or decay_one_dim))


def test_one_dimensional_parameters_are_a_group_and_frozen_ones_in_none() -> None:
    model = net()
    model[0].requires_grad_(False)
    decay, no_decay = build_optimizer(model, optim(weight_decay=0.1)).param_groups
    assert [p.shape for p in decay["params"]] == [(4, 12)]
    assert [p.shape for p in no_decay["params"]] == [(3,), (3,), (4,)]


def test_groups_are_described_with_their_counts() -> None:
    model = net()
    optimizer = build_optimizer(model, optim(kind="lars", weight_decay=1e-6))
    assert describe_groups(optimizer.param_groups, model).splitlines() == [
        "decay: 2 tensors, 102 numbers, weight decay 1e-06, adapted layer by layer"
        " (1 Conv2d.weight, 1 Linear.weight)",
        "no_decay: 4 tensors, 13 numbers, weight decay 0, not adapted"
        " (1 Conv2d.bias, 1 BatchNorm2d.weight, 1 BatchNorm2d.bias, 1 Linear.bias)",
    ]


@pytest.mark.parametrize(
    "settings",
    [
        {"kind": "sgd", "momentum": 0.8, "nesterov": True},
        {"kind": "adamw", "betas": (0.5, 0.6)},
        {"kind": "lars", "trust_coefficient": 0.02, "momentum": 0.7},
    ],
)
def test_settings_reach_every_group(settings: dict[str, Any]) -> None:
    optimizer = build_optimizer(net(), optim(**settings))
    for group in optimizer.param_groups:
        assert {"kind": settings["kind"], **group}.items() >= settings.items()


def lars_by_numpy(
    w: np.ndarray, grads: list[np.ndarray], rates: list[float], decay: float, adapt: bool
) -> np.ndarray:
    """google-research/simclr lars_optimizer.py, classic momentum, one tensor."""
    velocity = np.zeros_like(w)
    for grad, lr in zip(grads, rates, strict=True):
        update = grad + decay * w
        ratio = 1.0
        if adapt:
            w_norm, g_norm = np.sqrt((w**2).sum()), np.sqrt((update**2).sum())
            if w_norm > 0 and g_norm > 0:
                ratio = 0.05 * w_norm / g_norm
        velocity = 0.9 * velocity + lr * ratio * update
        w = w - velocity
    return w


def test_lars_follows_the_paper_over_steps_with_a_changing_rate() -> None:
    generator = np.random.default_rng(0)
    shapes = [(4, 3), (2, 3, 3, 3), (5,), ()]
    weights = [generator.normal(size=shape) for shape in shapes]
    weights.append(np.zeros((3, 2)))  # zero-initialised: ratio 1, and it moves
    grads = [[generator.normal(size=w.shape) for w in weights] for _ in range(4)]
    rates = [0.0, 0.5, 2.0, 1.0]
    parameters = [torch.tensor(w, requires_grad=True) for w in weights]
    groups = [
        {"params": [parameters[i] for i in (0, 1, 4)], "weight_decay": 0.01},
        {"params": parameters[2:4], "adapt": False},
    ]
    optimizer = LARS(groups, lr=1.0, trust_coefficient=0.05)
    for step_grads, lr in zip(grads, rates, strict=True):
        set_lr(optimizer, lr)
        for p, grad in zip(parameters, step_grads, strict=True):
            p.grad = torch.tensor(grad)
        optimizer.step()
    for i, p in enumerate(parameters):
        adapt = i in (0, 1, 4)
        own = [step_grads[i] for step_grads in grads]
        expected = lars_by_numpy(weights[i], own, rates, 0.01 if adapt else 0.0, adapt)
        np.testing.assert_allclose(p.detach().numpy(), expected, rtol=1e-13, atol=1e-16)
    assert parameters[4].any()


def test_lars_divides_the_gradient_by_the_scale_that_it_is_given() -> None:
    steps = []
    for scale in (1.0, 4.0):
        w, b = nn.Parameter(torch.tensor([3.0, 4.0])), nn.Parameter(torch.tensor([1.0]))
        groups = [{"params": [w], "weight_decay": 0.5}, {"params": [b], "adapt": False}]
        optimizer: Any = LARS(groups, lr=0.5, trust_coefficient=0.1)
        w.grad, b.grad = torch.tensor([1.0, 2.0]) * scale, torch.tensor([3.0]) * scale
        optimizer.grad_scale = torch.tensor(scale)
        optimizer.step()
        steps.append(torch.cat([w.detach(), b.detach()]))
    assert steps[0].equal(steps[1])


def test_lars_resumes_bitwise_and_skips_what_has_no_gradient() -> None:
    def run(break_at: int | None) -> torch.Tensor:
        torch.manual_seed(0)
        model, unused = nn.Linear(4, 3), nn.Parameter(torch.ones(2, 2))
        optimizer = LARS([*model.parameters(), unused], lr=0.5)
        for step in range(4):
            if step == break_at:
                state = optimizer.state_dict()
                optimizer = LARS([*model.parameters(), unused], lr=9.0)
                optimizer.load_state_dict(state)
            model(torch.full((2, 4), step + 1.0)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        assert torch.equal(unused, torch.ones(2, 2))
        return model.weight.detach().clone()

    assert torch.equal(run(None), run(2))


def test_lars_takes_a_closure_and_refuses_negative_settings() -> None:
    w = torch.ones(2, 2, requires_grad=True)
    optimizer = LARS([w], lr=0.1)

    def closure() -> float:
        loss = w.square().sum()
        loss.backward()
        return loss.item()

    assert optimizer.step(closure) == 4.0
    assert w.grad is not None
    assert not torch.equal(w, torch.ones(2, 2))
    for name in ("lr", "momentum", "weight_decay", "trust_coefficient"):
        with pytest.raises(ValueError, match=f"{name} = -1"):
            LARS([w], **{"lr": 0.1, name: -1.0})


@pytest.mark.parametrize(
    ("kind", "batch_size", "usual"),
    [
        ("sgd", 256, 0.1),
        ("sgd", 8192, 3.2),
        ("sgd", 32, 0.1),  # fewer images do not make a rate absurd
        ("lars", 4096, 4.8),
        ("lars", 256, 1.2),  # by the square root
        ("lars", 16384, 19.2),
        ("adamw", 1024, 2e-3),
        ("adamw", 64, 5e-4),
    ],
)
def test_a_rate_is_absurd_from_a_hundred_times_the_usual_one_on(
    kind: str, batch_size: int, usual: float
) -> None:
    assert rate_warning(optim(kind=kind, peak_lr=99 * usual), batch_size) is None
    assert f"; {usual:.2g} is usual (" in rate_warning(optim(kind=kind, peak_lr=0.0), batch_size)
    said = rate_warning(optim(kind=kind, peak_lr=250 * usual), batch_size)
    assert said is not None
    assert said.startswith(f"optim.peak_lr = {250 * usual:g} is 250 times {usual:.2g}, which is ")
    assert f"usual of {kind} at a batch of {batch_size} (" in said


def test_no_rate_of_an_optimizer_of_ones_own_is_called_absurd() -> None:
    class Own(Optim):
        kind: Literal["own"] = "own"

    assert rate_warning(Own(peak_lr=1e9), 256) is None
    assert rate_warning(Own(peak_lr=0.0), 256).startswith("optim.peak_lr = 0: ")
