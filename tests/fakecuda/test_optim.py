"""Optimizers on "cuda": the weights of a CPU's, in few launches, undone by found_inf alone."""

from copy import deepcopy
from typing import Any

import pytest
import torch
import torchvision
from torch import nn

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _steps(device: str, kind: str) -> list[torch.Tensor]:
    from sslpipe.optim import build_optimizer, set_lr
    from sslpipe.recipe.base import Optim

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.Conv2d(40, 4, 3))
    model = model.to(device).to(memory_format=torch.channels_last)
    nn.init.zeros_(model[2].weight)  # LARS: ratio 1
    optim = Optim(kind=kind, peak_lr=0.1, weight_decay=0.01, trust_coefficient=0.02)
    optimizer: Any = build_optimizer(model, optim)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        set_lr(optimizer, 0.1 * step)
        for p in model.parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        optimizer.step()
    before = [deepcopy(p.detach()) for p in model.parameters()]
    if device == "cuda":  # a step that the device itself refuses
        optimizer.grad_scale, optimizer.found_inf = None, torch.ones((), device=device)
        optimizer.step()
        for p, kept in zip(model.parameters(), before, strict=True):
            assert p.equal(kept)
    return [p.cpu() for p in before]


def _both(kind: str) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    return _steps("cpu", kind), _steps("cuda", kind)


@pytest.mark.parametrize("kind", ["lars", "sgd", "adamw"])
def test_steps_on_cuda_give_the_weights_of_a_cpu(kind):
    ((expected, got),) = run_on_cuda(_both, kind)
    for a, b in zip(expected, got, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def _operations(kinds: list[str]) -> dict[str, tuple[int, int]]:
    from sslpipe.optim import build_optimizer
    from sslpipe.recipe.base import Optim
    from tests.fakecuda.runtime import events, operations, reset, waits

    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    for p in model.parameters():
        p.grad = torch.zeros_like(p)
    found = {}
    for kind in kinds:
        optimizer: Any = build_optimizer(model, Optim(kind=kind, peak_lr=0.1))
        for _ in range(2):  # the first makes the state
            reset()
            optimizer.step()
        found[kind] = operations(events()), len(waits(events()))
    return found


def test_a_step_takes_few_operations_and_no_wait():
    (found,) = run_on_cuda(_operations, ["lars", "sgd", "adamw"], env={"FAKE_VALUES": "0"})
    most = {"lars": 20, "sgd": 4, "adamw": 6}
    for kind, (operations, waits) in found.items():
        assert operations <= most[kind]
        assert waits == 0
