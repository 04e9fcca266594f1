"""Optimizers and guard on "cuda": a CPU's weights, in few launches, undone by found_inf alone."""

import math
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision
from torch import Tensor, nn

from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda


def _steps(device: str, kind: str, most: float | None) -> list[torch.Tensor]:
    from sslpipe.optim.optimizers import OPTIMIZERS
    from sslpipe.optim.step import clip_gradient, set_lr
    from tests.helpers.optimizers import build_optimizer

    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Conv2d(3, 40, 3), nn.BatchNorm2d(40), nn.Conv2d(40, 4, 3))
    model = model.to(device).to(memory_format=torch.channels_last)
    nn.init.zeros_(model[2].weight)  # LARS: ratio 1
    own = {"trust_coefficient": 0.02} if kind == "lars" else {}
    optim = OPTIMIZERS[kind].model_validate({"peak_lr": 0.1, "weight_decay": 0.01, **own})
    optimizer: Any = build_optimizer(model, optim)
    generator = torch.Generator().manual_seed(1)
    for step in range(3):
        set_lr(optimizer, 0.1 * step)
        for p in model.parameters():
            p.grad = torch.empty_like(p).copy_(torch.randn(p.shape, generator=generator))
        norm = clip_gradient(optimizer, list(model.parameters()), most)
        assert 30 < norm < 60  # of 2,644 numbers
        optimizer.step()
    before = [deepcopy(p.detach()) for p in model.parameters()]
    if device == "cuda":  # a step that the device itself refuses
        optimizer.found_inf = torch.ones((), device=device)
        optimizer.step()
        for p, kept in zip(model.parameters(), before, strict=True):
            assert p.cpu().equal(kept.cpu())
    return [p.cpu() for p in before]


STEPS = [
    *(("lars", None), ("lars", 1.5), ("lars", 1e6)),  # no gradient is so long
    *(("sgd", None), ("sgd", 1.5), ("adamw", 1.5)),
]


def _all_steps() -> Any:
    return [[_steps(device, *case) for device in ("cpu", "cuda")] for case in STEPS]


def test_steps_on_cuda_give_the_weights_of_a_cpu():
    (found,) = run_on_cuda(_all_steps)
    for case, (expected, got) in zip(STEPS, found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-7, msg=str(case))


def _lars(lr: float, trust_coefficient: float, two_momenta: bool, device: str) -> list[Tensor]:
    """Weights after two steps in which some lengths are 0."""
    from sslpipe.optim.lars import LARS

    generator = torch.Generator().manual_seed(1)
    weights = [torch.randn(3, 50, generator=generator), torch.zeros(60), torch.ones(7)]
    grads = [torch.randn(w.shape, generator=generator) for w in weights]
    grads[2].zero_()
    tensors = [nn.Parameter(w.to(device)) for w in [*weights, torch.zeros(5), torch.ones(4)]]
    settings = {"lr": lr, "trust_coefficient": trust_coefficient}
    groups = [
        {"params": tensors[:3], **settings},
        {"params": tensors[3:], **settings, "adapt": False, "weight_decay": 0.1},
    ]
    if two_momenta:  # which are not stepped together
        groups[1]["momentum"] = 0.5
    optimizer = LARS(groups, lr=lr)
    for _ in range(2):
        for p, grad in zip(tensors, [*grads, torch.ones(5), torch.ones(4)], strict=True):
            p.grad = grad.to(device)
        optimizer.step()
    return [p.detach().cpu() for p in tensors]


RATES = [
    *((0.1, 0.02, False), (0.0, 0.02, False), (0.1, 0.0, False), (1e-12, 1e-6, False)),
    (0.1, 0.02, True),
]


def _all_lars() -> Any:
    return [[_lars(*rate, device) for device in ("cpu", "cuda")] for rate in RATES]


def test_weights_and_gradients_of_length_0_are_stepped_as_on_a_cpu():
    (found,) = run_on_cuda(_all_lars)
    for rate, (expected, got) in zip(RATES, found, strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-9, msg=str(rate))


def _gathered() -> tuple[list[float], list[bool]]:
    """Lengths of gradients in and outside of a block; whether another set gets another block."""
    from sslpipe.optim.lars import LARS
    from sslpipe.optim.step import gradient_norm

    generator = torch.Generator().manual_seed(1)
    weights = [nn.Parameter(torch.zeros(n, device="cuda")) for n in (3, 1500)]
    optimizer = LARS(weights, lr=0.1)
    norms, same = [], []
    for some in (weights, weights, weights[1:], weights):
        for p in weights:
            p.grad = None
        for p in some:
            p.grad = torch.randn(p.shape, generator=generator).cuda()
        expected = torch.nn.utils.get_total_norm([p.grad for p in some])
        norm = gradient_norm(optimizer, weights)
        again = gradient_norm(optimizer, weights)  # nothing is to be gathered
        norms += [float(norm) / float(expected), float(again) / float(expected)]
        torch._foreach_mul_([p.grad for p in some], 0.5)  # as clipping does
        norms.append(2 * float(gradient_norm(optimizer, weights)) / float(expected))
        kept = [p.grad for p in some]
        optimizer.step()
        same.append(all(p.grad is own for p, own in zip(some, kept, strict=True)))
    return norms, same


def test_the_length_of_gathered_gradients_is_theirs_whichever_there_are():
    ((norms, same),) = run_on_cuda(_gathered)
    assert norms == pytest.approx([1.0] * 12, rel=1e-6)
    assert all(same)  # what clipping changed is what was stepped with


def _length_behind_a_bad_step() -> tuple[float, bool]:
    """Length of finite gradients behind a step of NaN, and whether that step moved a weight."""
    from sslpipe.optim.lars import LARS
    from sslpipe.optim.step import clip_gradient

    weights = [nn.Parameter(torch.ones(n, device="cuda")) for n in (3, 1500)]
    optimizer: Any = LARS(weights, lr=0.1, trust_coefficient=0.02)
    for value in (float("nan"), float("inf"), 2.0):
        bad = not math.isfinite(value)
        optimizer.found_inf = torch.tensor(float(bad), device="cuda")
        for p in weights:
            p.grad = torch.full_like(p, value)
        norm = clip_gradient(optimizer, weights, 1.0)
        if bad:
            optimizer.step()
            still = all(bool((p.cpu() == 1).all()) for p in weights)
    return float(norm), still


def test_steps_of_nan_and_of_infinity_leave_nothing_to_the_next():
    ((norm, still),) = run_on_cuda(_length_behind_a_bad_step)
    assert still
    assert norm == pytest.approx(2 * 1503**0.5, rel=1e-6)


def _guard(model: nn.Module, optimizer: Any, **more: Any) -> Any:
    from sslpipe.run.guard import StepGuard

    accelerator = SimpleNamespace(device=torch.device("cuda", 0), scaler=None)
    where: Any = {"folder": Path("."), "first_step": 0, "rank": 0, "warn": print}
    where |= {"optim": None, "precision": "", **more}
    prepared = SimpleNamespace(optimizer=optimizer)
    return StepGuard([model], accelerator, prepared, max_bad_steps=10, **where)


def _operations(kinds: list[str], clip_norm: float | None) -> dict[str, tuple[int, int]]:
    """By optimizer: operations of guard, gradient norm and optimizer in a step; and waits."""
    from sslpipe.optim.optimizers import OPTIMIZERS
    from sslpipe.optim.step import clip_gradient
    from tests.fakecuda.runtime import events, operations, reset, waits
    from tests.helpers.optimizers import build_optimizer

    model = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    parameters = list(model.parameters())
    ids, loss = torch.arange(4), torch.zeros((), device="cuda")
    found = {}
    for kind in kinds:
        optimizer: Any = build_optimizer(model, OPTIMIZERS[kind](peak_lr=0.1))
        guard = _guard(model, optimizer)
        for step in range(2):  # the first makes the state
            for p in parameters:
                p.grad = torch.zeros_like(p)
            reset()
            guard.remember()
            norm = clip_gradient(optimizer, parameters, clip_norm)
            with guard.step(loss, norm) as decision:
                pass
            guard.count(step, ids, ids, decision, epoch=0)
        found[kind] = operations(events()), len(waits(events()))
    return found


# torch 2.11 launches more for the same lists of tensors
MORE = 0 if torch.__version__ >= (2, 15) else 8


@pytest.mark.parametrize(
    ("clip_norm", "most"),
    [(None, {"lars": 22, "sgd": 15, "adamw": 19}), (1.0, {"lars": 25, "sgd": 17, "adamw": 21})],
)
def test_a_step_with_guard_and_norm_takes_few_operations_and_no_wait(clip_norm, most):
    (found,) = run_on_cuda(_operations, list(most), clip_norm, env={"FAKE_VALUES": "0"})
    for kind, (operations, waits) in found.items():
        assert operations <= most[kind] + MORE, found
        assert waits == 0


# -- what the guard remembers: buffers of any kind, in one launch each way -------------------------


def _remembered(tie: bool) -> tuple[list[bool], list[tuple[int, ...]], list[int]]:
    """Whether buffers are kept, then restored; their strides; operations of either."""
    from sslpipe.run.guard import _Memory
    from tests.fakecuda.runtime import events, operations, reset

    generator, module = torch.Generator().manual_seed(0), nn.Module()
    for number, buffer in enumerate(
        (
            torch.randn(3, 5, generator=generator),
            torch.randn(7, 2, generator=generator).T,
            torch.tensor(2**40),
            torch.tensor([True, False, True]),
            torch.arange(33, dtype=torch.uint8),
            torch.randn(9, dtype=torch.float64, generator=generator),
            torch.randn(1, 1, 3, 3, generator=generator).bfloat16(),  # 18 bytes
        )
    ):
        module.register_buffer(f"b{number}", buffer.cuda())
    if tie:  # two buffers of one memory stay in it
        module.register_buffer("part", module.get_buffer("b5")[2:5])
    owned = list(module.buffers())
    memory = _Memory(owned)
    if tie:
        assert module.get_buffer("part").data_ptr() == module.get_buffer("b5")[2:].data_ptr()
    assert all(own is buffer for own, buffer in zip(owned, module.buffers(), strict=True))
    as_promised, counts = [], []
    for bad in (False, True):
        reset()
        memory.remember()
        counts.append(operations(events()))
        before = [buffer.cpu().clone() for buffer in owned]
        for buffer in owned:
            buffer.copy_(buffer == 0)
        after = [buffer.cpu().clone() for buffer in owned]
        flag = torch.tensor(bad, device="cuda")
        reset()
        memory.restore_where(flag)
        counts.append(operations(events()))
        expected = zip(module.buffers(), before if bad else after, strict=True)
        as_promised += [buffer.cpu().equal(value) for buffer, value in expected]
        memory.restore_where(torch.tensor(True, device="cuda"))
    return as_promised, [buffer.stride() for buffer in owned], counts


@pytest.mark.parametrize("tie", [False, True])
def test_the_guard_restores_buffers_of_every_kind_where_the_device_says_so(tie):
    ((as_promised, strides, counts),) = run_on_cuda(_remembered, tie)
    assert as_promised == [True] * (16 if tie else 14)
    if not tie:
        assert strides[:2] == [(5, 1), (1, 2)]
        assert max(counts) <= 8  # two kinds of integers; not a copy a buffer
