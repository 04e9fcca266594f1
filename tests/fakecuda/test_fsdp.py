"""Runs on "cuda" that FSDP2 shards: no step waits, and each rank's parts move as on a CPU."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.fakecuda.test_waits import waits_of_steps
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda
from tests.helpers.runs import write_recipe

pytestmark = needs_fakecuda

SHARDED = {"ACCELERATE_USE_FSDP": "true", "FSDP_VERSION": "2", "FAKE_VALUES": "0"}
RUNS = {
    "lars bf16": ("optim.kind=lars", "optim.precision=bf16", "optim.clip_norm=1"),
    "adamw, average, micro-batches, bf16 sums": (
        *("optim.kind=adamw", "optim.clip_norm=1", "data.micro_batch=8", "optim.ema=0.9"),
        "optim.gradient_compression=bf16",
    ),
}


@pytest.mark.slow
def test_no_step_of_a_sharded_run_waits_for_the_device(tmp_path):
    runs = {name: ("steps=4", *settings) for name, settings in RUNS.items()}
    arguments = write_recipe(tmp_path), write_dataset(tmp_path / "data"), tmp_path, runs, (1, 2)
    for found in run_on_cuda(waits_of_steps, *arguments, ranks=2, env=SHARDED, timeout_s=600):
        assert found == dict.fromkeys(runs, (0, {}))


def _stepped(kind: str, l2_to_init: float, device: str, *, cut: bool) -> list[Tensor]:
    """Weights after three steps with clipping; where they are cut, after a refused fourth."""
    from torch.distributed.tensor import distribute_tensor

    from sslpipe.models.backbones import small_resnet
    from sslpipe.models.simclr import SimCLR
    from sslpipe.optim import build_optimizer, clip_gradient, set_lr
    from sslpipe.recipe.base import Optim
    from sslpipe.recipe.pretrain import Projector
    from sslpipe.run.fsdp import shard

    torch.manual_seed(0)
    model: nn.Module = SimCLR(small_resnet((8, 16)), Projector(hidden_dim=16, out_dim=8))
    if cut:
        model = shard(model, torch.device(device))
    parameters: list[Any] = list(model.parameters())
    optim = Optim(kind=kind, peak_lr=0.1, weight_decay=0.01, trust_coefficient=0.02)
    start = {"pretrained": "backbone", "l2_to_init": l2_to_init} if l2_to_init else {}
    optimizer: Any = build_optimizer(model, optim, **start)
    generator = torch.Generator().manual_seed(1)
    for step in range(4 if cut else 3):
        set_lr(optimizer, 0.01 * (1 + step))
        for p in parameters:
            grad: Any = torch.randn(p.shape, generator=generator).to(device)
            if cut:
                grad = distribute_tensor(grad, p.device_mesh, p.placements, src_data_rank=None)
            p.grad = grad
        assert clip_gradient(optimizer, parameters, 2.0) > 20
        if step == 3:
            optimizer.found_inf = torch.ones((), device=device)
        optimizer.step()
        optimizer.grad_scale = None
        optimizer.zero_grad()
    return [(p.full_tensor() if cut else p).detach().cpu() for p in parameters]


def _whole_and_cut(kind: str, l2_to_init: float) -> tuple[list[Tensor], list[Tensor]]:
    from sslpipe.run.launch import join_processes

    join_processes(cpu=False, timeout_s=60, sharded=True)
    arguments = kind, l2_to_init
    return _stepped(*arguments, "cpu", cut=False), _stepped(*arguments, "cuda", cut=True)


@pytest.mark.parametrize(
    ("kind", "l2_to_init"), [("sgd", 0.1), ("adamw", 0.1), ("adamw", 0.0), ("lars", 0.1)]
)
def test_weights_that_are_cut_are_stepped_as_whole_ones_on_a_cpu(kind, l2_to_init):
    env = {"ACCELERATE_USE_FSDP": "true"}
    for whole, cut in run_on_cuda(_whole_and_cut, kind, l2_to_init, ranks=2, env=env):
        for a, b in zip(whole, cut, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)
