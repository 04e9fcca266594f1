"""One training step in micro-batches: peak memory and time against the whole batch at once.

    python -m benchmarks.gradient_cache [--batch 128] [--micro 128,32,8] [--px 32] [--json FILE]

SimCLR with torchvision's ResNet-18 (32 px: 3x3 stem, no max-pool), float32, NT-Xent, fused views;
each size in a fresh process of one thread. memory: the step's peak resident memory over that
before it, when weights, gradients and uint8 images are there already: activations, views,
workspaces. time: the second step. The first size is what ratios refer to. Linux only (reads /proc).
"""

import time
from functools import partial
from typing import Any

import torch
from torch import Tensor

from benchmarks.common import Peak, in_fresh_process, parser, print_table, save
from sslpipe.augment.ops import draws
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
    peak = Peak()
    step(images, micro_batch)
    return {"mb": peak.extra_mb(), "s": step(images, micro_batch)}


def main() -> None:
    parse = parser(__doc__)
    parse.add_argument("--batch", type=int, default=128)
    parse.add_argument("--micro", default="128,32,8")
    parse.add_argument("--px", type=int, default=32)
    given = parse.parse_args()
    records: list[dict[str, Any]] = []
    for size in map(int, given.micro.split(",")):
        result = in_fresh_process(measure, given.batch, size, given.px)
        records.append({"batch": given.batch, "micro_batch": size, **result})
    first, rows = records[0], []
    for record in records:
        less, slower = first["mb"] / record["mb"], record["s"] / first["s"]
        cells = [record["micro_batch"], f"{record['mb']:.1f}", f"{less:.1f}x"]
        rows.append([*cells, f"{record['s']:.2f}", f"{slower:.2f}x"])
    print_table(["micro-batch", "MB", "less", "s", "time"], rows)
    save(given.json, records)


if __name__ == "__main__":
    main()
