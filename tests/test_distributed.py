"""Ranks' talk and the global BatchNorm, each against what one process computes."""

import itertools
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

import sslpipe.models.sync_batchnorm
from sslpipe.distributed import (
    Rank,
    agree,
    all_gather_rows,
    broadcast_object,
    current_rank,
    gather_objects,
    gather_with_grad,
    pick_device,
    row_counts,
)
from sslpipe.errors import UserError
from sslpipe.models.sync_batchnorm import SyncBatchNorm, global_moments, sync_batchnorm
from tests.fakecuda.formulas import SYNC_BATCHNORM
from tests.helpers.processes import run_processes

SPLITS = [(6, 6), (8, 4), (2, 10), (3, 4, 5), (3, 3, 3, 3), (5, 1, 0, 6)]
DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.int64, torch.bool)


def shares(x: Tensor, split: tuple[int, ...], process: Rank) -> Tensor:
    return x.split(split)[process.rank]


# -- talk ------------------------------------------------------------------------------------------


def test_without_a_process_group_everything_is_the_identity() -> None:
    x = torch.arange(10.0).view(5, 2).requires_grad_()
    assert current_rank() == Rank(0, 1)
    assert row_counts(5) == (5,)
    assert torch.equal(all_gather_rows(x), x)
    assert not all_gather_rows(x).requires_grad
    assert gather_with_grad(x) is x
    assert [agree(flag) for flag in (True, False)] == [True, False]
    assert broadcast_object({"a": 1}) == {"a": 1}
    assert gather_objects("a") == ["a"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 7])
def test_the_ranks_shares_are_everything_once_in_order(world_size: int) -> None:
    for count in (0, 1, 6, 16, 23):
        shares = [Rank(rank, world_size).share(count) for rank in range(world_size)]
        assert [k for share in shares for k in share] == list(range(count))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_device_is_taken_where_it_is_and_refused_with_the_remedy_where_not(monkeypatch) -> None:
    for name, backend in (("cuda", torch.cuda), ("mps", torch.backends.mps)):
        monkeypatch.setattr(backend, "is_available", lambda: False)
        with pytest.raises(UserError, match=rf"run.device = '{name}', .* use 'auto' or"):
            pick_device(name, f"run.device = {name!r}")
    with pytest.raises(UserError, match="device gpu is unknown; use auto, cpu, cuda or mps"):
        pick_device("gpu", "--device gpu")
    assert pick_device("auto", "") == pick_device("cpu", "") == "cpu"
    # mps only where asked for
    monkeypatch.setattr(torch.backends.mps, "is_available", lambda: True)
    assert [pick_device(name, "") for name in ("mps", "auto")] == ["mps", "cpu"]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert [pick_device(name, "") for name in ("auto", "cuda", "cpu")] == ["cuda", "cuda", "cpu"]


def _talk(process: Rank, splits: list[tuple[int, ...]]) -> dict[str, object]:
    warnings.simplefilter("error", FutureWarning)  # users would see what torch is about to drop
    x = torch.ones(process.rank + 1, 2, requires_grad=True)
    gather_with_grad(x).sum().backward()
    for split in splits:
        for dtype in DTYPES:
            numbers = torch.randn(12, 3, generator=torch.Generator().manual_seed(1)) * 9
            everyone = numbers.to(dtype)
            mine = shares(everyone, split, process)
            assert row_counts(len(mine)) == split
            assert torch.equal(all_gather_rows(mine), everyone), (split, dtype)
            assert torch.equal(all_gather_rows(mine[:, 0], split), everyone[:, 0])
    return {
        "nobody": agree(False),
        "last": agree(process.rank == process.world_size - 1),
        "all": agree(True),
        "from_zero": broadcast_object({"precision": "bf16", "rank": process.rank}),
        "objects": gather_objects(("bad", process.rank)),
        "process": current_rank(),
    }


@pytest.mark.parametrize("world", [3, 4])
def test_gathered_rows_stand_in_rank_order_and_flags_and_objects_agree(world: int) -> None:
    splits = [split for split in SPLITS if len(split) == world]
    for rank, said in enumerate(run_processes(_talk, world, splits)):
        assert said == {
            "nobody": False,
            "last": True,
            "all": True,
            "from_zero": {"precision": "bf16", "rank": 0},
            "objects": [("bad", r) for r in range(world)],
            "process": (rank, world),
        }


def _mean_square_of_cosines(everyone: Tensor, z: Tensor) -> Tensor:
    """A row's value depends on all rows: what a metric loss looks like."""
    return ((z @ everyone.T).tanh().square().sum(1) / everyone.shape[0]).tanh()


def _metric_losses(process, splits, x, w):
    return [_metric_loss(process, split, x, w) for split in splits]


def _metric_loss(process, split, x, w):
    w = w.clone().requires_grad_()
    mine = shares(x, split, process)
    z = mine @ w
    z.retain_grad()
    values = _mean_square_of_cosines(gather_with_grad(z), z)
    # whose mean over the ranks is the mean over all rows
    loss = values.sum() * (process.world_size / sum(row_counts(len(values))))
    loss.backward()
    for t in (w.grad, value := loss.detach().clone()):
        dist.all_reduce(t)  # DDP's mean, and the mean of the local values
        t /= process.world_size
    return value, w.grad, z.grad


@pytest.mark.parametrize("world", [2, 4])
def test_gather_with_grad_and_row_mean_give_one_process_gradient(world: int) -> None:
    torch.manual_seed(0)
    x = torch.randn(12, 5, dtype=torch.float64)
    w = torch.randn(5, 4, dtype=torch.float64, requires_grad=True)
    z = x @ w
    z.retain_grad()
    expected = _mean_square_of_cosines(z, z).mean()
    expected.backward()
    splits = [split for split in SPLITS if len(split) == world]
    for answers in zip(*run_processes(_metric_losses, world, splits, x, w.detach()), strict=True):
        for value, grad_w, _ in answers:
            torch.testing.assert_close(value, expected.detach(), rtol=1e-12, atol=0)
            torch.testing.assert_close(grad_w, w.grad, rtol=1e-12, atol=1e-15)
        remote = torch.cat([grad_z for *_, grad_z in answers]) / world
        torch.testing.assert_close(remote, z.grad, rtol=1e-12, atol=1e-15)


# -- BatchNorm -------------------------------------------------------------------------------------

SHAPES = {1: (7,), 2: (6, 5), 3: (3, 4, 2), 0: ()}  # what follows (rows, channels)


def _one_norm(shape, dtype, momentum, affine):
    kind = [nn.BatchNorm1d, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d][len(shape)]
    torch.manual_seed(3)
    tracked = affine or momentum is not None
    norm = kind(4, momentum=momentum, affine=affine, track_running_stats=tracked).to(dtype)
    if affine:
        nn.init.normal_(norm.weight)
        nn.init.normal_(norm.bias)
    return norm


def _norm_cases() -> list[tuple[tuple[int, ...], float | None, bool]]:
    return list(itertools.product(SHAPES.values(), (0.1, None), (True, False)))


def _run_norm(norm: nn.Module, x: Tensor, upstream: Tensor) -> dict[str, Tensor]:
    """Two training steps and an eval forward; the gradients of the second step."""
    norm((x * 2 + 1).detach())
    x = x.detach().requires_grad_()
    y = norm(x)
    y.backward(upstream)
    grads = {f"grad_{name}": p.grad for name, p in norm.named_parameters()}
    norm.eval()
    out = {"y": y.detach(), "grad_x": x.grad, "evaluated": norm(x).detach(), **grads}
    return {**out, **norm.state_dict()}


def _norm_data(shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    ones = [1] * len(shape)
    x = torch.randn(12, 4, *shape, generator=generator, dtype=torch.float64)
    x *= torch.rand(12, 1, *ones, generator=generator)
    x += torch.arange(4.0).view(1, 4, *ones)
    return x, torch.randn(x.shape, generator=generator, dtype=torch.float64)


def _norms(process, splits, fused):
    if fused:  # what a GPU does, its kernels by their formulas; in this process only
        sslpipe.models.sync_batchnorm._has_fused_kernels = lambda x: True
        for name, formula in SYNC_BATCHNORM.items():
            setattr(torch, name, formula)
    wrapped = DistributedDataParallel(nn.BatchNorm1d(2))
    with pytest.raises(ValueError, match="before DDP wraps the model"):
        sync_batchnorm(wrapped, 2)
    answers = []
    for split in splits:
        for shape, momentum, affine in _norm_cases():
            norm = sync_batchnorm(_one_norm(shape, torch.float64, momentum, affine), 2)
            assert isinstance(norm, SyncBatchNorm)
            x, upstream = (shares(t, split, process) for t in _norm_data(shape))
            answers.append(_run_norm(norm, x, upstream))
    return answers


@pytest.mark.promise(1)
@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("fused", [False, True])
def test_sync_batchnorm_equals_one_process_in_value_gradient_and_statistics(world, fused):
    splits = [split for split in [*SPLITS, (0, 12)] if len(split) == world]
    by_rank = run_processes(_norms, world, splits, fused)
    cases = [(split, *case) for split in splits for case in _norm_cases()]
    for i, (_, shape, momentum, affine) in enumerate(cases):
        norm = _one_norm(shape, torch.float64, momentum, affine)
        expected = _run_norm(norm, *_norm_data(shape))
        for key, value in expected.items():
            parts = [answers[i][key] for answers in by_rank]  # buffers: the same on every rank
            if key in ("y", "grad_x", "evaluated"):
                parts = [torch.cat(parts)]
            elif key.startswith("grad_"):
                parts = [torch.stack(parts).sum(0)]  # each rank's share
            for part in parts:
                torch.testing.assert_close(part, value, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_moments_keep_their_digits_beside_a_large_mean(memory_format: torch.memory_format) -> None:
    """float32 at mean 4096, spread 1: E[x^2] - E[x]^2 would be off by about 1."""
    torch.manual_seed(0)
    x = (torch.randn(64, 8, 16, 16) + 4096).to(memory_format=memory_format)
    mean, var, count = global_moments(x)
    exact_var, exact_mean = torch.var_mean(x.double(), dim=(0, 2, 3), correction=0)
    torch.testing.assert_close(mean, exact_mean, rtol=3e-6, atol=0)  # as nn.BatchNorm sums it
    torch.testing.assert_close(var, exact_var, rtol=1e-4, atol=0)
    assert count == 64 * 16 * 16


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_dtype_and_memory_format_with_float32_statistics(dtype):
    torch.manual_seed(0)
    x = torch.randn(8, 4, 6, 6, dtype=dtype).to(memory_format=torch.channels_last)
    norm, plain = SyncBatchNorm(4), nn.BatchNorm2d(4)
    wide = x.detach().float().requires_grad_()
    x.requires_grad_()
    y, expected = norm(x), plain(wide)
    upstream = torch.randn(y.shape).to(dtype)
    y.backward(upstream)
    expected.backward(upstream.float())
    assert y.dtype is dtype
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert x.grad.is_contiguous(memory_format=torch.channels_last)
    one_rounding = torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), expected, rtol=one_rounding, atol=one_rounding)
    torch.testing.assert_close(x.grad.float(), wide.grad, rtol=one_rounding, atol=one_rounding)
    torch.testing.assert_close(norm.running_var, plain.running_var, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(norm.running_mean, plain.running_mean, rtol=1e-5, atol=1e-6)


def test_conversion_keeps_names_values_mode_and_order_of_a_real_backbone() -> None:
    from torchvision.models import resnet18

    torch.manual_seed(0)
    plain = resnet18(num_classes=3)
    torch.manual_seed(0)
    model = resnet18(num_classes=3)
    assert sync_batchnorm(model, 1) is model
    assert not any(isinstance(m, SyncBatchNorm) for m in model.modules())
    parameters = list(model.parameters())
    model.layer1.eval()
    model = sync_batchnorm(model, 2)
    assert sum(isinstance(m, SyncBatchNorm) for m in model.modules()) == 20
    assert not any(isinstance(m, nn.BatchNorm2d) for m in model.modules())
    assert all(a is b for a, b in zip(parameters, model.parameters(), strict=True))
    assert list(model.state_dict()) == list(plain.state_dict())
    assert not model.layer1[0].bn1.training
    assert model.layer2[0].bn1.training
    plain.load_state_dict(model.state_dict(), strict=True)
    x = torch.randn(4, 3, 32, 32, dtype=torch.float64)
    model.double().train(), plain.double()
    torch.testing.assert_close(model(x), plain(x), rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(model.eval()(x), plain.eval()(x), rtol=1e-9, atol=1e-9)


def test_conversion_keeps_timms_activation_and_refuses_an_unknown_norm() -> None:
    from timm.layers import BatchNormAct2d

    torch.manual_seed(0)
    x = torch.randn(4, 3, 5, 5)
    norm = sync_batchnorm(BatchNormAct2d(3), 2)
    assert isinstance(norm, SyncBatchNorm)
    torch.testing.assert_close(norm(x), F.relu(nn.BatchNorm2d(3)(x)))

    class Doubled(nn.BatchNorm2d):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    with pytest.raises(TypeError, match="Doubled is a BatchNorm with a forward of its own"):
        sync_batchnorm(nn.Sequential(Doubled(3)), 2)
