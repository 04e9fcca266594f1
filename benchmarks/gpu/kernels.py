"""The parts that call one function, or take several GPUs, each against a reference."""

import os
import socket
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from benchmarks.gpu.common import Bench, Figures, check, relative
from benchmarks.nt_xent import TEMPERATURE, textbook
from benchmarks.views import MEAN, STD, Case, kornia, ours, torchvision
from sslpipe.augment.ops import draws
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.pipeline import Batch
from sslpipe.errors import RecipeError
from sslpipe.evaluation.neighbours import nearest
from sslpipe.losses import NTXentLoss
from sslpipe.models.sync_batchnorm import SyncBatchNorm, sync_batchnorm

ROWS = 32  # of a process
OURS = NTXentLoss(temperature=TEMPERATURE)


def gradient(loss_fn: Callable[[Tensor, Tensor], Tensor], z: Tensor) -> Tensor:
    """Of both views' rows, z (2, N, D)."""
    z = z.detach().requires_grad_()
    return torch.autograd.grad(loss_fn(z[0], z[1]), z)[0]


def nt_xent(bench: Bench) -> Figures:
    """Loss and gradient in 128 dimensions, to 2N = 131,072; checked in float64 at 2N = 2,048.

    Beside the largest its bare products, by the same sizes of tiles: two units of (2N)^2 D
    multiply-adds of the symmetric algorithm, in bf16 and in float32 with TF32.
    """
    torch.manual_seed(0)
    z = torch.randn(2, bench.size(1024, 16), 128)
    error = relative(gradient(OURS, z.to(bench.device)), gradient(textbook, z.double()))
    figures = check("gradient", error, 1e-3)
    for images in bench.size((256, 2048, 16_384, 65_536), (8, 32)):
        z = torch.randn(2, images, 128, device=bench.device)
        bench.forget_memory()
        time_s = bench.seconds(lambda z=z: gradient(OURS, z), rounds=3)  # type: ignore[misc]
        figures[f"2N = {2 * images:,}: ms"] = 1e3 * time_s
        figures |= {f"2N = {2 * images:,}: {key}": v for key, v in bench.peak_gib().items()}
    rows = 2 * images
    for what, dtype in {"bf16": torch.bfloat16, "TF32": torch.float32}.items():
        products_s = products_seconds(bench, rows, 128, dtype)
        figures[f"2N = {rows:,}: bare products, {what}: ms"] = 1e3 * products_s
        figures[f"2N = {rows:,}: of the bare products' rate, {what} %"] = 100 * products_s / time_s
    return figures


def products_seconds(bench: Bench, rows: int, width: int, dtype: torch.dtype) -> float:
    """Seconds of two products of (rows)^2 x width multiply-adds, in tiles of 8,192 rows."""
    z = torch.randn(rows, width, device=bench.device, dtype=dtype)
    tile = min(rows, 8192)
    out = torch.empty(tile, rows, device=bench.device, dtype=dtype)
    gradient = torch.empty(tile, width, device=bench.device, dtype=dtype)

    def products() -> None:
        for part in z.split(tile):
            torch.mm(part, z.T, out=out)
            torch.mm(out, z, out=gradient)

    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        return bench.seconds(products, rounds=3)
    finally:
        torch.set_float32_matmul_precision(before)


def knn(bench: Bench) -> Figures:
    """20 nearest in a bank of 1.28 M x 2,048, or as much of it as fits; a small one as the CPU."""
    torch.manual_seed(0)
    bank, queries = torch.randn(bench.size(20_000, 300), 512), torch.randn(bench.size(200, 20), 512)
    expected = nearest(bank, queries, 20).indices
    actual = nearest(bank.to(bench.device), queries.to(bench.device), 20).indices.cpu()
    figures = check("other neighbours than the CPU's", float((actual != expected).sum()), 0)
    rows, width, count = bench.size((1_281_167, 2048, 10_000), (3000, 64, 100))
    while True:
        try:
            time_s = _search_seconds(bench, rows, count, width)
            break
        except torch.OutOfMemoryError:
            if rows < 10_000:
                raise
            rows //= 2
    figures |= {"rows": rows, "dimensions": width, "queries/s": count / time_s}
    bank = torch.empty(rows // 2, width, device=bench.device)  # read and written: its bytes once
    copy_s = bench.seconds(lambda: bank.copy_(bank.clone()), rounds=3) / 2
    figures |= {"a copy of half of the rows: ms": 1e3 * copy_s, "search: ms": 1e3 * time_s}
    return figures | bench.peak_gib()


def _search_seconds(bench: Bench, rows: int, count: int, width: int) -> float:
    bench.forget_memory()
    bank = torch.randn(rows, width, device=bench.device)
    queries = torch.randn(count, width, device=bench.device)
    return bench.seconds(lambda: nearest(bank, queries, 20), rounds=1)


def batchnorm(bench: Bench) -> Figures:
    """The BatchNorm of several processes on one: output, gradients and time as nn.BatchNorm2d's."""
    figures: Figures = {}
    shape = bench.size((256, 256, 56, 56), (4, 8, 6, 6))
    for dtype, allowed in ((torch.float32, 1e-4), (torch.bfloat16, 2e-2)):
        name = str(dtype).removeprefix("torch.")
        times_s, values = [], []
        for kind in (nn.BatchNorm2d, SyncBatchNorm):
            torch.manual_seed(0)
            x = torch.randn(shape, device=bench.device).add_(3).to(dtype)
            x = x.contiguous(memory_format=torch.channels_last).requires_grad_()
            upstream = torch.randn_like(x)
            norm = kind(shape[1]).to(bench.device)

            def both(norm=norm, x=x, upstream=upstream) -> tuple[Tensor, ...]:  # type: ignore[no-untyped-def]
                y = norm(x)
                return (y, *torch.autograd.grad(y, (x, norm.weight, norm.bias), upstream))

            first = both()
            values.append([v.detach() for v in (*first, norm.running_mean, norm.running_var)])
            del first
            times_s.append(bench.seconds(both))
        for expected, actual, what in zip(
            *values,
            ("output", "gradient", "weight's", "bias's", "running mean", "running variance"),
            strict=True,
        ):
            figures |= check(f"{name}: {what}", relative(actual, expected), allowed)
        figures |= {
            f"{name}: ms": 1e3 * times_s[1],
            f"{name}: nn.BatchNorm2d: ms": 1e3 * times_s[0],
        }
    return figures


def views(bench: Bench) -> Figures:
    """Milliseconds for both views of a batch, as float32; ours checked against the CPU's first."""
    case = bench.size(Case(256, 375, 500, 224), Case(4, 48, 64, 32))
    name = bench.device.type
    contenders: dict[str, Callable[[], Callable[[], Any]]] = {}
    for kernels in ("torch", "triton"):
        label = f"ours, kernels = {kernels}"
        contenders[label] = partial(ours, case, name, kernels=kernels)
        contenders[f"{label}, as in training"] = partial(planned, case, bench, kernels)
    contenders |= {
        "kornia, slice": partial(kornia, case, name, cropping="slice"),
        "kornia, resample": partial(kornia, case, name, cropping="resample"),
        "torchvision v2, image by image": partial(torchvision, case, name, form="float"),
    }
    figures: Figures = {"images": case.count}
    for kernels in ("torch", "triton"):
        try:
            error = difference(bench.device, case._replace(count=4), kernels)
        except RecipeError as refused:
            figures[f"ours, kernels = {kernels}"] = f"skipped: {refused}".partition(";")[0]
            for label in [label for label in contenders if f"kernels = {kernels}" in label]:
                del contenders[label]
        else:
            figures |= check(f"ours, kernels = {kernels}", error, 1e-3)
    for label, make in contenders.items():
        bench.forget_memory()
        time_s = bench.seconds(make())
        figures |= {f"{label}: ms": 1e3 * time_s, f"{label}: images/s": case.count / time_s}
        figures |= {f"{label}: {key}": value for key, value in bench.peak_gib().items()}
    return figures


def planned(case: Case, bench: Bench, kernels: str) -> Callable[[], Any]:
    """As a run under bf16 makes them: planned and sent by the loader's threads, written in bf16."""
    augment = FusedViews("simclr", case.crop_px, MEAN, STD, kernels=kernels).to(bench.device)
    sent = augment.prepare(batch_of(case), seed=0, number=0).to(bench.device)
    return partial(augment, sent, dtype=torch.bfloat16)


def difference(device: torch.device, case: Case, kernels: str) -> float:
    """Largest difference from the CPU's views, in units of the normalised views."""
    batch = batch_of(case)
    reference = FusedViews("simclr", case.crop_px, MEAN, STD, kernels="torch")
    drawn = draws(0, 0, batch.ids, batch.sizes, reference.specs)
    augment = FusedViews("simclr", case.crop_px, MEAN, STD, kernels=kernels).to(device)
    return float((augment(batch.to(device), drawn).cpu() - reference(batch, drawn)).abs().max())


def batch_of(case: Case) -> Batch:
    images = case.images().contiguous(memory_format=torch.channels_last)
    ids, sizes = torch.arange(case.count), torch.tensor([[case.height, case.width]] * case.count)
    return Batch(images, sizes, ids, ids, ids, 0)


def several_gpus(bench: Bench) -> Figures:
    """Gradient of NT-Xent, output and gradient of BatchNorm: those of one process in float64."""
    bench.needs_cuda(2)
    world = torch.cuda.device_count()
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    answers = torch.multiprocessing.get_context("spawn").SimpleQueue()
    torch.multiprocessing.spawn(_rank, (world, port, answers), nprocs=world)
    figures: Figures = {"processes": world}
    for errors in zip(*(answers.get() for _ in range(world)), strict=True):
        what = errors[0][0]
        figures |= check(what, max(error for _, error in errors), 1e-4)
    return figures


def _rank(rank: int, world: int, port: int, answers: Any) -> None:
    device = torch.device("cuda", rank)
    torch.cuda.set_device(device)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("nccl", rank=rank, world_size=world, device_id=device)
    torch.manual_seed(0)
    whole, upstream = torch.randn(2, ROWS * world, 64), torch.randn(ROWS * world, 64)
    mine = slice(ROWS * rank, ROWS * (rank + 1))

    actual = gradient(OURS, whole[:, mine].to(device)) / world
    errors = [("NT-Xent's gradient", relative(actual, gradient(textbook, whole.double())[:, mine]))]

    rows = whole[0].double().requires_grad_()
    y = nn.BatchNorm1d(64).double()(rows)
    (of_rows,) = torch.autograd.grad(y, rows, upstream.double())
    own = whole[0, mine].to(device).requires_grad_()
    output = sync_batchnorm(nn.BatchNorm1d(64), world).to(device)(own)
    (of_own,) = torch.autograd.grad(output, own, upstream[mine].to(device))
    errors.append(("BatchNorm's output", relative(output, y[mine])))
    errors.append(("BatchNorm's gradient", relative(of_own, of_rows[mine])))
    answers.put(errors)
    dist.barrier()
    dist.destroy_process_group()
