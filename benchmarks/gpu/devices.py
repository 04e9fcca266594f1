"""What takes several GPUs: NT-Xent and BatchNorm over NCCL, against one process on all rows."""

import os
import socket
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from benchmarks.gpu.common import Bench, Figures, check, relative
from benchmarks.gpu.kernels import textbook_gradient
from sslpipe.losses import NTXentLoss
from sslpipe.models.sync_batchnorm import sync_batchnorm

ROWS = 32  # of a process


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

    z = whole[:, mine].to(device).requires_grad_()
    (gradient,) = torch.autograd.grad(NTXentLoss(0.1)(z[0], z[1]), z)
    expected = textbook_gradient(whole.double().requires_grad_())[:, mine]
    errors = [("NT-Xent's gradient", relative(gradient / world, expected))]

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
