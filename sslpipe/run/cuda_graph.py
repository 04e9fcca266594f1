"""`run.cuda_graph`: a step, from views to weights, is recorded once and then replayed.

A small encoder computes faster than the host launches its hundreds of kernels. A CUDA graph of them
is one launch. A replay does what was recorded, on the same memory: so what a step gets from the
host is copied to places that stay, and a step that would launch something else is launched.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple, cast

import numpy as np
import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from sslpipe.augment.triton_views import TritonPlan
from sslpipe.augment.two_views import ViewPlan
from sslpipe.data.pipeline import Batch
from sslpipe.losses.base import Objective
from sslpipe.optim import LARS
from sslpipe.recipe.pretrain import Recipe
from sslpipe.run.guard import Decision, StepGuard
from sslpipe.run.launch import training_device

NO_EFFECT = "run.cuda_graph = true has no effect"
WARM_UP = 3  # steps that are launched before one is recorded, the last of them as it is compared


class Step(NamedTuple):
    """What a step leaves: (B, D) embeddings of either view, and what became of it."""

    z_a: Tensor
    z_b: Tensor
    decision: Decision


TakeStep = Callable[..., Step]  # (batch, seed, *numbers, views=None); see StepGraph
Seed = Callable[[int], None]
Number = float | Tensor  # the latter () float64, on the device


def graph_refusal(
    recipe: Recipe,
    device_type: str,
    world_size: int,
    loss_fn: Objective,
    precision: str = "",
    *,
    on_device: bool = True,
) -> str | None:
    """Say why the steps of a run cannot be recorded; None: they can be, or nobody asked for it.

    Args:
        recipe: Of the run.
        device_type: "cuda", "cpu" or "mps".
        world_size: Processes of the run.
        loss_fn: The objective.
        precision: Of the run, where it is known.
        on_device: Whether the device decides if a step is taken.
    """
    loss_reason = loss_fn.unlike(torch.arange(2), torch.full((2,), -1))
    optim, precisions = recipe.optim, (precision, recipe.optim.precision)
    reasons = {
        f"{device_type} has no CUDA graphs": device_type != "cuda",
        f"{world_size} processes exchange gradients and statistics inside a step": world_size > 1,
        "data.micro_batch takes several passes a step": recipe.data.micro_batch,
        "run.compile = true makes kernels of its own": recipe.run.compile,
        "[pairs] gives batches of unequal numbers of images": recipe.pairs,
        f"loss.kind = {recipe.loss.kind!r}: {loss_reason}": loss_reason,
        "the host keeps the scale of fp16's gradients": "fp16" in precisions,
        f"torch's {optim.kind} would take fp64's rate in float32": "fp64" in precisions
        and optim.kind != "lars",
        "run.max_bad_steps = 1 asks in each step about the last": recipe.run.max_bad_steps == 1,
        "the weights are of several dtypes, so the host decides each step": not on_device,
    }
    reason = next((text for text, holds in reasons.items() if holds), None)
    return f"{NO_EFFECT}: {reason}" if reason and recipe.run.cuda_graph else None


def will_record(recipe: Recipe, world_size: int, loss_fn: Objective) -> bool:
    """Say, before the device is used, whether steps are likely to be recorded."""
    kind = training_device(recipe).type
    return recipe.run.cuda_graph and graph_refusal(recipe, kind, world_size, loss_fn) is None


class StepGraph:
    """Takes a run's steps: launches WARM_UP of them, records one and replays it from then on.

    Weights, buffers and optimizer state stay where they are, so evaluations and checkpoints between
    steps see them. Views are recorded, too, where Triton's kernels make them; what torch's
    operations launch for them depends on the batch, so those are made before.

    Args:
        take_step: Launches the whole step: (batch, seed, *numbers, views=None).
        make_views: batch -> (2B, 3, S, S).
        optimizer: That it steps. Learning rates are read before each call.
        loss_fn: That it computes; plain attributes are set as the recorded call has set them.
        guard: Of the run.
        canvas_px: The longest side of an image.
        alike: Whether the steps from now on train the same weights; before, they are launched.
        warn: Tells why nothing is recorded, or the first time that a step is not replayed.
    """

    def __init__(
        self,
        take_step: TakeStep,
        make_views: Callable[[Batch], Tensor],
        optimizer: Optimizer,
        loss_fn: Objective,
        guard: StepGuard,
        canvas_px: int,
        alike: Callable[[], bool],
        warn: Callable[[str], None],
    ) -> None:
        self._take_step, self._make_views, self._optimizer = take_step, make_views, optimizer
        self._loss_fn, self._guard, self._warn = loss_fn, guard, warn
        self._canvas_px, self._alike, self._launched = canvas_px, alike, 0
        self._numbers: _Numbers | None = None
        self._inputs: _Inputs | None = None
        self._recorded: _Recorded | None = None
        self._operations = _Operations()
        self._gave_up = self._warned = False
        # graphs are recorded on no default stream; what is launched before should be on the same
        self._stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def __call__(self, batch: Batch, seed: Seed, *numbers: float) -> Step:
        """Take a step, from a batch on the device; the next call overwrites what it returns.

        Args:
            batch: Of this step.
            seed: Handed on to take_step; torch's generators are seeded already.
            numbers: What else differs between steps; take_step gets () float64 on the device.
        """
        before = torch.cuda.current_stream()
        self._stream.wait_stream(before)
        with torch.cuda.stream(self._stream):
            if self._numbers is None:
                self._numbers = _Numbers(self._optimizer, len(numbers), batch.images.device)
            with self._numbers.sent(numbers) as sent:
                step = self._launch_or_replay(batch, seed, sent)
        before.wait_stream(self._stream)
        return step

    def _launch_or_replay(self, batch: Batch, seed: Seed, numbers: Sequence[Tensor]) -> Step:
        views = None if _triton_plan(batch) else self._make_views(batch)
        if self._gave_up or not self._alike():
            return self._take_step(batch, seed, *numbers, views=views)
        if self._inputs is None:
            ids_on_device = self._loss_fn.ids_on_device
            self._inputs = _Inputs(batch, views, self._canvas_px, ids_on_device=ids_on_device)
        reason = self._loss_fn.unlike(**batch.loss_arguments) or self._inputs.unlike(batch, views)
        if self._guard.last_may_end_it:
            reason = "it must know how the last step went"
        if reason:
            if not self._warned:
                self._warn(
                    f"run.cuda_graph: a step is launched, not replayed: {reason} (told once)"
                )
            self._warned = True
            return self._take_step(batch, seed, *numbers, views=views)

        self._inputs.fill(batch, views)
        if self._recorded is None:
            batch, views = self._inputs.over(batch)
            if self._launched < WARM_UP:
                self._launched += 1
                self._operations = _Operations()
                with self._operations:
                    return self._take_step(batch, seed, *numbers, views=views)
            self._recorded = self._record(batch, seed, *numbers, views=views)
        if self._recorded is None:
            self._inputs = None
            return self._take_step(batch, seed, *numbers, views=views)
        self._recorded.graph.replay()
        vars(self._loss_fn).update(self._recorded.kept)
        return self._recorded.step

    def _record(self, *call: Any, views: Tensor | None) -> "_Recorded | None":
        """Record a step, which is not taken by that; None: it cannot be, and a warning says why."""
        operations, graph = _Operations(), torch.cuda.CUDAGraph()
        groups = [group for group in self._optimizer.param_groups if "capturable" in group]
        for group in groups:
            group["capturable"] = True  # AdamW asks; fused, it is
        try:
            if (reason := self._operations.of_host) is None:
                # thread_local: the loader's threads go on using the device
                mode, stream = "thread_local", self._stream
                with torch.cuda.graph(graph, None, stream, mode), operations:
                    step = self._take_step(*call, views=views)
                reason = self._operations.difference(operations)
        except (RuntimeError, AssertionError) as error:
            reason = str(error).splitlines()[0] if str(error) else "it failed"
        finally:
            for group in groups:
                group["capturable"] = False
        if reason is None:
            step = step._replace(z_a=step.z_a.detach(), z_b=step.z_b.detach())
            return _Recorded(graph, step, kept=dict(vars(self._loss_fn)))
        self._gave_up = True
        self._optimizer.zero_grad(set_to_none=True)  # in memory of what was being recorded
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        self._warn(f"{NO_EFFECT}: {reason}")
        return None


class _Recorded(NamedTuple):
    """A graph; what its replays leave, in its memory; the objective's attributes."""

    graph: torch.cuda.CUDAGraph
    step: Step
    kept: dict[str, Any]


class _Numbers:
    """The learning rates and further numbers of a step, on the device, in one copy."""

    def __init__(self, optimizer: Optimizer, count: int, device: torch.device) -> None:
        self._groups = optimizer.param_groups
        # torch's fused kernels read float32, LARS the very number
        dtype = torch.float64 if isinstance(optimizer, LARS) else torch.float32
        parts = [("numbers", "f8", (count,)), ("rates", f"f{dtype.itemsize}", (len(self._groups),))]
        self._host = np.zeros(1, parts)
        self._block = torch.zeros(self._host.nbytes, dtype=torch.uint8, device=device)
        self._numbers = self._block[: 8 * count].view(torch.float64).unbind()
        self._rates = self._block[8 * count :].view(dtype).unbind()

    @contextmanager
    def sent(self, numbers: Sequence[float]) -> Iterator[Sequence[Tensor]]:
        """Inside, each group's rate is a number on the device; gives the other numbers."""
        self._host["numbers"] = numbers
        self._host["rates"] = [group["lr"] for group in self._groups]
        values = torch.from_numpy(self._host.view(np.uint8)).pin_memory()  # a copy for each step
        self._block.copy_(values, non_blocking=True)
        rates = [group["lr"] for group in self._groups]
        for group, rate in zip(self._groups, self._rates, strict=True):
            group["lr"] = rate
        try:
            yield self._numbers
        finally:
            for group, lr in zip(self._groups, rates, strict=True):
                group["lr"] = lr


class _Inputs:
    """The memory that a recorded step reads: images and their views' tables, or views; ids."""

    def __init__(
        self, batch: Batch, views: Tensor | None, canvas_px: int, *, ids_on_device: bool
    ) -> None:
        self._views = None if views is None else torch.empty_like(views)
        self._ids = batch.source_ids.to(batch.images.device) if ids_on_device else None
        if (plan := _triton_plan(batch)) is not None:
            shape = (len(batch.images), canvas_px, canvas_px, batch.images.shape[1])
            self._images = batch.images.new_zeros(shape).permute(0, 3, 1, 2)
            self._block = torch.empty_like(cast(Tensor, plan.block))

    def unlike(self, batch: Batch, views: Tensor | None) -> str | None:
        """Say why a batch cannot be copied into it; None: it can."""
        plan = _triton_plan(batch)
        if self._views is not None:
            same = views is not None and views.shape == self._views.shape
        else:
            block = None if plan is None else plan.block
            count, height, width = (batch.images.shape[dim] for dim in (0, 2, 3))
            room, side = self._images.shape[0], self._images.shape[2]
            fits = count == room and max(height, width) <= side
            same = fits and block is not None and block.shape == self._block.shape
        return None if same else "its batch is of another shape"

    def fill(self, batch: Batch, views: Tensor | None) -> None:
        """Copy a batch, or its views."""
        if self._ids is not None:
            self._ids.copy_(batch.source_ids.pin_memory(), non_blocking=True)
        if self._views is not None:
            self._views.copy_(cast(Tensor, views))
            return
        height, width = batch.images.shape[2:]
        self._images[:, :, :height, :width].copy_(batch.images)  # nothing reads what is beside
        self._block.copy_(cast(Tensor, cast(TritonPlan, _triton_plan(batch)).block))

    def over(self, batch: Batch) -> tuple[Batch, Tensor | None]:
        """Return the batch, and its views if they are here, as they are read from here."""
        plan = _triton_plan(batch)
        if self._ids is not None:
            batch = batch._replace(source_ids=self._ids)
        if self._views is not None or plan is None:
            return batch, self._views
        moved = ViewPlan(batch.plan.draws, plan.over(self._block))
        return batch._replace(images=self._images, plan=moved), None


def _triton_plan(batch: Batch) -> TritonPlan | None:
    work = getattr(batch.plan, "work", None)
    return work if isinstance(work, TritonPlan) else None


class _Operations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Lists the operations on the device inside, with shapes and the numbers that they are given.

    Two steps whose lists are equal launch the same. `of_host` is the first operation that takes a
    tensor of the host, or gives the host one.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[str] = []
        self.of_host: str | None = None

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        devices = {x.device.type for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)}
        if "cuda" in devices:
            name = func.name().removeprefix("aten::")
            self.calls.append(f"{name}{tree_map(_described, (args, kwargs or {}))}")
            if self.of_host is None and (len(devices) > 1 or "_local_scalar_dense" in name):
                self.of_host = f"the host takes part in its operation {name}"
        return out

    def difference(self, other: "_Operations") -> str | None:
        """Say where two steps differ; None: nowhere."""
        for one, two in zip(self.calls, other.calls, strict=False):
            if one != two:
                return f"an operation differs between two steps: {one:.150} and {two:.150}"
        more = len(other.calls) - len(self.calls)
        return f"a step has {more:+d} operations of the last one's" if more else None


def _described(x: Any) -> Any:
    if isinstance(x, Tensor):
        return f"{x.dtype}{tuple(x.shape)}{x.stride()}"
    return repr(x)
