"""The parts that train: speed of three recipes, and waits."""

import os
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest.mock import patch

import timm
import torch
from accelerate.state import AcceleratorState, GradientState

from benchmarks.gpu.common import Bench, Figures
from benchmarks.photographs import write_photographs
from sslpipe.api import train
from sslpipe.data.index import load_index
from sslpipe.export.load import FrozenBackbone
from sslpipe.export.named import open_init
from sslpipe.parts import build_model
from sslpipe.precision import AUTOCAST
from sslpipe.recipe.pretrain import Recipe
from sslpipe.recipe.reading import load_recipe
from sslpipe.run.log import read_metrics
from sslpipe.run.run import Run
from sslpipe.sharding.build import read_samples, write_shards
from sslpipe.sharding.sources import SourceOptions
from sslpipe.sharding.writer import Layout

MOBILE = "tf_efficientnet_lite0"
RECIPES = Path(__file__).parents[2] / "recipes"
NO_SAVES = ("run.save_steps=1000000", "data.holdout=0", "run.monitor_steps=0")
VARIANTS = ("run.compile=default", "run.compile=reduce-overhead", "optim.precision=fp16")
# what a CPU trains in a second; it takes the place of sizes, and no other setting
TINY = (
    *("data.batch_size=8", "data.num_streams=4", "data.shuffle_window=4", "data.canvas_px=32"),
    *("augment.crop_px=32", "backbone.kind='small_resnet'", "projector.hidden_dim=16"),
    *("optim.precision='fp32'", "optim.warmup_steps=0", "run.num_workers=1"),
)


def _data(bench: Bench, px: tuple[int, int], images: int) -> Path:
    return photographs(bench.folder, *bench.size((images, *px), (24, 40, 30)))


def _overrides(bench: Bench, *full: str) -> tuple[str, ...]:
    return bench.size((*full, f"run.num_workers={os.cpu_count()}"), TINY)


@dataclass(frozen=True)
class Training:
    """A recipe on a data set, with the steps of a log line."""

    recipe: str
    data: Path
    overrides: tuple[str, ...]
    log_steps: int
    init: FrozenBackbone | None = None


def resnet50(bench: Bench) -> Figures:
    """imagenet1k.toml: ResNet-50, 256 photographs of 500 x 375 a step to 224 px, LARS, bf16."""
    training = resnet50_training(bench)
    again = trained(bench, training, "run.deterministic=true")
    return end_to_end(bench, training) | {"run.deterministic: images/s": again[1]["images/s"]}


def resnet18(bench: Bench) -> Figures:
    """cifar10.toml: ResNet-18, 512 images of 32 px a step, SGD, bf16."""
    return end_to_end(bench, resnet18_training(bench))


def vit(bench: Bench) -> Figures:
    """ViT-S/16 on photographs of 500 x 375 to 224 px, AdamW, bf16."""
    return end_to_end(bench, vit_training(bench))


def mobile(bench: Bench) -> Figures:
    """adapt_mobile.toml: EfficientNet-Lite0, 128 images a step to 64 px, bf16."""
    return trained(bench, mobile_training(bench))[1]


def resnet50_variants(bench: Bench) -> Figures:
    """The run of `resnet50` by torch.compile, both ways, and in fp16."""
    return variants(bench, resnet50_training(bench))


def resnet18_variants(bench: Bench) -> Figures:
    """The run of `resnet18` by torch.compile, both ways, and in fp16."""
    return variants(bench, resnet18_training(bench))


def vit_variants(bench: Bench) -> Figures:
    """The run of `vit` by torch.compile, both ways, and in fp16."""
    return variants(bench, vit_training(bench))


def mobile_variants(bench: Bench) -> Figures:
    """The run of `mobile` by torch.compile, both ways, and in fp16."""
    return variants(bench, mobile_training(bench))


def variants(bench: Bench, training: Training) -> Figures:
    """Speed and memory with each of VARIANTS; the compiler's time is in the lines not counted."""
    bench.needs_cuda()  # tests on a CPU would wait for the compiler
    for setting in VARIANTS:
        found = trained(bench, training, setting)[1]
        bench.keep({f"{setting}: {what}": value for what, value in found.items()})
    return dict(bench.kept)


def resnet50_training(bench: Bench) -> Training:
    data = _data(bench, (500, 375), 4096)
    return Training("imagenet1k", data, _overrides(bench), bench.size(25, 1))


def resnet18_training(bench: Bench) -> Training:
    data, overrides = _data(bench, (32, 32), 8192), _overrides(bench, "run.cache='device'")
    return Training("cifar10", data, overrides, bench.size(100, 1))


def vit_training(bench: Bench) -> Training:
    name = bench.size("vit_small_patch16_224", "test_vit")  # timm's smallest
    adamw = "optim={kind='adamw', peak_lr=1e-4, precision='bf16'}"
    overrides = (adamw, *_overrides(bench), f"backbone.kind='timm/{name}'")
    return Training("imagenet1k", _data(bench, (500, 375), 4096), overrides, bench.size(25, 1))


def mobile_training(bench: Bench) -> Training:
    overrides = _overrides(bench, "run.cache='device'", "optim.precision='bf16'")
    with TemporaryDirectory() as folder:  # of random weights, which are as fast as others
        file = Path(folder) / "weights.pth"
        torch.save(timm.create_model(MOBILE).state_dict(), file)
        init = open_init(read_recipe("adapt_mobile", []), f"timm/{MOBILE}@{file}")
    own = [text for text in overrides if not text.startswith(("backbone", "optim.warmup"))]
    own += ["data.holdout_from='labelled'", "run.keep='last'", "run.patience=0"]
    data = _data(bench, (128, 128), 2048)
    return Training("adapt_mobile", data, tuple(own), bench.size(25, 1), init)


def waits(bench: Bench) -> Figures:
    """Steps between log lines during which torch refuses every wait for the device."""
    bench.needs_cuda()
    steps = bench.size(40, 8)
    own = f"steps={steps}", f"run.log_steps={steps // 2}", f"run.device={bench.device.type}"
    recipe = read_recipe("cifar10", [*_overrides(bench), *NO_SAVES, *own])
    all_steps, refusing = Run.steps, 0

    def refused(run: Run, *args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal refusing
        for step, batch in all_steps(run, *args, **kwargs):
            # in the first steps kernels are compiled and memory is taken
            if step >= 3 and not run.is_log_step(step):
                refusing += 1
                torch.cuda.set_sync_debug_mode("error")
            yield step, batch
            torch.cuda.set_sync_debug_mode("default")

    try:
        with patch.object(Run, "steps", refused):
            run_training(recipe, _data(bench, (32, 32), 8192))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return {"steps without a wait": refusing}


def photographs(folder: Path, images: int, width: int, height: int) -> Path:
    """dataset.json of `write_photographs`, in shards."""
    out = folder / f"photographs-{images}-{width}x{height}"
    if (out / "dataset.json").exists():
        return out / "dataset.json"
    sources = out / "images"
    write_photographs(sources, images, width, height)
    layout = Layout(samples_per_shard=256, max_shard_bytes=2**30)
    options = SourceOptions(root=sources, split="train")
    samples = read_samples("folder", options)
    write_shards(out, samples, layout, workers=os.cpu_count() or 1)
    return out / "dataset.json"


def read_recipe(name: str, overrides: Sequence[str]) -> Recipe:
    recipe = load_recipe(RECIPES / f"{name}.toml", overrides)
    assert isinstance(recipe, Recipe)
    return recipe


def run_training(
    recipe: Recipe, data: Path, init: FrozenBackbone | None = None
) -> list[dict[str, Any]]:
    """Train in a folder that is removed; returns the log's lines."""
    try:
        with TemporaryDirectory() as folder:
            train(recipe, load_index(data), Path(folder), init=init)
            return read_metrics(Path(folder))
    finally:
        free_accelerator()


def free_accelerator() -> None:
    """Let the next run of this process choose its device and precision, and compile anew."""
    torch.compiler.reset()  # at its limit of compiled forms torch runs the network uncompiled
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)


def trained(bench: Bench, training: Training, *settings: str) -> tuple[Recipe, Figures]:
    """A recipe from shards to weights, three log lines long; the last two are what is measured."""
    bench.forget_memory()
    log_steps = training.log_steps
    cadence = (f"steps={3 * log_steps}", f"run.log_steps={log_steps}")
    own = (*NO_SAVES, f"run.device={bench.device.type}", *cadence, *settings)
    recipe = read_recipe(training.recipe, [*training.overrides, *own])
    lines = run_training(recipe, training.data, training.init)
    return recipe, {
        "images/s": statistics.mean(line["images_per_s"] for line in lines[-2:]),
        "waiting for data %": statistics.mean(line["data_wait_percent"] for line in lines[-2:]),
        **bench.peak_gib(),
    }


def end_to_end(bench: Bench, training: Training) -> Figures:
    """The same, and beside it the bare encoder."""
    recipe, figures = trained(bench, training)
    alone = bare_encoder(bench, recipe, recipe.optim.precision)
    figures |= {f"bare encoder: {key}": value for key, value in alone.items()}
    speed, bare_speed = figures["images/s"], alone["images/s"]
    assert isinstance(speed, float)
    assert isinstance(bare_speed, float)
    return figures | {"of the bare encoder's speed %": 100 * speed / bare_speed}


def bare_encoder(bench: Bench, recipe: Recipe, precision: str) -> Figures:
    """The recipe's model on ready random views: forward, backward and SGD, nothing else."""
    bench.forget_memory()
    crop_px, images = recipe.augment.crop_px, recipe.data.batch_size
    model = build_model(recipe, crop_px)
    model = model.to(bench.device).to(memory_format=torch.channels_last)
    views = torch.rand(2 * images, 3, crop_px, crop_px, device=bench.device)
    views = views.contiguous(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4, momentum=0.9)
    scaler = torch.amp.GradScaler(bench.device.type, enabled=precision == "fp16")
    dtype = AUTOCAST.get(precision)

    def step() -> None:
        with torch.autocast(bench.device.type, dtype=dtype, enabled=dtype is not None):
            z = model(views)
        scaler.scale(z.float().square().mean()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)

    step_s = bench.seconds(step, rounds=10)
    return {"images/s": images / step_s, **bench.peak_gib()}
