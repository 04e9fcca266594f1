"""The parts that train: speed of three recipes, waits, repeatability, precisions, quality."""

import multiprocessing
import os
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from accelerate.state import AcceleratorState, GradientState
from safetensors.torch import load_file

from benchmarks.gpu.common import Bench, Figures, SkippedError, WrongError
from benchmarks.gpu.data import fashion_mnist, photographs
from benchmarks.gpu.training import (
    NO_SAVES,
    bare_encoder,
    end_to_end,
    read_recipe,
    run_training,
)
from sslpipe.data.index import load_index
from sslpipe.run.checkpoint_files import latest
from sslpipe.run.log import read_metrics
from sslpipe.train import train

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


def resnet50(bench: Bench) -> Figures:
    """imagenet1k.toml: ResNet-50, 256 photographs of 500 x 375 a step to 224 px, LARS, bf16."""
    data = _data(bench, (500, 375), 4096)
    return end_to_end(bench, "imagenet1k", data, _overrides(bench), log_steps=bench.size(25, 1))


def resnet18(bench: Bench) -> Figures:
    """cifar10.toml: ResNet-18, 512 images of 32 px a step, SGD, bf16."""
    data = _data(bench, (32, 32), 8192)
    overrides = _overrides(bench, "run.cache='device'")
    return end_to_end(bench, "cifar10", data, overrides, log_steps=bench.size(100, 1))


def vit(bench: Bench) -> Figures:
    """ViT-S/16 on photographs of 500 x 375 to 224 px, AdamW, bf16."""
    data = _data(bench, (500, 375), 4096)
    name = bench.size("vit_small_patch16_224", "test_vit")  # timm's smallest
    own = f"backbone.kind='timm/{name}'", "optim.kind='adamw'", "optim.peak_lr=1e-4"
    overrides = (*_overrides(bench), *own)
    return end_to_end(bench, "imagenet1k", data, overrides, log_steps=bench.size(25, 1))


def waits(bench: Bench) -> Figures:
    """Steps between log lines during which torch refuses every wait for the device."""
    bench.needs_cuda()
    steps = bench.size(40, 8)
    own = f"steps={steps}", f"run.log_steps={steps // 2}", f"run.device={bench.device.type}"
    recipe = read_recipe("cifar10", [*_overrides(bench), *NO_SAVES, *own])
    # in the first steps kernels are compiled and memory is taken
    trained = run_training(bench, recipe, _data(bench, (32, 32), 8192), 3, refuse_waits=True)
    return {"steps without a wait": trained.stages.refusing}


def precisions(bench: Bench) -> Figures:
    """ResNet-50 at 224 px without the pipeline, in bf16, fp16 and torch's fp32 (TF32)."""
    recipe = read_recipe("imagenet1k", [*_overrides(bench), "steps=1"])
    figures: Figures = {}
    for precision in ("bf16", "fp16", "fp32"):
        if precision == "fp16" and not bench.on_cuda:
            figures["fp16: images/s"] = "skipped: no CUDA device"
            continue
        try:
            one = bare_encoder(bench, recipe, precision)
        except torch.OutOfMemoryError:
            figures[f"{precision}: images/s"] = "skipped: not enough memory"
            continue
        figures |= {f"{precision}: {key}": value for key, value in one.items()}
    return figures


def deterministic(bench: Bench) -> Figures:
    """Two runs with run.deterministic = true, bit by bit, and what it costs against one without."""
    steps = bench.size(60, 2)
    own = f"steps={steps}", f"run.log_steps={steps // 2}", f"run.device={bench.device.type}"
    overrides = [*_overrides(bench), *NO_SAVES, *own]
    data = _data(bench, (32, 32), 8192)
    with TemporaryDirectory() as folder, ExitStack() as stack:
        call = _call
        if bench.on_cuda:  # a fresh process each: cuBLAS reads its setting when it starts
            context = multiprocessing.get_context("spawn")
            pool = ProcessPoolExecutor(1, context, max_tasks_per_child=1)
            call = stack.enter_context(pool).submit
        names = ("first", "second", "plain")
        futures = [call(_images_per_s, Path(folder, n), data, overrides) for n in names]
        speed, _, plain_speed = (future.result() for future in futures)
        first, second = (
            load_file(latest(Path(folder, name)) / "model.safetensors") for name in names[:2]
        )
    other = [key for key, value in first.items() if not torch.equal(value, second[key])]
    if other:
        raise WrongError(f"{len(other)} of {len(first)} tensors differ, the first: {other[0]}")
    return {"equal tensors": len(first), "images/s": speed, "images/s without": plain_speed}


def _call(fn: Callable[..., Any], *args: Any) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(fn(*args))
    return done


def _images_per_s(run_dir: Path, data: Path, overrides: list[str]) -> float:
    """Train with run.deterministic, unless the run is the plain one."""
    setting = f"run.deterministic={str(run_dir.name != 'plain').lower()}"
    train(read_recipe("cifar10", [*overrides, setting]), load_index(data), run_dir)
    GradientState._reset_state()
    AcceleratorState._reset_state(reset_partial_state=True)
    return float(read_metrics(run_dir)[-1]["images_per_s"])


def quality(bench: Bench) -> Figures:
    """demo.toml for ten times its steps: kNN of held-out Fashion-MNIST, and how long it took."""
    steps = bench.size(6000, 2)
    data = fashion_mnist(bench.folder, bench.size(10_000, 300))
    own = f"steps={steps}", f"run.log_steps={steps // 2}", f"run.monitor_steps={steps // 2}"
    small = (*TINY, "data.holdout=40", "data.canvas_px=28", "augment.crop_px=28")
    full = ("optim.precision='bf16'", "optim.warmup_steps=1200", "run.cache='device'")
    recipe = read_recipe(
        "demo", [*bench.size(full, small), *own, NO_SAVES[0], f"run.device={bench.device.type}"]
    )
    begin_s = time.perf_counter()
    lines, scores, _ = run_training(bench, recipe, data, steps)  # no step is timed
    if not scores:
        raise SkippedError("no held-out images")
    return {
        "steps": steps,
        "seconds": time.perf_counter() - begin_s,
        "images/s": lines[-1]["images_per_s"],
        "held-out kNN % halfway": 100 * scores[0]["holdout_knn"],
        "held-out kNN %": 100 * scores[-1]["holdout_knn"],
    }
