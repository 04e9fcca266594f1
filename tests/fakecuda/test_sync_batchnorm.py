"""BatchNorm over two GPUs costs a few kernels and no wait."""

from typing import Any

import torch
import torch.distributed as dist
import torchvision

from sslpipe.models.sync_batchnorm import sync_batchnorm
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda

pytestmark = needs_fakecuda
NORMS = 53  # of a ResNet-50


def _both_ways(synchronised: bool) -> dict[str, dict[str, int]]:
    from tests.fakecuda.runtime import counts, events, reset, section

    model: Any = torchvision.models.resnet50().cuda().to(memory_format=torch.channels_last)
    if synchronised:
        model = sync_batchnorm(model, 2)
    images = torch.zeros(4, 3, 64, 64, device="cuda").to(memory_format=torch.channels_last)
    for _ in range(2):  # the second allocates nothing
        reset()
        with section("forward"), torch.autocast("cuda", dtype=torch.bfloat16):
            z = model(images)
        with section("backward"):
            z.backward(torch.zeros_like(z))
        model.zero_grad()
    return counts(events())


def _plain_and_synchronised() -> list[dict[str, dict[str, int]]]:
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank())
    tables = [_both_ways(False), _both_ways(True)]
    dist.destroy_process_group()
    return tables


def test_sync_batchnorm_adds_few_operations_one_collective_each_way_and_no_wait():
    for plain, synchronised in run_on_cuda(
        _plain_and_synchronised, ranks=2, env={"FAKE_VALUES": "0"}
    ):
        for way in ("forward", "backward"):
            assert synchronised[way]["operations"] <= 1.4 * plain[way]["operations"]
            assert synchronised[way]["collectives"] == NORMS
            assert "waits" not in synchronised[way]
