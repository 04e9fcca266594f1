"""`run.cuda_graph` on "cuda": one launch a step, and the numbers of launched steps.

The runtime writes at each replay what a CPU computes for the recorded operations, on their memory:
a number of the host that was recorded, or memory that has moved, gives other weights.
"""

import contextlib
import importlib.util
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten_with_path

from sslpipe.run.checkpoint_files import latest
from sslpipe.run.log import read_metrics
from tests.fakecuda.test_training import train_and_count
from tests.helpers.dataset import write_dataset
from tests.helpers.fakecuda import needs_fakecuda, run_on_cuda
from tests.helpers.runs import RECIPE, ROOT, final_weights, forget_accelerator, write_recipe

pytestmark = needs_fakecuda

Settings = tuple[str, ...]
GRAPH = "run.cuda_graph=true"
COMMON = (GRAPH, "steps=11", "run.log_steps=1", "run.save_steps=5", "optim.peak_lr=0.02")
STEADY = ("optim.warmup_steps=2", "optim.ema=0.9")
QUEUE = ("loss.kind=moco", "loss.queue_rows=120")
RUNS: dict[str, Settings] = {
    "lars": (*STEADY, "optim.kind=lars", "optim.clip_norm=1", "momentum.start=0.9"),
    # a queue that holds images of the epoch before, which are masked by their ids; sgd
    "moco": (*QUEUE, "optim.clip_norm=1", "momentum.start=0.9", "momentum.schedule=cosine"),
    # from the weights of a run above; the first steps train its projector alone
    "from weights": (
        *(*STEADY, "optim.kind=adamw", "loss.kind=hard_negatives"),
        "tune.projector_first_steps=2",
    ),
}
TOLD = "run.cuda_graph: a step is launched, not replayed: an image stands in the batch twice"
TIMED = {"images_per_s", "data_wait_percent", "mfu_percent", "wall", "restart"}  # of a log line


class Stopped(Exception):
    """A run ends here, as by a signal."""


class Acting(nn.Module):
    """Calls a function with what it gets and the number of the call."""

    def __init__(self, act: Callable[[Tensor, int], Tensor]) -> None:
        super().__init__()
        self.act, self.calls = act, 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        return self.act(x, self.calls)


def _with_module(build: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    def call(*args: Any) -> Any:
        model = build(*args)
        model.projector[2] = nn.Sequential(nn.ReLU(), module)
        return model

    return call


def _interpret_triton() -> None:
    """Have Triton's interpreter make the views of a part, by the memory of the fake card."""
    from sslpipe.augment import triton_views
    from tests.fakecuda.runtime import aliases, allow_triton, launch

    def interpreted(images: Tensor, plan: Any, tables: Any, *rest: Tensor) -> None:
        images, *others = aliases([images, *rest])
        tables = triton_views.Tables(*aliases(list(tables)))
        launch(lambda: make_part(images, plan, tables, *others))

    allow_triton()
    make_part, triton_views._make_part = triton_views._make_part, interpreted


def train_twice(
    recipe: Path, data: Path, folder: Path, runs: dict[str, Settings], triton: bool = False
) -> Any:
    """Train each of the runs with replays and launched singly; the former are resumed at step 5.

    The views of step 4 are NaN, and at step 8 one image stands in the batch twice. With `triton`
    its kernels make the views, interpreted; then none are NaN. Returns: by run which steps were
    replayed with either, and what was warned of.
    """
    import sslpipe.pretrain as training
    from sslpipe.augment.two_views import FusedViews
    from sslpipe.data.index import load_index
    from sslpipe.export.initial import open_init
    from sslpipe.recipe import load_recipe
    from sslpipe.run import cuda_graph
    from sslpipe.run.log import RunLog
    from sslpipe.run.session import Run

    if triton:
        _interpret_triton()
    now = stop_at = -1
    replayed: list[int] = []
    warned: list[str] = []

    def steps(self: Any, *args: Any, **kwargs: Any) -> Iterator[Any]:
        nonlocal now
        for now, batch in all_steps(self, *args, **kwargs):
            if now == stop_at:
                raise Stopped
            source_ids = batch.source_ids.clone()
            if now == 8:
                source_ids[1] = source_ids[0]
            yield now, batch._replace(source_ids=source_ids)

    def views(self: Any, *args: Any, **kwargs: Any) -> Tensor:
        made: Tensor = make_views(self, *args, **kwargs)
        return made * float("nan") if now == 4 and not triton else made

    def replay(graph: Any) -> None:
        replayed.append(now)
        replay_graph(graph)

    all_steps, Run.steps = Run.steps, steps  # type: ignore[method-assign, assignment]
    make_views, FusedViews.forward = FusedViews.forward, views  # type: ignore[method-assign]
    replay_graph, torch.cuda.CUDAGraph.replay = torch.cuda.CUDAGraph.replay, replay
    warn = RunLog.warn
    RunLog.warn = lambda self, text: (warned.append(text), warn(self, text))  # type: ignore
    training.build_model = _with_module(training.build_model, nn.Dropout(0.3))

    found: dict[str, list[Any]] = {}
    for name, overrides in runs.items():
        for kind, warm_up, stops in (("replayed", 2, (5, -1)), ("launched", 99, (-1,))):
            cuda_graph.WARM_UP = warm_up
            replayed.clear()
            warned.clear()
            for stop_at in stops:  # noqa: B007  # of `steps`
                settings = load_recipe(recipe, (*COMMON, *overrides))
                init = None
                if settings.tune.projector_first_steps:
                    init = open_init(settings, str(folder / "lars" / "launched"))
                with contextlib.suppress(Stopped):
                    training.pretrain(settings, load_index(data), folder / name / kind, init)
                forget_accelerator()
            found.setdefault(name, []).extend([list(replayed), list(warned)])
    return found


def _state(run: Path) -> Any:
    """All that the newest checkpoint holds: leaves by their path."""
    parts = torch.load(latest(run) / "parts.pt", map_location="cpu", weights_only=True)
    return tree_flatten_with_path({"weights": final_weights(run), "parts": parts})[0]


def _assert_same_run(run: Path) -> None:
    """The checkpoints of run/replayed and run/launched hold the same, and so do their logs."""
    replayed, launched = run / "replayed", run / "launched"
    for (path, value), (other, expected) in zip(_state(replayed), _state(launched), strict=True):
        assert path == other
        same = value.equal(expected) if isinstance(value, Tensor) else value == expected
        assert same, path
    lines = [read_metrics(run) for run in (replayed, launched)]
    for one, two in zip(*lines, strict=True):
        assert one.keys() == two.keys()
        for key in set(one) - TIMED:
            assert one[key] == two[key], (one["step"], key)


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("tiny")
    return write_recipe(folder), write_dataset(folder / "data")


@pytest.mark.parametrize("runs", [["lars"], pytest.param(list(RUNS), marks=pytest.mark.slow)])
def test_replayed_steps_leave_the_bits_of_launched_ones(
    runs: list[str], tiny: Any, tmp_path: Path
) -> None:
    """Over rates that change, a step of NaN, one that is not alike, dropout, and a resume."""
    chosen = {name: RUNS[name] for name in runs}
    ((found),) = run_on_cuda(train_twice, *tiny, tmp_path, chosen, timeout_s=600)
    for name in runs:
        replayed, warned, launched, _ = found[name]
        # 5, 6: warm up again; 8: a duplicate, which changes a mask within the batch
        alike, first = name == "moco", 4 if name == "from weights" else 2
        assert replayed == [*range(first, 5), 7, *[8] * alike, 9, 10], name
        assert launched == []
        told = [text for text in warned if "cuda_graph" in text]
        assert [text.startswith(TOLD) for text in told] == [True] * (not alike), name
        _assert_same_run(tmp_path / name)
        bad = (tmp_path / name / "replayed" / "bad_steps.0.jsonl").read_text().splitlines()
        assert [json.loads(line)["step"] for line in bad] == [4]


@pytest.mark.skipif(not importlib.util.find_spec("triton"), reason="needs triton")
def test_views_are_made_anew_by_every_replay(tiny: Any, tmp_path: Path) -> None:
    views = "augment.kernels=triton", "augment.preset=simclr"
    runs = {"views": (*views, "data.batch_size=2", "data.num_streams=2", "steps=4")}
    env = {"TRITON_INTERPRET": "1"}
    (found,) = run_on_cuda(train_twice, *tiny, tmp_path, runs, True, env=env, timeout_s=600)
    assert found["views"][0] == [2, 3]
    _assert_same_run(tmp_path / "views")
    losses = {line["loss"] for line in read_metrics(tmp_path / "views" / "replayed")}
    assert len(losses) == 4


def _train_the_guides_objective(recipe: Path, data: Path, folder: Path) -> Any:
    text = (ROOT / "docs" / "extending.md").read_text()
    exec(text.split("```python\n")[1].split("```")[0], {"__name__": "my_parts"})
    return train_twice(recipe, data, folder, {"guide": ()})


def test_the_objective_that_the_guide_shows_is_replayed_in_each_step(
    tiny: Any, tmp_path: Path
) -> None:
    loss = 'kind = "nt_xent"\ntemperature = 0.2'
    assert loss in RECIPE
    recipe = write_recipe(tmp_path, RECIPE.replace(loss, 'kind = "alignment"'))
    (found,) = run_on_cuda(_train_the_guides_objective, recipe, tiny[1], tmp_path)
    replayed, warned, _, _ = found["guide"]
    assert replayed == [2, 3, 4, 7, 8, 9, 10]  # 5, 6: warm up again; 8: a duplicate, which it takes
    assert not [text for text in warned if "cuda_graph" in text]
    _assert_same_run(tmp_path / "guide")
    shown = {line["view_distance"] for line in read_metrics(tmp_path / "guide" / "replayed")}
    assert len(shown) == 11


REFUSED: dict[Callable[[Tensor, int], Tensor], str] = {
    # a number that is another one in each call
    lambda x, call: x * (1 + call / 1000): "an operation differs between two steps: mul.Tensor",
    # the device is asked for a number
    lambda x, call: x * (1 + float(x.detach().sum()) * 0): (
        "the host takes part in its operation _local_scalar_dense"
    ),
    # and sent one
    lambda x, call: x * torch.rand(1, pin_memory=True).to(x.device, non_blocking=True): (
        "the host takes part in its operation _to_copy"
    ),
    # an operation less in one of the calls, three of which are made before the first step
    lambda x, call: x * 2 if call % 7 else x: "an operation differs between two steps: ",
}


def _refused(recipe: Path, data: Path, folder: Path) -> Any:
    """Of each module in the model: the last step, what was warned of, graph launches."""
    import sslpipe.pretrain as training
    from sslpipe.run.log import RunLog
    from tests.fakecuda.runtime import reset

    found, warned, build = [], list[str](), training.build_model
    RunLog.warn = lambda self, text: warned.append(text)  # type: ignore[method-assign]
    for number, act in enumerate(REFUSED):
        training.build_model = _with_module(build, Acting(act))
        warned.clear()
        reset()
        settings = GRAPH, "steps=6", "run.save_steps=99", "run.max_bad_steps=99"
        done, table = train_and_count(recipe, data, folder / str(number), *settings)
        found.append((done, list(warned), sum(row.get("graphs", 0) for row in table.values())))
        forget_accelerator()
    return found


def test_a_model_that_takes_anything_from_the_host_is_launched_and_the_reason_told(
    tiny: Any, tmp_path: Path
) -> None:
    (found,) = run_on_cuda(_refused, *tiny, tmp_path, env={"FAKE_VALUES": "0"})
    for reason, (done, warned, graphs) in zip(REFUSED.values(), found, strict=True):
        (told,) = [text for text in warned if "cuda_graph" in text]
        assert told.startswith(f"run.cuda_graph = true has no effect: {reason}")
        assert (done, graphs) == (6, 0), reason


def _counted(recipe: Path, data: Path, folder: Path, kernels: str) -> Any:
    """Counts of step 4, launched and replayed, and what the training thread sends in the latter."""
    from tests.fakecuda.runtime import allow_triton, events, operations, reset

    if kernels == "triton":
        allow_triton()
    tables = []
    for settings in ((), (GRAPH,)):
        reset()
        seldom = ("steps=6", "run.log_steps=9", "run.save_steps=9", "run.max_bad_steps=99")
        chosen = f"augment.kernels={kernels}", "optim.precision=bf16", *settings
        run = folder / str(len(settings))
        _, table = train_and_count(recipe, data, run, *seldom, *chosen)
        tables.append(table["step 4"])
        forget_accelerator()
    log = [event for event in events() if event.section == "step 4" and event.main_thread]
    order = [event.name if event.kind == "M" else event.kind for event in log]
    return tables, operations(log), order


@pytest.mark.parametrize("kernels", ["torch", "triton"])
def test_a_step_is_one_launch_and_a_few_copies_and_never_waits(
    kernels: str, tiny: Any, tmp_path: Path
) -> None:
    env = {"FAKE_VALUES": "0", "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    (found,) = run_on_cuda(_counted, *tiny, tmp_path, kernels, env=env)
    (launched, replayed), sent, order = found
    assert "graphs" not in launched
    assert launched["operations"] > 200
    assert replayed["graphs"] == 1
    assert "waits" not in replayed
    # rates in, images and tables (or views) to their places, loss and gradient norm out
    inside = ["D2D"] * (2 if kernels == "triton" else 1)
    assert [name for name in order if name in ("H2D", "D2D", "L", "D2H")] == [
        *("H2D", *inside, "L", "D2H")
    ]
    assert sent <= (4 if kernels == "triton" else 100)
