"""Whole trainings by `sslpipe.train`, timed without a wait in a step; and the encoder alone."""

import statistics
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, GradientState
from torch.optim.optimizer import (
    register_optimizer_step_post_hook,
    register_optimizer_step_pre_hook,
)

from benchmarks.gpu.common import Bench, Figures
from sslpipe.augment.fused_views import FusedViews
from sslpipe.build import build_model, recipe_flops
from sslpipe.data.index import load_index
from sslpipe.losses.base import InBatchLoss
from sslpipe.precision import AUTOCAST
from sslpipe.recipe import load_recipe
from sslpipe.recipe.pretrain import Recipe
from sslpipe.run import session
from sslpipe.run.guard import StepGuard
from sslpipe.run.log import read_metrics
from sslpipe.run.session import Run
from sslpipe.run.throughput import peak_flops
from sslpipe.train import train

RECIPES = Path(__file__).parents[2] / "recipes"
NO_SAVES = ("run.save_steps=1000000", "data.holdout=0", "run.monitor_steps=0")
STAGES: list[tuple[str, Any, str]] = [
    ("views", FusedViews, "forward"),
    ("loss", InBatchLoss, "forward"),  # and its gradient by z
    ("gradient norm", session, "clip_gradient"),
    ("guard", StepGuard, "remember"),
    ("guard", StepGuard, "step"),  # the optimizer steps inside
]


def read_recipe(name: str, overrides: Sequence[str]) -> Recipe:
    recipe = load_recipe(RECIPES / f"{name}.toml", overrides)
    assert isinstance(recipe, Recipe)
    return recipe


class Stages:
    """Times of stages of the steps, by events on the device, which nothing waits for.

    Attributes:
        counting: Whether the present step is timed.
        steps: Timed so far.
        refusing: How many of them refused every wait for the device.
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self.counting = device, False
        self.steps = self.refusing = 0
        self._begun: dict[str, Any] = {}
        self._times: list[tuple[str, Any, Any]] = []

    def now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def begin(self, name: str) -> None:
        if self.counting:
            self._begun[name] = self.now()

    def end(self, name: str) -> None:
        if name in self._begun:
            self._times.append((name, self._begun.pop(name), self.now()))

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        self.begin(name)
        yield
        self.end(name)

    def seconds(self) -> dict[str, float]:
        """Of each stage, in a step."""
        total: dict[str, float] = defaultdict(float)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        for name, begin, end in self._times:
            cuda = self._device.type == "cuda"
            total[name] += begin.elapsed_time(end) / 1e3 if cuda else end - begin
        total["guard"] -= total["optimizer"]
        return {name: time_s / self.steps for name, time_s in total.items()}


def _staged(stages: Stages, name: str, original: Any) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        with stages.stage(name):
            return original(*args, **kwargs)

    def context(*args: Any, **kwargs: Any) -> Any:
        @contextmanager
        def inside() -> Iterator[Any]:
            with stages.stage(name), original(*args, **kwargs) as value:
                yield value

        return inside()

    return context if original is StepGuard.step else call


@contextmanager
def observed(stages: Stages, first: int, *, refuse_waits: bool) -> Iterator[None]:
    """Inside, trainings are timed from step `first` on.

    Args:
        stages: Where the times go.
        first: The first step that counts.
        refuse_waits: Whether a wait for the device is an error, in every counted step but those of
            a log line: torch raises RuntimeError where the host would wait.
    """
    all_steps = Run.steps

    def steps(run: Run, *args: Any, **kwargs: Any) -> Iterator[Any]:
        for step, batch in all_steps(run, *args, **kwargs):
            stages.counting = step >= first
            stages.steps += stages.counting
            if refuse_waits and stages.counting and not run.is_log_step(step):
                stages.refusing += 1
                torch.cuda.set_sync_debug_mode("error")
            yield step, batch
            if refuse_waits:
                torch.cuda.set_sync_debug_mode("default")

    with ExitStack() as stack:
        if refuse_waits:
            stack.callback(torch.cuda.set_sync_debug_mode, "default")
        stack.enter_context(patch.object(Run, "steps", steps))
        for name, owner, method in STAGES:
            staged = _staged(stages, name, getattr(owner, method))
            stack.enter_context(patch.object(owner, method, staged))
        for hook in (
            register_optimizer_step_pre_hook(lambda *_: stages.begin("optimizer")),
            register_optimizer_step_post_hook(lambda *_: stages.end("optimizer")),
        ):
            stack.callback(hook.remove)
        stack.callback(GradientState._reset_state)
        stack.callback(AcceleratorState._reset_state, reset_partial_state=True)
        yield


class Trained(NamedTuple):
    """Log lines, the monitor's lines, and the timed stages of a training."""

    lines: list[dict[str, Any]]
    scores: list[dict[str, Any]]
    stages: Stages


def run_training(
    bench: Bench, recipe: Recipe, data: Path, first: int, *, refuse_waits: bool = False
) -> Trained:
    """Train in a folder that is removed, timed from step `first` on."""
    stages = Stages(bench.device)
    with TemporaryDirectory() as folder, observed(stages, first, refuse_waits=refuse_waits):
        train(recipe, load_index(data), Path(folder))
        return Trained(read_metrics(Path(folder)), read_metrics(Path(folder), "eval"), stages)


def end_to_end(
    bench: Bench, name: str, data: Path, overrides: Sequence[str], *, log_steps: int
) -> Figures:
    """A recipe from shards to weights, three log lines long; the last two are what is measured."""
    bench.forget_memory()
    cadence = (f"steps={3 * log_steps}", f"run.log_steps={log_steps}")
    own = (*NO_SAVES, f"run.device={bench.device.type}", *cadence)
    recipe = read_recipe(name, [*overrides, *own])
    lines, _, stages = run_training(bench, recipe, data, log_steps)
    speed = statistics.mean(line["images_per_s"] for line in lines[-2:])
    step_s = recipe.data.batch_size / speed
    figures: Figures = {
        "images/s": speed,
        **({"MFU %": lines[-1]["mfu_percent"]} if "mfu_percent" in lines[-1] else {}),
        "waiting for data %": statistics.mean(line["data_wait_percent"] for line in lines[-2:]),
        **{f"{stage} %": 100 * seconds / step_s for stage, seconds in stages.seconds().items()},
        **bench.peak_gib(),
    }
    alone = bare_encoder(bench, recipe, recipe.optim.precision)
    figures |= {f"bare encoder: {key}": value for key, value in alone.items()}
    bare_speed = alone["images/s"]
    assert isinstance(bare_speed, float)
    return figures | {"of the bare encoder's speed %": 100 * speed / bare_speed}


def bare_encoder(bench: Bench, recipe: Recipe, precision: str) -> Figures:
    """The recipe's model on ready random views: forward, backward and SGD, nothing else."""
    bench.forget_memory()
    crop_px, images = recipe.augment.arguments["crop_px"], recipe.data.batch_size
    model = build_model(recipe, crop_px)
    flops, peak = recipe_flops(recipe, model, crop_px), peak_flops(bench.device, precision)
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
    figures: Figures = {"images/s": images / step_s}
    if peak:
        figures["MFU %"] = 100 * flops / step_s / peak
    return figures | bench.peak_gib()
