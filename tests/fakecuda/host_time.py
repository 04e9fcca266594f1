"""How long a step keeps the training thread busy: `python -m tests.fakecuda.host_time [STEPS]`.

A real training by recipes/imagenet1k.toml, clipped, of small pictures (their size changes no
launch), on the runtime without kernels and without the values that a CPU computes for them. Of each
part of a step: its operations, the least processor time of many, and what is left of it when each
operation is taken for a launch alone, which is what torch's cheapest one takes. Copies to the
device do nothing here either. The launch of a graph counts as no operation.
"""

import gc
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from pathlib import Path
from time import thread_time_ns
from typing import Any
from unittest.mock import patch

from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import run_on_cuda

RECIPE = Path(__file__).parents[2] / "recipes" / "imagenet1k.toml"
SETTINGS = (
    *("data.num_streams=1", "data.canvas_px=64", "augment.crop_px=64", "optim.clip_norm=1"),
    *("run.device=cuda", "run.num_workers=0", "run.log_steps=1000000", "run.save_steps=1000000"),
)
WARM_UP = 5  # steps that are not timed


class Parts:
    """Times and operations of the parts of steps; no part is inside of another."""

    def __init__(self) -> None:
        self.least_us: dict[str, float] = defaultdict(lambda: float("inf"))  # of all steps
        self.operations = Counter[str]()  # of the last step
        self._step = Counter[str]()
        self._mark: Callable[[str], None] = lambda text: None

    def timed(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a function, which then is a part."""

        def call(*given: Any, **named: Any) -> Any:
            self._mark(name)
            begin_ns = thread_time_ns()
            result = original(*given, **named)
            self._step[name] += thread_time_ns() - begin_ns
            self._mark("other")
            return result

        return call

    def timed_context(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        """Wrap a context manager: entering and leaving it are a part."""

        @contextmanager
        def inside(*given: Any, **named: Any) -> Iterator[Any]:
            context = original(*given, **named)
            value = self.timed(name, context.__enter__)()
            yield value
            self.timed(name, context.__exit__)(None, None, None)

        return inside

    def steps(self, waiting: Callable[..., Iterator[Any]], last: int) -> Callable[..., Any]:
        """Wrap Meter.waiting: a step is what is between its items, without the wait for data."""
        from tests.fakecuda.runtime import counts, events, mark, reset

        def call(*given: Any) -> Iterator[Any]:
            gc.disable()
            for step, item in enumerate(waiting(*given)):
                self._step = Counter[str]()
                reset()
                if step == last:
                    self._mark = mark
                    mark("other")
                begin_ns = thread_time_ns()
                yield item
                whole_ns = thread_time_ns() - begin_ns
                if step == last:
                    found = counts(events())
                    self.operations.update({k: v.get("operations", 0) for k, v in found.items()})
                elif step >= WARM_UP:
                    self._step["other"] = whole_ns - self._step.total()
                    for name, time_ns in self._step.items():
                        self.least_us[name] = min(self.least_us[name], time_ns / 1e3)

        return call


def _launch_us() -> float:
    """The least time of torch's cheapest operation on a GPU."""
    import torch

    x, times = torch.zeros(1, device="cuda"), []
    for _ in range(200):
        begin_ns = thread_time_ns()
        for _ in range(20):
            x.neg_()
        times.append((thread_time_ns() - begin_ns) / 20e3)
    return min(times)


def measure(
    data: Path, folder: Path, steps: int, kernels: str, recorded: bool
) -> tuple[float, dict[str, tuple[int, float]]]:
    """A launch's time, and by part operations and time; in a process with a fake GPU."""
    from torch.utils._python_dispatch import _disable_current_modes

    import sslpipe.train as training
    from sslpipe.augment.fused_views import FusedViews
    from sslpipe.data.index import load_index
    from sslpipe.data.pipeline import Batch
    from sslpipe.losses.base import InBatchLoss
    from sslpipe.models.simclr import SimCLR
    from sslpipe.recipe import load_recipe
    from sslpipe.run import session
    from sslpipe.run.cuda_graph import StepGraph
    from sslpipe.run.guard import StepGuard
    from sslpipe.run.throughput import Meter
    from tests.fakecuda.runtime import allow_triton

    parts, last = Parts(), WARM_UP + steps
    patched: list[tuple[Any, str, str]] = [
        (Batch, "to", "batch to the device"),
        (session.Run, "step_done", "what became of it"),
        (session, "set_lr", "rate"),
        (training, "seed_torch", "seeds"),
    ]
    inside: list[tuple[Any, str, str]] = [
        (StepGuard, "remember", "guard: remember"),
        (FusedViews, "forward", "views"),
        (SimCLR, "forward", "encoder"),
        (InBatchLoss, "forward", "loss"),
        (session.Run, "backward", "encoder"),
        (session, "clip_gradient", "gradient norm, clipping"),
    ]
    patched += [(StepGraph, "__call__", "recorded step")] if recorded else inside
    # the values of kernels would take most of the time
    with _disable_current_modes(), ExitStack() as stack:
        for owner, name, part in patched:
            timed = parts.timed(part, getattr(owner, name))
            stack.enter_context(patch.object(owner, name, timed))
        if not recorded:
            guarded = parts.timed_context("guard, optimizer", StepGuard.step)
            stack.enter_context(patch.object(StepGuard, "step", guarded))
        waiting = parts.steps(Meter.waiting, last)
        stack.enter_context(patch.object(Meter, "waiting", waiting))
        if kernels == "triton":
            allow_triton()
        graph = f"run.cuda_graph={str(recorded).lower()}"
        overrides = f"steps={last + 2}", f"augment.kernels={kernels}", graph
        recipe = load_recipe(RECIPE, (*SETTINGS, *overrides))
        training.train(recipe, load_index(data), folder)
        launch_us = _launch_us()
    return launch_us, {name: (parts.operations[name], us) for name, us in parts.least_us.items()}


def main() -> None:
    """Measure, and print a table for each kind of kernels, without and with a graph."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 40
    with tempfile.TemporaryDirectory() as name:
        data = write_dataset(Path(name) / "data", (256,))
        for kernels, recorded in product(("torch", "triton"), (False, True)):
            arguments = data, Path(name) / f"{kernels}-{recorded}", steps, kernels, recorded
            env = {"FAKE_FILLED": "0"}
            ((launch_us, parts),) = run_on_cuda(measure, *arguments, env=env, timeout_s=600)
            print(
                f"augment.kernels = {kernels}, run.cuda_graph = {str(recorded).lower()}; "
                f"a launch alone: {launch_us:.1f} us"
            )
            print(f"{'part of a step':24}operations  time, ms  without launches, ms")
            whole = sum(count for count, _ in parts.values()), sum(us for _, us in parts.values())
            for part, (operations, time_us) in [*sorted(parts.items()), ("all parts", whole)]:
                own_us = time_us - operations * launch_us
                print(f"{part:24}{operations:10}{time_us / 1e3:10.2f}{own_us / 1e3:10.2f}")


if __name__ == "__main__":
    main()
