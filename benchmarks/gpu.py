"""What needs a CUDA device: right as on the CPU, and how fast. Without one it says what it skips.

    python -m benchmarks.gpu [--device cuda] [--json docs/gpu.json]

Each part compares with a reference on the CPU and then takes the median of five times. NCCL and the
global BatchNorm take two devices or more; nvJPEG takes the extra `nvjpeg`.
`--device cpu` runs the same code small, on the CPU, to try the program itself: its times mean
nothing.
A part whose numbers are wrong is an error at the end.
"""

import argparse
import io
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch import nn

from benchmarks.views import MEAN, STD, hardware
from sslpipe.augment.params import draws
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.decode import Buffer, decode
from sslpipe.data.nvjpeg import DeviceDecoder
from sslpipe.data.pipeline import Batch
from sslpipe.evaluation.neighbours import nearest
from sslpipe.losses import NTXentLoss
from sslpipe.models.backbones import build_backbone
from sslpipe.models.simclr import SimCLR
from sslpipe.models.sync_batchnorm import sync_batchnorm
from sslpipe.recipe.base import Component
from sslpipe.recipe.pretrain import Projector


class Skipped(Exception):
    """A part that this machine cannot run, and why."""


def seconds(call: Callable[[], Any], device: torch.device) -> float:
    """Median of five, after two that do not count."""
    times = []
    for _ in range(7):
        begin_s = time.perf_counter()
        call()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - begin_s)
    return statistics.median(times[2:])


def fused_views(device: torch.device) -> dict[str, float]:
    """Both views of photographs of 256 px at 224 px, against the same on the CPU."""
    images, px = (256, 224) if device.type == "cuda" else (4, 32)
    augment = FusedViews("simclr", px, MEAN, STD)
    torch.manual_seed(0)
    ids, sizes = torch.arange(images), torch.full((images, 2), px + 32)
    pixels = torch.randint(0, 256, (images, 3, px + 32, px + 32), dtype=torch.uint8)
    batch = Batch(pixels, sizes, ids, ids, ids, 0)
    drawn = draws(0, 0, ids, sizes, augment.specs)
    few = Batch(pixels[:4], sizes[:4], ids[:4], ids[:4], ids[:4], 0)
    few_drawn = draws(0, 0, ids[:4], sizes[:4], augment.specs)
    expected = augment(few, few_drawn)
    augment, moved = augment.to(device), batch.to(device)
    error = float((augment(few.to(device), few_drawn).cpu() - expected).abs().max())
    time_s = seconds(lambda: augment(moved, drawn), device)
    return {"error": error, "allowed": 1e-3, "images_per_s": images / time_s}


def nt_xent(device: torch.device) -> dict[str, float]:
    """Loss and gradient of 4,096 images in 128 dimensions, against float64 on the CPU."""
    images = 4096 if device.type == "cuda" else 64
    torch.manual_seed(0)
    z = torch.randn(2, images, 128)

    def run(z: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        z = z.detach().requires_grad_()
        loss = NTXentLoss(0.1)(z[0], z[1])
        (gradient,) = torch.autograd.grad(loss, z)
        return loss.detach().cpu().double(), gradient.cpu().double()

    expected_loss, expected_gradient = run(z.double())
    on_device = z.to(device)
    loss, gradient = run(on_device)
    error = float((gradient - expected_gradient).norm() / expected_gradient.norm())
    error = max(error, float((loss - expected_loss).abs()))
    numbers = {"error": error, "allowed": 1e-3}
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        run(on_device)
        numbers["extra_mib"] = (torch.cuda.max_memory_allocated(device) - before) / 2**20
    return {**numbers, "ms": 1e3 * seconds(lambda: run(on_device), device)}


def bf16(device: torch.device) -> dict[str, float]:
    """A training step of ResNet-18 at 96 px: bf16's projections near fp32's, the speed of both."""
    images, px = (256, 96) if device.type == "cuda" else (4, 32)
    backbone = build_backbone(Component(kind="torchvision/resnet18"), crop_px=px)
    model = SimCLR(backbone, Projector()).to(device).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    loss_fn = NTXentLoss(0.5)
    torch.manual_seed(0)
    views = torch.rand(2 * images, 3, px, px, device=device)
    views = views.contiguous(memory_format=torch.channels_last)

    def step(lower: bool) -> None:
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=lower):
            z = model(views)
        loss = loss_fn(*z.float().chunk(2))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    with torch.no_grad():
        z = model(views)
        with torch.autocast(device.type, dtype=torch.bfloat16):
            error = 1 - float(nn.functional.cosine_similarity(z, model(views).float()).mean())
    times_s = {name: seconds(lambda on=on: step(on), device) for name, on in _PRECISIONS.items()}  # type: ignore[misc]
    speeds = {f"images_per_s_{name}": images / time_s for name, time_s in times_s.items()}
    return {"error": error, "allowed": 0.05, **speeds}


_PRECISIONS = {"fp32": False, "bf16": True}


def knn(device: torch.device) -> dict[str, float]:
    """20 nearest of 100,000 rows of 512 dimensions for 2,000 queries: the CPU's own."""
    rows, queries = (100_000, 2000) if device.type == "cuda" else (500, 50)
    torch.manual_seed(0)
    bank, wanted = torch.randn(rows, 512), torch.randn(queries, 512)
    expected = nearest(bank, wanted[:200], 20).indices
    bank, wanted = bank.to(device), wanted.to(device)
    actual = nearest(bank, wanted[:200], 20).indices.cpu()
    time_s = seconds(lambda: nearest(bank, wanted, 20), device)
    wrong = float((actual != expected).double().mean())
    return {"error": wrong, "allowed": 0.0, "queries_per_s": queries / time_s}


def nvjpeg(device: torch.device) -> dict[str, float]:
    """data.decoder = "nvjpeg", 128 JPEGs in one call, against the CPU's decoder on one thread."""
    rng = np.random.default_rng(0)
    smooth = np.kron(rng.integers(0, 256, (16, 16, 3)), np.ones((16, 16, 1))).astype(np.uint8)
    file = io.BytesIO()
    Image.fromarray(smooth).save(file, "JPEG", quality=90)
    many: list[Buffer] = [file.getvalue()] * 128
    expected = decode(many[0], 256).transpose(1, 2, 0).astype(np.int16)
    try:
        decoder = DeviceDecoder(device)
        first = decoder(many)[0]
    except ImportError:
        raise Skipped("torchcodec is not installed: pip install 'sslpipe[nvjpeg]'") from None
    except (RuntimeError, OSError) as error:
        raise Skipped(f"torchcodec has no nvJPEG: {str(error).splitlines()[0]}") from None
    cpu_s = seconds(lambda: [decode(raw, 256) for raw in many], device)
    return {
        "error": float(np.abs(first - expected).mean()),
        "allowed": 2.0,  # levels, on average: decoders upsample colour differently
        "images_per_s": len(many) / seconds(lambda: decoder(many), device),
        "cpu_images_per_s": len(many) / cpu_s,
    }


def nccl(device: torch.device) -> dict[str, float]:
    """NT-Xent over all devices: loss and gradient of one process on the whole batch."""
    return _over_devices(device, "nccl")


def global_batchnorm(device: torch.device) -> dict[str, float]:
    """BatchNorm over all devices: outputs of one process on the whole batch."""
    return _over_devices(device, "batchnorm")


def _over_devices(device: torch.device, part: str) -> dict[str, float]:
    world = torch.cuda.device_count() if device.type == "cuda" else 2
    if world < 2:
        raise Skipped(f"needs two CUDA devices, there is {world}")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="29517")
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (world, device.type, part, answers), nprocs=world)
    actual = [answers.get() for _ in range(world)]
    return {
        "error": max(error for error, _ in actual),
        "allowed": 1e-4,
        "processes": world,
        "ms": 1e3 * max(time_s for _, time_s in actual),
    }


def _rank(rank: int, world: int, kind: str, part: str, answers: Any) -> None:
    device = torch.device(kind, rank) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if kind == "cuda" else "gloo"
    dist.init_process_group(backend, rank=rank, world_size=world)
    torch.manual_seed(0)
    whole = torch.randn(2, 32 * world, 64)
    mine = slice(32 * rank, 32 * (rank + 1))
    if part == "nccl":
        z = whole[:, mine].to(device).requires_grad_()

        def run() -> torch.Tensor:
            (gradient,) = torch.autograd.grad(NTXentLoss(0.1)(z[0], z[1]), z)
            return gradient / world

        everything = whole.double().requires_grad_()
        expected = _one_process(everything)[:, mine]
    else:
        norm = sync_batchnorm(nn.BatchNorm1d(64), world).to(device)

        def run() -> torch.Tensor:
            output: torch.Tensor = norm(whole[0, mine].to(device))
            return output

        expected = nn.BatchNorm1d(64).double()(whole[0].double())[mine]
    actual = run().detach().cpu().double()
    error = float((actual - expected).detach().norm() / expected.norm().detach())
    answers.put((error, seconds(run, device)))
    dist.barrier()
    dist.destroy_process_group()


def _one_process(z: torch.Tensor) -> torch.Tensor:
    """The gradient by the textbook, in float64: cosines of everything with everything."""
    n = z.shape[1]
    unit = nn.functional.normalize(z.flatten(0, 1), dim=1)  # (2N, D)
    logits = (unit @ unit.T / 0.1).fill_diagonal_(-torch.inf)
    positive = torch.arange(2 * n).roll(n)
    (gradient,) = torch.autograd.grad(nn.functional.cross_entropy(logits, positive), z)
    return gradient


PARTS = (fused_views, nt_xent, bf16, knn, nvjpeg, nccl, global_batchnorm)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--device", default="cuda", choices=("cuda", "cpu"))
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    device = torch.device(arguments.device)
    absent = device.type == "cuda" and not torch.cuda.is_available()
    facts: dict[str, Any] = {"machine": hardware(), "device": device.type, "parts": {}}
    if device.type == "cuda" and not absent:
        names = [torch.cuda.get_device_name(k) for k in range(torch.cuda.device_count())]
        facts["machine"] |= {"devices": names, "cuda": torch.version.cuda}
    bad = 0
    for part in PARTS:
        try:
            if absent:
                raise Skipped("torch sees no CUDA device")
            numbers = part(device)
            wrong = not numbers["error"] <= numbers["allowed"]
            bad += wrong
            text = "  ".join(f"{key} {value:.4g}" for key, value in numbers.items())
            print(f"{part.__name__:17} {'WRONG' if wrong else 'right'}    {text}", flush=True)
            facts["parts"][part.__name__] = numbers
        except Skipped as reason:
            print(f"{part.__name__:17} skipped  {reason}", flush=True)
            facts["parts"][part.__name__] = {"skipped": str(reason)}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(json.dumps(facts, indent=1) + "\n")
    return int(bad > 0)


if __name__ == "__main__":
    sys.exit(main())
