"""One training step in micro-batches: peak memory and time against the whole batch at once.

    python -m benchmarks.gradient_cache [--batch 128] [--micro 128,32,8] [--px 32] [--json FILE]

SimCLR with torchvision's ResNet-18 (32 px: 3x3 stem, no max-pool), float32, NT-Xent, fused views;
each size in a fresh process of one thread. memory: the step's peak resident memory over that
before it, when weights, gradients and uint8 images are there already: activations, views,
workspaces. time: the second step. The first size is what ratios refer to. Linux only (reads /proc).
"""

import argparse
import json
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from benchmarks.memory import memory_mb
from sslpipe.augment.params import draws
from sslpipe.augment.two_views import FusedViews
from sslpipe.data.pipeline import Batch
from sslpipe.losses import NTXentLoss
from sslpipe.models.backbones import build_backbone
from sslpipe.models.simclr import SimCLR
from sslpipe.recipe.base import Component
from sslpipe.recipe.pretrain import Projector
from sslpipe.run.gradient_cache import PooledStatistics, cached_backward, micro_batch_rows


def measure(images: int, micro_batch: int, px: int) -> dict[str, float]:
    """Seconds and MB of one step, in this process."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = SimCLR(build_backbone(Component(kind="torchvision/resnet18"), crop_px=px), Projector())
    model = model.to(memory_format=torch.channels_last)
    augment, loss_fn = FusedViews("simclr_small", px), NTXentLoss()

    def step(images: int, micro_batch: int) -> float:
        ids, sizes = torch.arange(images), torch.full((images, 2), px)
        pixels = torch.randint(0, 256, (images, 3, px, px), dtype=torch.uint8)
        batch = Batch(pixels, sizes, torch.full((images,), -1), ids, ids, 0)
        drawn = draws(0, 0, ids, sizes, augment.specs)

        def make_views(rows: Tensor) -> Tensor:
            return augment(batch.rows(rows), drawn.rows(torch.cat([rows, rows + images])))

        Path("/proc/self/clear_refs").write_text("5")  # the peak starts from here
        begin_s = time.perf_counter()
        if micro_batch == images:
            loss_fn(*model(augment(batch, drawn)).chunk(2)).backward()
        else:
            cached_backward(
                model,
                statistics,
                micro_batch_rows(images, 1, images // micro_batch),
                make_views=make_views,
                compute_loss=partial(loss_fn, ids=batch.source_ids),
                backward=lambda loss: loss.backward(),
                seed=lambda micro_batch: None,
            )
        return time.perf_counter() - begin_s

    statistics = PooledStatistics(model, torch.zeros(2, 3, px, px))
    step(4, 4)  # imports, kernels chosen, gradients allocated
    before = memory_mb("VmRSS")
    step(images, micro_batch)
    return {"mb": memory_mb("VmHWM") - before, "s": step(images, micro_batch)}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--batch", type=int, default=128)
    parser.add_argument("--micro", default="128,32,8")
    parser.add_argument("--px", type=int, default=32)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--one", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one:
        print(json.dumps(measure(arguments.batch, int(arguments.micro), arguments.px)))
        return

    records: list[dict[str, Any]] = []
    print(f"{'batch':>6} {'micro':>6} {'MB':>8} {'less':>7} {'s':>7} {'time':>6}")
    for size in arguments.micro.split(","):
        command = [sys.executable, "-m", "benchmarks.gradient_cache", "--one", "--micro", size]
        command += ["--batch", str(arguments.batch), "--px", str(arguments.px)]
        output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
        result = json.loads(output.splitlines()[-1])
        records.append({"batch": arguments.batch, "micro_batch": int(size), **result})
        less, slower = records[0]["mb"] / result["mb"], result["s"] / records[0]["s"]
        print(
            f"{arguments.batch:>6} {size:>6} {result['mb']:>8.1f} {less:>6.1f}x"
            f" {result['s']:>7.2f} {slower:>5.2f}x"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(records, indent=2) + "\n")


if __name__ == "__main__":
    main()
