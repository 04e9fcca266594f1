"""A training step beside peers': same card, images, batch, network and precision."""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from benchmarks.common import absent
from benchmarks.gpu.common import Bench, Figures
from benchmarks.gpu.runs import resnet50_training, trained
from benchmarks.nt_xent import lightly as lightly_loss
from benchmarks.nt_xent import textbook
from benchmarks.step import Loss
from benchmarks.views import MEAN, STD, Case, kornia_augment
from sslpipe.parts import build_model
from sslpipe.recipe.pretrain import Recipe

SGD = "optim={{kind='sgd', peak_lr=0.03, precision='{}'}}"
LR, MOMENTUM = 0.03, 0.9
WARM_STEPS, STEPS = 3, 12
Batches = DataLoader[Any]


def peers(bench: Bench) -> Figures:
    """ResNet-50, 256 JPEGs of 500 x 375 a step to 224 px, SGD, bf16: ours, kornia's, lightly's.

    kornia's: uint8 images by Pillow in as many workers as there are cores, its views on the
    device, the textbook's loss. lightly's: its transform in as many workers, and its loss,
    as its own example of SimCLR does. Both have our network and projector.
    """
    training = resnet50_training(bench)
    recipe, figures = trained(bench, training, SGD.format(bench.size("bf16", "fp32")))
    bench.keep({f"ours: {what}": value for what, value in figures.items()})
    paths = sorted((training.data.parent / "images").rglob("*.jpg"))
    crop_px = recipe.augment.crop_px
    case = bench.size(Case(256, 375, 500, crop_px), Case(8, 30, 40, crop_px))
    pixels: Dataset[Tensor] = Pixels(paths)
    views = kornia_augment(case, cropping="slice").to(bench.device)

    def kornia_views(images: Tensor) -> tuple[Tensor, Tensor]:
        floats = images.to(bench.device, non_blocking=True).float() / 255
        return views(floats), views(floats)

    with_kornia = measured(bench, recipe, loader(pixels, case.count), kornia_views, textbook)
    bench.keep({f"kornia: {what}": value for what, value in with_kornia.items()})
    if missing := absent({"lightly": "lightly"}):
        return bench.kept | {f"{missing[0]}: images/s": "not installed"}

    def lightly_views(pair: list[Tensor]) -> tuple[Tensor, Tensor]:
        first, second = (each.to(bench.device, non_blocking=True) for each in pair)
        return first, second

    transformed: Dataset[list[Tensor]] = Transformed(paths, crop_px)
    with_lightly = measured(
        bench, recipe, loader(transformed, case.count), lightly_views, lightly_loss()
    )
    return bench.kept | {f"lightly: {what}": value for what, value in with_lightly.items()}


class Pixels(Dataset[Tensor]):
    """Decoded images, (3, H, W) uint8."""

    def __init__(self, paths: list[Path]) -> None:
        self.paths = paths

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> Tensor:
        with Image.open(self.paths[number]) as image:
            return torch.from_numpy(np.array(image.convert("RGB"))).permute(2, 0, 1)


class Transformed(Dataset[list[Tensor]]):
    """Two views of each image by lightly's transform."""

    def __init__(self, paths: list[Path], crop_px: int) -> None:
        from lightly.transforms import SimCLRTransform

        self.paths = paths
        self.transform = SimCLRTransform(
            input_size=crop_px, sigmas=(0.1, 2.0), normalize={"mean": MEAN, "std": STD}
        )

    def __len__(self) -> int:
        return len(self.paths)

    def __getitem__(self, number: int) -> list[Tensor]:
        with Image.open(self.paths[number]) as image:
            return list(self.transform(image.convert("RGB")))


def loader(images: Dataset[Any], batch_size: int) -> Batches:
    return DataLoader(
        images,
        batch_size=batch_size,
        shuffle=True,
        drop_last=True,
        num_workers=len(os.sched_getaffinity(0)),
        pin_memory=torch.cuda.is_available(),
        persistent_workers=True,
    )


def epochs(batches: Batches) -> Iterator[Any]:
    while True:
        yield from batches


def measured(
    bench: Bench,
    recipe: Recipe,
    batches: Batches,
    views: Callable[[Any], tuple[Tensor, Tensor]],
    loss_fn: Loss,
) -> Figures:
    """Images a second and the wait for data, after the first steps."""
    bench.forget_memory()
    bf16 = recipe.optim.precision == "bf16"
    model: nn.Module = build_model(recipe, recipe.augment.crop_px).to(bench.device)
    model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=MOMENTUM)
    stream = epochs(batches)
    steps = bench.size(STEPS, 1)
    waited_s = begin_s = 0.0
    for step in range(WARM_STEPS + steps):
        if step == WARM_STEPS:
            bench.wait()
            begin_s = time.perf_counter()
            waited_s = 0.0
        asked_s = time.perf_counter()
        batch = next(stream)
        waited_s += time.perf_counter() - asked_s
        first, second = views(batch)
        both = torch.cat([first, second]).to(memory_format=torch.channels_last)
        with torch.autocast(bench.device.type, dtype=torch.bfloat16, enabled=bf16):
            z = model(both)
        z_a, z_b = z.float().chunk(2)
        loss_fn(z_a, z_b).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    bench.wait()
    elapsed_s = time.perf_counter() - begin_s
    images = steps * (batches.batch_size or 1)
    return {
        "images/s": images / elapsed_s,
        "waiting for data %": 100 * waited_s / elapsed_s,
        **bench.peak_gib(),
    }
